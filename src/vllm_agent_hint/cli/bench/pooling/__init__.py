"""``vllm-agent-hint bench pooling``: what parking a context and bringing it back is worth."""
