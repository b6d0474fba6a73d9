"""Hints without a server: ``SamplingParams.extra_args``, and edits through ``manage``.

.venv/bin/python examples/offline.py out/models/qwen3-*     # the demo's model
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    from vllm_agent_hint import manage

    llm = LLM(model=model, max_model_len=4096, enforce_eager=True, num_gpu_blocks_override=64)
    hint = {"session_id": "rollout-1", "cache_control": {"ttl": 300}}
    hinted = SamplingParams(max_tokens=8, temperature=0, extra_args={"agent_hint": hint})
    prompt = "The task is long. " * 150

    def turn(text: str) -> str:
        (output,) = llm.generate([text], hinted, use_tqdm=False)
        print(f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} cached")
        return output.outputs[0].text

    reply = turn(prompt)
    turn(prompt + reply + " The environment answers.")
    evict = {
        "session_id": "rollout-1",
        "context_management": {"manage_request": True, "edits": [{"type": "evict"}]},
    }
    for result in manage(llm, evict):
        print(f"{result.type.value}: {result.status.value}, {result.blocks} blocks")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: offline.py MODEL (any model that vLLM can load)")
    main(sys.argv[1])
