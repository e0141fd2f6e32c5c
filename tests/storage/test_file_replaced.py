"""Records that give way to others in a file store: the older copy is gone for good, whatever happens to the files."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from budget import examples
from faulty_disk import FaultyDisk
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.record import MAGIC, pack_header
from cache_manager.storage.disk import SystemDisk
from cache_manager.storage.file import FileReader, FileStore, Sync, fsck
from cache_manager.storage.file.index import SegmentIndex
from cache_manager.storage.file.segment import DELETED, LIVING, PAGE_NBYTES, pack_entry, states_at
from cache_manager.storage.file.table import Segment
from cache_manager.testing.origins import NUMBERS, Content, batches, header, held, offer
from cache_manager.testing.records import BOTH, FIRST, SECOND, key_of
from tests.storage.file_stores import RECORD_NBYTES, SEGMENT_NBYTES, Clock, flip, opened, reading, segments
from tests.storage.test_file_crash import MEMORY, VolatileDisk

OLD, NEW = Content(1, BOTH), Content(2, BOTH)
KEYS = range(NUMBERS)


class ReplacementMachine(RuleBasedStateMachine):
    """Puts, crashes, openings, repairs, and either a small quota or one flipped bit: no older copy comes back."""

    @initialize(segments=st.sampled_from((2, 3, 32)), sync=st.sampled_from(Sync))
    def start(self, segments: int, sync: Sync) -> None:
        self.scratch = Path(tempfile.mkdtemp(dir=MEMORY))
        self.options = {"quota_nbytes": segments * SEGMENT_NBYTES, "segment_nbytes": SEGMENT_NBYTES, "sync": sync}
        self.roomy = segments > 3
        self.harmed = False
        self.lives = 0
        self.newest: dict[int, Content | None] = dict.fromkeys(KEYS)
        self.directory = self.scratch / "0"
        self.store = FileStore(self.directory, **self.options)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.scratch)

    def lost(self, answer: Content | Absence | None) -> bool:
        """Whether the answer says that a record has gone, which a quota and damage may do."""
        return (not self.roomy or self.harmed) and (answer is None or isinstance(answer, Absence))

    @rule(batch=batches, replace=st.booleans())
    def put(self, batch: list[tuple[int, Content]], replace: bool) -> None:
        for (n, _), answer in zip(batch, offer(self.store, batch, replace=replace), strict=True):
            self.newest[n] = answer

    @rule(others=st.lists(st.integers(100, 110), min_size=1, max_size=6))
    def put_others(self, others: list[int]) -> None:
        offer(self.store, [(n, OLD) for n in others], replace=False)

    @rule(n=st.sampled_from(KEYS))
    def delete(self, n: int) -> None:
        self.store.delete([key_of(n)])
        self.newest[n] = None

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.store = FileStore(self.directory, **self.options)

    @rule()
    def lose_the_process(self) -> None:
        self.lives += 1
        after_it = self.scratch / str(self.lives)
        shutil.copytree(self.directory, after_it)
        self.store.close()
        self.directory = after_it
        self.store = FileStore(self.directory, **self.options)

    @rule()
    def repair(self) -> None:
        self.store.close()
        first = fsck(self.directory, repair=True)
        assert first.sound or self.harmed
        assert fsck(self.directory).sound
        self.store = FileStore(self.directory, **self.options)

    @precondition(lambda self: self.roomy and not self.harmed and segments(self.directory))
    @rule(which=st.integers(0, 100), at=st.integers(0, SEGMENT_NBYTES - 1))
    def flip_a_bit(self, which: int, at: int) -> None:
        self.store.close()
        paths = segments(self.directory)
        path = paths[which % len(paths)]
        flip(path, at % path.stat().st_size)
        self.harmed = True
        self.store = FileStore(self.directory, **self.options)

    @invariant()
    def a_key_holds_the_newest_record_or_nothing(self) -> None:
        for backend in (self.store, FileReader(self.directory)):
            for n, answer in zip(KEYS, held_or_corrupt(backend, KEYS), strict=True):
                assert answer == (self.newest[n] or Absence.MISS) or self.lost(answer)
            if backend is not self.store:
                backend.close()


TestReplacements = ReplacementMachine.TestCase
TestReplacements.settings = examples(60, stateful_step_count=25)


def held_or_corrupt(backend: FileStore | FileReader, wanted: Sequence[int]) -> list[Content | Absence]:
    """As :func:`held`, where payloads may be damaged."""
    answers: list[Content | Absence] = []
    for n in wanted:
        try:
            answers += held(backend, [n])
        except AssertionError:
            answers.append(Absence.CORRUPT)
    return answers


@pytest.mark.parametrize("sync", Sync)
def test_a_replaced_record_is_marked_on_the_disk_when_put_returns(tmp_path: Path, sync: Sync) -> None:
    """Goal: the older copy stays away when the newer one is evicted. Method: the newer one's segment vanishes."""
    with opened(tmp_path, sync=sync) as store:
        offer(store.backend, [(n, OLD) for n in range(6)], replace=False)
        assert offer(store.backend, [(1, NEW)], replace=True) == [NEW]
        assert store.usage()["replaced_records"] == 1
    _, second = segments(tmp_path)
    second.unlink()
    with opened(tmp_path) as store, reading(tmp_path) as reader:
        for backend in (store.backend, reader.backend):
            assert held(backend, range(6)) == [OLD, Absence.MISS, OLD, OLD, OLD, OLD]


