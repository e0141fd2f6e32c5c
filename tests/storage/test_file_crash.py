"""The file store across crashes, cuts, flipped bits and its quota: what it acknowledged is there, and right."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from budget import examples
from faulty_disk import FaultyDisk
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.file import FileStore, Sync
from cache_manager.storage.records import RecordStore
from cache_manager.testing.contract import numbers
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put
from tests.storage.file_stores import RECORD_NBYTES, SEGMENT_NBYTES, segments
from tests.storage.kills import LIFE_RECORDS, check, fill, in_child, kill_me

EVERYTHING = range(24)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - names below it are mkdtemp's
"""A file system whose syncs cost nothing; a killed process leaves the same behind on any."""


class CrashMachine(RuleBasedStateMachine):
    """A crash is a copy of the directory as it is, opened while the first store still runs."""

    @initialize(quota=st.integers(2, 8), sync=st.sampled_from(Sync))
    def start(self, quota: int, sync: Sync) -> None:
        self.scratch = Path(tempfile.mkdtemp(dir=MEMORY))
        self.lives = 0
        self.quota_nbytes = quota * SEGMENT_NBYTES
        self.sync = sync
        self.put_since_deleted: set[int] = set()
        self.certain: set[int] = set()  # acknowledged, and neither dropped nor damaged since
        self.doubtful: set[int] = set()  # stored when a bit was flipped: a put looks at headers, a read at payloads
        self.open(self.scratch / "0")

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.scratch)

    def open(self, directory: Path) -> None:
        self.directory = directory
        self.store = RecordStore(
            FileStore(directory, quota_nbytes=self.quota_nbytes, segment_nbytes=SEGMENT_NBYTES, sync=self.sync), LAYOUT
        )
        self.dropped = 0

    def crash(self, harm: Callable[[list[Path]], None] | None = None) -> None:
        self.lives += 1
        after = self.scratch / str(self.lives)
        shutil.copytree(self.directory, after)
        self.store.close()
        shutil.rmtree(self.directory)
        if harm is not None:
            harm(sorted(after.glob("segment-*.kvr")))
        self.open(after)

    @rule(wanted=numbers)
    def put(self, wanted: list[int]) -> None:
        answers = put(self.store, wanted)
        self.put_since_deleted.update(wanted)
        for n, stored in zip(wanted, answers, strict=True):  # one that was there may make room for another
            (self.certain.add if stored and n not in self.doubtful else self.certain.discard)(n)
        if (dropped := self.store.usage()["dropped_segments"]) != self.dropped:
            self.dropped = dropped
            self.certain.intersection_update(self.there())

    @rule(wanted=numbers)
    def delete(self, wanted: list[int]) -> None:
        self.store.backend.delete([key_of(n) for n in wanted])
        self.put_since_deleted.difference_update(wanted)
        self.doubtful.difference_update(wanted)
        self.certain.difference_update(wanted)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.open(self.directory)

    @rule()
    def lose_the_process(self) -> None:
        self.crash()

    @precondition(lambda self: self.certain)
    @rule(which=st.integers(0, 100), share=st.floats(0, 1))
    def lose_the_end_of_a_segment(self, which: int, share: float) -> None:
        def harm(paths: list[Path]) -> None:
            if paths:
                path = paths[which % len(paths)]
                os.truncate(path, int(path.stat().st_size * share))

        self.crash(harm)
        self.certain.clear()

    @precondition(lambda self: self.certain)
    @rule(which=st.integers(0, 100), bit=st.integers(0, SEGMENT_NBYTES * 8 - 1))
    def flip_a_bit(self, which: int, bit: int) -> None:
        def harm(paths: list[Path]) -> None:
            if paths:
                path = paths[which % len(paths)]
                raw = bytearray(path.read_bytes())
                if raw:
                    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
                    path.write_bytes(raw)

        self.crash(harm)
        self.certain.clear()
        self.doubtful |= self.there()

    @rule(wanted=st.permutations(EVERYTHING))
    def a_record_read_is_the_record_put_or_missing(self, wanted: list[int]) -> None:
        there = self.there()
        for n, answer in zip(wanted, get(self.store, wanted), strict=True):
            if n in self.certain:
                assert answer == payload_of(n)
            elif n in there and n in self.put_since_deleted:
                assert answer in (payload_of(n), Absence.CORRUPT)
            else:
                assert answer is Absence.MISS
            self.doubtful.discard(n)  # read, and gone if it was damaged

    def there(self) -> set[int]:
        answers = self.store.contains([key_of(n) for n in EVERYTHING])
        return {n for n, is_there in zip(EVERYTHING, answers, strict=True) if is_there}

    @invariant()
    def bytes_used_plus_free_equal_capacity(self) -> None:
        usage = self.store.usage()
        assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"] == self.quota_nbytes
        assert usage["free_nbytes"] >= 0
        assert usage["used_nbytes"] == sum(path.stat().st_size for path in segments(self.directory))

    @invariant()
    def what_was_acknowledged_is_there_and_what_was_deleted_is_not(self) -> None:
        assert self.certain <= self.there() <= self.put_since_deleted


def test_a_put_over_a_damaged_payload_is_found_by_the_read_and_mended_by_the_next_put(tmp_path: Path) -> None:
    """Goal: damage behind a sound header is never handed out, and does not stay. Method: a bit of a finished segment.

    What opening reads of finished segments are their indexes.
    """

    def opened() -> RecordStore:
        return RecordStore(FileStore(tmp_path, quota_nbytes=1 << 20, segment_nbytes=SEGMENT_NBYTES), LAYOUT)

    with closing(opened()) as store:
        assert all(put(store, EVERYTHING))
    first = min(segments(tmp_path))
    raw = bytearray(first.read_bytes())
    raw[raw.index(payload_of(0))] ^= 1
    first.write_bytes(raw)
    with closing(opened()) as store:
        assert all(put(store, [0]))  # its header says that it is there
        assert get(store, [0]) == [Absence.CORRUPT]
        assert get(store, [0]) == [Absence.MISS]
        assert all(put(store, [0]))
        assert get(store, [0]) == [payload_of(0)]


TestCrashes = CrashMachine.TestCase
TestCrashes.settings = examples(60, stateful_step_count=30)


@pytest.mark.parametrize("sync", Sync)
def test_a_process_killed_at_any_byte_loses_nothing_that_it_acknowledged(tmp_path: Path, sync: Sync) -> None:
    """Twenty lives in one directory; each is killed in a write, after a number of bytes drawn from a seed."""
    rng = np.random.default_rng(20 + len(sync))
    acknowledged: list[int] = []
    torn = 0
    for life in range(20):
        budget = int(rng.integers(0, 25 * RECORD_NBYTES))

        def work(acknowledge: Callable[[int], None], first: int = 40 * life, budget: int = budget) -> None:
            disk = FaultyDisk()
            disk.write_budget_nbytes = budget
            disk.at_limit = kill_me
            fill(tmp_path, first, disk, acknowledge, sync)

        acknowledged += in_child(work)
        torn += check(tmp_path, acknowledged, 40 * (life + 1))
    assert len(acknowledged) > 20
    assert torn > 0  # the test has seen what it is about


LIVES, DIRECTORIES, SEED = 200, 10, 5


def test_two_hundred_writers_killed_at_any_time_lose_nothing_that_was_acknowledged_and_synced(tmp_path: Path) -> None:
    """Twenty lives in each of ten directories, killed from outside while they recover, write, sync or roll over: one
    half at some time after they began, the other half at some time after they first put something.

    Half of the directories are on a disk, where most of the time is spent syncing, the others in memory.

    Every record that was acknowledged is there, in this life and all later ones, and none is torn, wrong or from
    nowhere: after every life all numbers are asked for that any life could have put.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        kill_writers((tmp_path, Path(memory)))


