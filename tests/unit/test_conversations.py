"""Requests without a hint that go on with one another: who is recognised, and what that changes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plain_engine import PAGE, PlainEngine, Request
from vllm_agent_hint.sessions.conversations import (
    MAX_GROWTH,
    MIN_TOKENS,
    STRIDE_TOKENS,
    Conversations,
)
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.sessions.policy import reuse_class
from vllm_agent_hint.sessions.reuse import CONVERSATION
from vllm_agent_hint.settings import Settings

STRIDE = STRIDE_TOKENS // PAGE
LEAST = MIN_TOKENS // PAGE
AGENT = SessionKey("", None, "agent")


def pages(name: object, n: int) -> list[object]:
    return [(name, k) for k in range(n)]


def make_engine(num_blocks: int = 1000, **bounds: object) -> PlainEngine:
    """With one hinted session, beside which conversations are looked for."""
    engine = PlainEngine(num_blocks=num_blocks, settings=Settings.model_validate(bounds))
    engine.turn(AGENT, pages("agent", 3), ttl=3600.0)
    return engine


def arrive(engine: PlainEngine, prompt: Sequence[object], tenant: str = "") -> Request | None:
    """A request without a hint; None if it goes on with nothing."""
    if not engine.sam.recognizes:
        return None
    (hashes,) = engine._prompt_of(prompt)
    live = engine.sam.unhinted_added(hashes, engine.now, tenant=tenant)
    return None if live is None else Request(live, None)


def chat(engine: PlainEngine, prompt: Sequence[object], tenant: str = "") -> Request | None:
    """A whole request without a hint, after which some time passes."""
    request = arrive(engine, prompt, tenant)
    if request is not None:
        engine.run(request, prompt)
        engine.end(request)
    engine.wait(5.0)
    return request


def conversation_of(request: Request | None) -> object:
    assert request is not None, "it was not recognised"
    return request.live.session.key


# -- who is recognised -----------------------------------------------------------------------------


def test_a_prompt_that_goes_on_with_the_last_one_is_its_conversation() -> None:
    engine = make_engine()
    assert chat(engine, pages("chat", LEAST)) is None
    second = chat(engine, pages("chat", LEAST + 10))
    third = chat(engine, pages("chat", LEAST + 90))
    assert conversation_of(second) == conversation_of(third)
    assert engine.sam.num_conversations == 1
    assert engine.sam.num_hinted_sessions == 1


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (pages("chat", LEAST - 1), pages("chat", LEAST + 10)),
        (pages("chat", LEAST), pages("other", LEAST + 10)),
        (pages("chat", LEAST + 10), pages("chat", LEAST + 10)),
        (pages("chat", LEAST + 10), pages("chat", LEAST)),
        (pages("chat", LEAST), pages("chat", MAX_GROWTH * LEAST + 1)),
    ],
    ids=["too short", "shares nothing", "the same again", "shorter", "a prefix that many have"],
)
def test_what_goes_on_with_nothing(first: list[object], later: list[object]) -> None:
    engine = make_engine()
    assert chat(engine, first) is None
    assert chat(engine, later) is None


def test_the_end_of_a_turn_that_the_next_one_does_not_repeat_is_no_hindrance() -> None:
    """A template's last tokens, or a reasoning that is left out."""
    engine = make_engine()
    chat(engine, [*pages("chat", LEAST), *pages("template", STRIDE - 1)])
    assert chat(engine, pages("chat", LEAST + STRIDE)) is not None


def test_a_prefix_that_two_have_at_once_is_nobodys_conversation() -> None:
    engine = make_engine()
    chat(engine, pages("system", LEAST))
    one = arrive(engine, [*pages("system", LEAST), *pages("one", 5)])
    assert one is not None
    assert arrive(engine, [*pages("system", LEAST), *pages("two", 6)]) is None
    engine.run(one, pages("system", LEAST))
    engine.end(one)
    engine.wait(5.0)
    assert chat(engine, [*pages("system", LEAST), *pages("three", 7)]) is None


def test_siblings_of_one_prompt_are_one_turn() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST))
    first = arrive(engine, pages("chat", LEAST + 1))
    assert first is not None
    assert arrive(engine, pages("chat", LEAST + 1)) is None
    engine.run(first, pages("chat", LEAST + 1))
    engine.end(first)
    assert chat(engine, pages("chat", LEAST + 2)) is not None, "they were taken for two"


def test_no_tenant_goes_on_with_another() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST), "one")
    assert chat(engine, pages("chat", LEAST + 1), "two") is None


def test_nobody_is_looked_at_without_a_hinted_session() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST))
    assert chat(engine, pages("chat", LEAST + 1)) is not None
    engine.free_session(AGENT)
    assert not engine.sam.recognizes
    engine.wait(engine.settings.associated_seconds + 2)
    assert engine.sam.num_records == 0
    assert not engine.sam.sessions


def test_off_is_off() -> None:
    assert not make_engine(conversations=False).sam.recognizes


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(LEAST - STRIDE, 3 * LEAST)), max_size=12),
    st.integers(1, 3),
)
def test_conversations_are_known_as_a_plain_list_knows_them(
    prompts: list[tuple[str, int]], most: int
) -> None:
    known = Conversations(PAGE, most)
    plain: list[tuple[str, int, int]] = []
    """Family, blocks by which it is known, blocks of its last prompt; oldest first."""
    for name, length in prompts:
        hashes = pages(name, length)
        end = length // STRIDE * STRIDE
        found = max(
            (entry for entry in plain if entry[0] == name and entry[1] <= length),
            key=lambda entry: entry[1],
            default=None,
        )
        is_turn = found is not None and found[2] < length <= MAX_GROWTH * found[2]
        known_by, conversation = known.find(hashes) or (None, None)
        assert (conversation is None) is (found is None)
        if found is not None and conversation is not None:
            assert conversation.num_hashes == found[2]
            assert conversation.is_continued_by(hashes) is is_turn
        if found is not None and is_turn:
            plain.remove(found)
            plain = [entry for entry in plain if entry[:2] != (name, end)]
            plain.append((name, end, length))
            known.go_on(known_by, hashes, 0.0)
        else:
            known.begin(hashes, 0.0)
            if end >= LEAST and all(entry[:2] != (name, end) for entry in plain):
                plain.append((name, end, length))
        del plain[:-most]
        assert len(known) == len(plain)


