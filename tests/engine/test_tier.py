"""The tier: which chunks go first, what is never reused, and what damage does."""

import os
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
)

from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.tier.files import ChunkFile
from vllm_agent_hint.pooling.tier.folder import ChunkFolder
from vllm_agent_hint.pooling.tier.manager import (
    NOT_IN_HOST,
    SessionAwareOffloadingManager,
    TierSpec,
)
from vllm_agent_hint.pooling.tier.options import TierOptions
from vllm_agent_hint.pooling.tier.sweep import Sweep
from vllm_agent_hint.pooling.tier.worker import TorchTierWorker

Manager = SessionAwareOffloadingManager


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def store(manager: Manager, *names: str) -> list[bytes] | None:
    """Store chunks to their end. Returns what had to go for them; None if there was no room."""
    done = manager.prepare_store(keys(*names), None)
    if done is None:
        return None
    manager.complete_store(done.keys_to_store, None)
    return list(done.evicted_keys)


def is_there(manager: Manager, name: str) -> bool:
    return manager.lookup(name.encode(), None) is LookupResult.HIT


# -- which go first --------------------------------------------------------------------------------


def test_dead_chunks_go_first_then_ordinary_ones_and_protected_ones_last() -> None:
    manager = Manager(3)
    store(manager, "protected", "ordinary", "dead")
    manager.claim(keys("protected"), Claim.PROTECTED)
    manager.claim(keys("dead"), Claim.DEAD)

    assert store(manager, "a") == keys("dead")
    assert store(manager, "b") == keys("ordinary")
    assert store(manager, "c") == keys("a")


def test_a_store_succeeds_also_when_only_protected_chunks_are_left() -> None:
    manager = Manager(2)
    store(manager, "a", "b")
    manager.claim(keys("a", "b"), Claim.PROTECTED)
    manager.refresh(keys("a"))

    assert store(manager, "c") == keys("b")


def test_a_claim_counts_also_when_it_comes_before_the_chunk() -> None:
    manager = Manager(2)
    manager.claim(keys("kept"), Claim.PROTECTED)
    store(manager, "kept", "other")

    assert store(manager, "new") == keys("other")


def test_within_a_claim_the_least_recently_used_go_first() -> None:
    manager = Manager(3)
    store(manager, "a", "b", "c")
    manager.touch(keys("a"), None)
    manager.complete_load(keys("b"), None) if manager.prepare_load(keys("b"), None) else None

    assert store(manager, "d", "e") == keys("c", "a")


def test_keys_that_nobody_speaks_for_any_more_leave_no_account() -> None:
    manager = Manager(2)
    store(manager, "here")
    manager.claim(keys("here", "never"), Claim.PROTECTED)
    manager.forget_claims(keys("here", "never"))
    store(manager, "x", "y")

    assert not manager._claims


# -- what is never reused --------------------------------------------------------------------------


def test_chunks_that_are_read_or_written_make_no_room() -> None:
    manager = Manager(2)
    store(manager, "read")
    manager.prepare_load(keys("read"), None)
    manager.prepare_store(keys("written"), None)

    assert store(manager, "new") is None
    assert manager.refused == 1
    assert manager.lookup(b"written", None) is LookupResult.HIT_PENDING
    manager.complete_load(keys("read"), None)
    assert store(manager, "new") == keys("read")
    manager.complete_store(keys("written"), None)
    assert manager.num_busy == 0


def test_all_keys_of_a_store_find_room_or_none_goes() -> None:
    manager = Manager(2)
    store(manager, "a", "b")

    assert store(manager, "c", "d", "e") is None
    assert is_there(manager, "a")
    assert is_there(manager, "b")


def test_what_is_stored_already_is_not_stored_again_nor_evicted_for_itself() -> None:
    manager = Manager(2)
    store(manager, "a", "b")

    done = manager.prepare_store(keys("a", "c"), None)

    assert done is not None
    assert list(done.keys_to_store) == keys("c")
    assert list(done.evicted_keys) == keys("b")


def test_a_store_that_failed_leaves_nothing() -> None:
    manager = Manager(1)
    manager.prepare_store(keys("a"), None)
    manager.complete_store(keys("a"), None, success=False)

    assert not is_there(manager, "a")
    assert store(manager, "b") == []


# -- deleting --------------------------------------------------------------------------------------


