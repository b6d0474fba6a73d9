"""The tier through vLLM's own ``OffloadingConnector``, without any hint."""

from pathlib import Path

import pytest

from tests.serve.pooling_rig import KINDS, files_of, flood, tier, whole_blocks, with_connector
from tests.serve.rig import Serve, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_flood_evicts_comes_back_from_host_memory(serve: Serve, kind: str) -> None:
    model, blocks = KINDS[kind]
    server = serve(model, with_connector(blocks))
    context = tokens(2_000, 1)
    grown = [*context, *tokens(100, 2)]
    first = server.complete(context)

    flood(server)
    again = server.complete(context)
    more = server.complete(grown)

    assert first.cached_tokens == 0
    assert again.cached_tokens >= whole_blocks(context) - 128
    assert more.cached_tokens >= whole_blocks(context) - 128
    assert again.token_ids == first.token_ids
    stock = serve(model, with_connector(blocks), {"VLLM_AGENT_HINT": "0"})
    assert stock.complete(grown).token_ids == more.token_ids


def test_a_directory_keeps_what_host_memory_cannot_and_outlives_the_server(
    serve: Serve, tmp_path: Path
) -> None:
    # One chunk of this model has 64 KiB.
    small = tier(directory=str(tmp_path), cpu_bytes_to_use=4 * 65_536)
    environment = {"PYTHONHASHSEED": "0"}
    first = serve("qwen3-small", with_connector(40, extra=small), environment)
    context = tokens(2_000, 1)
    said = first.complete(context)
    flood(first)

    assert first.complete(context).cached_tokens == whole_blocks(context)
    first.stop()
    second = serve("qwen3-small", with_connector(40, extra=small), environment)
    resumed = second.complete(context)

    assert resumed.cached_tokens == whole_blocks(context)
    assert resumed.token_ids == said.token_ids
    assert files_of(tmp_path)
