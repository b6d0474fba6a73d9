"""Hints for an offline ``LLM``, its engine in the same process and in another one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

PROMPT_BLOCKS = 7  # of 1000 tokens, 128 each


@pytest.fixture(scope="module", params=["in this process", "in another process"])
def found(
    request: pytest.FixtureRequest,
    model: Callable[[str], Path],
    environment: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What ``offline_session.py`` has seen."""
    findings = tmp_path_factory.mktemp("offline") / "findings.json"
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve.offline_session", model("qwen3-small"), findings],
        cwd=here.parents[2],
        env={
            **os.environ,
            **environment,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(request.param == "in another process")),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(findings.read_text())
    return seen


def test_a_hint_changes_no_token(found: dict[str, Any]) -> None:
    assert found["same_tokens"]


def test_the_callers_sampling_params_stay_as_they_are(found: dict[str, Any]) -> None:
    assert found["params_untouched"]
    assert found["shared_params_untouched"]


def test_a_wrong_hint_is_an_error_that_names_the_field(found: dict[str, Any]) -> None:
    refused = found["refusals"]
    assert {refusal["error"] for refusal in refused} == {"VLLMValidationError"}
    assert [refusal["field"] for refusal in refused] == [
        "agent_hint",
        "agent_hint.session_id",
        "agent_hint.cache_control.ttl",
        refused[3]["field"],
        "agent_hint.context_management.manage_request",
    ]
    assert refused[3]["field"].startswith("agent_hint")
    assert found["after_refusals"] == 1


def test_managing_in_a_request_is_refused_with_the_cure(found: dict[str, Any]) -> None:
    assert "vllm_agent_hint.manage(llm, hint)" in found["refusals"][-1]["message"]


def test_manage_runs_the_edits_without_a_request(found: dict[str, Any]) -> None:
    managed = found["managed"]
    assert managed["salted"] == [["evict", "missing", 0]]
    assert managed["object"] == [["offload", "unsupported", 0], ["evict", "applied", PROMPT_BLOCKS]]
    assert managed["text"] == [["evict", "applied", PROMPT_BLOCKS]]
    assert managed["never seen"] == [["evict", "missing", 0]]
    assert managed["no edits"] == []


def test_the_metrics_count_offline_too(found: dict[str, Any]) -> None:
    assert found["metrics"]["vllm:agent_hint_active"] == 1
    assert found["metrics"]["vllm:agent_hint_sessions"] >= 2
    looked_up = found["metrics"]["vllm:prefix_cache_queries"]
    assert found["metrics"]["vllm:agent_hint_prompt_tokens"] == looked_up > 0
    # One behind the request with n = 2, five by manage().
    assert found["metrics"]["vllm:agent_hint_edits"] == 6