def test_a_deleted_chunk_is_gone_at_once_or_as_soon_as_it_has_been_read() -> None:
    manager = Manager(2)
    store(manager, "idle", "read")
    manager.prepare_load(keys("read"), None)

    assert manager.delete(keys("idle", "read", "never")) == 2
    assert not is_there(manager, "idle")
    assert not is_there(manager, "read")
    assert manager.num_resident == 1
    manager.complete_load(keys("read"), None)
    assert manager.num_resident == 0
    assert store(manager, "x", "y") == []


def test_a_deleted_chunk_that_was_claimed_leaves_no_trace() -> None:
    manager = Manager(1)
    store(manager, "a")
    manager.claim(keys("a"), Claim.PROTECTED)

    manager.delete(keys("a"))

    assert manager.num_resident == manager.num_busy == 0
    assert store(manager, "b") == []
    assert store(manager, "c") == keys("b")


def test_a_reset_forgets_every_chunk_and_every_transfer() -> None:
    manager = Manager(2)
    store(manager, "a")
    manager.prepare_load(keys("a"), None)
    manager.prepare_store(keys("b"), None)

    manager.reset_cache()

    assert manager.num_resident == manager.num_busy == 0
    assert store(manager, "c", "d") == []


# -- copies ----------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_worker(clock: Clock, **options: Any) -> tuple[TorchTierWorker, torch.Tensor]:
    """A worker over one layer of 12 blocks of 8 bytes, two of them in a chunk."""
    cache = torch.arange(96, dtype=torch.int8).view(12, 8)
    worker = TorchTierWorker(
        CanonicalKVCaches([CanonicalKVCacheTensor(cache, 8)], [[CanonicalKVCacheRef(0, 8)]]),
        blocks_per_chunk=2,
        num_chunks=4,
        rank=0,
        clock=clock,
        sleep=clock.sleep,
        **options,
    )
    return worker, cache


def gpu(blocks: list[int], start: int = 0) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[start])


def test_a_load_that_begins_within_a_chunk_gets_the_right_blocks() -> None:
    worker, cache = make_worker(Clock())
    before = cache.clone()
    worker.submit_store(1, gpu([1, 2, 3, 4, 5]), TierSpec([3, 0, 2], []))
    cache.zero_()

    worker.submit_load(2, TierSpec([3, 0], []), gpu([7, 8], start=1))

    assert [result.job_id for result in worker.get_finished()] == [1, 2]
    assert torch.equal(cache[7], before[2])
    assert torch.equal(cache[8], before[3])
    assert not cache[[0, 1, 2, 3, 4, 5, 6, 9, 10, 11]].any()


def test_a_throttled_transfer_ends_when_its_bytes_are_through_one_after_the_other() -> None:
    clock = Clock()
    worker, cache = make_worker(clock, load_bytes_per_second=16.0)
    worker.submit_store(1, gpu([1, 2]), TierSpec([0], []))
    worker.submit_load(2, TierSpec([0], []), gpu([7, 8]))
    worker.submit_load(3, TierSpec([0], []), gpu([9, 10]))

    assert [result.job_id for result in worker.get_finished()] == [1]
    clock.now += 1.0
    assert [result.job_id for result in worker.get_finished()] == [2]
    assert torch.equal(cache[7:9], cache[1:3])
    clock.now += 1.0
    assert [result.job_id for result in worker.get_finished()] == [3]


def test_a_throttled_save_has_left_the_cache_when_it_is_submitted() -> None:
    clock = Clock()
    worker, cache = make_worker(clock, save_bytes_per_second=16.0)
    before = cache.clone()
    worker.submit_store(1, gpu([1, 2]), TierSpec([0], []))

    worker.wait({1})
    cache.zero_()

    assert clock.now == 100.0
    assert not worker.get_finished()
    clock.now += 1.0
    assert worker.get_finished()
    worker.submit_load(2, TierSpec([0], []), gpu([5, 6]))
    worker.get_finished()
    assert torch.equal(cache[5:7], before[1:3])


def test_who_waits_for_a_load_may_use_its_chunk_for_something_else_at_once() -> None:
    clock = Clock()
    worker, cache = make_worker(clock, load_bytes_per_second=16.0)
    before = cache.clone()
    worker.submit_store(1, gpu([1, 2]), TierSpec([0], []))
    worker.submit_load(2, TierSpec([0], []), gpu([7, 8]))

    worker.wait({2})
    worker.submit_store(3, gpu([4, 5]), TierSpec([0], []))

    assert clock.now == 101.0
    assert torch.equal(cache[7:9], before[1:3])
    assert {result.job_id for result in worker.get_finished()} == {1, 2, 3}


