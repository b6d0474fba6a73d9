"""One answer from those of several data-parallel engines, each of which may hold a part.

A session's requests may have run on any of them, so the same session may be on several.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from vllm_agent_hint.frontend.engine_calls import EngineAnswer, best_of
from vllm_agent_hint.hints import EditResult

Plain = dict[str, Any]


def merge_lists(answers: Sequence[EngineAnswer], limit: int) -> tuple[list[Plain], str | None]:
    """The first sessions of all engines, in the order of their cursors.

    Args:
        answers: Each with its first ``limit + 1`` sessions.
        limit: How many to return.

    Returns:
        The sessions, and the cursor after which there are more; None if there are not.
    """
    by_cursor: dict[str, Plain] = {}
    for answer in answers:
        for line in answer.content.get("sessions", ()):
            cursor = line["cursor"]
            by_cursor[cursor] = _add(by_cursor[cursor], line) if cursor in by_cursor else line
    cursors = sorted(by_cursor)
    shown = cursors[:limit]
    return [by_cursor[cursor] for cursor in shown], shown[-1] if len(cursors) > limit else None


def _add(one: Plain, other: Plain) -> Plain:
    sums = {
        count: one[count] + other[count]
        for count in ("live_requests", "lineages", "blocks", "tokens")
    }
    parent = one["parent_session_id"] or other["parent_session_id"]
    return {**one, **sums, "parent_session_id": parent}


def merge_sessions(answers: Sequence[EngineAnswer]) -> Plain | None:
    """What the engines say of one session; None if none of them has it.

    Each lineage says which engine it is on.
    """
    found = [(a.engine, a.content["session"]) for a in answers if a.content.get("session")]
    if not found:
        return None
    parts = [part for _, part in found]
    return {
        "session_id": parts[0]["session_id"],
        "has_cache_salt": parts[0]["has_cache_salt"],
        "parent_session_id": _first(part["parent_session_id"] for part in parts),
        "children": sorted({child for part in parts for child in part["children"]}),
        "live_requests": sum(part["live_requests"] for part in parts),
        "lineages": [
            {"engine": engine, **lineage} for engine, part in found for lineage in part["lineages"]
        ],
        "residency": [
            {"engine": engine, **part["residency"]} for engine, part in found if "residency" in part
        ],
    }


def merge_operations(answers: Sequence[EngineAnswer]) -> Plain | None:
    """What the engines say of one operation; None if none of them knows it.

    It is pending while it is so on any engine. Its requests may be spread over several, and an
    engine that had none of them has nothing to say of edits.
    """
    parts = [a.content["operation"] for a in answers if a.content.get("operation")]
    if not parts:
        return None
    of_each_edit = zip_longest(
        *([EditResult.model_validate(result) for result in part["results"]] for part in parts)
    )
    results = [best_of([r for r in results if r is not None]) for results in of_each_edit]
    return {
        "operation_id": parts[0]["operation_id"],
        "status": "pending" if any(part["status"] == "pending" for part in parts) else "done",
        "results": results,
        "retention": _merge_retention([p["retention"] for p in parts if p["retention"]]),
    }


def _merge_retention(parts: Sequence[Plain]) -> Plain | None:
    """Blocks and tokens add up, each bound that clipped counts; else the first engine is right."""
    if not parts:
        return None
    merged = {key: value for part in reversed(parts) for key, value in part.items()}
    for count in ("blocks", "tokens"):
        if count in merged:
            merged[count] = sum(part.get(count, 0) for part in parts)
    if "bounds" in merged:
        merged["bounds"] = sorted({bound for part in parts for bound in part.get("bounds", ())})
    return merged


def _first(values: Iterable[str | None]) -> str | None:
    return next((value for value in values if value is not None), None)
