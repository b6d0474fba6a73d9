"""A prefetch that names its content by the request's own prompt, on real servers that share a
directory: what one has saved, for whatever session, the other brings without running the model."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.serve.apis import (
    APIS,
    APIS_AND_STREAMS,
    BATCH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    body,
    report,
)
from tests.serve.at_rest import wait_until
from tests.serve.pooling_rig import KINDS, files_of, tier, with_connector
from tests.serve.rig import Serve, TestServer, tokens
from vllm_agent_hint.cli.demo.server import MODEL_NAME

BLOCK = 128
SOME = 6 * BLOCK
"""Less than what ``text_of`` makes in any API."""
SAME_HASHES = {"PYTHONHASHSEED": "0", "VLLM_SERVER_DEV_MODE": "1"}
OFFLOADING = {"context_management": {"edits": [{"type": "offload"}]}}


def prefetching(session_id: str, *edits: str) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "context_management": {
            "manage_request": True,
            "wait_seconds": 20,
            "edits": [{"type": edit} for edit in (*edits, "prefetch")],
        },
    }


def text_of(name: str) -> str:
    """Some blocks that begin with a name."""
    return f"{name} " + "word " * 250


def park(server: TestServer, path: str, text: str, **more: Any) -> None:
    """Run a turn of a session "there" and have all of it saved."""
    hint = {"session_id": f"there {path}", **OFFLOADING}
    response = server.post(path, body(path, text, agent_hint=hint, **more))
    assert response.status_code == 200, response.text
    until = time.monotonic() + 20
    operation = report(response)["operation_id"]
    while server.get(f"/v1/agent_hint/operations/{operation}").json()["status"] != "done":
        assert time.monotonic() < until
        time.sleep(0.05)


def fetch(server: TestServer, path: str, text: str, session: str, **more: Any) -> dict[str, Any]:
    response = server.post(path, body(path, text, agent_hint=prefetching(session), **more))
    (result,) = report(response, stream=bool(more.get("stream")))["results"]
    return dict(result)


class Hits:
    """Tokens that requests have found, since it was made."""

    def __init__(self, server: TestServer) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> tuple[float, float, float]:
        metrics = self._server.metrics()
        return (
            metrics.total("vllm:prefix_cache_hits_total"),
            metrics.total("vllm:external_prefix_cache_hits_total"),
            metrics.total("vllm:prompt_tokens_total"),
        )

    def since(self) -> tuple[int, int, int]:
        """In the GPU cache, in the connector, and tokens of prompts that have run."""
        local, external, run = (
            int(now - before) for now, before in zip(self._now(), self._before, strict=True)
        )
        return local, external, run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def args(directory: Path) -> list[str]:
    return with_connector(60, extra=tier(directory=str(directory)))


@pytest.fixture(scope="module")
def first(serve_module: Serve, args: list[str]) -> TestServer:
    return serve_module("qwen3-small", args, SAME_HASHES)


@pytest.fixture(scope="module")
def second(serve_module: Serve, args: list[str]) -> TestServer:
    return serve_module("qwen3-small", args, SAME_HASHES)


# -- as the request that will follow ---------------------------------------------------------------


@APIS_AND_STREAMS
def test_each_apis_prompt_is_the_one_that_its_requests_have(
    first: TestServer, second: TestServer, path: str, stream: bool
) -> None:
    text = text_of(f"{path} {stream}")
    park(first, path, text)
    more = {"stream": True} if stream else {}
    hits = Hits(second)

    fetched = fetch(second, path, text, f"here {path} {stream}", **more)
    ran = hits.since()[2]
    hits = Hits(second)
    assert second.post(path, body(path, text)).status_code == 200
    local, external, _ = hits.since()

    assert fetched["status"] == "applied", fetched
    assert fetched["tokens"] >= SOME
    assert ran == 0, "the model has not run"
    conversations = 2 if path == BATCH else 1
    assert local == conversations * fetched["tokens"], "all of it was in the GPU cache"
    assert external == 0


def test_tools_and_the_turns_before_are_a_part_of_the_prompt(
    first: TestServer, second: TestServer
) -> None:
    messages = [
        {"role": "system", "content": text_of("a system prompt")},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": text_of("what then?")},
    ]
    parked = {"session_id": "there", **OFFLOADING}
    turn = {"model": MODEL_NAME, "messages": messages, "max_tokens": 3, "temperature": 0}
    response = first.post(CHAT, {**turn, "agent_hint": parked})
    whole = response.json()["usage"]["prompt_tokens"] // BLOCK * BLOCK
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        answer = second.post(CHAT, {**turn, "agent_hint": prefetching("with turns")})
        (result,) = report(answer)["results"]
        if result["tokens"] == whole:
            break
        time.sleep(0.2)
    assert (result["status"], result["tokens"]) == ("applied", whole)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_resumes_by_the_prompt_alone(
    serve: Serve, kind: str, tmp_path: Path
) -> None:
    model, blocks = KINDS[kind]
    shared = with_connector(blocks, extra=tier(directory=str(tmp_path)))
    one, other = serve(model, shared, SAME_HASHES), serve(model, shared, SAME_HASHES)
    context = tokens(2_000, 1)
    said = one.complete(context, {"session_id": "there", **OFFLOADING}, max_tokens=8)
    wait_until(lambda: len(files_of(tmp_path)) >= 15)
    time.sleep(0.5)
    one.stop()
    resumed_with = [*context, *said.token_ids, *tokens(300, 5)]

    fetched = _complete(other, resumed_with, "here")
    before = Hits(other)
    resumed = other.complete(resumed_with, {"session_id": "here"})

    assert (fetched["status"], fetched["tokens"]) == ("applied", 1_920), fetched
    assert resumed.cached_tokens == 1_920
    assert before.since()[1] == 0


def _complete(server: TestServer, prompt: list[int], session: str, **more: Any) -> dict[str, Any]:
    """A prefetch with tokens for a prompt."""
    response = _post(server, prompt, prefetching(session), **more)
    (result,) = report(response)["results"]
    return dict(result)


def _post(server: TestServer, prompt: Any, hint: Any, **more: Any) -> httpx.Response:
    asked = {"model": MODEL_NAME, "prompt": prompt, "agent_hint": hint, **more}
    return server.post(COMPLETIONS, asked)


# -- what must not be found ------------------------------------------------------------------------


@APIS
def test_another_salt_finds_nothing(first: TestServer, second: TestServer, path: str) -> None:
    text = text_of(f"salted {path}")
    park(first, path, text, cache_salt="pepper")

    unsalted = fetch(second, path, text, f"unsalted {path}")
    other = fetch(second, path, text, f"unsalted {path}", cache_salt="thyme")
    same = fetch(second, path, text, f"salted {path}", cache_salt="pepper")

    assert [unsalted["status"], other["status"], same["status"]] == ["missing"] * 2 + ["applied"]


def test_another_adapter_finds_nothing(serve: Serve, tmp_path: Path) -> None:
    adapter = adapter_in(tmp_path / "adapter")
    args = [
        *with_connector(60, extra=tier(directory=str(tmp_path / "shared"))),
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}"),
    ]
    one, other = serve("qwen3-small", args, SAME_HASHES), serve("qwen3-small", args, SAME_HASHES)
    text = text_of("adapted")
    park(one, CHAT, text, model="adapter")

    plain = fetch(other, CHAT, text, "plain")
    adapted = fetch(other, CHAT, text, "adapted", model="adapter")
    hits = Hits(other)
    assert other.post(CHAT, body(CHAT, text, model="adapter")).status_code == 200

    assert plain["status"] == "missing"
    assert adapted["status"] == "applied", adapted
    assert hits.since()[:2] == (adapted["tokens"], 0)


def adapter_in(folder: Path) -> Path:
    """A LoRA adapter for the smallest model."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn((8, 128), generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn((64, 8), generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_hashes_of_another_scheme_are_incompatible_by_manifest_and_unknown_by_prompt(
    serve: Serve, first: TestServer, args: list[str], directory: Path
) -> None:
    text = text_of("another scheme")
    park(first, CHAT, text)
    other = serve("qwen3-small", args, {"PYTHONHASHSEED": "1"})

    by_prompt = fetch(other, CHAT, text, f"there {CHAT}")
    by_manifest = fetch(other, CHAT, "", f"there {CHAT}")

    assert by_prompt["status"] == by_manifest["status"] == "missing"
    assert by_prompt["reason"] == "the store has nothing of this prompt"
    assert by_manifest["reason"].startswith("incompatible")


