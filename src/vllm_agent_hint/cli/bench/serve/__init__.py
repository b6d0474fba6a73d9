"""``vllm-agent-hint bench serve``: arms of real servers under the same seeded loads, in pairs."""
