"""The utility call: one tenant's sessions and operations, answered at once or when they are done.

``tests/serve`` asks the same through HTTP; here it is what no client can send or see.
"""

import copy
import traceback
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import msgpack

from tests.engine.conftest import Log
from tests.engine.rig import (
    KINDS,
    Clock,
    Engine,
    hinted,
    make_request,
    make_scheduler,
    prompt,
)
from vllm_agent_hint.engine import utility
from vllm_agent_hint.engine.hooks import EngineHooks
from vllm_agent_hint.engine.utility import agent_hint_rpc
from vllm_agent_hint.hints import HINT_KEY, EditResult, EditStatus, EditType
from vllm_agent_hint.sessions import view
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings
from vllm_agent_hint.stamp import STAMP_KEY, Stamp

APPLIED = EditResult(type=EditType.EVICT, status=EditStatus.APPLIED)
READS = {
    "list": {"limit": 10},
    "show": {"session_id": "a"},
    "operation": {"operation_id": "op"},
    "state": {},
}


@pytest.fixture
def engine(clock: Clock) -> Engine:
    return Engine(make_scheduler(plugged=True, num_blocks=70))


def ask(engine: Engine, op: str, **more: Any) -> Any:
    return agent_hint_rpc(SimpleNamespace(scheduler=engine.scheduler), {"op": op, **more})


def stamped(session_id: str, tenant: str, operation_id: str, *edits: str) -> dict[str, Any]:
    """``extra_args`` as our front end makes them."""
    hint = hinted(session_id, 60.0, *edits)
    return {STAMP_KEY: Stamp(hint, tenant, operation_id).sealed()}


def siblings(number: int, *, may_spread: bool = False) -> dict[str, Any]:
    """``extra_args`` of each of the requests that one HTTP request has become."""
    stamp = Stamp(hinted("a", 60.0, "evict"), "red", "op", number, may_spread=may_spread)
    return {STAMP_KEY: stamp.sealed()}


def status_of(engine: Engine) -> str:
    status: str = ask(engine, "operation", tenant="red", operation_id="op")["operation"]["status"]
    return status


def edits_of(engine: Engine) -> list[str]:
    operation = ask(engine, "operation", tenant="red", operation_id="op")["operation"]
    assert operation["status"] == "done"
    return [result["status"] for result in operation["results"]]


def serve_stamped(engine: Engine, extra_args: dict[str, Any], *, run: bool = True) -> None:
    request_id = engine.add(prompt(1, 64), hint=None, extra_args=extra_args)
    assert request_id
    if run:
        engine.run()


def test_each_operation_speaks_for_one_tenant(engine: Engine) -> None:
    serve_stamped(engine, stamped("a", "red", "op-red"))
    serve_stamped(engine, stamped("a", "blue", "op-blue"))

    for tenant, other in (("red", "blue"), ("blue", "red")):
        listed = ask(engine, "list", tenant=tenant, limit=10)["sessions"]
        assert [line["session_id"] for line in listed] == ["a"]
        assert ask(engine, "state", tenant=tenant)["state"]["sessions"] == 1
        assert ask(engine, "show", tenant=tenant, session_id="a")["session"] is not None
        own = ask(engine, "operation", tenant=tenant, operation_id=f"op-{tenant}")
        assert own["operation"]["status"] == "done"
        others = ask(engine, "operation", tenant=tenant, operation_id=f"op-{other}")
        assert others["operation"] is None
    assert ask(engine, "free", tenant="red", session_id="a")["known"] is True
    assert ask(engine, "show", tenant="red", session_id="a")["session"] is None
    assert ask(engine, "show", tenant="blue", session_id="a")["session"] is not None


def test_a_caller_that_names_no_tenant_is_the_default_one(engine: Engine) -> None:
    serve_stamped(engine, stamped("a", "red", "op"))
    assert ask(engine, "list", limit=10)["sessions"] == []
    assert ask(engine, "show", session_id="a")["session"] is None
    assert ask(engine, "state")["state"]["sessions"] == 0