def test_of_two_living_copies_the_newer_one_wins_and_the_older_one_is_deleted(tmp_path: Path) -> None:
    """Goal: the order of copies. Method: the mark of deletion is taken back, as a power cut may leave it."""
    with opened(tmp_path) as store:
        offer(store.backend, [(n, OLD) for n in range(6)], replace=False)
        offer(store.backend, [(1, NEW)], replace=True)
    first = segments(tmp_path)[0]
    revive(first, 1)
    report = fsck(tmp_path)
    assert (report.total("older"), report.sound) == (1, False)
    with reading(tmp_path) as reader:
        assert held(reader.backend, [1, 2]) == [NEW, OLD]
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    with opened(tmp_path / "copy") as store:
        assert held(store.backend, [1, 2]) == [NEW, OLD]
    assert fsck(tmp_path, repair=True).total("older") == 1
    for directory in (tmp_path, tmp_path / "copy"):
        assert fsck(directory).sound
        segments(directory)[1].unlink()
        with opened(directory) as store:
            assert held(store.backend, [1, 2]) == [Absence.MISS, OLD]


def test_a_deleted_newer_copy_keeps_the_older_one_away(tmp_path: Path) -> None:
    """Goal: what was deleted stays deleted. Method: the older copy lives again, the newer one is marked."""
    with opened(tmp_path) as store:
        offer(store.backend, [(n, OLD) for n in range(6)], replace=False)
        offer(store.backend, [(1, NEW)], replace=True)
        store.backend.delete([key_of(1)])
    revive(segments(tmp_path)[0], 1)
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    assert fsck(tmp_path / "copy", repair=True).total("older") == 1
    for directory in (tmp_path, tmp_path / "copy"):
        with opened(directory) as store:
            assert held(store.backend, [1, 2]) == [Absence.MISS, OLD]
        with opened(directory) as store:
            assert held(store.backend, [1, 2]) == [Absence.MISS, OLD]


def test_a_damaged_newer_copy_keeps_the_older_one_away(tmp_path: Path) -> None:
    """Goal: the newest copy decides, sound or not. Method: the older one lives again, the newer one's payload flips."""
    with opened(tmp_path) as store:
        offer(store.backend, [(n, OLD) for n in range(6)], replace=False)
        offer(store.backend, [(1, NEW), (7, OLD)], replace=True)
    first, second = segments(tmp_path)
    revive(first, 1)
    flip(second, PAGE_NBYTES + RECORD_NBYTES - 100)
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    assert fsck(tmp_path / "copy", repair=True).total("older") == 1
    for directory in (tmp_path, tmp_path / "copy"):
        for _ in range(2):
            with opened(directory) as store:
                assert held(store.backend, [1, 2, 7]) == [Absence.MISS, OLD, OLD]


def test_segments_may_be_read_in_any_order() -> None:
    """Goal: the order of reading does not decide. Method: an older segment is read after a newer one, and grows."""
    index = SegmentIndex(SystemDisk(), None, "dir", Clock())
    first, second = (Segment(n, f"s{n}", -1, 0) for n in (1, 2))

    def entry(content: Content, offset: int) -> bytes:
        record = header(1, content)
        return pack_entry(record, offset, pack_header(record))

    def served() -> tuple[Segment, int] | None:
        place = index.table.find(key_of(1))
        return place and (place[0], place[1].number)

    index.join(second)
    index.take(second, entry(NEW, PAGE_NBYTES), bytes([LIVING]))
    assert served() == (second, 0)
    index.join(first)
    for state in (LIVING, DELETED):
        index.take(first, entry(OLD, PAGE_NBYTES), bytes([state]))
        assert (served(), index.table.records) == ((second, 0), 1)
    index.take(second, entry(OLD, PAGE_NBYTES + 64), bytes([DELETED]))
    assert (served(), index.table.records) == (None, 0)


def test_a_mark_is_on_the_disk_before_the_newer_copy_goes(tmp_path: Path) -> None:
    """Goal: no power cut brings a replaced record back once the newer one was evicted. Method: eviction, then a cut."""
    directory = tmp_path / "before"
    directory.mkdir()
    disk = VolatileDisk(directory)
    with opened(directory, disk, quota_nbytes=3 * SEGMENT_NBYTES) as store:
        offer(store.backend, [(n, OLD) for n in range(6)], replace=False)
        store.flush()
        offer(store.backend, [(1, NEW)], replace=True)
        for n in range(100, 120):
            assert held(store.backend, [0]) == [OLD]  # its segment is the one that is used
            offer(store.backend, [(n, OLD)], replace=False)
        assert held(store.backend, [0, 1]) == [OLD, Absence.MISS]
        for seed in range(8):
            disk.cut_power(tmp_path / str(seed), np.random.default_rng(seed))
    for seed in range(8):
        with opened(tmp_path / str(seed), quota_nbytes=3 * SEGMENT_NBYTES) as store:
            assert held(store.backend, [1]) == [Absence.MISS]


