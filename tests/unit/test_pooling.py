"""The parts of pooling that know nothing of vLLM: accounts, order, expectations, the manifest."""

import errno
import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.capability import (
    MAX_TIMES,
    Content,
    Operation,
    OperationHandle,
    Outcome,
    PoolingCounters,
)
from vllm_agent_hint.pooling.lanes import Lanes
from vllm_agent_hint.pooling.manifest import IncompatibleError, SessionManifest
from vllm_agent_hint.pooling.pages import PagesInDirectory
from vllm_agent_hint.pooling.resumes import Resumes
from vllm_agent_hint.pooling.tracker import SessionKeyTracker
from vllm_agent_hint.sessions.intent import SessionKey

DONE = Outcome(EditStatus.APPLIED)


def key(name: str, tenant: str = "") -> SessionKey:
    return SessionKey(tenant, None, name)


def content(text: str) -> Content:
    """A hash block per character; each hash stands for all before it."""
    return Content([text[: k + 1].encode() for k in range(len(text))], 16)


def ends(orphans: Sequence[bytes]) -> str:
    """The last character of each hash."""
    return "".join(sorted(chr(h[-1]) for h in orphans))


# -- whose is what ---------------------------------------------------------------------------------


def test_a_turn_takes_the_place_of_the_one_it_goes_on_with() -> None:
    tracker = SessionKeyTracker(1_000)
    assert ends(tracker.register(key("a"), content("abcd"), 0.0, at_most=1).fresh) == "abcd"
    change = tracker.register(key("a"), content("abXYZ"), 0.0, at_most=1)
    assert (ends(change.fresh), ends(change.orphans)) == ("XYZ", "cd")
    assert tracker.num_tracked == 5
    assert ends(tracker.register(key("a"), content("abXYZ1"), 0.0, at_most=1).fresh) == "1"
    assert tracker.num_tracked == 6


def test_prompts_side_by_side_stay_up_to_as_many_as_the_session_runs() -> None:
    tracker = SessionKeyTracker(1_000)
    tracker.register(key("a"), content("main"), 0.0, at_most=2)
    assert not tracker.register(key("a"), content("title"), 0.0, at_most=2).orphans
    assert ends(tracker.register(key("a"), content("other"), 0.0, at_most=2).orphans) == "aimn"


def test_what_another_session_has_registered_is_nobodys_orphan() -> None:
    tracker = SessionKeyTracker(1_000)
    tracker.register(key("a"), content("sharedA"), 0.0, at_most=1)
    tracker.register(key("b"), content("sharedB"), 0.0, at_most=1)

    assert tracker.num_shared == 6
    assert ends(tracker.owned_alone(key("a"))) == "A"
    assert ends(tracker.forget(key("a"))) == "A"
    assert ends(tracker.forget(key("b"))) == "Badehrs"
    assert (tracker.num_tracked, tracker.num_shared, len(tracker)) == (0, 0, 0)


def test_above_its_bound_the_session_that_was_registered_longest_ago_is_forgotten() -> None:
    tracker = SessionKeyTracker(8)
    tracker.register(key("a"), content("1234"), 0.0, at_most=1)
    tracker.register(key("b"), content("5678"), 0.0, at_most=1)
    tracker.register(key("a"), content("12345"), 0.0, at_most=1)

    assert list(tracker) == [key("a")]


# -- one after the other ---------------------------------------------------------------------------


def test_operations_of_one_session_wait_for_each_other_and_those_of_two_do_not() -> None:
    lanes, begun = Lanes(), []
    handles = {name: OperationHandle() for name in ("a1", "a2", "b1")}

    def start(name: str) -> OperationHandle:
        begun.append(name)
        return handles[name]

    for name in handles:
        lanes.run(key(name[0]), Operation.OFFLOAD, lambda name=name: start(name))  # type: ignore[misc]
    assert begun == ["a1", "b1"]
    handles["a1"].finish(DONE)
    assert begun == ["a1", "b1", "a2"]
    handles["a2"].finish(DONE)
    handles["b1"].finish(DONE)
    assert len(lanes) == 0