# -- with and without ------------------------------------------------------------------------------


@APIS
def test_a_request_that_says_nothing_goes_by_the_manifest(
    first: TestServer, second: TestServer, path: str
) -> None:
    park(first, path, text_of(f"nothing {path}"))
    # The RFC's own example of a prefetch is one message without text; a completion has to have
    # some, and less than a block of it names nothing that could be stored.
    fetched = fetch(second, path, "x" if path == COMPLETIONS else "", f"there {path}")
    assert fetched["status"] == "applied", fetched
    assert fetched["tokens"] >= SOME


@APIS
def test_a_bad_prompt_is_a_400_and_no_edit_runs(second: TestServer, path: str) -> None:
    kept = f"kept {path}"
    assert (
        second.post(path, body(path, text_of(kept), agent_hint={"session_id": kept})).status_code
        == 200
    )
    too_long = "word " * 2_000

    response = second.post(path, body(path, too_long, agent_hint=prefetching(kept, "evict")))

    assert response.status_code == 400, response.text
    assert "maximum" in response.text
    assert "word word" not in response.text
    shown = second.get(f"/v1/agent_hint/sessions/{kept.replace('/', '%2F').replace(' ', '%20')}")
    assert shown.status_code == 200, shown.text
    assert shown.json()["lineages"][0]["tokens"] >= SOME


def test_tokens_that_the_model_does_not_know_are_a_400(second: TestServer) -> None:
    response = _post(second, [10**8] * 300, prefetching("unknown tokens"))
    assert response.status_code == 400, response.text


def test_an_answer_that_is_not_stored_can_not_be_gone_on_with(second: TestServer) -> None:
    asked = body(
        RESPONSES, "on", previous_response_id="resp_1", agent_hint=prefetching("no answer")
    )
    response = second.post(RESPONSES, asked)
    assert response.status_code == 404, response.text


def test_without_a_connector_nothing_is_rendered(serve: Serve) -> None:
    server = serve("qwen3-small", ["--num-gpu-blocks-override", "96"])
    for path in (CHAT, MESSAGES):
        hint = prefetching("nobody")
        response = server.post(path, body(path, "word " * 50_000, agent_hint=hint))
        assert report(response)["results"][0]["status"] == "unsupported"
