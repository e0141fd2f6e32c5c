"""Records that were asked for outlive the segment that makes room: copied, and nothing else is changed by it.

A store of four segments of six records; whoever was asked for in the oldest goes along into the new one.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from budget import examples
from faulty_disk import FaultyDisk
from hypothesis import given
from hypothesis import strategies as st
from waiting import until_it_waits

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.disk import Room
from cache_manager.storage.file import FileStore, Sync, fsck
from cache_manager.storage.file.limits import KEPT_NBYTES_MAX, Limits
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put
from tests.storage.file_stores import SEGMENT_NBYTES, Clock, flip, opened, reading, segments
from tests.storage.kills import in_child, kill_me
from tests.storage.test_file_crash import MEMORY, VolatileDisk

QUOTA_NBYTES = 4 * SEGMENT_NBYTES
MISS = Absence.MISS


class InterruptedDisk(FaultyDisk):
    """Calls ``interrupt`` once, before the call ``number`` (of the name ``what``, if one is given) from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._interrupt: Callable[[], None] | None = None

    def arm(self, interrupt: Callable[[], None], number: int = 0, what: str = "") -> None:
        self.calls, self._interrupt, self._number, self._what = [], interrupt, number, what

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if self._interrupt is not None and self._what in ("", what):
            self._number -= 1
            if self._number < 0:
                interrupt, self._interrupt = self._interrupt, None
                interrupt()

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._call("write")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Room], offset: int) -> int:
        self._call("read")
        return super().preadv(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._call("allocate")  # the segment that makes room is gone, and the new one not there
        super().allocate(fd, nbytes)

    def sync(self, fd: int) -> None:
        self._call("sync")
        super().sync(fd)


def fill(store: RecordStore) -> None:
    """Four full segments: 0 to 5, 6 to 11, 12 to 17, 18 to 23."""
    assert all(put(store, range(24)))


def kept(store: RecordStore) -> int:
    return store.usage()["kept_records"]


def there(store: RecordStore, wanted: Sequence[int]) -> list[int]:
    return [n for n, found in zip(wanted, store.contains([key_of(n) for n in wanted]), strict=True) if found]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_what_was_asked_for_goes_along_when_its_segment_makes_room(tmp_path: Path) -> None:
    """Also across a restart, and for a reader in another process; what nobody asked for goes with its segment."""
    with opened(tmp_path, quota_nbytes=QUOTA_NBYTES) as store:
        fill(store)
        get(store, [1, 4])
        get(store, range(6, 24))
        with reading(tmp_path) as other:
            assert put(store, [24]) == [True]
            assert kept(store) == 2
            assert store.usage()["dropped_segments"] == 1
            assert get(store, range(25)) == [payload_of(n) if n in (1, 4) or n > 5 else MISS for n in range(25)]
            assert there(other, range(25)) == [1, 4, *range(6, 25)]
            assert get(other, [1, 4, 24]) == [payload_of(n) for n in (1, 4, 24)]
    with opened(tmp_path, quota_nbytes=QUOTA_NBYTES) as store:
        assert there(store, range(25)) == [1, 4, *range(6, 25)]
        assert get(store, [1, 4]) == [payload_of(1), payload_of(4)]
    assert fsck(tmp_path).sound


def test_it_goes_along_again_only_when_it_is_asked_for_again(tmp_path: Path) -> None:
    with opened(tmp_path, quota_nbytes=QUOTA_NBYTES) as store:
        fill(store)
        get(store, [1, 4])
        get(store, range(6, 24))
        put(store, [24])  # 1, 4 and 24 are in one segment now
        get(store, [4])
        for n in range(25, 45):
            put(store, [n])
        assert there(store, [1, 4, 24]) == [4]


def test_storing_a_record_again_is_not_asking_for_it(tmp_path: Path) -> None:
    with opened(tmp_path, quota_nbytes=QUOTA_NBYTES) as store:
        fill(store)
        assert put(store, range(6)) == [True] * 6
        for n in range(24, 48):
            put(store, [n])
        assert kept(store) == 0
        assert there(store, range(24)) == []


def test_a_third_of_a_new_segment_is_for_what_is_new(tmp_path: Path) -> None:
    """All that is there was asked for: four of six records go along, the newest, and every put finds room."""
    with opened(tmp_path, quota_nbytes=QUOTA_NBYTES) as store:
        fill(store)
        get(store, range(24))
        assert put(store, [24]) == [True]
        assert there(store, range(6)) == [2, 3, 4, 5]
        for n in range(25, 99):
            get(store, range(n))
            assert put(store, [n]) == [True]
    assert Limits(1 << 40, 1 << 32).kept_nbytes == KEPT_NBYTES_MAX  # they are in memory meanwhile


def test_many_small_records_and_their_index_fit_the_segment_that_they_go_to(tmp_path: Path) -> None:
    with FileStore(tmp_path, quota_nbytes=4 * SEGMENT_NBYTES, segment_nbytes=SEGMENT_NBYTES) as store:
        for first in range(0, 2000, 100):
            numbers, room = range(first, first + 100), memoryview(bytearray(64))
            store.get_into([key_of(n) for n in range(first)], [room] * first)
            headers = [header_of(n, 64) for n in numbers]
            assert store.put(headers, [payload_of(n, 64) for n in numbers]) == headers
            assert max(path.stat().st_size for path in segments(tmp_path)) <= SEGMENT_NBYTES
        usage = store.usage()
        assert usage["kept_records"] > 500
        assert usage["used_nbytes"] <= 4 * SEGMENT_NBYTES


def test_with_a_time_to_live_nothing_goes_along(tmp_path: Path) -> None:
    """It would be as young as its new segment."""
    with opened(tmp_path, quota_nbytes=QUOTA_NBYTES, ttl_s=800.0, clock=Clock()) as store:
        fill(store)
        get(store, range(24))
        assert put(store, [24]) == [True]
        assert kept(store) == 0


def test_a_put_that_is_answered_from_a_segment_that_goes_is_answered_right(tmp_path: Path) -> None:
    """0 and 1 are stored when the call begins, and make room for 24 in it: 1 was asked for and goes along."""
    with opened(tmp_path, quota_nbytes=2 * SEGMENT_NBYTES) as store:
        assert all(put(store, range(12)))
        get(store, [1])
        wanted = [0, 1, *range(6, 12), *range(24, 27)]
        answers = put(store, wanted)
        assert there(store, wanted) == [n for n, stored in zip(wanted, answers, strict=True) if stored]
        assert answers[1]
        assert not answers[0]


def test_what_the_same_call_replaces_does_not_go_along(tmp_path: Path) -> None:
    with opened(tmp_path, quota_nbytes=2 * SEGMENT_NBYTES) as store:
        assert all(put(store, range(12)))
        get(store, [1, 2])
        get(store, range(6, 12))
        assert put(store, [24, 1, 7], origin=2, replace=True) == [True] * 3
        assert kept(store) == 1
        found = store.get_into([key_of(1)], [memoryview(buffer := bytearray(store.layout.nbytes))])
        assert found[0] is not MISS
        assert bytes(buffer) == payload_of(1, origin=2)
    assert fsck(tmp_path).sound
    assert fsck(tmp_path).total("older") == 0


@pytest.mark.parametrize("damage", ["payload", "header", "sector"])
def test_what_is_damaged_does_not_go_along(tmp_path: Path, damage: str) -> None:
    """Its neighbours do; where the disk gives nothing back, all goes as it would have gone, and the put works."""
    disk = FaultyDisk()
    with opened(tmp_path, disk, quota_nbytes=QUOTA_NBYTES) as store:
        fill(store)
        get(store, [1, 2])
        get(store, range(6, 24))
        if damage == "sector":
            disk.read_errno = errno.EIO
        else:
            flip(segments(tmp_path)[0], 4096 + 4288 + (70 if damage == "header" else 900))
        assert put(store, [24]) == [True]
        disk.read_errno = None
        assert there(store, range(6)) == ([] if damage == "sector" else [2])
        assert get(store, [2, 24])[1] == payload_of(24)
        assert store.counters.corrupt == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_costs_what_was_going_along_and_nothing_else(tmp_path: Path, number: int) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, quota_nbytes=QUOTA_NBYTES) as store:
        fill(store)
        get(store, [1, 4])
        get(store, range(6, 24))
        disk.write_budget_nbytes, disk.write_errno = 4096 + 5000, number  # the page, and the first record
        if number == errno.EIO:
            with pytest.raises(StorageError, match="cannot write"):
                put(store, [24])
        else:
            assert put(store, [24]) == [False]
        disk.write_budget_nbytes = None
        assert get(store, range(25)) == [payload_of(n) if 6 <= n < 24 else MISS for n in range(25)]
        assert put(store, [1, 24]) == [True, True]
        usage = store.usage()
        assert usage["used_nbytes"] == sum(path.stat().st_size for path in segments(tmp_path)) <= QUOTA_NBYTES
    assert fsck(tmp_path).sound


