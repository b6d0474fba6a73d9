"""The columns of the table: which server, which pool, which traffic."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vllm_agent_hint.cli.demo.settings import DemoSettings
from vllm_agent_hint.settings import ENV_SWITCH


class ColumnName(StrEnum):
    OFF = "off"
    ON = "on"
    CEILING = "ceiling"
    NO_PRESSURE = "no_pressure"
    AGENTS_ONLY = "agents_only"


@dataclass(frozen=True, slots=True)
class Column:
    """One server and what it is asked.

    Args:
        meaning: For the reader of the table.
        hints_on: Whether the plugin is active; the requests carry their hints in any case.
        pool_holds_everything: The big pool instead of the small one.
        with_one_shots: Whether one-shot requests come between the agents'.
    """

    name: ColumnName
    meaning: str
    hints_on: bool
    pool_holds_everything: bool
    with_one_shots: bool

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    def environment(self) -> dict[str, str]:
        return {ENV_SWITCH: "1" if self.hints_on else "0"}

    def pool_blocks(self, settings: DemoSettings) -> int:
        if self.pool_holds_everything:
            return settings.big_pool_blocks
        return settings.small_pool_blocks


def _column(
    name: ColumnName, meaning: str, *, hints: bool, big_pool: bool, one_shots: bool = True
) -> Column:
    return Column(name, meaning, hints, big_pool, one_shots)


COLUMNS: Final = (
    _column(
        ColumnName.OFF,
        "stock vLLM, small pool: one-shot traffic flushes the waiting agents",
        hints=False,
        big_pool=False,
    ),
    _column(ColumnName.ON, "the same with hints", hints=True, big_pool=False),
    _column(
        ColumnName.CEILING,
        "stock vLLM with a pool that holds everything: the most that can be won",
        hints=False,
        big_pool=True,
    ),
    _column(
        ColumnName.NO_PRESSURE,
        "hints with a pool that holds everything: nothing to win, nothing may change",
        hints=True,
        big_pool=True,
    ),
    _column(
        ColumnName.AGENTS_ONLY,
        "hints, small pool, no one-shot traffic",
        hints=True,
        big_pool=False,
        one_shots=False,
    ),
)
