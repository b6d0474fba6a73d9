"""Traces: what each reader makes of hand-written lines, and what it says of wrong ones."""

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_agent_hint.traces.line import read_lines
from vllm_agent_hint.traces.model import (
    Trace,
    TracedRequest,
    TracedSession,
    TraceError,
    common_blocks,
    ids_of,
    runs_of,
)
from vllm_agent_hint.traces.plain import read_plain, write_plain
from vllm_agent_hint.traces.reading import read_trace

HEADER = {"format": "vllm-agent-hint-trace", "version": 1, "block_size": 16}


def read(tmp_path: Path, *lines: dict[str, Any] | str) -> Trace:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(texts) + "\n")
    return read_trace(file)


def blocks(session: TracedSession) -> list[list[int]]:
    return [request.blocks.tolist() for request in session.requests]


# -- weka -------------------------------------------------------------------------------------


def weka_request(t: float, keep: int, runs: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 5, "keep": keep, "runs": runs} | more


def weka_line(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def test_weka_prompt_keeps_blocks_of_the_one_before_and_adds_runs(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        weka_line(
            "one",
            weka_request(3.0, 0, [1, 3], 200, stop="tool_use", api_time=2.5),
            weka_request(9.0, 2, [7, 1, 9, 1], 256, stop="end_turn"),
        ),
    )
    (session,) = trace.sessions
    assert (trace.block_size, session.name, session.starts_at) == (64, "one", None)
    assert blocks(session) == [[1, 2, 3], [1, 2, 7, 9]]
    assert [request.at for request in session.requests] == [0.0, 6.0]
    assert [request.stop for request in session.requests] == ["tool_use", "end_turn"]
    assert session.requests[0].service_seconds == 2.5


def test_weka_ids_of_one_session_are_never_those_of_another(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        weka_line("one", weka_request(0, 0, [1, 3], 192)),
        weka_line("two", weka_request(0, 0, [1, 3], 192)),
    )
    first, second = (set(blocks(session)[0]) for session in trace.sessions)
    assert not first & second


def test_weka_sub_agent_is_a_session_with_a_parent_and_its_own_keep(tmp_path: Path) -> None:
    agent = {
        "t": 10.0,
        "type": "subagent",
        "agent_id": "x",
        "requests": [weka_request(1.0, 0, [1, 1, 50, 1], 128), weka_request(4.0, 2, [52, 1], 192)],
    }
    trace = read(
        tmp_path,
        weka_line(
            "main",
            weka_request(2.0, 0, [1, 2], 128),
            agent,
            weka_request(30.0, 2, [3, 1], 192),
        ),
    )
    main, sub = trace.sessions
    assert blocks(main) == [[1, 2], [1, 2, 3]]
    assert blocks(sub) == [[1, 50], [1, 50, 52]]
    assert (sub.parent, sub.after_parent) == ("main", 9.0)
    assert [request.at for request in sub.requests] == [0.0, 3.0]


# -- mooncake ---------------------------------------------------------------------------------


def mooncake(at: int, tokens: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": 9, "hash_ids": ids}


def test_mooncake_request_goes_on_with_the_prompt_that_is_a_prefix_of_its_own(
    tmp_path: Path,
) -> None:
    trace = read(
        tmp_path,
        mooncake(1_000, 1030, [0, 1, 2]),
        mooncake(3_000, 1030, [0, 5, 6]),
        mooncake(6_000, 1600, [0, 1, 7, 8]),
    )
    assert [blocks(session) for session in trace.sessions] == [[[0, 1], [0, 1, 7]], [[0, 5]]]
    assert [session.starts_at for session in trace.sessions] == [1.0, 3.0]
    assert trace.sessions[0].requests[1].at == 5.0
    assert not any(session.is_named for session in trace.sessions)


def test_a_prompt_of_one_block_is_nobodys_history(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake(0, 600, [0, 1]), mooncake(9, 1100, [0, 2, 3]))
    assert len(trace.sessions) == 2


# -- lmcache ----------------------------------------------------------------------------------


def test_lmcache_sessions_have_no_common_clock_and_empty_prompts_are_left_out(
    tmp_path: Path,
) -> None:
    trace = read(
        tmp_path,
        {"t": 0.0, "s": "a", "in": 40, "out": 1, "runs": [0, 2]},
        {"t": 1.0, "s": "a", "in": 0, "out": 1, "runs": []},
        {"t": 7.0, "s": "b", "in": 33, "out": 1, "runs": [0, 1, 5, 1]},
    )
    first, second = trace.sessions
    assert blocks(first) == [[0, 1]]
    assert blocks(second) == [[0, 5]]
    assert (first.starts_at, second.starts_at, second.requests[0].at) == (None, None, 0.0)


# -- plain ------------------------------------------------------------------------------------


def test_plain_line_says_all_that_is_known_of_a_request(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        HEADER,
        {"t": 5, "session": "a", "in": 35, "out": 7, "runs": [3, 2]},
        {
            "t": 6.5,
            "session": "a",
            "parent": "p",
            "in": 48,
            "out": 0,
            "keep": 1,
            "runs": [9, 2],
            "stop": "tool_use",
            "tool": "Bash",
            "seconds": 0.5,
            "hinted": True,
        },
    )
    (session,) = trace.sessions
    assert (session.name, session.parent, session.starts_at) == ("a", "p", 5.0)
    assert session.requests[1] == TracedRequest(
        1.5, 48, 0, np.array([3, 9, 10]), "tool_use", "Bash", 0.5, True
    )


def test_plain_requests_without_session_are_put_together_by_prefix(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        HEADER,
        {"t": 0, "in": 32, "out": 1, "runs": [0, 2]},
        {"t": 1, "in": 32, "out": 1, "runs": [7, 2]},
        {"t": 2, "in": 50, "out": 1, "runs": [0, 3]},
    )
    assert [blocks(session) for session in trace.sessions] == [[[0, 1], [0, 1, 2]], [[7, 8]]]
    assert [session.is_named for session in trace.sessions] == [False, False]


CHAINS = st.lists(st.integers(0, 40), max_size=6)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Sessions with prefix-exact ids on one clock; times are such that no addition rounds."""
    chain_ids: dict[tuple[int, ...], int] = {}
    times = st.integers(0, 4_000).map(lambda n: n / 4)
    sessions = []
    for number in range(draw(st.integers(1, 4))):
        gaps = sorted(draw(st.lists(times, min_size=1, max_size=5)))
        requests = []
        for gap in gaps:
            content = tuple(draw(CHAINS))
            ids = [
                chain_ids.setdefault(content[: k + 1], len(chain_ids)) for k in range(len(content))
            ]
            requests.append(
                TracedRequest(
                    gap - gaps[0],
                    16 * len(ids) + draw(st.integers(1, 15)),
                    draw(st.integers(0, 9)),
                    np.array(ids, dtype=np.int64),
                    draw(st.sampled_from([None, "", "tool_use"])),
                    draw(st.sampled_from([None, "Bash"])),
                    draw(st.none() | times),
                    draw(st.none() | st.booleans()),
                )
            )
        parent = draw(st.sampled_from([None, "boss"]))
        sessions.append(TracedSession(f"s{number}", tuple(requests), draw(times), parent))
    return Trace("t", 16, tuple(sessions))


@given(traces())
def test_what_was_written_is_read_again(trace: Trace) -> None:
    file = io.StringIO()
    write_plain(trace, file)
    again = read_plain("t", read_lines("t", io.StringIO(file.getvalue())))
    assert {s.name: s for s in again.sessions} == {s.name: s for s in trace.sessions}
    assert again.block_size == trace.block_size


@given(st.lists(st.integers(0, 9)))
def test_runs_hold_exactly_the_ids(ids: list[int]) -> None:
    assert ids_of(runs_of(np.array(ids, dtype=np.int64))).tolist() == ids


@given(CHAINS, CHAINS)
def test_common_blocks_are_the_common_prefix(first: list[int], second: list[int]) -> None:
    common = common_blocks(np.array(first), np.array(second))
    assert first[:common] == second[:common]
    assert common in (len(first), len(second)) or first[common] != second[common]


def test_a_trace_without_a_common_clock_is_not_written() -> None:
    session = TracedSession("a", (TracedRequest(0.0, 3, 1, np.array([], dtype=np.int64)),))
    with pytest.raises(ValueError, match="'a' has no start"):
        write_plain(Trace("t", 16, (session,)), io.StringIO())


# -- files ------------------------------------------------------------------------------------


def test_compressed_files_are_read_alike(tmp_path: Path) -> None:
    line = json.dumps(mooncake(0, 600, [0, 1]))
    file = tmp_path / "trace"
    file.write_bytes(gzip.compress(line.encode()))
    assert blocks(read_trace(file).sessions[0]) == [[0]]


REQUEST = {"t": 0, "session": "a", "in": 35, "out": 7, "runs": [3, 2]}


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([HEADER | {"version": 2}], r"line 1, field 'version': must be 1"),
        ([HEADER, REQUEST, "{"], r"line 3, the line: is no JSON; was the file cut off\?"),
        ([HEADER, []], r"line 2, the line: must be a JSON object"),
        ([HEADER, REQUEST | {"t": -1}], r"line 2, field 't': must be a time, 0 or later"),
        ([HEADER, {"in": 3}], r"line 2, field 't': is missing"),
        ([HEADER, REQUEST | {"in": "9"}], r"field 'in': must be a whole number of at least 1"),
        ([HEADER, REQUEST | {"in": True}], r"field 'in': must be a whole number"),
        ([HEADER, REQUEST | {"in": 0}], r"field 'in': must be at least 1"),
        ([HEADER, REQUEST | {"in": 99}], r"field 'runs': names 2 blocks, but a prompt of 99"),
        ([HEADER, REQUEST | {"keep": 1}], r"field 'keep': must be at most 0"),
        ([HEADER, REQUEST | {"runs": [1]}], r"field 'runs': must hold pairs"),
        ([HEADER, REQUEST | {"runs": [1, -2]}], r"field 'runs': must be a list of whole numbers"),
        ([HEADER, REQUEST | {"stop": 4}], r"field 'stop': must be a string"),
        ([HEADER, REQUEST | {"hinted": 1}], r"field 'hinted': must be true or false"),
        ([HEADER, REQUEST | {"parent": "a"}], r"field 'parent': must differ from session"),
        ([{"foo": 1}], r"line 1, the line: is of no known format; write the plain one"),
        ([""], r"is empty"),
        ([HEADER], r"holds no request"),
        (
            [weka_line("w", weka_request(0, 0, [1, 2], 128), weka_request(0, 5, [], 128))],
            r"line 1, field 'requests.1.keep': must be at most 2",
        ),
        (
            [weka_line("w", weka_request(0, 0, [1, 2], 128)) | {"requests": 5}],
            r"field 'requests': must be a list of objects",
        ),
        ([mooncake(0, 9_000, [1])], r"field 'hash_ids': names 1 blocks"),
        (
            [{"t": 0, "s": "", "in": 1, "out": 1, "runs": []}],
            r"field 's': is missing; name the session",
        ),
    ],
)
def test_an_error_names_file_line_field_and_cure(
    tmp_path: Path, lines: list[Any], complaint: str
) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    with pytest.raises(TraceError, match=complaint) as error:
        read(tmp_path, *texts)
    assert "trace.jsonl" in str(error.value)


def test_a_missing_file_is_an_error_of_the_same_kind(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")


def test_a_file_that_was_cut_off_says_so(tmp_path: Path) -> None:
    file = tmp_path / "cut.gz"
    file.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(TraceError, match="fetch it anew"):
        read_trace(file)


def test_reading_a_trace_needs_neither_vllm_nor_torch() -> None:
    script = "import sys, vllm_agent_hint.traces.reading; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    packages = {name.split(".")[0] for name in done.stdout.decode().split()}
    assert "numpy" in packages
    assert not packages & {"vllm", "torch"}