def test_what_is_deleted_while_it_goes_along_stays_deleted(tmp_path: Path) -> None:
    """The deletion begins when its segment is gone and the copy is not written; it returns when there is none."""
    disk = InterruptedDisk()
    with opened(tmp_path, disk, quota_nbytes=QUOTA_NBYTES) as store:
        fill(store)
        get(store, [1, 4])
        get(store, range(6, 24))
        threads: list[threading.Thread] = []

        def delete() -> None:
            threads.append(in_thread(lambda: store.backend.delete([key_of(1)])))
            assert until_it_waits(threads[0])

        disk.arm(delete, what="allocate")
        assert put(store, [24]) == [True]
        threads[0].join()
        assert there(store, [1, 4, 24]) == [4, 24]
    with opened(tmp_path, quota_nbytes=QUOTA_NBYTES) as store:
        assert there(store, [1, 4, 24]) == [4, 24]


def test_a_flush_covers_what_is_going_along(tmp_path: Path) -> None:
    """It begins when the record is in no segment, and returns when the new one is synced."""
    disk = InterruptedDisk()
    with opened(tmp_path, disk, quota_nbytes=QUOTA_NBYTES) as store:
        fill(store)
        get(store, [1])
        store.flush()
        threads: list[threading.Thread] = []

        def flush() -> None:
            threads.append(in_thread(store.flush))
            assert until_it_waits(threads[0])

        disk.arm(flush, what="allocate")
        assert put(store, [24]) == [True]
        threads[0].join()
        written = len(disk.calls) - disk.calls[::-1].index("write")
        assert disk.calls[written:].count("sync") == 3  # directory, new segment, and the index of the one before


