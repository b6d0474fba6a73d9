"""``bench serve``: its loads, its arms, its figures and what it says of them. No server here."""

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_agent_hint.cli.bench.serve.arms import ARMS, Arm, TtlSaid, WishError, parse_arm
from vllm_agent_hint.cli.bench.serve.clock_file import Reading, lay_out, seconds_per_step
from vllm_agent_hint.cli.bench.serve.command import scripts
from vllm_agent_hint.cli.bench.serve.export import export, lines_of
from vllm_agent_hint.cli.bench.serve.figures import FIGURES, Good, sheet_of
from vllm_agent_hint.cli.bench.serve.interval import (
    difference_interval,
    ratio_interval,
    t_quantile,
)
from vllm_agent_hint.cli.bench.serve.loads.mixed import mixed_script
from vllm_agent_hint.cli.bench.serve.loads.rfc import rfc_script
from vllm_agent_hint.cli.bench.serve.loads.traced import (
    LONGEST_PLAY_SECONDS,
    TracedLoads,
    TraceTooSmallError,
)
from vllm_agent_hint.cli.bench.serve.play import Played, Target, usage_in
from vllm_agent_hint.cli.bench.serve.report import ServeRun, as_json
from vllm_agent_hint.cli.bench.serve.result import ArmResult, LoadResult, Play, losses
from vllm_agent_hint.cli.bench.serve.run import WriteScript
from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.bench.serve.script import (
    Actor,
    Extent,
    Piece,
    Script,
    Text,
    Turn,
    Vocabulary,
)
from vllm_agent_hint.cli.bench.serve.stage import Stage
from vllm_agent_hint.cli.bench.serve.standing import cache_tokens_in
from vllm_agent_hint.cli.bench.serve.verdict import Outcome, judge
from vllm_agent_hint.cli.demo.client import RequestRecord, Traffic
from vllm_agent_hint.cli.demo.measure import ServerFigures
from vllm_agent_hint.cli.demo.metrics import Metrics
from vllm_agent_hint.hints import AgentHintParams
from vllm_agent_hint.traces.model import Trace
from vllm_agent_hint.traces.reading import read_trace

CPU = Scale.for_cpu()
VOCABULARY = Vocabulary(3, 258)
SMALL = Scale(7_000, 7_000, 8_000.0, cache_tokens=9_000)
SCALES = [
    pytest.param(CPU, id="cpu"),
    pytest.param(Scale.for_gpu(), id="gpu"),
    pytest.param(Scale(27_000, 27_000, 40_000.0, cache_tokens=400_000), id="standing"),
    pytest.param(SMALL, id="standing-small"),
]


# -- a trace made by hand --------------------------------------------------------------------------


def weka_line(number: int, requests: int = 17, blocks: int = 400) -> dict[str, object]:
    """A session of two windows that grows by ten blocks a turn, and rewinds once in each.

    Every third has even gaps, every thirteenth one only long ones; the others one that is long.
    """
    entries, first, length = [], 1_000 * number, blocks
    at = 0.0
    for turn in range(requests):
        keep = 0 if turn == 0 else length // 2 if turn % 8 == 4 else length
        new = blocks if turn == 0 else 10
        length = keep + new
        slow = 4_000.0 if (number % 3 and turn % 8 == 5) or number % 13 == 0 else 5.0 + number
        at += slow if turn else 0.0
        entries.append(
            {
                "t": at,
                "type": "n",
                "in": 64 * length + 7,
                "out": 120,
                "stop": "end_turn" if turn % 8 == 6 else "tool_use",
                "api_time": 2.0,
                "keep": keep,
                "runs": [first, new],
            }
        )
        first += new
    return {"id": f"session-{number}", "block_size": 64, "requests": entries}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    file = tmp_path_factory.mktemp("trace") / "small.jsonl.gz"
    lines = "\n".join(json.dumps(weka_line(number)) for number in range(1, 40))
    file.write_bytes(gzip.compress(lines.encode()))
    return read_trace(file)


@pytest.fixture(scope="module")
def loads(trace: Trace) -> dict[str, WriteScript]:
    traced = TracedLoads(trace)
    return {
        "rfc": rfc_script,
        "mixed": mixed_script,
        "fleet": traced.fleet,
        "long-tail": traced.long_tail,
    }


# -- loads -----------------------------------------------------------------------------------------

