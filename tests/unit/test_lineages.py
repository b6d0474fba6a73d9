"""Several prompts in one session: what a turn replaces, and what it must leave alone."""

import pytest

from tests.unit.plain_engine import DENSE, HYBRID, PlainEngine, Request
from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import GroupLayout
from vllm_agent_hint.settings import Settings

A = SessionKey("", None, "a")


@pytest.fixture(params=[DENSE, HYBRID], ids=["dense", "hybrid"])
def engine(request: pytest.FixtureRequest) -> PlainEngine:
    layouts: tuple[GroupLayout, ...] = request.param
    return PlainEngine(layouts, 400)


def prompts(engine: PlainEngine) -> list[int]:
    """Attention blocks of each prompt of the session, the one continued last at the end."""
    return [len(lineage.chains[0]) for lineage in engine.sam.sessions[A].lineages]


def counts(engine: PlainEngine, pages: str) -> list[int]:
    """The session counts of the attention blocks of a context."""
    cached = [engine.port.cached_block(h) for h in engine._prompt_of(pages)[0]]
    return [engine.port.blocks[found[0]].count if found else -1 for found in cached]


def begin(engine: PlainEngine, pages: str, *, is_sibling: bool = False) -> Request:
    intent = SessionIntent(A, protections=(Protection(300.0),), is_sibling=is_sibling)
    request = engine.arrive(intent)
    assert request is not None
    engine.run(request, pages)
    return request


def test_stripped_reasoning_is_superseded_and_offered_first(engine: PlainEngine) -> None:
    engine.turn(A, "system", ttl=300.0)
    engine.turn(A, "system user think", ttl=300.0)
    engine.port.fronted.clear()
    engine.turn(A, "system user answer", ttl=300.0)
    assert prompts(engine) == [len("system user answer")]
    assert counts(engine, "system user think")[-5:] == [0] * 5
    assert len(engine.port.fronted) >= 5
    assert engine.sam.counters.superseded_blocks == 5


def test_a_retry_replaces_the_answer_that_it_does_not_repeat(engine: PlainEngine) -> None:
    engine.turn(A, "question wrong", ttl=300.0)
    engine.turn(A, "question wronh", ttl=300.0)
    assert prompts(engine) == [len("question wronh")]
    assert counts(engine, "question wrong")[-1] == 0


def test_a_retry_while_the_first_still_runs_replaces_nothing(engine: PlainEngine) -> None:
    engine.turn(A, "question", ttl=300.0)
    first = begin(engine, "question one")
    second = begin(engine, "question two")
    engine.end(first)
    engine.end(second)
    assert min(counts(engine, "question one")) >= 1
    assert min(counts(engine, "question two")) >= 1


def test_parallel_tool_calls_keep_each_other(engine: PlainEngine) -> None:
    engine.turn(A, "trunk", ttl=300.0)
    calls = [begin(engine, f"trunk {name}") for name in "xyz"]
    for call in calls:
        engine.end(call)
    for name in "xyz":
        assert min(counts(engine, f"trunk {name}")) >= 1
    assert len(prompts(engine)) == 3


def test_a_title_writer_beside_the_main_agent_leaves_its_context_alone(
    engine: PlainEngine,
) -> None:
    main = begin(engine, "main agent")
    title = begin(engine, "write a title")
    engine.end(title)
    engine.end(main)
    assert min(counts(engine, "main agent")) >= 1
    title = begin(engine, "write a title again")
    engine.turn(A, "main agent goes on", ttl=300.0)
    engine.end(title)
    assert min(counts(engine, "main agent goes on")) >= 1


def test_a_title_writer_that_shares_the_system_prompt_leaves_the_main_agent_alone(
    engine: PlainEngine,
) -> None:
    main = begin(engine, "system agent")
    side = begin(engine, "system title")
    engine.end(main)
    engine.end(side)
    engine.turn(A, "system summary", ttl=300.0)
    assert min(counts(engine, "system agent")) >= 1
    assert min(counts(engine, "system title")) >= 1
    assert len(prompts(engine)) == 3


def test_a_title_writer_does_not_keep_the_main_agent_from_superseding(
    engine: PlainEngine,
) -> None:
    main = begin(engine, "main agent thinks")
    title = begin(engine, "write a title")
    engine.end(main)
    engine.turn(A, "main agent thinkt", ttl=300.0)
    assert counts(engine, "main agent thinks")[-1] == 0
    engine.end(title)


def test_the_answers_of_one_request_release_nothing(engine: PlainEngine) -> None:
    engine.turn(A, "question", ttl=300.0)
    answers = [begin(engine, f"question {name}", is_sibling=True) for name in "xy"]
    for answer in answers:
        engine.end(answer)
    assert min(counts(engine, "question x")) >= 1
    assert min(counts(engine, "question y")) >= 1
    last = begin(engine, "question z", is_sibling=True)
    engine.end(last)
    assert min(counts(engine, "question x")) >= 1


