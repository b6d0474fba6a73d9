"""``vllm-agent-hint demo``: one seeded load, on vLLM with hints off and with hints on."""