@pytest.mark.parametrize("sync", Sync)
def test_a_process_killed_at_any_call_while_records_go_along_leaves_a_sound_store(sync: Sync) -> None:
    """At every single call to the disk of a put that makes room: what does not go is there, and all is itself."""
    lived = [kill_at(number, sync) for number in range(30)]
    assert 5 < lived.count(False) < 30  # the put's own calls; then it is through


def kill_at(number: int, sync: Sync) -> bool:
    """Whether the put had returned before it was killed in this call to the disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
        directory, disk = Path(scratch), InterruptedDisk()
        with opened(directory, quota_nbytes=QUOTA_NBYTES) as store:
            fill(store)

        def work(acknowledge: Callable[[int], None]) -> None:
            with opened(directory, disk, quota_nbytes=QUOTA_NBYTES, sync=sync) as store:
                get(store, [1, 4])
                get(store, range(6, 24))
                disk.arm(kill_me, number)
                put(store, [24])
                acknowledge(1)
                kill_me()

        returned = bool(in_child(work))
        with opened(directory, quota_nbytes=QUOTA_NBYTES) as store:
            found = there(store, range(25))
            assert set(range(6, 24)) <= set(found)
            assert set(found) & set(range(6)) in ({0, 1, 2, 3, 4, 5}, set(), {1}, {1, 4})
            assert get(store, range(25)) == [payload_of(n) if n in found else MISS for n in range(25)]
            assert not returned or {1, 4, 24} <= set(found)
        assert fsck(directory).sound
        return returned


@examples(60)
@given(
    batches=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=7, unique=True), min_size=4, max_size=16),
    sync=st.sampled_from(Sync),
    flush_every=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
)
def test_a_power_cut_takes_nothing_that_was_synced_where_records_go_along(
    batches: list[list[int]], sync: Sync, flush_every: int, seed: int
) -> None:
    """With sync=batch what the store has after a put is there afterwards; otherwise what it had at a flush and kept."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
        (directory := Path(scratch) / "before").mkdir()
        disk, certain = VolatileDisk(directory), set[int]()
        with opened(directory, disk, quota_nbytes=3 * SEGMENT_NBYTES, sync=sync) as store:
            for i, batch in enumerate(batches):
                dropped = store.usage()["dropped_segments"]
                get(store, batch[:2])
                put(store, batch)
                if store.usage()["dropped_segments"] != dropped:
                    certain = set()
                if sync is Sync.NONE and i % flush_every == 0:
                    store.flush()
                if sync is Sync.BATCH or i % flush_every == 0:
                    certain = set(there(store, range(31)))
            disk.cut_power(Path(scratch) / "after", np.random.default_rng(seed))
        with opened(Path(scratch) / "after", quota_nbytes=3 * SEGMENT_NBYTES) as store:
            for n, answer in enumerate(get(store, range(31))):
                assert answer == payload_of(n) or (n not in certain and isinstance(answer, Absence))


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "get", "replace", "delete", "reopen", "crash"]),
        st.lists(st.integers(0, 30), min_size=1, max_size=7, unique=True),
    ),
    max_size=40,
)