def kill_writers(scratches: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(SEED)
    acknowledged: dict[int, list[int]] = {which: [] for which in range(DIRECTORIES)}
    for life in range(LIVES):
        which, round_ = life % DIRECTORIES, life // DIRECTORIES
        directory, first = scratches[which % 2] / str(which), LIFE_RECORDS * round_

        def work(acknowledge: Callable[[int], None], directory: Path = directory, first: int = first) -> None:
            fill(directory, first, FaultyDisk(), acknowledge, Sync.BATCH, records=LIFE_RECORDS)
            signal.pause()

        at_work = bool(round_ % 2)
        done = in_child(work, kill_after_s=float(rng.uniform(0.001, 0.04)), at_work=at_work)
        assert done or not at_work
        acknowledged[which] += done
        check(directory, acknowledged[which], first + LIFE_RECORDS)


class VolatileDisk(FaultyDisk):
    """Remembers what a power cut could take back: the sectors written since their file was synced, and new names."""

    SECTOR_NBYTES = 512

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.undo: dict[int, list[tuple[int, bytes]]] = {}  # inode: offset and what was there
        self.named = set(os.listdir(directory)) if directory.exists() else set()

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        before = os.pread(fd, nbytes, offset).ljust(nbytes, b"\0")
        undo = self.undo.setdefault(os.fstat(fd).st_ino, [])
        undo += [(offset + at, before[at : at + self.SECTOR_NBYTES]) for at in range(0, nbytes, self.SECTOR_NBYTES)]
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self.named = set(os.listdir(self.directory))
        else:
            self.undo.pop(found.st_ino, None)

    def cut_power(self, target: Path, rng: np.random.Generator) -> None:
        """Leave in ``target`` what could be on the disk: of what was not synced, any part."""
        shutil.copytree(self.directory, target)
        for path in self.directory.glob("segment-*"):
            if path.name not in self.named and rng.random() < 0.5:
                (target / path.name).unlink()
                continue
            with (target / path.name).open("r+b") as file:
                for offset, before in reversed(self.undo.get(path.stat().st_ino, [])):
                    if rng.random() < 0.5:
                        file.seek(offset)
                        file.write(before)


@examples(60)
@given(
    batches=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True), min_size=1, max_size=8),
    sync=st.sampled_from(Sync),
    flush_every=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
)
@example(batches=[[0, 1, 2, 3, 6], [0, 1, 2, 4, 5]], sync=Sync.NONE, flush_every=2, seed=1)  # a name without its page
def test_a_power_cut_takes_nothing_that_was_synced_and_makes_nothing_wrong(
    batches: list[list[int]], sync: Sync, flush_every: int, seed: int
) -> None:
    """With sync=batch every acknowledged record is there afterwards, otherwise every one that was flushed."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
        cut_power_after(Path(scratch), batches, sync, flush_every, seed)


def cut_power_after(scratch: Path, batches: list[list[int]], sync: Sync, flush_every: int, seed: int) -> None:
    rng, directory = np.random.default_rng(seed), scratch / "before"
    directory.mkdir()
    disk = VolatileDisk(directory)
    backend = FileStore(directory, quota_nbytes=1 << 20, segment_nbytes=SEGMENT_NBYTES, sync=sync, disk=disk)
    store, certain, put_ever = RecordStore(backend, LAYOUT), set[int](), set[int]()
    for i, batch in enumerate(batches):
        assert all(put(store, batch))
        put_ever.update(batch)
        if sync is Sync.NONE and i % flush_every == 0:
            store.flush()
            certain |= put_ever
        if sync is Sync.BATCH:
            certain |= put_ever
    disk.cut_power(scratch / "after", rng)
    store.close()
    for life in range(2):  # the second opening finds what the first one made of it
        after = RecordStore(FileStore(scratch / "after", quota_nbytes=1 << 20, segment_nbytes=SEGMENT_NBYTES), LAYOUT)
        for n, answer in enumerate(get(after, range(41))):
            if n in certain:
                assert answer == payload_of(n)
            else:
                assert answer is Absence.MISS or (n in put_ever and answer in (payload_of(n), Absence.CORRUPT))
                assert life == 0 or answer is not Absence.CORRUPT
        after.close()
