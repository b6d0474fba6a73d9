"""What a tenant may see of its sessions: of others' nothing, of a cache salt that there is one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_agent_hint.sessions import view
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.sessions.lineage import GroupLayout, Lease, Lineage
from vllm_agent_hint.sessions.session import LiveRequest, Session
from vllm_agent_hint.sessions.ttl import TTLManager

ONE_GROUP = [GroupLayout(16)]
KEY = SessionKey("tenant", None, "main")


def session(key: SessionKey = KEY, num_groups: int = 1) -> Session:
    return Session(key, num_groups)


def record(lineage: Lineage, num_blocks: int, group: int = 0) -> None:
    chain = lineage.chains[group]
    for position in range(num_blocks):
        chain.put(position, 100 + position, bytes([position]) * 32, computed=True)


def test_an_empty_session_has_one_lineage_without_records_or_leases() -> None:
    assert view.describe(KEY, session(), ONE_GROUP, 0.0) == {
        "session_id": "main",
        "has_cache_salt": False,
        "parent_session_id": None,
        "children": [],
        "live_requests": 0,
        "lineages": [{"tokens": 0, "blocks": 0, "resident_blocks": 0, "leases": []}],
    }


def test_blocks_that_were_reused_are_recorded_and_not_resident() -> None:
    main = session()
    record(main.lineages[0], 5)
    main.lineages[0].chains[0].mark_lost(4)
    main.lineages[0].chains[0].mark_lost(3)

    [lineage] = view.describe(KEY, main, ONE_GROUP, 0.0)["lineages"]

    assert (lineage["tokens"], lineage["blocks"], lineage["resident_blocks"]) == (80, 5, 3)


def test_tokens_are_those_of_the_group_that_holds_most() -> None:
    main = session(num_groups=2)
    record(main.lineages[0], 4, group=0)
    record(main.lineages[0], 3, group=1)

    [lineage] = view.describe(KEY, main, [GroupLayout(16), GroupLayout(32)], 0.0)["lineages"]

    assert (lineage["tokens"], lineage["blocks"]) == (96, 7)


def test_each_lineage_is_shown_for_itself_and_the_summary_adds_them_up() -> None:
    main = session()
    main.lineages.append(Lineage(main, 1))
    record(main.lineages[0], 2)
    record(main.lineages[1], 3)

    described = view.describe(KEY, main, ONE_GROUP, 0.0)
    line = view.summary(KEY, main, ONE_GROUP)

    assert [lineage["blocks"] for lineage in described["lineages"]] == [2, 3]
    assert (line["lineages"], line["blocks"], line["tokens"]) == (2, 5, 80)


def test_a_running_lease_says_what_remains_of_it() -> None:
    main = session()
    lineage = main.lineages[0]
    whole, part = Lease(lineage, 60.0, None, 160.0), Lease(lineage, 90.0, 32, 190.0)
    lineage.leases = [part, whole]
    wheel = TTLManager(100.0)
    for lease in lineage.leases:
        wheel.register(lease, lease.deadline)

    [shown] = view.describe(KEY, main, ONE_GROUP, 165.0)["lineages"]

    assert shown["leases"] == [
        {"ttl": 90.0, "remaining": 25.0, "end_token": 32},
        {"ttl": 60.0, "remaining": 0.0, "end_token": None},
    ]


def test_a_lease_that_a_live_request_holds_has_no_remaining_time() -> None:
    main = session()
    main.lineages[0].leases = [Lease(main.lineages[0], 60.0, None, 160.0)]
    main.live.add(LiveRequest(main, None))  # type: ignore[arg-type]

    described = view.describe(KEY, main, ONE_GROUP, 120.0)

    assert described["live_requests"] == 1
    assert described["lineages"][0]["leases"][0]["remaining"] is None


def test_parent_and_children_are_named_by_their_ids() -> None:
    main, worker, other = (
        session(SessionKey("tenant", None, name)) for name in ("main", "worker", "other")
    )
    for child in (worker, other):
        child.parent = main
        main.children.add(child)

    assert view.describe(KEY, main, ONE_GROUP, 0.0)["children"] == ["other", "worker"]
    assert view.describe(KEY, worker, ONE_GROUP, 0.0)["parent_session_id"] == "main"
    assert view.summary(KEY, worker, ONE_GROUP)["parent_session_id"] == "main"


@pytest.mark.parametrize("show", ["describe", "summary"])
def test_a_cache_salt_is_never_shown_but_that_there_is_one(show: str) -> None:
    key = SessionKey("tenant", "s3cret-salt", "main")
    shown = (
        view.describe(key, session(key), ONE_GROUP, 0.0)
        if show == "describe"
        else view.summary(key, session(key), ONE_GROUP)
    )

    assert shown["has_cache_salt"] is True
    assert "s3cret" not in json.dumps(shown)


# -- the list -----------------------------------------------------------------------------------

SALTS = st.sampled_from([None, "x", "y"])
NAMES = st.text(
    st.characters(exclude_categories=["C"]).filter(str.isprintable), min_size=1, max_size=3
)
KEYS: st.SearchStrategy[Any] = st.builds(
    SessionKey, st.sampled_from(["", "a", "b"]), SALTS, NAMES | st.sampled_from(["a", "ab", "a b"])
) | st.integers(0, 5)


@given(st.sets(KEYS, max_size=25), st.integers(1, 4), st.sampled_from(["", "a", "b"]))
def test_pages_show_each_session_of_the_tenant_once_in_one_order_and_no_other(
    keys: set[Any], limit: int, tenant: str
) -> None:
    seen: list[SessionKey] = []
    after = None
    while found := view.page(view.keys_of(tenant, keys), limit, after):
        assert len(found) <= limit
        seen += found
        assert len(seen) <= len(keys), "the pages go in a circle"
        after = view.cursor_of(found[-1])

    own = [key for key in keys if isinstance(key, SessionKey) and key.tenant == tenant]
    assert len(seen) == len(own)
    assert set(seen) == set(own)
    assert [key.session_id for key in seen] == sorted(key.session_id for key in own)


@given(st.sets(KEYS, min_size=1, max_size=25), st.data())
def test_a_session_that_goes_between_two_pages_makes_no_other_one_skipped_or_seen_twice(
    keys: set[Any], data: st.DataObject
) -> None:
    own = list(view.keys_of("a", keys))
    first = view.page(own, 2, None)
    if not first:
        return
    gone = data.draw(st.sampled_from(own))
    after = view.cursor_of(first[-1])
    rest = view.page([key for key in own if key != gone], 100, after)

    assert {*first, *rest} >= {key for key in own if key != gone}
    assert not set(first) & set(rest)


def test_a_cursor_names_no_salt_and_no_tenant() -> None:
    cursor = view.cursor_of(SessionKey("tenant", "s3cret", "main"))
    assert "s3cret" not in cursor
    assert "tenant" not in cursor
    assert cursor != view.cursor_of(SessionKey("other", "s3cret", "main"))


def test_a_page_costs_a_digest_for_each_session_that_it_shows_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A digest costs 50 times a comparison, and the engine's own thread makes it."""
    keys = [SessionKey("tenant", "salt", f"{n:05}") for n in range(10_000)]
    digested: list[SessionKey] = []
    cursor_of = view.cursor_of

    def counting(key: SessionKey) -> str:
        digested.append(key)
        return cursor_of(key)

    monkeypatch.setattr(view, "cursor_of", counting)
    for after in (None, cursor_of(keys[4_999])):
        digested.clear()
        shown = view.page(keys, 100, after)
        assert len(shown) == 100
        assert len(digested) <= 101
