"""One answer from several engines: whatever of a session is where, it is told once and whole."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_agent_hint.frontend.engine_calls import EngineAnswer
from vllm_agent_hint.frontend.merging import merge_lists, merge_operations, merge_sessions


def answers(key: str, *contents: Any) -> list[EngineAnswer]:
    return [
        EngineAnswer(engine, active=True, content={key: content})
        for engine, content in enumerate(contents)
    ]


def line(name: str, *, blocks: int = 1, parent: str | None = None) -> dict[str, Any]:
    return {
        "cursor": f"{name}\n",
        "session_id": name,
        "has_cache_salt": False,
        "parent_session_id": parent,
        "live_requests": 1,
        "lineages": 1,
        "blocks": blocks,
        "tokens": 16 * blocks,
    }


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True).map(sorted)


@given(st.lists(NAMES, min_size=1, max_size=3), st.integers(1, 4))
def test_pages_over_several_engines_show_each_session_once_in_order(
    engines: list[list[str]], limit: int
) -> None:
    seen: list[str] = []
    after = ""
    while True:
        of_each = [
            [line(name) for name in names if f"{name}\n" > after][: limit + 1] for names in engines
        ]
        page, last = merge_lists(answers("sessions", *of_each), limit)
        seen += [shown["session_id"] for shown in page]
        if last is None:
            break
        after = last
        assert len(page) == limit
    assert seen == sorted({name for names in engines for name in names})


def test_what_two_engines_hold_of_one_session_adds_up() -> None:
    [shown], last = merge_lists(
        answers("sessions", [line("a", blocks=2)], [line("a", blocks=3, parent="main")]), 10
    )

    assert last is None
    assert (shown["lineages"], shown["blocks"], shown["tokens"]) == (2, 5, 80)
    assert (shown["live_requests"], shown["parent_session_id"]) == (2, "main")


def session(*children: str, parent: str | None = None, blocks: int = 1) -> dict[str, Any]:
    lineage = {"tokens": 16 * blocks, "blocks": blocks, "resident_blocks": blocks, "leases": []}
    return {
        "session_id": "main",
        "has_cache_salt": False,
        "parent_session_id": parent,
        "children": list(children),
        "live_requests": 1,
        "lineages": [lineage],
    }


def test_a_session_is_found_whichever_engine_has_it() -> None:
    found = merge_sessions(answers("session", None, session("x")))

    assert found is not None
    assert [lineage["engine"] for lineage in found["lineages"]] == [1]


def test_a_session_that_no_engine_has_is_not_found() -> None:
    assert merge_sessions(answers("session", None, None)) is None
    assert merge_sessions([EngineAnswer(0, active=False, has_failed=True)]) is None


def test_a_session_on_two_engines_is_one() -> None:
    found = merge_sessions(answers("session", session("x", "y"), session("y", parent="top")))

    assert found is not None
    assert found["children"] == ["x", "y"]
    assert found["parent_session_id"] == "top"
    assert found["live_requests"] == 2
    assert [lineage["engine"] for lineage in found["lineages"]] == [0, 1]


def operation(
    status: str, *results: tuple[str, int], retention: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "operation_id": "op",
        "status": status,
        "results": [{"type": "evict", "status": s, "blocks": n} for s, n in results],
        "retention": retention,
    }


def test_an_operation_is_pending_while_it_is_so_on_any_engine() -> None:
    for first, second in (("pending", "done"), ("done", "pending")):
        found = merge_operations(answers("operation", operation(first), operation(second)))
        assert found is not None
        assert found["status"] == "pending"
    found = merge_operations(answers("operation", operation("done"), None))
    assert found is not None
    assert found["status"] == "done"


def test_an_operation_that_no_engine_knows_is_unknown_and_not_pending() -> None:
    assert merge_operations(answers("operation", None, None)) is None


def test_each_edit_has_its_best_result_though_an_engine_has_none_of_them() -> None:
    found = merge_operations(
        answers(
            "operation",
            operation("done", ("missing", 0), ("applied", 2)),
            operation("done", ("applied", 1), ("missing", 0)),
            operation("done"),
        )
    )

    assert found is not None
    assert [(r.status, r.blocks) for r in found["results"]] == [("applied", 1), ("applied", 2)]


def test_edits_that_one_engine_rejected_are_partial_where_another_applied_them() -> None:
    """Its requests of the operation did not succeed, so it keeps what it has of the session."""
    found = merge_operations(
        answers("operation", operation("done", ("applied", 2)), operation("done", ("rejected", 0)))
    )

    assert found is not None
    [result] = found["results"]
    assert (result.status, result.blocks) == ("partial", 2)
    assert "1 of 2 engines rejected" in result.reason


def test_what_is_retained_on_several_engines_adds_up() -> None:
    found = merge_operations(
        answers(
            "operation",
            operation(
                "done",
                retention={"status": "clipped", "blocks": 1, "tokens": 16, "bounds": ["b", "a"]},
            ),
            operation("done"),
            operation(
                "done",
                retention={"status": "applied", "blocks": 2, "tokens": 32, "bounds": ["a"]},
            ),
        )
    )

    assert found is not None
    assert found["retention"] == {
        "status": "clipped",
        "blocks": 3,
        "tokens": 48,
        "bounds": ["a", "b"],
    }
