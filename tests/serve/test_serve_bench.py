"""A tiny ``bench serve`` on real servers: nothing about time is asserted, all of the report is."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.serve.rig import Serve
from vllm_agent_hint.cli.bench.serve.arms import ARMS, Voice, WishError
from vllm_agent_hint.cli.bench.serve.command import scripts
from vllm_agent_hint.cli.bench.serve.figures import FIGURES
from vllm_agent_hint.cli.bench.serve.loads.mixed import mixed_script
from vllm_agent_hint.cli.bench.serve.local import Stand, local_stages
from vllm_agent_hint.cli.bench.serve.play import Player, Target
from vllm_agent_hint.cli.bench.serve.report import ServeRun
from vllm_agent_hint.cli.bench.serve.result import LoadResult
from vllm_agent_hint.cli.bench.serve.run import run_load, show, write
from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.bench.serve.script import Actor, Piece, Script, Turn
from vllm_agent_hint.cli.bench.serve.standing import StandingServers, Urls
from vllm_agent_hint.cli.demo.client import Traffic
from vllm_agent_hint.cli.demo.run import describe_machine

TINY = Scale(longest_prompt=900, rfc_longest_prompt=900, prefill_rate=20_000.0)
BLOCKS = 120


def play_tiny(arms: list[str], open_stage: object, scale: Scale, console: Console) -> LoadResult:
    script_of = scripts(mixed_script, scale, seed=1)
    chosen = [ARMS[name] for name in arms]
    return run_load("mixed", script_of, chosen, open_stage, 2, console)  # type: ignore[arg-type]


def cached_in_second_play(target: Target) -> int:
    """Tokens that a play hits of one before it, with nothing done in between."""
    turn = Turn((Piece("the same", 600),), False, 0.0, 4, 0.0)
    script = Script("x", (Actor("asker", Traffic.ONE_SHOT, 0.0, (turn,)),), 1_000, 0, "")
    first, second = (
        Player(script, target, Voice(), f"{target.can_reset}/{play}", lambda: None, polls=False)
        for play in range(2)
    )
    assert first.play().records[0].prompt_tokens == 600
    return second.play().records[0].cached_tokens


@pytest.fixture
def console(tmp_path: Path) -> Console:
    return Console(file=(tmp_path / "screen.txt").open("w"), width=160)


def test_a_tiny_run_on_vllm_serve_yields_a_complete_report(
    model: Callable[[str], Path], environment: dict[str, str], tmp_path: Path, console: Console
) -> None:
    stand = Stand(model("qwen3-small"), tmp_path, environment, "float32", 128, is_async=False)

    result = play_tiny(["stock", "hints-evict"], local_stages(stand, "mixed"), TINY, console)
    show(result, console)
    run = ServeRun(asdict(describe_machine()), "bench serve", 1, 2, [result])
    write(run, tmp_path / "serve.json", console)

    report = json.loads((tmp_path / "serve.json").read_text())["loads"]["mixed"]
    assert report["same_prompts"]
    for name, arm in report["arms"].items():
        assert set(arm["figures"]) == {figure.key for figure in FIGURES}
        assert all(len(figure["each"]) == 2 for figure in arm["figures"].values())
        assert arm["hints_active"] == (name != "stock")
        for key in ("all.scheduler_step", "all.bytes_per_block", "all.peak_usage", "all.steps"):
            assert min(arm["figures"][key]["each"]) > 0.0, key
    stock, ours = report["arms"]["stock"], report["arms"]["hints-evict"]
    assert ours["figures"]["all.bytes_per_block"]["mean"] == pytest.approx(
        stock["figures"]["all.bytes_per_block"]["mean"] + 16, abs=4
    )
    assert ours["hint_metrics"][0]["edits_total{operation=evict,status=applied}"] == 3
    assert ours["hint_metrics"][1]["edits_total{operation=evict,status=applied}"] > 3
    assert any(finding["key"] == "mixed.plugin" for finding in report["verdict"])
    assert (tmp_path / "serve-mixed.svg").read_text().lstrip().startswith("<?xml")
    screen = (tmp_path / "screen.txt").read_text()
    assert "scheduler CPU/step" in screen
    assert "hints-evict" in screen


@pytest.mark.parametrize("dev_mode", ["0", "1"])
def test_the_same_load_plays_on_a_server_that_stands_already(
    serve: Serve, console: Console, dev_mode: str
) -> None:
    server = serve(
        "qwen3-small",
        ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024"],
        {"VLLM_SERVER_DEV_MODE": dev_mode},
    )
    servers = StandingServers(Urls(server.base_url, None, None, None))
    scale = servers.scale()
    assert scale.cache_tokens == BLOCKS * 128
    assert scale.longest_prompt == round(1024 * 0.9)
    assert bool(servers.notes()) == (dev_mode == "0")

    result = play_tiny(["unhinted", "hints-evict"], servers.open_stage, scale, console)

    assert result.reference == "unhinted"
    assert result.same_prompts
    assert not any(play.hint_metrics.get("sessions") for play in result.arms[0].plays)
    assert all(play.hint_metrics["sessions"] for play in result.arms[1].plays)
    target = servers.target_of(ARMS["hints"])
    assert target.can_reset == (dev_mode == "1")
    assert cached_in_second_play(replace(target, can_reset=True)) == 512
    assert cached_in_second_play(replace(target, can_reset=False)) == 0
    evicts = "vllm:agent_hint_edits_total"
    assert server.metrics().total(evicts, operation="evict", status="applied") >= 6
    assert server.get("/v1/agent_hint/sessions").json()["sessions"] == []
    with pytest.raises(WishError, match="needs a server of its own"):
        servers.check([ARMS["shadow"]])
