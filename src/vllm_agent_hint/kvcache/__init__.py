"""The classes that stand in for vLLM's own: block, free queue, pool and KV cache manager."""