# -- what that changes -----------------------------------------------------------------------------


def test_a_conversation_goes_after_prompts_that_nobody_repeats_and_before_leases() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST))
    request = chat(engine, pages("chat", LEAST + 1))
    ids = engine.blocks_of(conversation_of(request))
    assert engine.counts_of(ids) == [1] * (LEAST + 1)
    assert engine.deadlines_of(conversation_of(request)) == [0.0] * (LEAST + 1)


def test_its_class_is_its_own() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST))
    request = chat(engine, pages("chat", LEAST + 1))
    assert request is not None
    turn = request.live.session.turn
    assert (turn.conversation_turns, turn.last_gap) == (2, 5.0)
    assert turn.prompt_tokens == (LEAST + 1) * PAGE
    assert reuse_class(turn).ended == CONVERSATION
    assert reuse_class(turn) != reuse_class(replace(turn, conversation_turns=6))
    assert reuse_class(turn) != reuse_class(replace(turn, prompt_tokens=100_000))


def test_what_the_next_turn_does_not_repeat_goes_at_once() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST))
    chat(engine, [*pages("chat", LEAST), *pages("template", 5)])
    before = engine.sam.num_records
    chat(engine, pages("chat", LEAST + 9))
    assert engine.sam.num_records == before + 4
    assert engine.sam.counters.superseded_blocks == 5


def test_it_does_not_outstay_a_session_without_a_lease() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST))
    chat(engine, pages("chat", LEAST + 1))
    engine.wait(engine.settings.associated_seconds + 2)
    assert engine.sam.num_conversations == 0
    assert engine.sam.num_records == 3
    again = chat(engine, pages("chat", LEAST + 2))
    assert again is not None, "it is still known"
    assert again.live.conversation_turns == 3


def test_no_hinted_session_makes_room_for_conversations() -> None:
    engine = make_engine(max_sessions=2, max_conversations=2)
    engine.turn(SessionKey("", None, "second"), pages("second", 3), ttl=3600.0)
    for name in range(5):
        chat(engine, pages(name, LEAST))
        chat(engine, pages(name, LEAST + 1))
    assert engine.sam.num_hinted_sessions == 2
    assert engine.sam.num_conversations == 2
    engine.turn(SessionKey("", None, "third"), pages("third", 3), ttl=3600.0)
    assert engine.sam.num_hinted_sessions == 2
    assert engine.sam.num_conversations == 2


def test_above_the_protected_share_a_conversation_gives_way_and_no_session_to_it() -> None:
    bound = LEAST + 20
    engine = make_engine(401, protected_share=bound / 400)
    quiet = SessionKey("", None, "quiet")
    engine.turn(quiet, pages("quiet", 3), ttl=0.0)
    engine.sam.turn_ended(quiet, "", "final_message", (), engine.now)
    engine.wait(200.0)
    for name in "ab":
        chat(engine, pages(name, LEAST))
        chat(engine, pages(name, LEAST + 1))
    assert engine.port.num_retained_blocks <= bound
    assert len(engine.blocks_of(quiet)) == 3
    assert len(engine.blocks_of(AGENT)) == 3
    engine.turn(SessionKey("", None, "large"), pages("large", bound - 6), ttl=60.0)
    assert engine.port.num_retained_blocks <= bound
    assert len(engine.blocks_of(AGENT)) == 3


def test_conversations_leave_half_of_the_records_to_sessions() -> None:
    engine = make_engine(max_records=2 * LEAST)
    for name in "abc":
        chat(engine, pages(name, LEAST))
        chat(engine, pages(name, LEAST + 1))
    assert engine.sam.num_records <= LEAST


def test_an_evict_keeps_what_a_conversation_has_been_served_from() -> None:
    engine = make_engine()
    shared = pages("shared", LEAST)
    engine.turn(SessionKey("", None, "other"), shared, ttl=300.0)
    chat(engine, shared)
    request = arrive(engine, [*shared, "more"])
    assert request is not None
    engine.run(request, [*shared, "more"])
    engine.end(request)
    ids = engine.blocks_of(conversation_of(request))[:LEAST]
    engine.evict(SessionKey("", None, "other"))
    assert all(engine.port.blocks[i].deadline > engine.now for i in ids), "an heir keeps it"


def test_everything_is_forgotten_with_the_sessions() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST))
    chat(engine, pages("chat", LEAST + 1))
    engine.free_all_sessions()
    assert not engine.sam.sessions
    assert engine.sam.num_conversations == 0
    assert engine.sam.num_records == 0
    assert not engine.sam.ledger.index


def test_a_reset_empties_a_conversation_and_it_goes_on() -> None:
    engine = make_engine()
    chat(engine, pages("chat", LEAST))
    chat(engine, pages("chat", LEAST + 1))
    engine.reset()
    assert engine.sam.num_records == 0
    assert chat(engine, pages("chat", LEAST + 2)) is not None
