"""Fixtures of the tests that run vLLM's real scheduler without a model."""

import logging
from collections.abc import Iterator

import pytest

from tests.engine.rig import Clock

# What vLLM says of each of some thousand schedulers.
for _name in ("vllm.platforms", "vllm.config", "vllm.v1.core"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Time as the plugin sees it; moves only when a test says so."""
    clock = Clock()
    clock.start()
    yield clock
    clock.stop()