@examples(80)
@given(steps=steps, quota=st.integers(2, 6), sync=st.sampled_from(Sync))
def test_a_record_is_the_last_one_that_was_stored_or_missing(
    steps: list[tuple[str, list[int]]], quota: int, sync: Sync
) -> None:
    """Under a quota that a few puts fill, records of two origins; a crash is a copy of the directory as it is."""
    quota_nbytes, last = quota * SEGMENT_NBYTES, dict[int, int]()  # the origin of what is stored, if anything is
    with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
        directory = Path(scratch) / "0"

        def open_() -> RecordStore:
            options = {"quota_nbytes": quota_nbytes, "segment_nbytes": SEGMENT_NBYTES}
            return RecordStore(FileStore(directory, **options, sync=sync), LAYOUT)

        store = open_()
        for step, (what, wanted) in enumerate(steps):
            match what:
                case "delete":
                    store.backend.delete([key_of(n) for n in wanted])
                    last = {n: origin for n, origin in last.items() if n not in wanted}
                case "crash" | "reopen":
                    before = directory
                    if what == "crash":
                        directory = directory.with_name(str(step + 1))
                        shutil.copytree(before, directory)
                    store.close()
                    store = open_()
                case "put" | "replace":
                    origin = 1 if what == "put" else 2
                    headers = [header_of(n, origin=origin) for n in wanted]
                    payloads = [payload_of(n, origin=origin) for n in wanted]
                    answers = store.backend.put(headers, payloads, replace=origin == 2)
                    last |= {n: header.origin for n, header in zip(wanted, answers, strict=True) if header is not None}
            asked = range(31) if what == "delete" else wanted
            buffers = [memoryview(bytearray(LAYOUT.nbytes)) for _ in asked]
            found = store.get_into([key_of(n) for n in asked], buffers)
            for n, buffer, header in zip(asked, buffers, found, strict=True):
                if isinstance(header, Absence):
                    assert header is MISS
                    last.pop(n, None)  # what is gone stays away
                else:
                    assert last[n] == header.origin
                    assert bytes(buffer) == payload_of(n, origin=header.origin)
            usage = store.usage()
            assert usage["used_nbytes"] == sum(path.stat().st_size for path in segments(directory)) <= quota_nbytes
        store.close()
        assert fsck(directory).sound
