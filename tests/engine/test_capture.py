"""Traffic recorded at the engine: every request while somebody reads, and nothing else."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.request import RequestStatus

from tests.engine import rig
from tests.engine.conftest import Log
from tests.engine.pooling_rig import pooling_engine
from tests.engine.rig import BLOCK, Clock, Engine, hinted, make_request, make_scheduler, prompt
from vllm_agent_hint.engine import capture as engine_capture
from vllm_agent_hint.engine import utility
from vllm_agent_hint.engine.capture import DIGEST_BYTES, TrafficCapture
from vllm_agent_hint.settings import Settings
from vllm_agent_hint.stamp import STAMP_KEY, Stamp

KEY = b"k" * 32


@pytest.fixture(autouse=True)
def allowed() -> Any:
    with patch.object(utility, "load_settings", lambda: Settings(capture=True, auto=True)):
        yield


@pytest.fixture
def engine(clock: Clock) -> Engine:
    return Engine(make_scheduler(plugged=True, num_blocks=200))


def start(engine: Engine, capture_id: str = "c", key: bytes = KEY) -> dict[str, Any]:
    answer = engine.call("capture_start", capture_id=capture_id, capture_key=key)
    return dict(answer["capture"])


def take(engine: Engine, capture_id: str = "c") -> dict[str, Any]:
    return dict(engine.call("capture_take", capture_id=capture_id)["capture"])


def blocks_of(request: dict[str, Any]) -> list[bytes]:
    blocks = request["blocks"]
    return [blocks[i : i + DIGEST_BYTES] for i in range(0, len(blocks), DIGEST_BYTES)]


def stamped(session_id: str, tenant: str, operation_id: str = "op") -> dict[str, Any]:
    return {STAMP_KEY: Stamp(hinted(session_id, 60.0), tenant, operation_id).sealed()}


# -- what is recorded ------------------------------------------------------------------------------


def test_what_a_prefetch_brings_is_no_traffic(clock: Clock) -> None:
    engine = pooling_engine()
    engine.serve(prompt(1, 8 * BLOCK), hint=hinted("a", 60.0))
    engine.done("a", "offload")
    engine.flood()
    start(engine)
    engine.done("a", "prefetch")
    assert engine.results()[0]["status"] == "applied"
    engine.serve(prompt(2, BLOCK))
    taken = take(engine)
    assert [request["prompt_tokens"] for request in taken["requests"]] == [BLOCK]


def test_an_unhinted_request_is_recorded_with_its_times_and_lengths(
    engine: Engine, clock: Clock
) -> None:
    assert start(engine) == {"state": "running", "block_size": BLOCK}
    clock.advance(2.0)
    engine.add(prompt(1, 3 * BLOCK + 5), max_tokens=4)
    clock.advance(1.5)
    engine.run()
    part = take(engine)
    [request] = part["requests"]
    assert request["t"] == pytest.approx(2.0)
    assert request["seconds"] == pytest.approx(1.5)
    assert (request["prompt_tokens"], request["output_tokens"]) == (3 * BLOCK + 5, 4)
    assert len(blocks_of(request)) == 3
    assert request["finish"] == "length"
    assert (request["session"], request["parent"], request["hinted"]) == (None, None, False)
    assert (part["more"], part["dropped"], part["unfinished"]) == (False, 0, 0)


def test_prompts_share_exactly_the_digests_of_the_blocks_that_they_share(engine: Engine) -> None:
    start(engine)
    short, long = prompt(1, 2 * BLOCK), prompt(1, 4 * BLOCK)
    for tokens in (short, long, prompt(2, 4 * BLOCK)):
        engine.serve(tokens)
    first, second, other = map(blocks_of, take(engine)["requests"])
    assert second[:2] == first
    assert len(set(second)) == 4
    assert not set(other) & set(second)


def test_the_blocks_of_an_answer_are_those_of_the_prompt_only(engine: Engine) -> None:
    start(engine)
    engine.serve(prompt(1, BLOCK), max_tokens=2 * BLOCK)
    assert len(blocks_of(take(engine)["requests"][0])) == 1


def test_a_hinted_request_is_recorded_with_its_session_and_parent(engine: Engine) -> None:
    start(engine)
    engine.serve(prompt(1, 64), hint=hinted("leader"))
    engine.serve(prompt(2, 64), hint={**hinted("worker", 60.0), "parent_session_id": "leader"})
    leader, worker = take(engine)["requests"]
    assert leader["hinted"]
    assert worker["parent"] == leader["session"] != worker["session"]


def test_a_session_that_is_named_without_a_hint_is_recorded_as_unhinted(engine: Engine) -> None:
    start(engine)
    engine.serve(prompt(1, 64), hint=hinted("bare"))
    # vLLM's own field, as the engine core sets it before the request is added.
    with patch.object(rig, "make_request", _named("bare")):
        engine.serve(prompt(1, 64))
    with_hint, without = take(engine)["requests"]
    assert with_hint["session"] == without["session"]
    assert (with_hint["hinted"], without["hinted"]) == (True, False)


def _named(session_id: str) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        request = make_request(*args, **kwargs)
        request.session_id = session_id
        return request

    return make


def test_equal_ids_of_two_tenants_and_salts_are_different_sessions(engine: Engine) -> None:
    start(engine)
    for tenant, salt in (("red", None), ("blue", None), ("red", "salt")):
        engine.serve(prompt(1, 64), extra_args=stamped("same", tenant), cache_salt=salt)
    assert len({request["session"] for request in take(engine)["requests"]}) == 3


def test_an_aborted_request_is_recorded_as_aborted(engine: Engine) -> None:
    start(engine)
    engine.abort(engine.add(prompt(1, 64)))
    [request] = take(engine)["requests"]
    assert (request["finish"], request["output_tokens"]) == ("abort", 0)


def test_a_request_that_a_stop_string_has_ended_has_stopped(engine: Engine) -> None:
    start(engine)
    request_id = engine.add(prompt(1, 64))
    engine.step()
    aborted = RequestStatus.FINISHED_ABORTED
    engine.scheduler.finish_requests([request_id, request_id], aborted)
    [request] = take(engine)["requests"]
    assert request["finish"] == "stop"


def test_a_preempted_request_is_recorded_once(clock: Clock) -> None:
    engine = Engine(make_scheduler(plugged=True, num_blocks=12))
    start(engine)
    for family in (1, 2):
        engine.add(prompt(family, 5 * BLOCK), max_tokens=2 * BLOCK)
    engine.run()
    part = take(engine)
    assert len(part["requests"]) == 2
    assert part["unfinished"] == 0


def test_how_a_turn_ended_is_added_while_it_waits(engine: Engine) -> None:
    start(engine)
    for operation_id in ("one", "two"):
        engine.serve(prompt(1, 64), extra_args=stamped("s", "red", operation_id))
    facts = {"tenant": "red", "session_id": "s", "ended": "tool_call", "tools": ["bash"]}
    engine.call("facts", **{**facts, "operation_id": "two"})
    one, two = take(engine)["requests"]
    assert (one["ended"], one["tool"]) == (None, None)
    assert two["ended"] == "tool_call"
    assert len(two["tool"]) == 2 * DIGEST_BYTES
    engine.call("facts", **{**facts, "operation_id": "two"})


# -- nothing when it is off ------------------------------------------------------------------------


def test_without_a_capture_nothing_is_recorded(engine: Engine) -> None:
    with patch.object(TrafficCapture, "request_added", side_effect=AssertionError) as added:
        engine.serve(prompt(1, 64))
        engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
    assert engine.scheduler.agent_hint.traffic is None
    assert not added.called
    assert take(engine) == {"state": "none"}


def test_the_flag_forbids_a_capture(engine: Engine) -> None:
    with patch.object(utility, "load_settings", lambda: Settings(capture=False)):
        assert start(engine) == {"state": "off"}
    assert engine.scheduler.agent_hint.traffic is None


def test_a_request_that_came_before_the_capture_is_not_recorded(engine: Engine) -> None:
    engine.add(prompt(1, 64))
    start(engine)
    engine.run()
    assert take(engine)["requests"] == []


def test_nothing_is_recorded_once_it_has_been_stopped(engine: Engine) -> None:
    start(engine)
    engine.add(prompt(1, 64))
    stopped = engine.call("capture_stop", capture_id="c")["capture"]
    assert stopped == {"state": "ended", "dropped": 0, "unfinished": 1}
    engine.run()
    assert take(engine) == {"state": "none"}
    assert engine.scheduler.agent_hint.traffic is None


def test_a_capture_changes_nothing_of_what_the_engine_does(clock: Clock) -> None:
    logs = []
    for with_capture in (False, True):
        engine = Engine(make_scheduler(plugged=True, num_blocks=40))
        if with_capture:
            start(engine)
        for family in range(6):
            engine.add(prompt(family % 4, 100), request_id=f"r{family}")
        engine.run()
        logs.append((engine.log, engine.cached, engine.free_ids()))
    assert logs[0] == logs[1]


# -- whose it is -----------------------------------------------------------------------------------


def test_there_is_one_capture_at_a_time(engine: Engine) -> None:
    start(engine)
    assert start(engine, "other") == {"state": "busy"}
    assert take(engine, "other") == {"state": "none"}
    assert engine.call("capture_stop", capture_id="other")["capture"] == {"state": "none"}
    engine.serve(prompt(1, 64))
    assert len(take(engine)["requests"]) == 1


def test_another_key_makes_other_digests_of_the_same_traffic(engine: Engine) -> None:
    taken = []
    for key in (KEY, b"j" * 32, KEY):
        start(engine, key=key)
        engine.serve(prompt(1, 64), hint=hinted("a"))
        taken.append(take(engine)["requests"][0])
        engine.call("capture_stop", capture_id="c")
    first, other, same = taken
    assert not set(blocks_of(first)) & set(blocks_of(other))
    assert first["session"] != other["session"]
    assert (first["blocks"], first["session"]) == (same["blocks"], same["session"])


def test_no_digest_is_the_hash_that_vllm_knows(engine: Engine) -> None:
    start(engine)
    request_id = engine.add(prompt(1, 64))
    known = b"".join(engine.scheduler.requests[request_id].block_hashes)
    engine.run()
    assert all(block not in known for block in blocks_of(take(engine)["requests"][0]))


# -- bounds ----------------------------------------------------------------------------------------


def test_a_capture_that_nobody_reads_for_a_minute_ends(engine: Engine, clock: Clock) -> None:
    start(engine)
    clock.advance(59.0)
    assert take(engine)["state"] == "running"
    clock.advance(59.0)
    engine.serve(prompt(1, 64))
    assert len(take(engine)["requests"]) == 1
    clock.advance(61.0)
    engine.serve(prompt(1, 64))
    assert engine.scheduler.agent_hint.traffic is None
    assert take(engine) == {"state": "none"}


def test_one_that_has_lapsed_gives_way_and_is_read_by_nobody(engine: Engine, clock: Clock) -> None:
    start(engine)
    clock.advance(61.0)
    assert take(engine) == {"state": "none"}
    assert start(engine, "other")["state"] == "running"


def test_what_is_more_than_fits_is_dropped_whole_and_counted(engine: Engine) -> None:
    start(engine)
    engine.scheduler.agent_hint.traffic.capture._max_blocks = 7
    for family, blocks in ((1, 3), (2, 5), (3, 4)):
        engine.serve(prompt(family, blocks * BLOCK))
    part = take(engine)
    assert [len(blocks_of(request)) for request in part["requests"]] == [3, 4]
    assert part["dropped"] == 1
    engine.serve(prompt(4, 7 * BLOCK))
    assert len(take(engine)["requests"]) == 1, "what has been taken makes room"


def test_requests_without_a_block_are_bounded_too(engine: Engine) -> None:
    start(engine)
    with patch.object(engine_capture, "MAX_REQUESTS", 2):
        for family in range(3):
            engine.serve(prompt(family, 5))
    part = take(engine)
    assert (len(part["requests"]), part["dropped"]) == (2, 1)


def test_a_part_is_cut_where_it_gets_long_and_says_that_there_is_more(engine: Engine) -> None:
    start(engine)
    for family in range(3):
        engine.serve(prompt(family, 4 * BLOCK))
    with patch.object(engine_capture, "PART_BLOCKS", 5):
        first, second = take(engine), take(engine)
    assert [len(first["requests"]), len(second["requests"])] == [2, 1]
    assert (first["more"], second["more"]) == (True, False)
    assert first["until"] <= second["requests"][0]["t"]


# -- until when everything is known ----------------------------------------------------------------


def test_nothing_is_settled_beyond_the_arrival_of_what_still_runs(
    engine: Engine, clock: Clock
) -> None:
    start(engine)
    clock.advance(1.0)
    slow = engine.add(prompt(1, 64), max_tokens=40)
    engine.step()
    clock.advance(1.0)
    engine.add(prompt(2, 64), max_tokens=1)
    for _ in range(3):
        engine.step()
    clock.advance(1.0)
    part = take(engine)
    assert [request["t"] for request in part["requests"]] == [pytest.approx(2.0)]
    assert part["until"] == pytest.approx(1.0)
    assert part["unfinished"] == 1
    engine.abort(slow)
    part = take(engine)
    assert [request["t"] for request in part["requests"]] == [pytest.approx(1.0)]
    assert part["until"] == pytest.approx(3.0)


# -- failing open ----------------------------------------------------------------------------------


def test_a_fault_of_the_recording_ends_the_capture_and_nothing_else(
    engine: Engine, log: Log
) -> None:
    start(engine)
    engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
    with patch.object(TrafficCapture, "request_ended", side_effect=RuntimeError):
        engine.serve(prompt(1, 64))
    assert engine.scheduler.agent_hint.traffic is None
    assert "the capture is over" in log.text
    assert engine.session("a")
    assert take(engine) == {"state": "none"}


def test_an_engine_without_prefix_caching_says_why_it_records_nothing() -> None:
    scheduler = make_scheduler(plugged=True, enable_caching=False)
    core = SimpleNamespace(scheduler=scheduler)
    answer = utility.agent_hint_rpc(
        core, {"op": "capture_start", "capture_id": "c", "capture_key": KEY}
    )
    assert isinstance(answer, dict)
    assert not answer["active"]
    assert answer["reason"] == "prefix caching is off"
    assert answer["capture"] == {"state": "none"}
