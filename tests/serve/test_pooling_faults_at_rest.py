"""Faults in the middle of transfers, many on one server: all of it comes to rest afterwards.

What each test leaves behind is looked at by ``assert_nothing_is_left``; what is answered
meanwhile, by a server without hints.
"""

import asyncio
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.at_rest import assert_nothing_is_left, ours, wait_until
from tests.serve.pooling_rig import (
    KINDS,
    away,
    edit,
    files_of,
    flood,
    hinted,
    manage,
    outcome,
    residency,
    stock_server,
    tier,
    with_connector,
)
from tests.serve.rig import Completion, Serve, TestServer, tokens
from vllm_agent_hint.cli.demo.server import MODEL_NAME

SMALL = "qwen3-small"
CHUNK_BYTES = 65_536
"""Of 128 tokens of this model."""
WAIT_SECONDS = 0.5
"""The longest that a request may wait for a prefetch, on the slow server."""

Answers = Callable[..., list[int]]


@pytest.fixture(scope="module")
def plain(serve_module: Serve) -> Answers:
    """What a server without hints and without a connector answers."""
    server = stock_server(serve_module, SMALL)
    return lambda prompt, max_tokens=4: server.complete(prompt, max_tokens=max_tokens).token_ids


@contextmanager
def dead(directory: Path) -> Iterator[None]:
    """The store is not there: all that is asked of it fails as from a disk that has gone."""
    groups = [folder for folder in directory.iterdir() if folder.name != "sessions"]
    for group in groups:
        aside = directory.parent / f"{group.name}.aside"
        group.rename(aside)
        group.write_text("not a directory")
    yield
    for group in groups:
        group.unlink()
        (directory.parent / f"{group.name}.aside").rename(group)


# -- the store dies and comes back -----------------------------------------------------------------


@pytest.fixture(scope="module")
def disk(serve_module: Serve, tmp_path_factory: pytest.TempPathFactory) -> tuple[TestServer, Path]:
    """A slow store in a directory, with hardly any host memory before it."""
    directory = tmp_path_factory.mktemp("tier") / "store"
    extra = tier(
        directory=str(directory),
        cpu_bytes_to_use=4 * CHUNK_BYTES,
        load_bytes_per_second=2e6,
        save_bytes_per_second=2e6,
    )
    args = with_connector(40, extra=extra, kv_load_failure_policy="recompute")
    return serve_module(SMALL, args, {"VLLM_AGENT_HINT_KEEP_ALIVE_SECONDS": "0.2"}), directory


def test_a_store_that_dies_in_the_middle_of_a_save_leaves_what_is_local(
    disk: tuple[TestServer, Path], plain: Answers
) -> None:
    server, directory = disk
    context = tokens(1_500, 11)
    said = server.complete(context, hinted("saver"), max_tokens=800).token_ids
    local, protected = residency(server, "saver")["local"], ours(server, "blocks", zone="ttl")

    report = manage(server, "saver", "offload")
    assert [r["status"] for r in report["results"]] == ["pending"]
    with dead(directory):
        (result,) = outcome(server, report["operation_id"])["results"]
        assert result["status"] in ("failed", "partial"), result
        assert "what is local stays" in result["reason"]
        assert residency(server, "saver")["local"] == local == 2_176
        assert ours(server, "blocks", zone="ttl") == protected == 17
        assert server.complete(tokens(500, 12)).token_ids == plain(tokens(500, 12))

    (again,) = edit(server, "saver", "offload")
    flood(server)
    (fetched,) = edit(server, "saver", "prefetch")
    resumed = server.complete([*context, *said, *tokens(50, 13)], hinted("saver"))
    assert [again["status"], fetched["status"]] == ["applied", "applied"], (again, fetched)
    assert resumed.cached_tokens == again["tokens"] == local
    assert said == plain(context, 800)
    assert resumed.token_ids == plain([*context, *said, *tokens(50, 13)])
    assert_nothing_is_left(server)


