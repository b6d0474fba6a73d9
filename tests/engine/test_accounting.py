"""What an engine reports with a step's statistics: prompt tokens by hint, gauges, slice times."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics import stats as vllm_stats

from tests.engine.rig import KINDS, Clock, Engine, hinted, make_scheduler, prompt
from vllm_agent_hint.engine import hooks as engine_hooks
from vllm_agent_hint.engine.scheduler_stats import FIELD, add_field_to_scheduler_stats
from vllm_agent_hint.engine.utility import agent_hint_rpc
from vllm_agent_hint.settings import Settings


class Reports:
    """Every statistics object that a scheduler has sent, and the sums over them."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    @property
    def ours(self) -> list[dict[str, Any]]:
        return [stats.agent_hint for stats in self.sent if stats.agent_hint is not None]

    @property
    def hinted(self) -> tuple[int, int]:
        taken = [report["prompt_tokens"] for report in self.ours]
        return sum(t[0] for t in taken), sum(t[1] for t in taken)

    @property
    def everyone(self) -> tuple[int, int]:
        taken = [stats.prefix_cache_stats for stats in self.sent]
        return sum(t.queries for t in taken), sum(t.hits for t in taken)


@pytest.fixture
def reports() -> Iterator[Reports]:
    found = Reports()
    stock = Scheduler.make_stats

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = stock(self, *args, **kwargs)
        found.sent.append(stats)
        return stats

    stats = vllm_stats.SchedulerStats
    with (
        patch.object(Scheduler, "make_stats", noted),
        # For these tests alone: with the field there, each step takes the counters away.
        patch.dict(stats.__dataclass_fields__),
        patch.dict(stats.__annotations__),
    ):
        add_field_to_scheduler_stats(vllm_stats)
        yield found
        delattr(stats, FIELD)


def plugged(**options: Any) -> Engine:
    return Engine(make_scheduler(plugged=True, **options))


def test_prompt_tokens_of_hinted_requests_are_counted_apart(reports: Reports) -> None:
    engine = plugged()
    engine.serve(prompt(1, 100), hint=hinted("a", 60.0))
    engine.serve(prompt(1, 130), hint=hinted("a", 60.0))
    engine.serve(prompt(2, 64))
    engine.serve(prompt(2, 70))
    assert reports.hinted == (230, 96)
    assert reports.everyone == (230 + 134, 96 + 64)


def test_what_is_counted_as_hinted_is_in_vllms_own_numbers_of_the_same_step(
    reports: Reports,
) -> None:
    """So that the difference, the unhinted share, never falls."""
    engine = plugged(max_num_batched_tokens=48, num_blocks=40)
    for k in range(12):
        engine.add(prompt(k % 3, 100), hint=hinted("ab"[k % 2], 60.0) if k % 3 else None)
        engine.step()
    engine.run()
    for stats in reports.sent:
        queried, cached = (stats.agent_hint or {}).get("prompt_tokens", (0, 0))
        assert 0 <= queried <= stats.prefix_cache_stats.queries
        assert 0 <= cached <= stats.prefix_cache_stats.hits
    assert reports.hinted[0] == 800


def test_a_request_that_waits_is_counted_once_when_it_is_admitted(reports: Reports) -> None:
    engine = plugged(max_num_seqs=1)
    engine.add(prompt(1, 64), hint=hinted("a"), max_tokens=5)
    engine.add(prompt(2, 64), hint=hinted("b"), max_tokens=5)
    engine.step()
    assert reports.hinted == (64, 0)
    engine.run()
    assert reports.hinted == (128, 0)


def test_what_is_computed_again_after_a_preemption_is_not_counted(reports: Reports) -> None:
    engine = plugged(num_blocks=24)
    for family in range(3):
        engine.add(prompt(family, 97), hint=hinted(f"s{family}", 60.0), max_tokens=60)
    engine.run()
    assert sum(stats.prefix_cache_stats.preempted_requests for stats in reports.sent) > 0
    assert reports.hinted == reports.everyone
    assert reports.hinted[0] == 3 * 97