def test_a_replacement_that_cannot_be_finished_changes_nothing(tmp_path: Path) -> None:
    """Goal: no two copies. Method: the disk fails after the new record, at the mark of the older one."""
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        offer(store.backend, [(1, OLD), (2, Content(1, FIRST))], replace=False)
        disk.write_budget_nbytes, disk.write_errno = 2 * RECORD_NBYTES, errno.EIO
        with pytest.raises(StorageError, match="cannot replace"):
            offer(store.backend, [(1, NEW), (3, OLD)], replace=True)
        assert held(store.backend, [1, 2, 3]) == [OLD, Content(1, FIRST), Absence.MISS]
        disk.write_budget_nbytes = None
    with opened(tmp_path) as store:
        assert held(store.backend, [1, 2, 3]) == [OLD, Content(1, FIRST), Absence.MISS]
        assert offer(store.backend, [(1, NEW), (2, OLD)], replace=True) == [NEW, OLD]


def test_a_read_during_a_replacement_finds_one_of_the_two(tmp_path: Path) -> None:
    """Goal: a record that is replaced is at no time missing. Method: it is replaced between look-up and read."""

    class Late(FaultyDisk):
        between = None

        def preadv(self, fd, buffers, offset):
            if (work := self.between) is not None:
                self.between = None
                work()
            return super().preadv(fd, buffers, offset)

    disk = Late()
    with opened(tmp_path, disk) as store:
        offer(store.backend, [(1, OLD), (2, OLD)], replace=False)
        disk.between = lambda: offer(store.backend, [(1, NEW)], replace=True)
        assert held(store.backend, [1, 2]) == [NEW, OLD]
        disk.between = lambda: store.backend.delete([key_of(1)])
        assert held(store.backend, [1, 2]) == [Absence.MISS, OLD]


@examples(60)
@given(
    puts=st.lists(st.tuples(batches, st.booleans()), min_size=1, max_size=8),
    sync=st.sampled_from(Sync),
    flush_every=st.integers(1, 4),
    quota=st.sampled_from((3, 32)),
    seed=st.integers(0, 1 << 32),
)
def test_a_power_cut_brings_back_nothing_that_was_replaced_and_flushed(
    puts: list[tuple[list[tuple[int, Content]], bool]], sync: Sync, flush_every: int, quota: int, seed: int
) -> None:
    """What a key holds afterwards is one of the contents that it has had since the last flush, now and from then on."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
        directory = Path(scratch) / "before"
        directory.mkdir()
        disk = VolatileDisk(directory)
        options = {"quota_nbytes": quota * SEGMENT_NBYTES, "segment_nbytes": SEGMENT_NBYTES, "sync": sync}
        store = FileStore(directory, disk=disk, **options)
        may: dict[int, set[Content | None]] = {n: {None} for n in KEYS}
        for i, (batch, replace) in enumerate(puts):
            answers = dict(zip([n for n, _ in batch], offer(store, batch, replace=replace), strict=True))
            for n, content in answers.items():
                may[n] = {content} if sync is Sync.BATCH else may[n] | {content}
            if i % flush_every == 0:
                store.flush()
                for n, content in zip(KEYS, held(store, KEYS), strict=True):
                    may[n] = {None if isinstance(content, Absence) else content}
        disk.cut_power(Path(scratch) / "after", np.random.default_rng(seed))
        store.close()
        for _ in range(3):
            store = FileStore(Path(scratch) / "after", **options)
            for n, answer in zip(KEYS, held_or_corrupt(store, KEYS), strict=True):
                assert isinstance(answer, Absence) or answer in may[n]
                may[n] = {None} if isinstance(answer, Absence) else {answer}
            store.close()


def test_more_rows_of_one_origin_cross_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert offer(store.backend, [(1, Content(7, SECOND))], replace=False) == [Content(7, SECOND)]
        assert offer(store.backend, [(1, Content(7, BOTH))], replace=False) == [Content(7, BOTH)]
    with opened(tmp_path) as store:
        assert offer(store.backend, [(1, Content(7, FIRST))], replace=True) == [Content(7, BOTH)]
        assert store.usage()["records"] == 1


def revive(path: Path, number: int) -> None:
    """Take the mark of deletion of one of six records back, in its header and in the index, as a power cut may."""
    with path.open("r+b") as file:
        for at, raw in (
            (PAGE_NBYTES + number * RECORD_NBYTES, MAGIC),
            (states_at(PAGE_NBYTES + 6 * RECORD_NBYTES, 6) + number, bytes([LIVING])),
        ):
            file.seek(at)
            file.write(raw)