def test_an_offload_waits_for_what_its_own_request_is_still_saving(
    disk: tuple[TestServer, Path],
) -> None:
    """The connector saves prompts by itself: nothing is left to save, and nothing there yet."""
    server, _ = disk
    server.complete(tokens(2_000, 15), hinted("hurried"), max_tokens=2)

    report = manage(server, "hurried", "offload")
    (result,) = outcome(server, report["operation_id"])["results"]

    assert [r["status"] for r in report["results"]] == ["pending"]
    assert (result["status"], result["tokens"]) == ("applied", 1_920), result
    assert_nothing_is_left(server)


def test_a_store_that_dies_in_the_middle_of_a_load_costs_the_prefetch_alone(
    disk: tuple[TestServer, Path], plain: Answers
) -> None:
    server, directory = disk
    context = tokens(2_000, 21)
    away(server, context, "loader", seed=200)
    failures = ours(server, "transfer_failures_total")

    report = manage(server, "loader", "prefetch")
    wait_until(lambda: ours(server, "prefetches_loading") == 1)
    with dead(directory):
        (result,) = outcome(server, report["operation_id"])["results"]
        again = server.complete(context, hinted("loader"))

    assert result["status"] in ("failed", "partial"), result
    counted = ours(server, "transfer_failures_total") - failures
    assert counted == (result["status"] == "failed")
    assert again.token_ids == plain(context)
    assert_nothing_is_left(server)


def test_files_that_hold_other_bytes_are_failed_blocks_and_are_computed_anew(
    disk: tuple[TestServer, Path], plain: Answers
) -> None:
    server, directory = disk
    context = tokens(2_000, 31)
    before = set(files_of(directory))
    away(server, context, "damaged", seed=300)
    damaged = set(files_of(directory)) - before
    for file in damaged:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    (result,) = edit(server, "damaged", "prefetch")
    left = sum(file.exists() for file in damaged)
    resumed = server.complete(context, hinted("damaged"))

    assert result["status"] in ("failed", "partial"), result
    assert "the connector could not" in result["reason"]
    assert left < len(damaged), "what is damaged is not asked for again and again"
    assert resumed.token_ids == plain(context)
    assert_nothing_is_left(server)


def test_a_disk_that_hangs_keeps_waiting_who_loads_from_it_and_nobody_else(
    disk: tuple[TestServer, Path], plain: Answers
) -> None:
    server, directory = disk
    context = tokens(2_000, 35)
    before = set(files_of(directory))
    away(server, context, "hanging", seed=350)
    hanging = [file for file in files_of(directory) if file not in before]
    for file in hanging:
        # Who opens it to read waits until somebody opens it to write.
        file.unlink()
        os.mkfifo(file)

    report = manage(server, "hanging", "prefetch")
    wait_until(lambda: ours(server, "prefetches_loading") == 1)
    time.sleep(1.5)  # By now it would have come, and whoever reads it hangs.
    began = time.monotonic()
    beside = server.complete(tokens(500, 36))
    spent = time.monotonic() - began
    still = server.get(f"/v1/agent_hint/operations/{report['operation_id']}").json()["status"]
    is_over = threading.Event()
    freeing = threading.Thread(target=_free_the_hanging, args=(hanging, is_over))
    freeing.start()
    (result,) = outcome(server, report["operation_id"])["results"]
    is_over.set()
    freeing.join()

    assert still == "pending"
    assert spent < 2.0
    assert beside.token_ids == plain(tokens(500, 36))
    assert result["status"] in ("failed", "partial"), result
    assert server.complete(context, hinted("hanging")).token_ids == plain(context)
    assert_nothing_is_left(server)


def _free_the_hanging(files: Sequence[Path], is_over: threading.Event) -> None:
    """Let each reader of a pipe find that there is nothing in it."""
    while not is_over.is_set():
        for file in files:
            with suppress(OSError):
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(0.01)


