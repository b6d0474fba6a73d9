"""``vllm-agent-hint capture``: records a running server's traffic for ``bench replay``."""
