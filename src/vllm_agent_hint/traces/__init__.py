"""Recorded traffic: what a trace is, and one reader per format. Knows nothing of vLLM."""