def test_a_store_that_dies_during_keep_alive_is_asked_again_and_found(
    disk: tuple[TestServer, Path], plain: Answers
) -> None:
    server, directory = disk
    context = tokens(2_000, 41)
    away(server, context, "kept", seed=400)
    alive = ours(server, "keep_alives_total")
    wait_until(lambda: ours(server, "keep_alives_total") > alive)

    lost = ours(server, "keep_alive_losses_total")
    with dead(directory):
        wait_until(lambda: ours(server, "keep_alive_losses_total") >= lost + 15)
        assert server.complete(tokens(500, 42)).token_ids == plain(tokens(500, 42))
    alive = ours(server, "keep_alives_total")
    wait_until(lambda: ours(server, "keep_alives_total") >= alive + 15)

    assert edit(server, "kept", "prefetch")[0]["status"] == "applied"
    resumed = server.complete([*context, *tokens(50, 43)], hinted("kept"))
    assert resumed.cached_tokens == 1_920
    assert resumed.token_ids == plain([*context, *tokens(50, 43)])
    assert_nothing_is_left(server)


# -- no room in the store --------------------------------------------------------------------------


def test_a_full_tier_takes_nothing_and_what_is_local_stays(serve: Serve, plain: Answers) -> None:
    server = serve(SMALL, with_connector(80, extra=tier(cpu_bytes_to_use=5 * CHUNK_BYTES)))
    large, small = tokens(2_000, 51), tokens(512, 52)
    server.complete(large, hinted("large"))

    (refused,) = edit(server, "large", "offload")
    assert refused["status"] == "failed", refused
    assert "has taken nothing" in refused["reason"]
    assert residency(server, "large")["local"] == 1_920
    assert ours(server, "blocks", zone="ttl") == 15
    assert ours(server, "transfer_back_pressure_total") == 1
    server.complete(small, hinted("small"))
    (taken,) = edit(server, "small", "offload")
    assert (taken["status"], taken["tokens"]) == ("applied", 512), taken

    flood(server)
    again = server.complete([*large, *tokens(40, 53)], hinted("large"))
    assert again.cached_tokens == 1_920, "it was protected all along"
    assert again.token_ids == plain([*large, *tokens(40, 53)])
    assert_nothing_is_left(server)


# -- while a slow load is under way ----------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(serve_module: Serve) -> TestServer:
    """A load of fifteen blocks takes two seconds."""
    extra = tier(load_bytes_per_second=5e5)
    environment = {"VLLM_AGENT_HINT_PREFETCH_WAIT_SECONDS": str(WAIT_SECONDS)}
    return serve_module(SMALL, with_connector(80, extra=extra), environment)


def loading(server: TestServer, session_id: str, context: Sequence[int], seed: int) -> str:
    """Park a context, drive it out, and ask for it. Returns the operation, once it loads."""
    away(server, context, session_id, seed=seed, requests=8)
    assert residency(server, session_id)["local"] == 0
    operation: str = manage(server, session_id, "prefetch")["operation_id"]
    wait_until(lambda: ours(server, "prefetches_loading") == 1)
    return operation


def give_up(server: TestServer, prompt: Sequence[int], agent_hint: Any) -> None:
    """A client that asks and goes away at once."""
    body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 50, "agent_hint": agent_hint}
    with suppress(httpx.TimeoutException):
        server.client.post("/v1/completions", json=body, timeout=0.2)


def test_requests_aborted_while_their_session_is_prefetched_harm_neither(
    slow: TestServer, plain: Answers
) -> None:
    context = tokens(2_000, 61)
    operation = loading(slow, "aborter", context, seed=600)

    for _ in range(3):
        give_up(slow, [*context, *tokens(50, 62)], hinted("aborter"))
    give_up(slow, tokens(3_900, 63), hinted("aborter"))
    (result,) = outcome(slow, operation)["results"]
    resumed = slow.complete([*context, *tokens(50, 62)], hinted("aborter"))

    assert (result["status"], result["tokens"]) == ("applied", 1_920), result
    assert resumed.cached_tokens == 1_920
    assert resumed.token_ids == plain([*context, *tokens(50, 62)])
    assert_nothing_is_left(slow)


