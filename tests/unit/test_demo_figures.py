"""The demo's arithmetic: what its table and verdict are made of."""

import pytest

from vllm_agent_hint.cli.demo.load import random_tokens
from vllm_agent_hint.cli.demo.measure import quantile
from vllm_agent_hint.cli.demo.metrics import Metrics
from vllm_agent_hint.cli.demo.settings import DemoSettings
from vllm_agent_hint.cli.demo.verdict import bootstrap_interval

EXPOSITION = """\
# HELP vllm:agent_hint_blocks Blocks in each zone.
# TYPE vllm:agent_hint_blocks gauge
vllm:agent_hint_blocks{engine="0",zone="a \\"b\\" {c}"} 3.0
vllm:agent_hint_blocks{engine="0",zone="d"} 4.0
python_info 1.0
"""


def test_metrics_of_one_name_add_up_over_their_labels() -> None:
    metrics = Metrics.parse(EXPOSITION)
    assert metrics["vllm:agent_hint_blocks"] == 7.0
    assert metrics.total("vllm:agent_hint_blocks", zone="d") == 4.0
    assert metrics.names("vllm:") == {"vllm:agent_hint_blocks"}
    with pytest.raises(KeyError):
        metrics["vllm:absent"]


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([7.0], 0.95) == 7.0


def test_an_interval_holds_the_ratio_of_equal_columns() -> None:
    low, high = bootstrap_interval([(1.0, 1.1), (1.1, 1.0), (2.0, 2.0), (3.0, 3.1), (3.1, 3.0)])
    assert low <= 1.0 <= high


@pytest.mark.parametrize("settings", [DemoSettings.for_cpu(), DemoSettings.for_gpu()])
def test_agents_fit_in_the_small_pool_and_everything_in_the_big_one(settings: DemoSettings) -> None:
    assert settings.agents_share_of_small_pool < 0.7
    assert settings.longest_context < settings.max_model_len
    one_shot = settings.one_shot_tokens + settings.one_shot_reply_tokens + settings.block_size
    everything = settings.agents * settings.longest_context + settings.one_shots * one_shot
    assert everything * 1.1 < settings.big_pool_tokens


def test_prompts_depend_on_the_seed_and_the_name_alone() -> None:
    settings = DemoSettings()
    assert random_tokens(settings, "a", 50) == random_tokens(settings, "a", 50)
    assert random_tokens(settings, "a", 50) != random_tokens(settings, "b", 50)
