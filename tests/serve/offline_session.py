"""A program for ``test_offline.py``: an offline ``LLM`` with hints, its findings as JSON.

python offline_session.py MODEL FINDINGS
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.serve.rig import tokens

EVICT = {"edits": [{"type": "evict"}]}


def main(model: str, findings: Path) -> None:
    from vllm import LLM, SamplingParams

    from vllm_agent_hint import AgentHintParams, CacheControlParams, manage

    llm = LLM(
        model,
        enforce_eager=True,
        max_model_len=8192,
        num_gpu_blocks_override=96,
        disable_log_stats=False,
    )

    def run(seed: int, hint: Any = None, **more: Any) -> Any:
        extra_args = None if hint is None else {"agent_hint": hint, "mine": 1}
        params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args=extra_args, **more)
        (output,) = llm.generate({"prompt_token_ids": tokens(1000, seed)}, params, use_tqdm=False)
        return params, output

    def refusal(hint: Any) -> dict[str, str]:
        try:
            run(1, hint)
        except Exception as error:
            return {
                "error": type(error).__name__,
                "field": str(getattr(error, "parameter", "")),
                "message": str(error),
            }
        return {"error": ""}

    def managed(session: str, *edits: str, cache_salt: str | None = None) -> list[Any]:
        hint = {
            "session_id": session,
            "context_management": {"edits": [{"type": edit} for edit in edits]},
        }
        return [
            [result.type, result.status, result.blocks]
            for result in manage(llm, hint, cache_salt=cache_salt)
        ]

    found: dict[str, Any] = {}
    _, plain = run(1, temperature=0)
    as_object = AgentHintParams(session_id="object", cache_control=CacheControlParams(ttl=60))
    params, hinted = run(1, as_object, temperature=0)
    found["same_tokens"] = list(plain.outputs[0].token_ids) == list(hinted.outputs[0].token_ids)
    found["params_untouched"] = params.extra_args == {"agent_hint": as_object, "mine": 1}
    shared = {"session_id": "shared", "context_management": EVICT}
    params, _ = run(2, shared, temperature=1, n=2, skip_clone=True)
    found["shared_params_untouched"] = params.extra_args == {"agent_hint": shared, "mine": 1}
    run(3, json.dumps({"session_id": "text"}), temperature=0)

    found["refusals"] = [
        refusal(hint)
        for hint in (
            5,
            {"session_id": 5},
            {"cache_control": {"ttl": float("nan")}},
            {1: 2},
            {"session_id": "a", "context_management": {**EVICT, "manage_request": True}},
        )
    ]
    found["after_refusals"] = len(run(1, temperature=0)[1].outputs)

    found["managed"] = {
        "object": managed("object", "offload", "evict"),
        "text": managed("text", "evict"),
        "never seen": managed("never-seen", "evict"),
        "salted": managed("object", "evict", cache_salt="pepper"),
        "no edits": managed("object"),
    }
    found["metrics"] = {
        name: sum(metric.value for metric in llm.get_metrics() if metric.name == name)
        for name in (
            "vllm:agent_hint_active",
            "vllm:agent_hint_sessions",
            "vllm:agent_hint_edits",
            "vllm:agent_hint_prompt_tokens",
            "vllm:prefix_cache_queries",
        )
    }
    findings.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