def test_the_answers_of_one_request_that_run_one_by_one_release_nothing(
    engine: PlainEngine,
) -> None:
    """A busy engine comes to the second answer only after the first has ended."""
    intent = SessionIntent(A, protections=(Protection(300.0),), is_sibling=True)
    arrived = [engine.arrive(intent) for _ in "xy"]
    for answer, name in zip(arrived, "xy", strict=True):
        assert answer is not None
        engine.run(answer, f"question {name}")
        engine.end(answer)
    assert min(counts(engine, "question x")) >= 1
    assert min(counts(engine, "question y")) >= 1


def test_an_abort_leaves_the_other_answers_of_a_request_alone(engine: PlainEngine) -> None:
    """Also where each ran alone, the others on other data-parallel engines."""
    for name in "xy":
        engine.end(begin(engine, f"{name} answers", is_sibling=True))
    engine.end(begin(engine, "y answers again"), succeeds=False)
    assert min(counts(engine, "x answers")) == 1
    assert min(counts(engine, "y answers")) == 1


def test_the_agent_goes_on_with_the_answer_that_it_chose(engine: PlainEngine) -> None:
    engine.turn(A, "question", ttl=300.0)
    for answer in [begin(engine, f"question {name}", is_sibling=True) for name in "xy"]:
        engine.end(answer)
    engine.turn(A, "question y and on", ttl=300.0)
    assert sorted(prompts(engine)) == [len("question x"), len("question y and on")]


def test_an_abort_in_mid_prefill_releases_nothing(engine: PlainEngine) -> None:
    engine.turn(A, "one two three", ttl=300.0)
    request = begin(engine, "one two four")
    engine.end(request, succeeds=False)
    assert min(counts(engine, "one two three")) == 1
    assert prompts(engine) == [len("one two three")]


def test_a_rewind_by_many_turns_lets_the_old_branch_go(engine: PlainEngine) -> None:
    for pages in ("s", "s a", "s a b", "s a b c"):
        engine.turn(A, pages, ttl=300.0)
    engine.turn(A, "s x", ttl=300.0)
    assert len(prompts(engine)) == 2, "it may come back yet"
    engine.turn(A, "s x y", ttl=300.0)
    assert prompts(engine) == [len("s x y")]
    assert counts(engine, "s a b c")[2:] == [0] * 5


def test_a_compaction_lets_the_old_context_go_where_nobody_ran_beside_it(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "system: a long history", ttl=300.0)
    engine.turn(A, "system: summary", ttl=300.0)
    engine.turn(A, "system: summary, on", ttl=300.0)
    assert prompts(engine) == [len("system: summary, on")]
    assert set(counts(engine, "system: a long history")[-1:]) == {0}


def test_an_agent_that_shares_no_block_with_the_main_one_never_ends_its_context(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "main agent", ttl=300.0)
    for pages in ("write a title", "write a title, on", "write a title, on and on"):
        engine.turn(A, pages, ttl=300.0)
    assert min(counts(engine, "main agent")) == 1


def test_a_compaction_keeps_the_old_context_where_somebody_ran_beside_it(
    engine: PlainEngine,
) -> None:
    side = begin(engine, "title")
    engine.turn(A, "system: a long history", ttl=300.0)
    engine.end(side)
    engine.turn(A, "system: summary", ttl=300.0)
    engine.turn(A, "system: summary, on", ttl=300.0)
    assert min(counts(engine, "system: a long history")) == 1
    assert len(prompts(engine)) == 3


def test_what_was_superseded_and_is_asked_for_again_is_regretted_once(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "s", ttl=300.0)
    engine.turn(A, "s abc", ttl=300.0)
    engine.turn(A, "s xyz", ttl=300.0)
    engine.turn(A, "s abd", ttl=300.0)
    page = engine.layouts[0].block_size
    assert engine.sam.counters.superseded_regret_tokens == 2 * page
    engine.turn(A, "s abd", ttl=300.0)
    assert engine.sam.counters.superseded_regret_tokens == 2 * page


def test_a_session_runs_so_many_prompts_at_most() -> None:
    engine = PlainEngine(num_blocks=200, settings=Settings(max_lineages=2))
    requests = [begin(engine, pages) for pages in ("first", "second", "third")]
    for request in requests:
        engine.end(request)
    assert prompts(engine) == [len("second"), len("third")]
    assert engine.sam.counters.clipped["max_lineages"] == len("first")
    assert set(counts(engine, "first")) == {0}


def test_each_prompt_keeps_the_lease_of_its_own_last_turn(engine: PlainEngine) -> None:
    main, side = (
        begin(engine, "main"),
        engine.arrive(SessionIntent(A, protections=(Protection(5.0),))),
    )
    assert side is not None
    engine.run(side, "side")
    engine.end(main)
    engine.end(side)
    engine.wait(10.0)
    assert min(counts(engine, "main")) == 1
    assert max(counts(engine, "side")) == 0