# -- files -----------------------------------------------------------------------------------------


def folder(path: Path) -> ChunkFolder:
    return ChunkFolder(path, "group", 1, 1 << 30)


def filed(tmp_path: Path) -> tuple[TorchTierWorker, torch.Tensor, TierSpec, list[Path]]:
    """Two chunks that lie in the directory and nowhere else."""
    worker, cache = make_worker(Clock())
    manager = Manager(0, folder(tmp_path))
    done = manager.prepare_store(keys("a", "b"), None)
    assert done is not None
    assert done.store_spec.block_ids.tolist() == [NOT_IN_HOST] * 2
    worker.submit_store(1, gpu([1, 2, 3, 4]), done.store_spec)
    worker.get_finished()
    manager.complete_store(done.keys_to_store, None)
    paths = [manager.folder.file_of(key).path(0) for key in keys("a", "b") if manager.folder]
    return worker, cache, manager.prepare_load(keys("a", "b"), None), paths


def test_chunks_that_host_memory_has_no_room_for_lie_in_the_directory(tmp_path: Path) -> None:
    worker, cache, spec, _ = filed(tmp_path)
    before = cache.clone()

    worker.submit_load(2, spec, gpu([7, 8, 9, 10]))
    worker.wait({2})

    assert [result.job_id for result in worker.get_finished()] == [2]
    assert torch.equal(cache[7:11], before[1:5])
    assert not worker.take_failed_loads()


@pytest.mark.parametrize("damage", ["gone", "short", "other bytes", "empty"])
def test_a_damaged_file_fails_its_blocks_and_no_others(tmp_path: Path, damage: str) -> None:
    worker, cache, spec, paths = filed(tmp_path)
    before = cache.clone()
    content = paths[1].read_bytes()
    if damage == "gone":
        paths[1].unlink()
    else:
        other = {"short": content[:-1], "other bytes": content[:-1] + b"\xff", "empty": b""}
        paths[1].write_bytes(other[damage])

    worker.submit_load(2, spec, gpu([7, 8, 9, 10]))
    worker.wait({2})

    assert [result.success for result in worker.get_finished()] == [True]
    assert worker.take_failed_loads() == {2: {9, 10}}
    assert not paths[1].exists(), "nobody shall try it again"
    assert torch.equal(cache[7:9], before[1:3])
    assert torch.equal(cache[9:11], before[9:11])


def test_a_file_that_hangs_keeps_the_worker_from_nothing_else(tmp_path: Path) -> None:
    worker, cache, spec, paths = filed(tmp_path)
    before = cache.clone()
    content = paths[1].read_bytes()
    paths[1].unlink()
    os.mkfifo(paths[1])

    worker.submit_load(2, spec, gpu([7, 8, 9, 10]))
    worker.submit_store(3, gpu([1, 2]), TierSpec([0], []))
    worker.submit_load(4, TierSpec([0], []), gpu([5, 6]))

    assert [result.job_id for result in worker.get_finished()] == [3, 4]
    assert torch.equal(cache[5:7], before[1:3])
    assert torch.equal(cache[7:11], before[7:11])
    paths[1].write_bytes(content)
    worker.wait({2})
    assert torch.equal(cache[7:11], before[1:5])


def test_a_directory_that_can_not_be_written_costs_the_chunk_and_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "group").write_text("in the way")
    worker, _ = make_worker(Clock())
    manager = Manager(0, folder(tmp_path))
    done = manager.prepare_store(keys("a"), None)
    assert done is not None
    worker.submit_store(1, gpu([1, 2]), done.store_spec)

    assert [result.success for result in worker.get_finished()] == [True]
    manager.complete_store(done.keys_to_store, None)
    assert not is_there(manager, "a")


def test_another_server_finds_the_chunks_of_the_directory(tmp_path: Path) -> None:
    filed(tmp_path)

    assert is_there(Manager(4, folder(tmp_path)), "a")
    assert not is_there(Manager(4, ChunkFolder(tmp_path, "other", 1, 1 << 30)), "a")


def test_after_a_reset_old_files_are_never_found_again(tmp_path: Path) -> None:
    filed(tmp_path)
    manager = Manager(4, folder(tmp_path))

    manager.reset_cache()

    assert not is_there(manager, "a")


def test_a_delete_takes_the_file_away(tmp_path: Path) -> None:
    _, _, _, paths = filed(tmp_path)
    manager = Manager(4, folder(tmp_path))

    assert manager.delete(keys("a")) == 1
    assert not paths[0].exists()
    assert paths[1].exists()


