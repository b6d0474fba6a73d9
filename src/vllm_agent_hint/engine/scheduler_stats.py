"""The field of ``SchedulerStats`` in which session statistics travel to the front end."""

from dataclasses import field, make_dataclass
from typing import Any

FIELD = "agent_hint"
"""Name of the field that ``SchedulerStats`` gains."""


def add_field_to_scheduler_stats(module: Any) -> None:
    """``vllm.v1.metrics.stats``: stock sends ``SchedulerStats`` from the engine to one front end.

    We add one optional field to the dataclass before its first instance is encoded. A receiver
    without it ignores the field; if the class moves, only our metrics stop.
    """
    stats = module.SchedulerStats
    if FIELD in stats.__dataclass_fields__:
        return
    donor = make_dataclass("_Donor", [(FIELD, dict[str, Any] | None, field(default=None))])
    stats.__dataclass_fields__[FIELD] = donor.__dataclass_fields__[FIELD]  # type: ignore[attr-defined]
    stats.__annotations__[FIELD] = dict[str, Any] | None
    setattr(stats, FIELD, None)
