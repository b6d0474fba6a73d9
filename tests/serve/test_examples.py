"""Each example does what its page says, run as a user runs it: in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.rig import Serve, TestServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WITHOUT_A_SERVER = {"offline.py"}

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> TestServer:
    """With the pool of ``make server``."""
    return serve_module("qwen3-small", ["--num-gpu-blocks-override", "236"])


@pytest.fixture
def run(server: TestServer) -> Run:
    def run_example(name: str) -> str:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / name)],
            env={**os.environ, "BASE_URL": f"{server.base_url}/v1", "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_example


def test_a_context_outlasts_the_flood_while_a_tool_runs(run: Run) -> None:
    lines = run("tool_pause.py").splitlines()
    prompt, cached = map(int, re.findall(r"\d+", lines[-1]))
    assert lines[-2] == "the agent's next turn:"
    assert cached > 0.9 * prompt


def test_a_harness_says_how_its_turns_ended(run: Run) -> None:
    lines = run("tool_turns.py").splitlines()
    assert [line.endswith("used: True") for line in lines] == [True, True, True, False]
    assert lines[2].startswith("coder: final_message")


def test_a_worker_that_has_finished_is_evicted(run: Run) -> None:
    printed = run("branch_completed.py")
    assert '"status": "applied"' in printed
    assert printed.splitlines()[-1].startswith("400 ")
    assert "agent_hint.cache_control.ttl" in printed


def test_workers_start_from_their_leaders_context_and_go_with_it(run: Run) -> None:
    leader, *workers, children, freed, gone = run("leader_and_workers.py").splitlines()
    computed = int(re.findall(r"\d+", leader)[0])
    assert all(int(worker.split()[-2]) > 0.9 * computed for worker in workers)
    assert children.endswith("worker-1 worker-2 worker-3")
    assert freed.startswith("applied: ")
    assert "4 sessions were freed" in freed
    assert gone == "worker-1 now: 404"


def test_every_route_answers(run: Run) -> None:
    printed = run("rest_routes.py")
    assert '"active": true' in printed
    assert printed.count('"status": "applied"') == 3  # what was kept, the evict, the free
    assert printed.count('"error"') == 1
    assert '"code": 404' in printed


@pytest.mark.parametrize("name", ["anthropic_messages.py", "openai_responses.py"])
def test_an_sdk_sends_hints_and_reads_what_comes_back(run: Run, name: str) -> None:
    first, second, last = run(name).splitlines()
    assert "operation_id" in first
    cached = [int(n) for n in re.findall(r"\d+(?= (?:input tokens cached|of them cached))", second)]
    assert cached[0] > 2000
    assert "'status': 'applied'" in last


def test_every_example_is_on_the_page_and_in_this_file() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    page = (EXAMPLES / "README.md").read_text()
    assert names == set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE))
    here = Path(__file__).read_text()
    assert all(f'"{name}"' in here for name in names)
    assert names > WITHOUT_A_SERVER