def test_ten_thousand_operations_that_end_at_once_are_no_recursion() -> None:
    lanes, first = Lanes(), OperationHandle()
    lanes.run(key("a"), Operation.OFFLOAD, lambda: first)
    last = [
        lanes.run(key("a"), Operation.OFFLOAD, lambda: OperationHandle.ended(DONE))
        for _ in range(10_000)
    ][-1]
    assert not last.is_done
    first.finish(DONE)
    assert last.is_done
    assert len(lanes) == 0


def test_who_is_called_back_may_ask_for_more() -> None:
    lanes, order = Lanes(), []

    def start(name: str) -> OperationHandle:
        order.append(name)
        return OperationHandle.ended(DONE)

    first = OperationHandle()
    handle = lanes.run(key("a"), Operation.OFFLOAD, lambda: first)
    lanes.run(key("a"), Operation.OFFLOAD, lambda: start("second"))
    handle.when_done(lambda _: lanes.run(key("a"), Operation.OFFLOAD, lambda: start("third")))
    first.finish(DONE)
    assert order == ["second", "third"]
    assert len(lanes) == 0


def test_what_has_not_begun_can_be_refused_by_kind_and_what_has_begun_goes_on() -> None:
    lanes, begun = Lanes(), OperationHandle()
    lanes.run(key("a"), Operation.OFFLOAD, lambda: begun)
    waiting = {
        kind: lanes.run(key("a"), kind, lambda: OperationHandle.ended(DONE)) for kind in Operation
    }
    assert lanes.num_waiting(Operation.PREFETCH) == 1
    lanes.refuse_waiting(key("a"), Outcome.refused("no"), Operation.PREFETCH)
    assert [kind for kind, handle in waiting.items() if handle.is_done] == [Operation.PREFETCH]
    assert lanes.num_waiting(Operation.PREFETCH) == 0
    lanes.refuse_all_waiting(Outcome.refused("no"))
    assert all(handle.is_done for handle in waiting.values())
    assert not begun.is_done
    assert len(lanes) == 1
    begun.finish(DONE)
    assert len(lanes) == 0


# -- who is expected when --------------------------------------------------------------------------


def test_a_load_begins_early_enough_to_end_before_the_session_is_back() -> None:
    resumes = Resumes()
    resumes.note_load(1_000, 2.0)
    resumes.expect(key("a"), 5_000, now=100.0, seconds=60.0)

    # It takes ten seconds; twice that, and a second.
    assert resumes.next_at == pytest.approx(139.0)
    assert resumes.take_due(138.9) == []
    assert resumes.take_due(139.0) == [key("a")]
    assert resumes.next_at == math.inf


def test_only_the_last_word_of_a_session_counts_and_none_once_it_is_back() -> None:
    resumes = Resumes()
    resumes.expect(key("a"), 10, now=0.0, seconds=10.0)
    resumes.expect(key("a"), 10, now=0.0, seconds=100.0)
    resumes.expect(key("b"), 10, now=0.0, seconds=20.0)
    resumes.forget(key("b"))

    assert resumes.take_due(40.0) == []
    assert resumes.take_due(100.0) == [key("a")]
    assert len(resumes) == 0


# -- the manifest ----------------------------------------------------------------------------------


def manifest(folder: Path, scheme: str = "one", now: float = 1_000.0) -> SessionManifest:
    return SessionManifest(folder, lambda: scheme, lambda: now)


def test_another_server_reads_what_a_session_has_and_how_long_it_is_kept(tmp_path: Path) -> None:
    first = manifest(tmp_path)
    first.write(key("a"), [content("old"), content("newer")], ttl=60.0)
    first.finish()

    page = manifest(tmp_path, now=1_020.0).read(key("a"))

    assert page is not None
    assert page.ttl == pytest.approx(40.0)
    assert [list(c.hashes) for c in page.contents] == [
        list(content("old").hashes),
        list(content("newer").hashes),
    ]
    assert manifest(tmp_path).read(key("a", tenant="other")) is None
    assert manifest(tmp_path).read(SessionKey("", "salt", "a")) is None


