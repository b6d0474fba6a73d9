"""The direction of imports is the architecture: the session core knows nothing of vLLM."""

import pkgutil
import subprocess
import sys

import pytest

import vllm_agent_hint.sessions

CORE = [
    "vllm_agent_hint.hints",
    "vllm_agent_hint.settings",
    *(
        m.name
        for m in pkgutil.walk_packages(
            vllm_agent_hint.sessions.__path__, "vllm_agent_hint.sessions."
        )
    ),
]

SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sys.modules, sep="\\n")
"""


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """What a fresh interpreter has loaded once it has imported the whole session core."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *CORE], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def test_the_session_core_is_more_than_its_package(loaded: set[str]) -> None:
    assert "vllm_agent_hint.sessions.manager" in CORE
    assert set(CORE) <= loaded


def test_the_session_core_imports_neither_vllm_nor_torch(loaded: set[str]) -> None:
    packages = {name.split(".")[0] for name in loaded}
    assert not packages & {"vllm", "torch"}


def test_the_session_core_imports_none_of_the_packages_above_it(loaded: set[str]) -> None:
    own = {name for name in loaded if name.startswith("vllm_agent_hint.")}
    above = {"engine", "frontend", "kvcache", "pooling", "cli", "seams"}
    assert not {name for name in own if name.split(".")[1] in above}