@pytest.mark.parametrize("mac", [None, "x"])
def test_a_stamp_that_we_did_not_make_gives_nobody_a_tenant(
    engine: Engine, mac: str | None
) -> None:
    """The front end drops it; who reaches the engine past the front end gains nothing by it."""
    forged = {"tenant": "red", "hint": hinted("forged", 60.0), "operation_id": "op", "mac": mac}
    serve_stamped(engine, {STAMP_KEY: forged, HINT_KEY: hinted("a", 60.0)})
    assert ask(engine, "list", tenant="red", limit=10)["sessions"] == []
    [line] = ask(engine, "list", limit=10)["sessions"]
    assert line["session_id"] == "a"


def test_an_operation_is_pending_from_the_arrival_of_its_request_to_its_end(
    engine: Engine,
) -> None:
    serve_stamped(engine, stamped("a", "red", "op", "evict"), run=False)

    found = ask(engine, "operation", tenant="red", operation_id="op")["operation"]
    assert found["status"] == "pending"
    assert [r["status"] for r in found["results"]] == ["pending"]

    engine.run()
    found = ask(engine, "operation", tenant="red", operation_id="op")["operation"]
    assert found["status"] == "done"
    assert [r["status"] for r in found["results"]] == ["applied"]


def test_the_edits_of_an_aborted_request_are_known_to_be_rejected(engine: Engine) -> None:
    request_id = engine.add(
        prompt(1, 64), hint=None, extra_args=stamped("a", "red", "op", "evict"), max_tokens=20
    )
    engine.step()
    engine.abort(request_id)

    found = ask(engine, "operation", tenant="red", operation_id="op")["operation"]
    assert found["status"] == "done"
    assert [r["status"] for r in found["results"]] == ["rejected"]


def test_siblings_that_may_be_spread_run_their_edits_when_none_is_left_on_the_engine(
    engine: Engine,
) -> None:
    """Of the four, two are on another engine."""
    spread = siblings(4, may_spread=True)
    for max_tokens in (2, 6):
        engine.add(prompt(1, 64), hint=None, extra_args=spread, max_tokens=max_tokens)
    seen = set()
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        seen.add((len(engine.scheduler.requests), status_of(engine)))
    assert seen == {(2, "pending"), (1, "pending"), (0, "done")}
    assert edits_of(engine) == ["applied"]

    engine.add(prompt(1, 64), hint=None, extra_args=spread)
    assert status_of(engine) == "pending", "one more has come"
    engine.run()
    assert edits_of(engine) == ["applied"]
    shown = ask(engine, "show", tenant="red", session_id="a")["session"]
    assert shown["lineages"][0]["blocks"] == 0, "what it left is gone as well"


def test_siblings_that_may_be_spread_reject_their_edits_where_one_of_them_failed(
    engine: Engine,
) -> None:
    spread = siblings(4, may_spread=True)
    first, _ = (engine.add(prompt(1, 64), hint=None, extra_args=spread) for _ in range(2))
    engine.abort(first)
    engine.run()
    assert edits_of(engine) == ["rejected"]


def test_what_waits_for_siblings_that_never_come_fails_after_ten_minutes(
    engine: Engine, clock: Clock
) -> None:
    engine.add(prompt(1, 64), hint=None, extra_args=siblings(2), max_tokens=200)
    clock.advance(3_000.0)
    engine.step()
    assert status_of(engine) == "pending", "it is alive"
    engine.run()
    clock.advance(599.0)
    assert status_of(engine) == "pending"
    clock.advance(1.0)
    assert edits_of(engine) == ["failed"]

    engine.add(prompt(1, 64), hint=None, extra_args=siblings(2))
    assert status_of(engine) == "pending"
    engine.run()
    assert edits_of(engine) == ["applied"], "better late"


def test_a_request_for_whose_session_there_is_no_room_is_told_so(clock: Clock) -> None:
    settings = Settings(max_sessions=1)
    engine = Engine(make_scheduler(plugged=True, num_blocks=70, settings=settings))
    engine.add(prompt(2, 64), hint=hinted("alive", 60.0), max_tokens=50)
    serve_stamped(engine, stamped("a", "red", "op", "evict"))

    found = ask(engine, "operation", tenant="red", operation_id="op")["operation"]
    assert [r["status"] for r in found["results"]] == ["rejected"]
    assert found["retention"]["status"] == "rejected"
    assert found["retention"]["bounds"] == ["max_sessions"]
    assert "no room" in found["retention"]["reason"]


