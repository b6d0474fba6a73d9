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
    with Clock() as clock:
        yield clock


class Log(logging.Handler):
    """What our own logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self.records)


@pytest.fixture
def log() -> Iterator[Log]:
    """The plugin's log lines from now on, whatever vLLM has set up."""
    ours = logging.getLogger("vllm.agent_hint")
    handler, level = Log(), ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    yield handler
    ours.removeHandler(handler)
    ours.setLevel(level)
