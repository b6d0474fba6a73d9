"""Two servers over one directory: a session goes on where it has never been."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.at_rest import wait_until
from tests.serve.pooling_rig import (
    KINDS,
    edit,
    files_of,
    flood,
    hinted,
    loaded,
    tier,
    whole_blocks,
    with_connector,
)
from tests.serve.rig import Serve, tokens

SALT = "a salt of its own"


def offloading(session_id: str = "agent") -> dict[str, Any]:
    return {**hinted(session_id), "context_management": {"edits": [{"type": "offload"}]}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_retained_on_one_server_resumes_on_the_other_after_the_first_has_died(
    serve: Serve, kind: str, tmp_path: Path
) -> None:
    model, blocks = KINDS[kind]
    shared = with_connector(blocks, extra=tier(directory=str(tmp_path)))
    environment = {"PYTHONHASHSEED": "0", "VLLM_AGENT_HINT_KEEP_ALIVE_SECONDS": "0.3"}
    first, second = serve(model, shared, environment), serve(model, shared, environment)
    context = tokens(2_000, 1)
    said = first.complete(context, offloading(), max_tokens=8)
    # The edits ran after the answer.
    wait_until(lambda: len(files_of(tmp_path)) >= 15)
    time.sleep(0.5)
    first.stop()

    (fetched,) = edit(second, "agent", "prefetch")
    files = files_of(tmp_path)
    for file in files:
        os.utime(file, (1, 1))
    time.sleep(0.8)
    before = loaded(second)
    resumed = second.complete([*context, *said.token_ids], {"session_id": "agent"})

    assert fetched["status"] == "applied", fetched
    assert fetched["tokens"] == 1_920
    assert resumed.cached_tokens == 1_920
    assert loaded(second) == before
    kept = [file for file in files if file.stat().st_mtime > 1]
    assert len(kept) >= 15, "its keep-alive has survived the first server"


def test_hashes_of_another_scheme_are_incompatible_and_no_stranger_learns_a_session(
    serve: Serve, tmp_path: Path
) -> None:
    shared = with_connector(40, extra=tier(directory=str(tmp_path)))
    first = serve("qwen3-small", shared, {"PYTHONHASHSEED": "0"})
    first.complete(tokens(2_000, 1), offloading())
    first.complete(tokens(2_000, 2), offloading("salted"), cache_salt=SALT)
    wait_until(lambda: len(list(tmp_path.glob("sessions/*/*.json"))) >= 2)

    other = serve("qwen3-small", shared, {"PYTHONHASHSEED": "1"})
    (foreign,) = edit(other, "agent", "prefetch")
    same = serve("qwen3-small", shared, {"PYTHONHASHSEED": "0"})
    (unsalted,) = edit(same, "salted", "prefetch")

    assert foreign["status"] == "missing"
    assert foreign["reason"].startswith("incompatible")
    assert unsalted["status"] == "missing"
    names = " ".join(str(path) for path in tmp_path.rglob("*"))
    texts = " ".join(path.read_text() for path in tmp_path.glob("sessions/*/*.json"))
    assert "agent" not in names + texts
    assert SALT not in texts


def test_an_evict_on_one_server_leaves_whole_what_is_parked_on_the_other(
    serve: Serve, tmp_path: Path
) -> None:
    shared = with_connector(40, extra=tier(directory=str(tmp_path)))
    first, second = (serve("qwen3-small", shared, {"PYTHONHASHSEED": "0"}) for _ in range(2))
    system = tokens(1_024, 1)
    ours, theirs = [*system, *tokens(976, 2)], [*system, *tokens(976, 3)]
    first.complete(ours, offloading("ours"))
    wait_until(lambda: len(files_of(tmp_path)) >= 15)
    time.sleep(0.5)
    second.complete(theirs, offloading("theirs"))
    wait_until(lambda: len(files_of(tmp_path)) >= 22)
    time.sleep(0.5)
    both = len(files_of(tmp_path))

    (evicted,) = edit(first, "ours", "evict")
    left = len(files_of(tmp_path))
    flood(second)
    (fetched,) = edit(second, "theirs", "prefetch")

    assert "blocks were deleted from the store" in evicted["reason"]
    assert left < both
    assert fetched["status"] == "applied", fetched
    assert second.complete(theirs, {"session_id": "theirs"}).cached_tokens == whole_blocks(theirs)
