"""``vllm-agent-hint capture`` beside a real server, and how turns ended, which a capture shows."""

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.apis import (
    APIS_AND_STREAMS,
    BATCH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    body,
    error,
)
from tests.serve.rig import Serve, TestServer, tokens
from tests.serve.tenant_rig import ALICE_KEY, BOB_KEY, KEYS, ROOT, error_of, key
from vllm_agent_hint.cli.capture.reader import CaptureError, CaptureReader
from vllm_agent_hint.traces.reading import read_trace

SECRET = "SECRET-session"
TOOL = {
    "name": "fetch_page",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"page": {"type": "string", "enum": ["one"]}},
        "required": ["page"],
        "additionalProperties": False,
    },
}
ON = {"VLLM_AGENT_HINT_CAPTURE": "1", "VLLM_AGENT_HINT_AUTO": "1"}
HERMES = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
SMALL_BLOCKS = ["--block-size", "32", "--num-gpu-blocks-override", "400"]


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> TestServer:
    return serve_module("qwen3-small", [*SMALL_BLOCKS, *HERMES], ON)


@contextmanager
def recording(
    server: TestServer, out: Path, *options: str, key: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command as a user runs it; Ctrl-C ends it."""
    program = "from vllm_agent_hint.cli import app; app()"
    command = [sys.executable, "-c", program, "capture", "--url", server.base_url]
    command += ["--out", str(out), *options, *(["--api-key", key] if key else [])]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while running.poll() is None and not (out.exists()):
            time.sleep(0.05)
        yield running
        if running.poll() is None:
            running.send_signal(2)
        running.wait(30)
    finally:
        if running.poll() is None:
            running.kill()


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mixed_traffic_becomes_a_trace_that_replay_reads(
    server: TestServer, tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    hint = {"session_id": SECRET, "cache_control": {"ttl": 60}}
    with recording(server, out) as running:
        first = server.complete(tokens(200, seed=1), hint)
        second = server.complete(tokens(200, seed=1) + tokens(100, seed=2), hint)
        server.complete(tokens(200, seed=1), session_id=SECRET)
        server.complete(tokens(70, seed=3))
        chat = server.post(CHAT, body(CHAT, "PRIVATE words " * 20))
        assert chat.status_code == 200
    said, errors = running.communicate()
    assert running.returncode == 0, errors
    assert "5 requests (2 hinted, 3 not) of 1 named sessions" in said
    assert "0 dropped" in said

    trace = read_trace(out)
    assert trace.block_size == 32
    assert trace.num_requests == 5
    [named] = [session for session in trace.sessions if session.is_named]
    assert [r.is_hinted for r in named.requests] == [True, True, False]
    one, two, three = named.requests
    assert [one.prompt_tokens, two.prompt_tokens] == [first.prompt_tokens, second.prompt_tokens]
    assert one.output_tokens == 4
    assert one.service_seconds is not None
    assert 0 < one.service_seconds < 60
    assert len(one.blocks) == 6
    assert list(two.blocks[:6]) == list(one.blocks) == list(three.blocks)
    everything = [id_ for s in trace.sessions for r in s.requests for id_ in r.blocks]
    assert sorted(set(everything)) == list(range(len(set(everything))))


def test_the_file_holds_no_text_no_token_and_no_id(server: TestServer, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    prompt = tokens(320, seed=4)
    with recording(server, out):
        server.complete(prompt, {"session_id": SECRET, "parent_session_id": "SECRET-parent"})
        forced = {"type": "function", "function": {"name": TOOL["name"]}}
        chat = body(
            CHAT, "PRIVATE words " * 20, tokens=2000, tools=[tool(CHAT)], tool_choice=forced
        )
        chat |= {"temperature": 1, "ignore_eos": False}
        server.post(CHAT, {**chat, "agent_hint": {"session_id": SECRET}})
    written = out.read_text()
    header, *lines = [json.loads(line) for line in written.splitlines()]
    assert header == {"format": "vllm-agent-hint-trace", "version": 1, "block_size": 32}
    assert len(lines) == 2
    for known in ("SECRET", "PRIVATE", "words", "fetch_page", "model", "chatcmpl", "cmpl-"):
        assert known not in written
    allowed = {"t", "session", "parent", "in", "out", "keep", "runs", "stop", "tool", "seconds"}
    for line in lines:
        assert line.keys() <= allowed | {"hinted"}
        assert max(line["runs"]) < 100, "numbers of blocks, no tokens and no hashes"


def test_two_captures_of_the_same_traffic_have_no_digest_in_common(
    server: TestServer, tmp_path: Path
) -> None:
    names = []
    for number in range(2):
        out = tmp_path / f"{number}.jsonl"
        with recording(server, out):
            server.complete(tokens(100, seed=5), {"session_id": SECRET})
        names.append(json.loads(out.read_text().splitlines()[1])["session"])
    assert names[0] != names[1]


def test_it_ends_by_itself_after_its_seconds(server: TestServer, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl.gz"
    began = time.monotonic()
    with recording(server, out, "--seconds", "1.5") as running:
        server.complete(tokens(100, seed=6))
        assert running.wait(30) == 0
    assert time.monotonic() - began < 20
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == 2


def test_a_second_reader_is_told_that_one_runs(server: TestServer) -> None:
    with CaptureReader(server.base_url) as first:
        with (
            pytest.raises(CaptureError, match="another capture runs"),
            CaptureReader(server.base_url),
        ):
            pass
        server.complete(tokens(100, seed=7))
        assert len(first.take()["requests"]) == 1
    with CaptureReader(server.base_url) as next_one:
        assert next_one.take()["requests"] == []


def test_what_runs_when_it_ends_is_left_out_and_counted(server: TestServer, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    with recording(server, out) as running:
        slow = threading.Thread(
            target=server.complete, args=(tokens(100, seed=8),), kwargs={"max_tokens": 2000}
        )
        slow.start()
        server.complete(tokens(100, seed=9))
        time.sleep(0.2)
    said, _ = running.communicate()
    slow.join()
    assert "1 requests" in said
    assert "1 not finished" in said
    assert read_trace(out).num_requests == 1


def test_a_server_that_goes_away_leaves_what_was_taken(serve: Serve, tmp_path: Path) -> None:
    server = serve("qwen3-small", SMALL_BLOCKS, ON)
    out = tmp_path / "trace.jsonl"
    with recording(server, out) as running:
        server.complete(tokens(100, seed=1))
        time.sleep(2.5)
        server.stop()
        assert running.wait(60) == 1
    said = running.stderr.read() if running.stderr else ""
    assert "can't be reached" in said
    assert "1 requests" in said
    assert read_trace(out).num_requests == 1


def test_engines_and_front_ends_that_share_the_load_make_one_trace(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve("qwen3-small", [*SMALL_BLOCKS, "--data-parallel-size", "2"], ON)
    out = tmp_path / "trace.jsonl"
    with recording(server, out) as running:
        for number in range(4):
            server.client.headers["x-data-parallel-rank"] = str(number % 2)
            server.complete(tokens(100, seed=1), {"session_id": "spread"})
            time.sleep(0.3)
    assert "4 requests (4 hinted, 0 not) of 1 named sessions" in running.communicate()[0]
    [session] = read_trace(out).sessions
    times = [request.at for request in session.requests]
    assert times == sorted(times)
    assert times[-1] > 0.9
    for request in session.requests:
        assert list(request.blocks) == [0, 1, 2], "equal blocks have equal digests on each engine"


# -- who may ---------------------------------------------------------------------------------------


def test_without_the_flag_it_is_refused_with_the_cure(serve: Serve, tmp_path: Path) -> None:
    server = serve("qwen3-small", SMALL_BLOCKS, {})
    for method in ("POST", "GET", "DELETE"):
        query = {} if method == "POST" else {"capture_id": "0" * 32}
        response = server.client.request(method, f"{ROOT}/capture", params=query)
        assert response.status_code == 403
        assert "VLLM_AGENT_HINT_CAPTURE=1" in error_of(response)["message"]
    out = tmp_path / "trace.jsonl"
    with recording(server, out) as running:
        assert running.wait(30) == 1
    said = running.stderr.read() if running.stderr else ""
    assert "VLLM_AGENT_HINT_CAPTURE=1" in said
    assert not out.exists()


def test_it_wants_the_key_and_shows_all_tenants(serve: Serve, tmp_path: Path) -> None:
    server = serve("qwen3-small", [*SMALL_BLOCKS, *KEYS], ON)
    route = f"{ROOT}/capture"
    for headers in ({}, key("wrong")):
        assert server.client.post(route, headers=headers).status_code == 401
    out = tmp_path / "trace.jsonl"
    with recording(server, out) as running:
        assert running.wait(30) == 1
    assert "--api-key" in (running.stderr.read() if running.stderr else "")
    with recording(server, out, key=ALICE_KEY):
        for owner in (ALICE_KEY, BOB_KEY):
            asked = {**body(COMPLETIONS), "agent_hint": {"session_id": "same"}}
            assert server.post(COMPLETIONS, asked, key(owner)).status_code == 200
    trace = read_trace(out)
    assert len([session for session in trace.sessions if session.is_named]) == 2


def test_a_wrong_id_is_a_400_and_an_unknown_one_a_404(server: TestServer) -> None:
    for method in ("GET", "DELETE"):
        for wrong in ({}, {"capture_id": "SECRET"}, {"capture_id": "0" * 32, "more": "SECRET"}):
            response = server.client.request(method, f"{ROOT}/capture", params=wrong)
            assert error(response)[0] in ("capture_id", "more")
            assert "SECRET" not in response.text
        unknown = server.client.request(method, f"{ROOT}/capture", params={"capture_id": "0" * 32})
        assert unknown.status_code == 404
        assert error_of(unknown)["param"] == "capture_id"


# -- how turns ended -------------------------------------------------------------------------------


def tool(path: str) -> dict[str, Any]:
    if path == MESSAGES:
        return {"name": TOOL["name"], "strict": True, "input_schema": TOOL["parameters"]}
    if path == RESPONSES:
        return {"type": "function", **TOOL}
    return {"type": "function", "function": TOOL}


def forcing(path: str) -> dict[str, Any]:
    """A choice of tool that makes even random weights call it."""
    if path == MESSAGES:
        return {"type": "tool", "name": TOOL["name"]}
    if path == RESPONSES:
        return {"type": "function", "name": TOOL["name"]}
    return {"type": "function", "function": {"name": TOOL["name"]}}


def ended(server: TestServer, requests: Any) -> list[dict[str, Any]]:
    """What the capture says of requests that ``requests`` sends, once all is known."""
    with CaptureReader(server.base_url) as reader:
        requests()
        time.sleep(0.5)
        found: list[dict[str, Any]] = reader.take()["requests"]
        return found


def one_turn(server: TestServer, path: str, **more: Any) -> dict[str, Any]:
    def ask() -> None:
        asked = body(path, **more, agent_hint={"session_id": "turns"})
        if "ignore_eos" in asked and "tools" in more:
            del asked["ignore_eos"]
        response = server.post(path, asked)
        assert response.status_code == 200, response.text

    return ended(server, ask)[0]


@APIS_AND_STREAMS
def test_a_turn_that_ran_out_of_tokens_was_cut(server: TestServer, path: str, stream: bool) -> None:
    more = {} if path == BATCH else {"stream": stream}
    assert one_turn(server, path, **more)["ended"] == "cut"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_turn_that_calls_a_tool_says_so(server: TestServer, path: str, stream: bool) -> None:
    # Greedy, random weights would put spaces into the call until they are cut.
    forced = {"temperature": 1, "tools": [tool(path)], "tool_choice": forcing(path), "tokens": 2000}
    turn = one_turn(server, path, stream=stream, **forced)
    assert turn["ended"] == "tool_call"
    assert turn["tool"]


@pytest.mark.parametrize(
    ("offered", "ended"), [(True, "final_message"), (False, None)], ids=["offered", "not offered"]
)
def test_a_turn_that_ends_by_itself_is_a_final_message_where_tools_were_offered(
    server: TestServer, offered: bool, ended: str | None
) -> None:
    """The model's own end is a token like this one; random weights hardly ever sample theirs."""
    more: dict[str, Any] = {"tools": [tool(CHAT)], "tool_choice": "none"} if offered else {}
    asked = {**body(CHAT, tokens=8), **more, "return_token_ids": True, "ignore_eos": False}
    ids = server.post(CHAT, asked).json()["choices"][0]["token_ids"]
    turn = one_turn(server, CHAT, tokens=8, stop_token_ids=ids[2:3], **more)
    assert (turn["finish"], turn["ended"]) == ("stop", ended)


def test_a_client_that_goes_in_mid_stream_has_disconnected(server: TestServer) -> None:
    def leave() -> None:
        asked = body(CHAT, tokens=3000, stream=True, agent_hint={"session_id": "left"})
        with server.client.stream("POST", CHAT, json=asked) as response:
            next(response.iter_lines())

    [turn] = ended(server, leave)
    assert (turn["ended"], turn["finish"]) == ("disconnected", "abort")


def test_a_client_that_goes_before_a_whole_reply_has_disconnected(server: TestServer) -> None:
    def leave() -> None:
        asked = body(CHAT, tokens=6000, agent_hint={"session_id": "left"})
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(CHAT, json=asked, timeout=0.3)
        time.sleep(0.5)

    [turn] = ended(server, leave)
    assert turn["ended"] == "disconnected"


def test_a_stop_string_says_nothing_of_what_comes_next(server: TestServer) -> None:
    first = server.complete("hello", max_tokens=40).body["choices"][0]["text"]
    assert len(first) > 8
    turn = one_turn(server, COMPLETIONS, text="hello", tokens=40, stop=[first[3:6]])
    assert (turn["finish"], turn["ended"]) == ("stop", None)


def test_a_request_without_a_session_is_not_watched(server: TestServer) -> None:
    [turn] = ended(server, lambda: server.complete(tokens(40), {"cache_control": {"ttl": 5}}))
    assert turn["hinted"]
    assert turn["ended"] is None


def test_a_server_without_a_tool_parser_says_so_once(serve: Serve) -> None:
    server = serve("qwen3-small", SMALL_BLOCKS, ON)
    assert server.log_text().count("this server has no tool parser") == 1


def test_one_with_a_tool_parser_has_nothing_to_say(server: TestServer) -> None:
    assert "no tool parser" not in server.log_text()
    assert "vllm-agent-hint: " not in "".join(
        line for line in server.log_text().splitlines(True) if "(said once)" in line
    )
