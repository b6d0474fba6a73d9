"""Fixtures for every test: where things lie, and models made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_agent_hint.cli.demo.model import ensure_model

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