EVERY_LOAD = pytest.mark.parametrize("load", ["rfc", "mixed", "fleet", "long-tail"])
EVERY_SCALE = pytest.mark.parametrize("scale", SCALES)


@EVERY_LOAD
def test_every_arm_of_a_repetition_is_played_the_same_script_and_text(
    load: str, loads: dict[str, WriteScript]
) -> None:
    script_of = scripts(loads[load], CPU, seed=1)
    first, second = script_of(3), script_of(3)
    assert first == second

    def texts(script: Script) -> list[list[int]]:
        text = Text(VOCABULARY)
        return [list(text.of_all(turn.pieces)) for a in script.actors for turn in a.turns]

    assert texts(first) == texts(second)


@EVERY_LOAD
def test_no_two_repetitions_share_text(load: str, loads: dict[str, WriteScript]) -> None:
    script_of = scripts(loads[load], CPU, seed=1)
    names = [
        {piece.name for a in script_of(k).actors for turn in a.turns for piece in turn.pieces}
        for k in range(2)
    ]
    assert not names[0] & names[1]
    assert scripts(loads[load], CPU, seed=2)(0) != script_of(0)


@EVERY_LOAD
@EVERY_SCALE
def test_no_request_is_longer_than_the_scale_allows(
    load: str, scale: Scale, loads: dict[str, WriteScript]
) -> None:
    script = loads[load](scale, "seed")
    longest = max(max(actor.prompt_lengths()) for actor in script.of(Traffic.AGENTS))
    allowed = scale.rfc_longest_prompt if load == "rfc" else scale.longest_prompt
    assert 0.5 * min(longest, allowed) < longest <= allowed
    assert script.longest_request < script.cache_tokens


@EVERY_LOAD
def test_a_servers_cache_is_the_same_in_every_repetition(
    load: str, loads: dict[str, WriteScript]
) -> None:
    script_of = scripts(loads[load], CPU, seed=1)
    assert len({script_of(repetition).cache_tokens for repetition in range(4)}) == 1


@pytest.mark.parametrize("load", ["rfc", "fleet", "long-tail"])
@pytest.mark.parametrize("scale", [CPU, Scale.for_gpu(), SMALL], ids=["cpu", "gpu", "standing"])
def test_contexts_side_by_side_are_more_than_the_cache_holds(
    load: str, scale: Scale, loads: dict[str, WriteScript]
) -> None:
    assert 1.4 < loads[load](scale, "seed").pressure < 4.5


@EVERY_SCALE
def test_mixed_agents_fit_and_what_passes_in_a_pause_does_not(scale: Scale) -> None:
    script = mixed_script(scale, "seed")
    agents, one_shots = script.of(Traffic.AGENTS), script.of(Traffic.ONE_SHOT)
    system = agents[0].turns[0].pieces[0].tokens
    held = system + sum(max(a.prompt_lengths()) - system for a in agents)
    assert held < 0.7 * script.cache_tokens

    pauses = [turn.gap_seconds for a in agents for turn in a.turns[1:]]
    passing = sum(a.turns[0].new_tokens for a in one_shots) / max(a.starts_at for a in one_shots)
    assert passing * min(pauses) > script.cache_tokens - held
    assert passing < 0.7 * scale.prefill_rate


def test_agents_of_mixed_share_their_system_prompt_and_nothing_else() -> None:
    agents = mixed_script(CPU, "seed").of(Traffic.AGENTS)
    assert len({a.turns[0].pieces[0] for a in agents}) == 1
    rest = [piece for a in agents for turn in a.turns for piece in turn.pieces]
    assert len(set(rest)) == len(rest) - len(agents) + 1


def test_rfc_is_twenty_sessions_five_requests_at_a_time_growing_threefold() -> None:
    script = rfc_script(CPU, "seed")
    assert (len(script.actors), script.slots) == (20, 5)
    for actor in script.actors:
        lengths = actor.prompt_lengths()
        assert 2.5 < lengths[-1] / lengths[0] < 3.5
        assert len(lengths) >= 4
    assert len({len(actor.turns) for actor in script.actors}) > 1