def test_no_request_waits_for_a_prefetch_for_longer_than_the_bound(
    slow: TestServer, plain: Answers
) -> None:
    context = tokens(2_000, 71)
    operation = loading(slow, "waiter", context, seed=700)

    began = time.monotonic()
    stranger = slow.complete(tokens(300, 72), max_tokens=2)
    beside = time.monotonic() - began
    same = slow.complete([*context, *tokens(50, 73)], hinted("waiter"), max_tokens=2)
    for_its_own = time.monotonic() - began - beside
    still = slow.get(f"/v1/agent_hint/operations/{operation}").json()["status"]

    assert still == "pending", "the load takes longer than both"
    assert beside < WAIT_SECONDS
    assert for_its_own < WAIT_SECONDS + 0.7, "it computes what it can't wait for"
    assert same.token_ids == plain([*context, *tokens(50, 73)], 2)
    assert stranger.token_ids == plain(tokens(300, 72), 2)
    outcome(slow, operation)
    assert_nothing_is_left(slow)


def test_edits_of_a_session_that_is_running_count_for_what_is_recorded(
    slow: TestServer, plain: Answers
) -> None:
    context = tokens(1_000, 81)
    slow.complete(context, hinted("runner"))
    grown = [*context, *tokens(300, 82)]
    answers: list[Completion] = []
    running = threading.Thread(
        target=lambda: answers.append(slow.complete(grown, hinted("runner"), max_tokens=1_200))
    )
    running.start()
    wait_until(lambda: slow.metrics().total("vllm:num_requests_running") == 1)

    saved, fetched, evicted = edit(slow, "runner", "offload", "prefetch", "evict")
    is_running = not answers
    running.join()

    assert is_running, "the edits ended before the request"
    assert saved["status"] == "applied", saved
    assert saved["tokens"] == 896
    # What an evict is to give up anyway is not brought first.
    assert fetched["status"] == "rejected", fetched
    assert "evict" in fetched["reason"]
    assert "is alive" in saved["reason"]
    assert evicted["status"] in ("applied", "partial"), evicted
    assert answers[0].token_ids == plain(grown, 1_200)
    assert_nothing_is_left(slow)


def test_requests_preempted_while_a_load_holds_blocks_end_as_they_would(
    slow: TestServer, plain: Answers
) -> None:
    context = tokens(2_000, 91)
    prompts = [tokens(2_300, 92 + k) for k in range(4)]
    operation = loading(slow, "bystander", context, seed=900)
    before = slow.metrics()["vllm:num_preemptions_total"]

    answers: dict[int, list[int]] = {}

    def ask(k: int) -> None:
        # Some of them belong to sessions, and one to the session that is being loaded.
        session = [None, hinted("other"), hinted("bystander"), None][k]
        answers[k] = slow.complete(prompts[k], session, max_tokens=400).token_ids

    asking = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    for one in asking:
        one.start()
    wait_until(lambda: slow.metrics()["vllm:num_preemptions_total"] > before)
    held = ours(slow, "prefetches_loading")
    for one in asking:
        one.join()

    assert held == 1, "they were preempted while the load held blocks"
    (result,) = outcome(slow, operation)["results"]
    assert result["status"] in ("applied", "partial"), result
    assert answers == {k: plain(prompts[k], 400) for k in range(4)}
    assert_nothing_is_left(slow)


