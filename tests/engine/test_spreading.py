"""Whether the engine requests of one HTTP request may run on several engines."""

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers
from vllm.config import ParallelConfig

from vllm_agent_hint.frontend.spreading import may_spread, may_spread_unseen


def serving(num_engines: int) -> Any:
    core_client = SimpleNamespace(core_engines=[b"%d" % k for k in range(num_engines)])
    return SimpleNamespace(engine_client=SimpleNamespace(engine_core=core_client))


def request(**headers: str) -> Any:
    return SimpleNamespace(headers=Headers({k.replace("_", "-"): v for k, v in headers.items()}))


@pytest.mark.parametrize(
    ("num_engines", "raw_request", "expected"),
    [
        (1, None, False),
        (2, None, True),
        (2, request(), True),
        (2, request(x_data_parallel_rank="1"), False),
        (2, request(x_data_parallel_rank=""), True),
        (2, request(x_data_parallel_rank="first"), True),
        (1, request(x_data_parallel_rank="0"), False),
    ],
)
def test_they_may_where_the_front_end_has_several_engines_and_none_is_named(
    num_engines: int, raw_request: Any, expected: bool
) -> None:
    assert may_spread(serving(num_engines), raw_request) is expected


@pytest.mark.parametrize(
    ("config", "rank", "expected"),
    [
        ({}, None, False),
        ({"data_parallel_size": 2}, None, True),
        ({"data_parallel_size": 2}, 1, False),
        ({"data_parallel_size": 2, "data_parallel_rank_local": 0}, None, False),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, None, False),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_hybrid_lb": True,
            },
            None,
            True,
        ),
    ],
    ids=str,
)
def test_so_it_is_for_requests_that_come_through_no_door(
    config: dict[str, Any], rank: int | None, expected: bool
) -> None:
    parallel_config = ParallelConfig(**config)
    if "data_parallel_external_lb" in config:
        parallel_config.data_parallel_size_local = 1
    assert may_spread_unseen(parallel_config, rank) is expected