def test_as_many_results_are_kept_as_the_setting_says(clock: Clock) -> None:
    settings = Settings(max_operations=2)
    engine = Engine(make_scheduler(plugged=True, num_blocks=70, settings=settings))
    for k in range(3):
        ask(engine, "edit", session_id="a", edits=[{"type": "evict"}], operation_id=f"op-{k}")
    found = [ask(engine, "operation", operation_id=f"op-{k}")["operation"] for k in range(3)]
    assert [operation is not None for operation in found] == [False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_freed_session_counts_what_an_evict_would(kind: str, clock: Clock) -> None:
    def told(op: str, **more: Any) -> tuple[int, int]:
        engine = Engine(make_scheduler(plugged=True, num_blocks=70, kind=kind))
        engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
        engine.serve(prompt(1, 100), hint=hinted("a", 60.0))
        if kind == "full":
            engine.serve(prompt(2, 16 * 65))  # Takes some of them away.
        [result] = ask(engine, op, session_id="a", at_once=True, **more)["results"]
        assert result["status"] == "applied"
        return result["blocks"], result["tokens"]

    freed = told("free")
    assert freed == told("edit", edits=[{"type": "evict"}])
    assert freed > (0, 0)


# -- what a log may hold -----------------------------------------------------------------------


def test_what_vllm_logs_of_a_scheduled_request_holds_nothing_of_its_hint(engine: Engine) -> None:
    """As ``dump_engine_exception`` does when a step fails."""
    shared = {
        **msgpack.decode(msgpack.encode(stamped("s3cret-id", "s3cret-tenant", "op"))),
        "someone_elses": 1,
    }
    request = make_request("r", prompt(1, 64), extra_args=shared)
    params = request.sampling_params
    before = copy.deepcopy(params.extra_args)

    engine.scheduler.add_request(request)
    bare = make_request("b", prompt(1, 64), hint=hinted("s3cret-bare", 60.0))
    engine.scheduler.add_request(bare)
    output = engine.scheduler.schedule()

    said = repr(output) + "".join(new.anon_repr() for new in output.scheduled_new_reqs)
    for secret in ("s3cret", "mac", "agent_hint"):
        assert secret not in said
    assert "someone_elses" in said
    assert engine.session("s3cret-bare").live
    assert params.extra_args == before, "siblings and the caller share them"
    assert bare.sampling_params.extra_args is None


def test_nor_does_it_where_hints_have_no_effect(log: Log) -> None:
    scheduler = make_scheduler(plugged=True, enable_caching=False)
    request = make_request("r", prompt(1, 64), extra_args=stamped("s3cret", "red", "op"))
    scheduler.add_request(request)
    assert "s3cret" not in repr(request.sampling_params.extra_args)


def test_a_stamp_that_does_not_verify_is_named_once_and_has_no_effect(
    engine: Engine, log: Log
) -> None:
    [sealed] = stamped("s3cret-id", "red", "op").values()
    for _ in range(2):
        engine.serve(prompt(1, 64), extra_args={STAMP_KEY: {**sealed, "mac": "0" * 64}})
    assert not engine.sam.sessions
    [record] = log.records
    assert record.levelname == "WARNING"
    assert "VLLM_AGENT_HINT_SECRET" in record.getMessage()
    assert "s3cret" not in record.getMessage()


def test_a_fault_over_a_session_says_nothing_of_its_name(
    engine: Engine,
) -> None:
    serve_stamped(engine, stamped("s3cret-id", "s3cret-tenant", "op"))
    [key] = engine.sam.sessions
    salted = key._replace(cache_salt="s3cret salt")
    try:
        engine.sam.sessions[salted]
    except KeyError:
        said = traceback.format_exc()
    assert "KeyError" in said
    assert "s3cret" not in said
    assert repr(key) == repr(SessionKey(*key)) != repr(salted)


def test_results_are_forgotten_after_ten_minutes(engine: Engine, clock: Clock) -> None:
    ask(engine, "edit", session_id="a", edits=[{"type": "evict"}], operation_id="op")
    clock.advance(599.0)
    assert ask(engine, "operation", operation_id="op")["operation"] is not None
    clock.advance(1.0)
    assert ask(engine, "operation", operation_id="op")["operation"] is None


def test_edits_that_take_several_steps_are_answered_when_they_are_done(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits: Future[list[EditResult]] = Future()
    monkeypatch.setattr(utility, "_apply", lambda hooks, call, now: edits)

    answer = ask(
        engine, "edit", tenant="red", session_id="a", edits=[{"type": "evict"}], operation_id="op"
    )
    assert isinstance(answer, Future)
    assert not answer.done()
    found = ask(engine, "operation", tenant="red", operation_id="op")["operation"]
    assert (found["status"], [r["status"] for r in found["results"]]) == ("pending", ["pending"])

    edits.set_result([APPLIED])
    assert answer.result(timeout=0)["results"] == [APPLIED.model_dump(mode="json")]
    assert answer.result(timeout=0)["active"] is True
    found = ask(engine, "operation", tenant="red", operation_id="op")["operation"]
    assert (found["status"], [r["status"] for r in found["results"]]) == ("done", ["applied"])


def test_edits_that_fail_between_two_steps_fail_their_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits: Future[list[EditResult]] = Future()
    monkeypatch.setattr(utility, "_apply", lambda hooks, call, now: edits)
    answer = ask(engine, "edit", session_id="a", edits=[{"type": "evict"}], operation_id="op")

    edits.set_exception(ZeroDivisionError())

    with pytest.raises(ZeroDivisionError):
        answer.result(timeout=0)


def test_what_was_pending_when_sessions_are_dropped_has_failed(engine: Engine, log: Log) -> None:
    serve_stamped(engine, stamped("a", "red", "op", "evict"), run=False)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        engine.scheduler.agent_hint.drop_sessions("a test")

    answer = ask(engine, "operation", tenant="red", operation_id="op")
    assert answer["active"] is False
    assert answer["operation"]["status"] == "done"
    [result] = answer["operation"]["results"]
    assert result["status"] == "failed"
    assert "a test failed" in result["reason"]


@pytest.mark.parametrize("op", READS)
def test_an_engine_without_sessions_says_why_and_has_none(op: str) -> None:
    core = SimpleNamespace(scheduler=make_scheduler(plugged=False))
    answer = agent_hint_rpc(core, {"op": op, **READS[op]})
    assert isinstance(answer, dict)
    assert (answer["active"], answer["results"]) == (False, [])
    assert not answer[{"list": "sessions", "show": "session"}.get(op, op)]


@pytest.mark.parametrize(
    ("op", "broken"),
    [
        ("list", (view, "page")),
        ("show", (view, "describe")),
        ("state", (view, "keys_of")),
        ("free", (utility, "_free_session")),
        ("list", (EngineHooks, "statistics")),
    ],
)
def test_a_fault_of_ours_drops_the_sessions_and_not_the_engine(
    engine: Engine,
    op: str,
    broken: tuple[Any, str],
    monkeypatch: pytest.MonkeyPatch,
    log: Log,
) -> None:
    engine.serve(prompt(1, 64), hint=hinted("a", 60.0))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as planted:
        planted.setattr(*broken, fails)
        answer = ask(engine, op, session_id="a", limit=10, operation_id="op")
    assert answer["active"] is False
    assert "a management call failed" in answer["reason"]
    assert engine.scheduler.agent_hint.sam is None
    engine.serve(prompt(2, 64), hint=hinted("b", 60.0))


def test_a_call_that_is_no_call_of_ours_harms_no_session(engine: Engine) -> None:
    """vLLM answers the caller with the exception; only our own front end calls."""
    engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
    for payload in ({"op": "format"}, {"op": "edit", "edits": [{"type": "delete"}]}):
        with pytest.raises((KeyError, ValueError)):
            agent_hint_rpc(SimpleNamespace(scheduler=engine.scheduler), payload)
    assert ask(engine, "show", session_id="a")["session"] is not None