def test_above_its_bound_the_directory_loses_what_was_used_longest_ago(tmp_path: Path) -> None:
    _, _, _, paths = filed(tmp_path)
    one = paths[0].stat().st_size
    os.utime(paths[0], (1, 1))
    os.utime(paths[1], (2, 2))
    folder(tmp_path).touch(keys("a"))

    assert Sweep(str(tmp_path), "group", one).run() == 1
    assert paths[0].exists()
    assert not paths[1].exists()


def test_two_writers_of_a_chunk_are_not_in_each_others_way_whatever_their_process_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, checksum = ChunkFile(str(tmp_path), "ab"), zlib.crc32

    def while_it_is_written(content: bytes) -> int:
        """Another server, in a container of its own, is in the middle of the same."""
        monkeypatch.setattr(zlib, "crc32", checksum)
        file.write(0, b"what both write")
        assert file.read(0, 15) == b"what both write"
        return checksum(content)

    monkeypatch.setattr(zlib, "crc32", while_it_is_written)
    file.write(0, b"what both write")

    assert file.read(0, 15) == b"what both write"
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["ab.0.kv"]


def test_a_file_system_without_links_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise PermissionError("planted")

    monkeypatch.setattr(os, "link", no_links)
    file = ChunkFile(str(tmp_path), "ab")

    file.write(0, b"content")

    assert file.read(0, 7) == b"content"
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["ab.0.kv"]


def test_what_a_dead_writer_has_left_aside_goes_after_an_hour(tmp_path: Path) -> None:
    _, _, _, paths = filed(tmp_path)
    young, old = (paths[0].with_name(f".{paths[0].name}.{name}") for name in ("young", "old"))
    for aside in (young, old):
        aside.write_bytes(b"half a chunk")
    at = old.stat().st_mtime
    os.utime(old, (at - 3_700, at - 3_700))

    assert Sweep(str(tmp_path), "group", 1 << 30).run() == 1

    assert not old.exists()
    assert all(path.exists() for path in (young, *paths))


def left_by(server: ChunkFolder) -> Path:
    """A chunk in the folder that a server has for itself after a reset."""
    server.leave_behind()
    server.file_of(b"k").write(0, b"content")
    return server.file_of(b"k").path(0)


def test_a_folder_that_a_server_has_left_goes_once_nobody_has_used_it_for_a_day(
    tmp_path: Path,
) -> None:
    _, _, _, shared = filed(tmp_path)
    used, unused = left_by(folder(tmp_path)), left_by(folder(tmp_path))
    at = unused.stat().st_mtime
    for old in (unused, *shared):
        os.utime(old, (at - 90_000, at - 90_000))
    for place in (unused.parent, unused.parents[1]):
        os.utime(place, (at - 90_000, at - 90_000))

    assert Sweep(str(tmp_path), "another", 1 << 30).run() == 1

    assert used.exists()
    assert not unused.exists()
    assert all(path.exists() for path in shared), "other servers go on with it"


def test_a_server_that_is_reset_again_leaves_nothing_of_its_own_folder(tmp_path: Path) -> None:
    server = folder(tmp_path)
    left = left_by(server)

    server.leave_behind()
    server.finish()

    assert not left.parents[1].exists()


def test_the_scheduler_never_walks_through_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filed(tmp_path)
    walkers, scandir = set(), os.scandir

    def noted(*args: Any) -> Any:
        walkers.add(threading.current_thread())
        return scandir(*args)

    monkeypatch.setattr(os, "scandir", noted)
    manager = Manager(2, folder(tmp_path))
    store(manager, "c")
    assert manager.folder is not None
    manager.folder.finish()

    assert walkers
    assert threading.main_thread() not in walkers


def test_however_many_files_there_are_sweeping_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[float] = []
    clock = Clock()
    server = folder(tmp_path)
    monkeypatch.setattr(server, "_timed_sweep", lambda: swept.append(clock.now))
    server._sweep_took = 2.0
    for _ in range(200):
        clock.now += 1.0
        server.sweep_soon(clock.now)
        server.finish()

    assert swept == [101.0 + 40.0 * k for k in range(5)]


@pytest.mark.parametrize(
    "wrong", [{"directory_bytes": 0}, {"load_bytes_per_second": 0}, {"cpu_bytes_to_use": None}]
)
def test_a_wrong_option_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TierOptions.read({"cpu_bytes_to_use": 1, **wrong})