def test_a_hybrid_model_s_states_outlive_aborts_and_preemption_during_a_load(serve: Serve) -> None:
    model, blocks = KINDS["hybrid"]
    stock = stock_server(serve, model)
    extra = tier(load_bytes_per_second=3e6)
    server = serve(model, with_connector(blocks, extra=extra))
    context = tokens(1_500, 141)
    away(server, context, "hybrid", seed=1_400, requests=3)
    operation = manage(server, "hybrid", "prefetch")["operation_id"]
    wait_until(lambda: ours(server, "prefetches_loading") == 1)

    give_up(server, [*context, *tokens(50, 142)], hinted("hybrid"))
    prompts = [tokens(1_250, 143 + k) for k in range(5)]
    with ThreadPoolExecutor(5) as clients:
        said = list(
            clients.map(lambda prompt: server.complete(prompt, max_tokens=80).token_ids, prompts)
        )
    (result,) = outcome(server, operation)["results"]
    (again,) = edit(server, "hybrid", "prefetch")
    resumed = server.complete([*context, *tokens(50, 142)], hinted("hybrid"))

    assert server.metrics()["vllm:num_preemptions_total"] > 0
    assert result["status"] in ("applied", "partial"), result
    assert (again["status"], again["tokens"]) == ("applied", 1_408), again
    assert resumed.cached_tokens == 1_408
    # What they say depends on the batch: without hints too, side by side is not one by one.
    assert [len(one) for one in said] == [80] * 5
    assert resumed.token_ids == stock.complete([*context, *tokens(50, 142)]).token_ids
    assert_nothing_is_left(server)


def test_a_thousand_edits_at_once_all_end_and_requests_go_on_beside_them(
    slow: TestServer, plain: Answers
) -> None:
    contexts = {f"many-{k}": tokens(700 + 128 * k, 110 + k) for k in range(5)}
    for session, context in contexts.items():
        slow.complete(context, hinted(session))
    dice = random.Random(0)
    kinds = ("offload", "prefetch", "evict")
    # After an evict there is nothing any more, so that most come before the first.
    wanted = [
        (dice.choice(list(contexts)), dice.choice(kinds[: 2 + (k > 900)])) for k in range(1_000)
    ]

    operations, waits = asyncio.run(_all_at_once(slow, wanted))
    results = [r for operation in operations for r in outcome(slow, operation, 30)["results"]]

    assert len(results) == 1_000
    ended = {"applied", "partial", "missing", "rejected", "failed"}
    assert {r["status"] for r in results} <= ended
    assert sum(r["status"] == "applied" for r in results) > 500, Counter(map(str, results))
    assert waits
    assert all(said == plain(tokens(200, 120)) for _, said in waits)
    for session, context in contexts.items():
        assert slow.complete(context, hinted(session)).token_ids == plain(context)
    assert_nothing_is_left(slow)


async def _all_at_once(
    server: TestServer, wanted: Sequence[tuple[str, str]]
) -> tuple[list[str], list[tuple[float, list[int]]]]:
    """Returns the operations, and of requests beside them the seconds and what they were told."""
    # httpx itself goes through all that wait for a connection, for each of them.
    at_once = asyncio.Semaphore(100)
    limits = httpx.Limits(max_connections=None)
    waits: list[tuple[float, list[int]]] = []
    async with httpx.AsyncClient(
        base_url=server.base_url, timeout=120, limits=limits, trust_env=False
    ) as client:

        async def ask(session: str, kind: str) -> str:
            path = f"/v1/agent_hint/sessions/{session}"
            async with at_once:
                response = await client.post(path, json={"edits": [{"type": kind}]})
            assert response.status_code == 200, response.text
            return str(response.json()["operation_id"])

        async def go_on() -> None:
            for _ in range(5):
                began = time.monotonic()
                answer = await asyncio.to_thread(server.complete, tokens(200, 120))
                waits.append((time.monotonic() - began, answer.token_ids))

        operations = [ask(session, kind) for session, kind in wanted]
        *ids, _ = await asyncio.gather(*operations, go_on())
    return [str(one) for one in ids], waits


def test_the_rig_s_dead_store_is_whole_again_afterwards(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "group" / "ab").mkdir(parents=True)
    with dead(store):
        assert (store / "group").is_file()
    assert (store / "group" / "ab").is_dir()
    shutil.rmtree(store)