def test_a_request_that_never_runs_is_not_counted(reports: Reports) -> None:
    engine = plugged(max_num_seqs=1)
    engine.add(prompt(1, 64), hint=hinted("a"), max_tokens=5)
    waiting = engine.add(prompt(2, 64), hint=hinted("b"), max_tokens=5)
    engine.step()
    engine.abort(waiting)
    engine.run()
    assert reports.hinted == (64, 0)


def test_a_session_that_is_freed_while_its_request_waits_does_not_hide_it(
    reports: Reports,
) -> None:
    engine = plugged(max_num_seqs=1)
    engine.add(prompt(1, 64), max_tokens=20)
    engine.add(prompt(2, 64), hint=hinted("a"), max_tokens=5)
    engine.step()
    engine.sam.free_all_sessions()
    engine.run()
    assert reports.hinted == (64, 0)


def test_a_management_call_takes_no_prompt_tokens(reports: Reports) -> None:
    """It may come between a step's scheduling and its statistics, which vLLM's own travel with."""
    engine = plugged()
    engine.add(prompt(1, 64), hint=hinted("a"))
    output = engine.scheduler.schedule()
    answer = agent_hint_rpc(SimpleNamespace(scheduler=engine.scheduler), {"op": "state"})
    assert "prompt_tokens" not in answer["stats"]
    engine._return(output, engine._sampling(output))
    assert reports.hinted == (64, 0)


def test_a_request_that_skips_the_cache_is_in_neither_number(reports: Reports) -> None:
    """As in vLLM's own ``prefix_cache_queries``."""
    engine = plugged(enable_caching=True)
    request_id = engine.add(prompt(1, 64), hint=hinted("a"))
    engine.scheduler.requests[request_id].skip_reading_prefix_cache = True
    engine.run()
    assert reports.hinted == reports.everyone == (0, 0)


def test_an_unhinted_engine_reports_once(reports: Reports) -> None:
    engine = plugged()
    for family in range(4):
        engine.serve(prompt(family, 64))
    [report] = reports.ours
    assert report["active"] is True
    assert report["sessions"] == report["records"] == report["leases"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gauges_say_what_is_recorded_and_what_runs(kind: str, clock: Clock) -> None:
    engine = plugged(kind=kind, num_blocks=200)
    engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
    engine.serve(prompt(2, 64), hint=hinted("b", 0.0))
    seen = engine.scheduler.agent_hint.statistics()
    assert (seen["sessions"], seen["leases"]) == (2, 1)
    assert seen["records"] == engine.sam.ledger.index.num_records > 0
    engine.add(prompt(1, 80), hint=hinted("a"), max_tokens=20)
    engine.step()
    assert engine.scheduler.agent_hint.statistics()["leases"] == 0, "it is stopped"
    engine.run()
    clock.advance(61.5)
    engine.serve(prompt(3, 20))
    seen = engine.scheduler.agent_hint.statistics()
    assert (seen["sessions"], seen["leases"]) == (2, 0)


def test_each_slice_of_expiry_is_timed_once(clock: Clock, reports: Reports) -> None:
    engine = plugged(settings=Settings(release_slice=2))
    engine.serve(prompt(1, 100), hint=hinted("a", 5.0))
    clock.advance(6.5)
    tick = engine.sam.tick

    def slow(now: float) -> None:
        tick(now)
        clock.advance(0.002)

    with patch.object(engine.sam, "tick", slow):
        engine.serve(prompt(2, 64), max_tokens=8)
    slices = [spent for report in reports.ours for spent in report["slices"]]
    assert len(slices) == 4, "six records, two a slice, and the look that finds no more"
    assert slices == pytest.approx([0.002] * 4)


def test_slices_that_nobody_asks_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = plugged()
    monkeypatch.setattr(engine.sam, "tick", lambda now: None)
    for _ in range(engine_hooks.MAX_SLICES + 7):
        engine.scheduler.agent_hint.tick(1.0)
    assert len(engine.scheduler.agent_hint.slices) == engine_hooks.MAX_SLICES
