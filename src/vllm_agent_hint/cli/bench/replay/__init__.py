"""``vllm-agent-hint bench replay``: what a cache policy would have served of recorded traffic."""