def test_a_traced_prompt_shares_exactly_the_prefix_that_the_recorded_one_shared(
    trace: Trace, loads: dict[str, WriteScript]
) -> None:
    script = loads["fleet"](Scale(4_500, 4_500, 1.0), "seed")
    text = Text(VOCABULARY)
    turns = script.actors[0].turns
    prompts = [list(text.of_all(turn.pieces)) for turn in turns]
    per_block = turns[0].pieces[0].tokens
    assert per_block == 4_500 // 440 or per_block > 1

    def shared(one: Sequence[int], other: Sequence[int]) -> int:
        pairs = zip(one, other, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

    by_blocks = [len(turn.pieces) - 1 for turn in turns]
    for k in range(1, len(turns)):
        kept = by_blocks[k - 1] // 2 if by_blocks[k] < by_blocks[k - 1] else by_blocks[k - 1]
        got = shared(prompts[k - 1], prompts[k])
        assert kept * per_block <= got < (kept + 1) * per_block


@pytest.mark.parametrize("seed", ["1", "2", "3", "4", "5"])
def test_sessions_of_a_fleet_are_different_ones(loads: dict[str, WriteScript], seed: str) -> None:
    actors = loads["fleet"](CPU, seed).actors
    pieces = [{piece for turn in actor.turns for piece in turn.pieces} for actor in actors]
    for k, mine in enumerate(pieces):
        for other in pieces[k + 1 :]:
            assert not mine & other


@EVERY_LOAD
@pytest.mark.parametrize("seed", ["1", "2", "3", "4", "5"])
def test_nobody_waits_for_ever(load: str, loads: dict[str, WriteScript], seed: str) -> None:
    for actor in loads[load](CPU, seed).actors:
        assert sum(turn.gap_seconds for turn in actor.turns) <= LONGEST_PLAY_SECONDS


def test_a_long_tail_has_a_gap_far_longer_than_its_median(
    loads: dict[str, WriteScript],
) -> None:
    def tails(load: str) -> list[float]:
        gaps = [sorted(t.gap_seconds for t in a.turns[1:]) for a in loads[load](CPU, "1").actors]
        return [each[-1] / each[len(each) // 2] for each in gaps]

    assert min(tails("long-tail")) > 5.0 > min(tails("fleet"))


def test_a_turn_after_which_the_agent_waits_for_its_user_asks_for_nothing(
    loads: dict[str, WriteScript],
) -> None:
    for actor in loads["fleet"](CPU, "s").actors:
        asked = [turn.ttl_seconds > 0.0 for turn in actor.turns]
        assert asked == [number != 6 for number in range(8)]


def test_a_trace_with_too_few_sessions_is_refused() -> None:
    with pytest.raises(TraceTooSmallError, match="10 are needed"):
        TracedLoads(Trace("tiny", 64, ()))


def test_an_extent_covers_every_repetition() -> None:
    script = rfc_script(CPU, "a")
    longer = replace(script, cache_tokens=77, actors=script.actors * 2)
    extent = Extent.of([script, longer])
    assert extent.cache_tokens == max(script.cache_tokens, 77)
    assert extent.total_tokens == 2 * script.total_tokens


def test_text_depends_on_a_pieces_name_and_lies_in_the_vocabulary() -> None:
    one, other = (VOCABULARY.text_of(Piece(name, 500)) for name in "ab")
    assert one != other
    assert one == VOCABULARY.text_of(Piece("a", 500))
    assert min(one) >= 3
    assert max(one) <= 258


# -- arms ------------------------------------------------------------------------------------------


def test_only_arms_with_our_scheduler_are_expected_to_keep_sessions() -> None:
    without = {name for name, arm in ARMS.items() if not arm.keeps_sessions}
    assert without == {"stock", "ceiling", "no-sam"}


def test_an_arm_may_be_made_of_another_with_other_flags() -> None:
    arm = parse_arm("late=no-renewal,VLLM_AGENT_HINT_EXPIRED_ENTERS=front")
    assert arm.name == "late"
    assert arm.environment == {
        "VLLM_AGENT_HINT_RENEW": "0",
        "VLLM_AGENT_HINT_EXPIRED_ENTERS": "front",
    }
    assert arm.voice.ttl is TtlSaid.FIRST_TURN


@pytest.mark.parametrize("text", ["nonsense", "a=nonsense", "a=hints,flag"])
def test_an_arm_that_does_not_exist_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(WishError, match=r"there are stock|FLAG=VALUE"):
        parse_arm(text)


# -- intervals -------------------------------------------------------------------------------------


def test_a_ratio_is_the_geometric_mean_and_its_interval_students() -> None:
    found = ratio_interval([(2.0, 1.0), (8.0, 1.0), (4.0, 1.0)])
    assert found is not None
    assert found.value == pytest.approx(4.0)
    reach = 4.303 * math.log(2.0) / math.sqrt(3)
    assert (found.low, found.high) == (
        pytest.approx(4.0 * math.exp(-reach)),
        pytest.approx(4.0 * math.exp(reach)),
    )


def test_pairs_cancel_what_a_repetition_brought_to_both() -> None:
    found = ratio_interval([(0.5 * hour, hour) for hour in (1.0, 7.0, 3.0, 20.0)])
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_zero_leaves_no_ratio_and_one_pair_no_interval() -> None:
    assert ratio_interval([(1.0, 0.0)]) is None
    assert ratio_interval([]) is None
    single = ratio_interval([(3.0, 2.0)])
    assert single is not None
    assert single.value == pytest.approx(1.5)
    assert math.isinf(single.half_width)


def test_shares_are_compared_by_difference() -> None:
    found = difference_interval([(0.5, 0.0), (0.7, 0.2)])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_the_quantile_falls_towards_the_normal_one() -> None:
    assert t_quantile(9) == 2.262
    assert t_quantile(30) > t_quantile(40) == pytest.approx(2.021, abs=2e-3)


# -- figures ---------------------------------------------------------------------------------------


def record(
    name: str,
    traffic: Traffic = Traffic.AGENTS,
    *,
    sent: float = 0.0,
    ttft: float = 0.1,
    tpot: float = 0.01,
    cached: int = 0,
) -> RequestRecord:
    return RequestRecord(
        traffic=traffic,
        name=name,
        turn=0,
        sent=sent,
        first_token=sent + ttft,
        finished=sent + ttft + 10 * tpot,
        prompt_tokens=1_000,
        cached_tokens=cached,
        completion_tokens=11,
        prompt_digest=name,
    )


QUIET = ServerFigures(0.0, 0.004, 1.5, 2, True, {})


def test_a_sheet_holds_each_traffics_figures_apart() -> None:
    records = (
        record("a", ttft=0.1, cached=600),
        record("b", ttft=0.3, cached=200, sent=1.0),
        record("c", Traffic.ONE_SHOT, ttft=0.5, tpot=0.02, sent=2.0),
    )
    clock = (Reading(10, 1.0, 150.0, 0.9), Reading(110, 1.02, 150.0, 0.8))
    sheet = sheet_of(Played(records, 4.0, 0.7), QUIET, clock)
    expected = {
        "agents.hit_share": 0.4,
        "agents.recomputed_tokens": 1_200.0,
        "agents.ttft_mean": 0.2,
        "agents.ttft_p50": 0.2,
        "agents.ttft_p95": 0.29,
        "agents.tpot_mean": 0.01,
        "one_shot.hit_share": 0.0,
        "one_shot.ttft_mean": 0.5,
        "one_shot.tpot_mean": 0.02,
        "all.tpot_mean": 0.04 / 3,
        "all.queue_mean": 0.004,
        "all.prefill_seconds": 1.5,
        "all.tokens_per_second": 3_033 / 2.7,
        "all.requests_per_second": 0.75,
        "all.peak_usage": 0.8,
        "all.preemptions": 2.0,
        "all.steps": 100.0,
        "all.scheduler_step": 2e-4,
        "all.bytes_per_block": 150.0,
    }
    assert {key: sheet[key] for key in expected} == pytest.approx(expected)
    assert set(sheet) <= {figure.key for figure in FIGURES}


def test_a_server_without_a_clock_has_no_scheduler_figures() -> None:
    sheet = sheet_of(Played((record("a"),), 1.0, 0.25), QUIET, None)
    assert "all.scheduler_step" not in sheet
    assert sheet["all.peak_usage"] == 0.25
    assert not any(key.startswith("one_shot.") for key in sheet)


def test_a_clock_that_no_server_has_touched_reads_zero(tmp_path: Path) -> None:
    lay_out(tmp_path / "clocks" / "a")
    reading = Reading.of(tmp_path / "clocks" / "a")
    assert reading == Reading(0, 0.0, 0.0, 0.0)
    assert seconds_per_step(reading, reading) == 0.0


def test_usage_is_that_of_the_fullest_engine() -> None:
    name = "vllm:kv_cache_usage_perc"
    text = f'# HELP {name} x\n{name}{{engine="0"}} 0.25\n{name}{{engine="1"}} 0.5\nother 1\n'
    assert usage_in(text) == 0.5
    assert usage_in("") == 0.0


def test_a_standing_servers_cache_is_what_its_metrics_say() -> None:
    info = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%s"} 1.0'
    both = "\n".join([info % (0, 100), info % (1, 50)])
    assert cache_tokens_in(Metrics.parse(both)) == 2_400
    assert cache_tokens_in(Metrics.parse(info % (0, "None"))) == 0


# -- what the arms say about each other ------------------------------------------------------------


def arm_result(
    name: str, each: Callable[[int], dict[str, float]], repetitions: int = 10
) -> ArmResult:
    arm: Arm = ARMS[name]
    plays = tuple(
        Play(each(k), (record("a"),), f"digest-{k}", arm.keeps_sessions, {})
        for k in range(repetitions)
    )
    return ArmResult(arm, 10_000, plays)


def result_of(*arms: ArmResult, load: str = "mixed") -> LoadResult:
    return LoadResult(load, "sizes", (), arms[0].arm.name, arms)


def steady(**values: float) -> Callable[[int], dict[str, float]]:
    """The same in each repetition but for a tenth of a percent."""
    return lambda k: {
        key.replace("__", "."): value * (1 + 0.001 * (k % 3)) for key, value in values.items()
    }


def outcomes(result: LoadResult) -> dict[str, Outcome]:
    return {finding.key: finding.outcome for finding in judge(result)}


def test_a_loss_is_an_interval_wholly_on_the_bad_side() -> None:
    def noisy(k: int) -> dict[str, float]:
        return {"agents.ttft_mean": 1.3 + 0.6 * (-1) ** k, "agents.hit_share": 0.4}

    stock = arm_result("stock", lambda k: {"agents.ttft_mean": 1.0, "agents.hit_share": 0.5})
    found = losses(result_of(stock, arm_result("hints", noisy)))
    assert [loss.figure.key for loss in found] == ["agents.hit_share"]

    worse = arm_result("hints", steady(agents__ttft_mean=1.1, agents__hit_share=0.6))
    found = losses(result_of(stock, worse))
    assert [loss.figure.key for loss in found] == ["agents.ttft_mean"]


def test_more_steps_are_no_loss() -> None:
    assert {f.key for f in FIGURES if f.good is Good.NEITHER} == {"all.steps"}


@pytest.mark.parametrize(
    ("ttft", "ceiling", "outcome"),
    [(0.40, 0.30, Outcome.MET), (0.50, 0.48, Outcome.MET), (0.50, 0.30, Outcome.NOT_MET)],
)
def test_mixed_is_won_by_a_ratio_to_stock_or_near_the_ceiling(
    ttft: float, ceiling: float, outcome: Outcome
) -> None:
    result = result_of(
        arm_result("stock", steady(agents__ttft_mean=1.0)),
        arm_result("hints", steady(agents__ttft_mean=ttft)),
        arm_result("ceiling", steady(agents__ttft_mean=ceiling)),
    )
    assert outcomes(result)["mixed.hints.agents.ttft_mean"] is outcome


def test_rfc_has_a_bound_of_its_own_and_no_way_round_it() -> None:
    result = result_of(
        arm_result("stock", steady(agents__ttft_mean=1.0)),
        arm_result("hints", steady(agents__ttft_mean=0.76)),
        arm_result("ceiling", steady(agents__ttft_mean=0.76)),
        load="rfc",
    )
    assert outcomes(result)["rfc.hints.agents.ttft_mean"] is Outcome.NOT_MET


@pytest.mark.parametrize(
    ("each", "repetitions", "outcome"),
    [
        (lambda k: 1.02, 10, Outcome.MET),
        (lambda k: 1.02, 9, Outcome.NOT_MEASURED),
        (lambda k: 1.0 + 0.1 * (-1) ** k, 10, Outcome.NOT_MEASURED),
        (lambda k: 1.04, 10, Outcome.NOT_MET),
        (lambda k: 1.3 + 0.1 * (-1) ** k, 10, Outcome.NOT_MET),
    ],
)
def test_what_must_not_grow_is_met_missed_or_not_measured(
    each: Callable[[int], float], repetitions: int, outcome: Outcome
) -> None:
    result = result_of(
        arm_result("stock", lambda k: {"one_shot.ttft_mean": 1.0}, repetitions),
        arm_result("hints", lambda k: {"one_shot.ttft_mean": each(k)}, repetitions),
    )
    assert outcomes(result)["mixed.hints.one_shot.ttft_mean"] is outcome


def test_an_arm_without_its_plugin_is_found_out() -> None:
    hints = arm_result("hints", steady(agents__ttft_mean=1.0))
    off = replace(hints, plays=tuple(replace(play, hints_active=False) for play in hints.plays))
    stock = arm_result("stock", steady(agents__ttft_mean=1.0))
    assert outcomes(result_of(stock, hints))["mixed.plugin"] is Outcome.MET
    assert outcomes(result_of(stock, off))["mixed.plugin"] is Outcome.NOT_MET


def test_prompts_that_differ_between_arms_are_found_out() -> None:
    stock = arm_result("stock", steady(agents__ttft_mean=1.0))
    hints = arm_result("hints", steady(agents__ttft_mean=1.0))
    assert result_of(stock, hints).same_prompts
    plays = (replace(hints.plays[0], prompts_digest="other"), *hints.plays[1:])
    assert not result_of(stock, replace(hints, plays=plays)).same_prompts


def test_the_report_has_a_value_per_repetition_and_no_infinity() -> None:
    result = result_of(
        arm_result("stock", steady(agents__ttft_mean=1.0), 1),
        arm_result("hints", steady(agents__ttft_mean=0.5), 1),
    )
    report = as_json(ServeRun({"cores": 2}, "bench serve", 1, 1, [result]))
    text = json.dumps(report, allow_nan=False)
    figure = json.loads(text)["loads"]["mixed"]["arms"]["hints"]["figures"]["agents.ttft_mean"]
    assert figure == {
        "mean": 0.5,
        "spread": None,
        "each": [0.5],
        "by_reference": {"value": 0.5, "low": None, "high": None, "pairs": 1},
    }


def test_a_stage_reads_no_clock_where_there_is_none() -> None:
    target = Target("http://127.0.0.1:1", "m", VOCABULARY, can_reset=True)
    assert Stage(ARMS["hints"], target, 0, None).reading() is None


# -- loads for other generators --------------------------------------------------------------------


@EVERY_LOAD
def test_exported_prompts_share_chunks_exactly_where_their_text_begins_the_same(
    load: str, loads: dict[str, WriteScript], tmp_path: Path
) -> None:
    script = loads[load](CPU, "seed")
    export(script, CPU, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]

    assert len(rows) == script.num_requests
    assert [row["timestamp"] for row in rows] == sorted(row["timestamp"] for row in rows)
    for row in rows:
        assert len(row["hash_ids"]) == -(-row["input_length"] // 16)
        hint = row.get("extra", {}).get("agent_hint")
        assert hint is None or AgentHintParams.model_validate(hint)
    hinted = sum("extra" in row for row in rows)
    assert hinted == sum(len(actor.turns) for actor in script.of(Traffic.AGENTS))


def test_an_exported_turn_begins_with_the_one_before_and_its_answer() -> None:
    script = rfc_script(CPU, "seed")
    first, second, *_ = lines_of(script, CPU)
    whole_chunks = first.input_length // 16
    assert first.hash_ids[:whole_chunks] == second.hash_ids[:whole_chunks]
    assert second.input_length == script.actors[0].prompt_lengths()[1]
    assert second.at > first.at


def test_the_same_text_after_another_beginning_is_another_chunk() -> None:
    def ask(*names: str) -> Actor:
        turn = Turn(tuple(Piece(name, 16) for name in names), False, 0.0, 8, 0.0)
        return Actor("-".join(names), Traffic.ONE_SHOT, 0.0, (turn,))

    script = Script("x", (ask("a", "end"), ask("b", "end"), ask("a", "end")), 1_000, 0, "")
    one, other, again = (line.hash_ids for line in lines_of(script, CPU))
    assert one == again
    assert not set(one) & set(other)


def test_an_actors_own_file_says_nothing_that_differs_between_its_requests(tmp_path: Path) -> None:
    script = mixed_script(CPU, "seed")
    written = {path.name for path in export(script, CPU, tmp_path)}
    assert written == {"all.jsonl", "one-shots.jsonl", *(f"agent-{k}.jsonl" for k in range(3))}
    assert "extra" not in (tmp_path / "agent-0.jsonl").read_text()
