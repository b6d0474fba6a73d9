"""Fixtures for every test: where things lie, and models made once.

Property tests try the same examples in every run, so that a red test means a change of ours.
``HYPOTHESIS_PROFILE=explore make test`` looks for new ones.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from vllm_agent_hint.cli.demo.model import ensure_model

# No deadline: a machine with other work is not a fault of ours.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
# A planted fault is known already: its first failing example will do (see tests/faults).
settings.register_profile(
    "no-shrink",
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def scratch() -> Path:
    """``out/`` of the checkout: models and vLLM's cache stay there from one run to the next."""
    folder = CHECKOUT / "out"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def model(scratch: Path) -> Callable[[str], Path]:
    """``model("qwen3-small")``: the folder of a small model of that kind, see ``model.KINDS``."""
    return lambda kind: ensure_model(kind, scratch / "models")
