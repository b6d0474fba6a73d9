"""A store for KV blocks in host memory and, optionally, a directory; see ``docs/pooling.md``.

--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "spec_name": "AgentHintOffloadingSpec",
    "spec_module_path": "vllm_agent_hint.pooling.tier",
    "cpu_bytes_to_use": 8000000000}}'
"""

from vllm_agent_hint.pooling.tier.spec import AgentHintOffloadingSpec

__all__ = ["AgentHintOffloadingSpec"]
