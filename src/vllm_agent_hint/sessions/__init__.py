"""The session core: which requests belong together, and what their KV cache is worth.

Plain Python. Imports neither vLLM nor torch; blocks are known by id and hash only, and time is
a parameter.
"""