def test_hashes_of_another_scheme_are_refused_by_name(tmp_path: Path) -> None:
    first = manifest(tmp_path)
    first.write(key("a"), [content("x")], ttl=60.0)
    first.finish()
    with pytest.raises(IncompatibleError):
        manifest(tmp_path, scheme="two").read(key("a"))


def test_a_page_that_is_gone_or_damaged_is_none(tmp_path: Path) -> None:
    first = manifest(tmp_path)
    first.write(key("a"), [content("x")], ttl=60.0)
    first.finish()
    (page,) = tmp_path.iterdir()
    for damage in ("", "{", '{"scheme": "one"}', "[]", '{"scheme": "one", "contents": [1]}'):
        page.write_text(damage)
        assert first.read(key("a")) is None
    first.forget(key("a"))
    first.finish()
    assert not first.holds(key("a"))


def test_what_a_dying_server_was_writing_is_forgotten_with_the_old_pages(tmp_path: Path) -> None:
    day = 86_400.0
    pages = PagesInDirectory(tmp_path, lambda: 64.0 * day)
    pages.put("old", b"page", 60.0)
    (tmp_path / ".left.json.aside").write_bytes(b"half a pa")
    (tmp_path / "not ours").write_bytes(b"")
    for path in tmp_path.iterdir():
        os.utime(path, (62.0 * day, 62.0 * day))
    pages.put("new", b"page", 60.0)
    assert {path.name for path in tmp_path.iterdir()} == {"new.json", "not ours"}


def test_a_page_that_could_not_be_put_in_place_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", is_full)
    with pytest.raises(OSError, match="No space"):
        PagesInDirectory(tmp_path, lambda: 32.0).put("page", b"page", 60.0)
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_can_not_be_written_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("")
    first = manifest(tmp_path / "in the way")
    first.write(key("a"), [content("x")], ttl=60.0)
    first.finish()
    assert first.read(key("a")) is None


def test_a_directory_that_can_not_be_looked_into_holds_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_stale(*_: object, **__: object) -> object:
        raise OSError(errno.ESTALE, "Stale file handle")

    first = manifest(tmp_path)
    first.write(key("a"), [content("x")], ttl=60.0)
    first.finish()
    with monkeypatch.context() as planted:
        planted.setattr(os, "stat", is_stale)
        planted.setattr(Path, "stat", is_stale)
        assert not first.holds(key("a"))
    assert first.holds(key("a"))


# -- what has happened -----------------------------------------------------------------------------


def test_an_event_is_handed_out_once_and_whoever_counts_goes_on() -> None:
    counters = PoolingCounters(failures=2, queue_seconds=deque([0.5]))
    first = counters.take()
    counters.failures += 1
    counters.queue_seconds.append(0.25)
    second = counters.take()
    assert (first.failures, list(first.queue_seconds)) == (2, [0.5])
    assert (second.failures, list(second.queue_seconds)) == (1, [0.25])


def test_an_engine_that_nobody_asks_for_its_statistics_keeps_a_bounded_number_of_times() -> None:
    """vLLM's ``--disable-log-stats``, which is the default of an offline engine."""
    counters = PoolingCounters()
    for _ in range(2):
        for k in range(2 * MAX_TIMES):
            counters.queue_seconds.append(float(k))
            counters.transfer_seconds.append(("prefetch", float(k)))
        taken = counters.take()
        assert list(taken.queue_seconds) == [float(MAX_TIMES + k) for k in range(MAX_TIMES)]
        assert len(taken.transfer_seconds) == MAX_TIMES
    assert counters == PoolingCounters()
