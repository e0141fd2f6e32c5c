"""The file store's time to live and the free space that it leaves: what goes when, and what a clock can do to it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from budget import examples
from faulty_disk import FaultyDisk
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import ConfigError, StorageError
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, checksum
from cache_manager.storage import open_store
from cache_manager.storage.disk import Space
from cache_manager.storage.file import FileStore
from cache_manager.storage.file.limits import Limits, is_older, victims
from cache_manager.storage.file.segment import PAGE_NBYTES
from cache_manager.storage.file.table import Segment
from cache_manager.testing.records import get, key_of, payload_of, put
from tests.storage.file_stores import SEGMENT_NBYTES, Clock, flip, opened, reading, segments

TTL_S = 800.0
MISSING = Absence.MISS


def test_a_record_is_a_miss_when_its_time_is_over_and_its_file_goes(tmp_path: Path) -> None:
    """No put happens: looking is enough. What went is counted as missed, expired and no longer used."""
    clock = Clock()
    with opened(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        assert all(put(store, range(8)))
        clock.now_s += TTL_S - 1
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]
        clock.now_s += 1
        assert get(store, range(8)) == [MISSING] * 8
        assert store.counters.misses == 8
        usage = store.usage()
        assert usage["expired_records"] == 8
        assert usage["expired_segments"] == 2
        assert usage["records"] == usage["used_nbytes"] == 0
        assert segments(tmp_path) == []
        assert put(store, [1]) == [True]
        assert get(store, [0, 1]) == [MISSING, payload_of(1)]


def test_a_record_that_expired_while_the_store_was_closed_is_not_served(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        put(store, range(8))
    clock.now_s += TTL_S
    with opened(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        assert store.contains([key_of(1)]) == [False]
        assert store.usage()["expired_segments"] == 2
        assert segments(tmp_path) == []


def test_a_store_without_a_time_to_live_serves_what_one_with_it_would_not(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        put(store, [1])
    clock.now_s += 10 * TTL_S
    with opened(tmp_path, clock=clock) as store:
        assert get(store, [1]) == [payload_of(1)]


def test_a_record_lives_for_seven_eighths_of_the_time_to_live_at_least(tmp_path: Path) -> None:
    """One record a second for three times the time to live: each is there, then not, at ages that were promised."""
    clock = Clock()
    start, ttl_s = clock.now_s, 24.0
    with opened(tmp_path, ttl_s=ttl_s, clock=clock) as store:
        for n in range(72):
            clock.now_s = start + n
            assert put(store, [n]) == [True]
            for m, answer in enumerate(get(store, range(n + 1))):
                age_s = n - m
                assert answer in (payload_of(m), MISSING)
                if age_s <= ttl_s * 7 / 8 - 1:
                    assert answer == payload_of(m)
                if age_s >= ttl_s:
                    assert answer is MISSING
        assert len(segments(tmp_path)) <= 10


@examples(60)
@given(moves=st.lists(st.tuples(st.floats(-3 * TTL_S, 3 * TTL_S), st.integers(0, 9)), min_size=1, max_size=12))
def test_a_clock_that_jumps_costs_records_and_never_their_bytes(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[float, int]]
) -> None:
    """Wall clocks jump both ways, also between two lives of the store; a record is itself or missing."""
    directory, clock = tmp_path_factory.mktemp("clock"), Clock()
    stored: set[int] = set()
    for jump_s, n in moves:
        clock.now_s += jump_s
        with (
            opened(directory, ttl_s=TTL_S, clock=clock) as store,
            reading(directory, ttl_s=TTL_S, clock=clock) as other,
        ):
            for _ in range(2):
                for each in (store, other):
                    for m, answer in enumerate(get(each, range(10))):
                        assert answer == payload_of(m) if m in stored and answer is not MISSING else answer is MISSING
                assert put(store, [n]) == [True]
                stored.add(n)
                assert get(store, [n]) == get(other, [n]) == [payload_of(n)]
                clock.now_s += jump_s / 7
            assert store.counters.corrupt == other.counters.corrupt == 0


def test_a_clock_that_was_set_back_far_makes_ages_unknown_and_unknown_is_too_old(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        put(store, [1])
        clock.now_s -= TTL_S / 2
        assert get(store, [1]) == [payload_of(1)]
        clock.now_s -= TTL_S / 2
        assert get(store, [1]) == [MISSING]


def test_a_segment_whose_creation_time_is_damaged_has_no_age_and_is_not_served(tmp_path: Path) -> None:
    """Without a time to live it is, and stays of unknown age: the page is written anew without a time."""
    clock = Clock()
    with opened(tmp_path, clock=clock) as store:
        put(store, range(8))
    flip(segments(tmp_path)[0], 41)
    for _ in range(2):
        with opened(tmp_path, clock=clock) as store:
            assert get(store, range(8)) == [payload_of(n) for n in range(8)]
    with reading(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        assert get(store, [0, 6]) == [MISSING, payload_of(6)]
    with opened(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        assert get(store, [0, 6]) == [MISSING, payload_of(6)]


def test_an_expired_file_that_cannot_be_removed_is_counted_and_not_served(tmp_path: Path) -> None:
    """Its name is taken by a directory, which no unlink removes; later it can be removed, and is."""
    clock = Clock()
    with opened(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        put(store, [1])
        path = segments(tmp_path)[0]
        path.rename(tmp_path / "aside")
        path.mkdir()
        clock.now_s += TTL_S
        assert get(store, [1]) == [MISSING]
        usage = store.usage()
        assert usage["sweep_failures"] == 1
        assert usage["used_nbytes"] == (tmp_path / "aside").stat().st_size > 0
        assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
        path.rmdir()
        assert get(store, [1]) == [MISSING]
        assert store.usage()["used_nbytes"] == 0
        assert put(store, [1]) == [True]


def test_what_is_put_again_does_not_get_younger(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, ttl_s=TTL_S, clock=clock) as store:
        put(store, [1])
        clock.now_s += TTL_S - 1
        assert put(store, [1]) == [True]
        clock.now_s += 1
        assert get(store, [1]) == [MISSING]


@given(created_s=st.floats(0, 1e10), age_s=st.floats(-1e9, 1e9), limit_s=st.floats(1e-3, 1e9))
def test_age_is_the_distance_of_two_times(created_s: float, age_s: float, limit_s: float) -> None:
    now_s = created_s + age_s
    assert is_older(created_s, now_s, limit_s) == (abs(now_s - created_s) >= limit_s)
    assert not is_older(created_s, now_s, None)
    assert is_older(None, now_s, limit_s)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ttl_s": 0}, "ttl"),
        ({"ttl_s": float("nan")}, "ttl"),
        ({"ttl_s": float("inf")}, "ttl"),
        ({"min_free_nbytes": -1}, "min_free"),
        ({"min_free_percent": 100}, "min_free"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_a_config_error(tmp_path: Path, options: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: wanted"):
        FileStore(tmp_path / "new", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_a_url_sets_the_limits(tmp_path: Path) -> None:
    for text, wanted in {
        "ttl=6h&min_free=5%25": Limits(4 << 30, 16 << 20, 21_600, 0, 5),
        "ttl=500ms&min_free=1GiB&quota=8MiB": Limits(8 << 20, 256 << 10, 0.5, 1 << 30, 0),
        "mode=write": Limits(4 << 30, 16 << 20),
    }.items():
        store = open_store(f"file://{tmp_path}?{text}")
        assert isinstance(store, FileStore)
        assert store.limits == wanted
        store.close()


# The free space of the file system.


class FilledDisk(FaultyDisk):
    """A file system of one MiB, of which others have taken ``foreign_nbytes``, and the store what its segments are.

    Journals are left out: they grow by 64 bytes a record without asking for the reserve.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.foreign_nbytes = 0
        self.lowest_nbytes = 1 << 20

    def space(self, fd: int) -> Space:
        own = sum(path.stat().st_size for path in segments(self.directory))
        return Space((1 << 20) - self.foreign_nbytes - own, 1 << 20)

    def allocate(self, fd: int, nbytes: int) -> None:
        super().allocate(fd, nbytes)
        self.lowest_nbytes = min(self.lowest_nbytes, self.space(fd).free_nbytes)


@examples(40)
@given(
    steps=st.lists(st.tuples(st.integers(0, 900 << 10), st.lists(st.integers(0, 60), max_size=9)), max_size=15),
    reserve_nbytes=st.integers(1, 300 << 10),
)
def test_the_store_never_takes_what_others_were_promised(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, list[int]]], reserve_nbytes: int
) -> None:
    """Others take and give back space; whatever the store allocates leaves the reserve, and what it says is true."""
    directory = tmp_path_factory.mktemp("filled")
    disk = FilledDisk(directory)
    with opened(directory, disk, min_free_nbytes=reserve_nbytes) as store:
        stored: set[int] = set()
        for foreign_nbytes, wanted in steps:
            disk.foreign_nbytes = foreign_nbytes
            before = disk.space(0).free_nbytes
            disk.lowest_nbytes = 1 << 20
            answers = put(store, wanted)
            stored |= {n for n, answer in zip(wanted, answers, strict=True) if answer}
            assert disk.lowest_nbytes >= reserve_nbytes
            assert disk.space(0).free_nbytes >= min(before, reserve_nbytes)
            for n, answer in enumerate(get(store, range(61))):
                assert answer is MISSING or (n in stored and answer == payload_of(n))
        assert store.counters.corrupt == 0


def test_segments_used_least_recently_make_way_for_the_reserve(tmp_path: Path) -> None:
    disk = FilledDisk(tmp_path)
    with opened(tmp_path, disk, min_free_nbytes=100 << 10) as store:
        put(store, range(18))  # three segments
        get(store, [2])
        disk.foreign_nbytes = (1 << 20) - (100 << 10) - 3 * SEGMENT_NBYTES
        assert put(store, [18]) == [True]
        there = store.contains([key_of(n) for n in range(19)])
        assert [n for n in range(19) if not there[n]] == list(range(6, 12))
        assert store.usage()["dropped_segments"] == 1
        assert store.usage()["short_of_free"] == 0


def test_nothing_is_dropped_when_dropping_everything_would_not_do(tmp_path: Path) -> None:
    """``False``, counted here and by the caller; the records that are there stay, and room is found when there is."""
    disk = FilledDisk(tmp_path)
    with opened(tmp_path, disk, min_free_nbytes=100 << 10) as store:
        put(store, range(18))
        disk.foreign_nbytes = (1 << 20) - (50 << 10) - 3 * SEGMENT_NBYTES
        disk.foreign_nbytes += 4 * SEGMENT_NBYTES
        assert put(store, [18, 1]) == [False, True]
        assert store.usage()["short_of_free"] == 1
        assert store.counters.refused == 1
        assert get(store, range(18)) == [payload_of(n) for n in range(18)]
        disk.foreign_nbytes = 0
        assert put(store, [18]) == [True]


def test_the_reserve_may_be_a_share_of_the_file_system(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, min_free_percent=5) as store:
        disk.space_now = Space(SEGMENT_NBYTES + 50_000, 1_000_000)
        assert put(store, [1]) == [True]
        disk.space_now = Space(SEGMENT_NBYTES + 49_999, 1_000_000)
        put(store, range(6))
        assert put(store, [6]) == [False]


def test_space_that_a_reader_keeps_is_not_dropped_for_over_and_over(tmp_path: Path) -> None:
    """The file system does not give back what another process has open: one segment goes for nothing, not all."""
    disk = FaultyDisk()
    with opened(tmp_path, disk, min_free_nbytes=1000) as store:
        put(store, range(24))  # four segments
        disk.space_now = Space(1000 + SEGMENT_NBYTES - 1, 1 << 30)
        assert put(store, [30]) == [False]
        assert store.usage()["dropped_segments"] == 1
        assert store.usage()["segments"] == 3
        assert store.usage()["short_of_free"] == 1


def test_a_disk_that_does_not_say_its_space_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, min_free_nbytes=1) as store:
        put(store, range(6))
        disk.space_errno = errno.EIO
        with pytest.raises(StorageError, match="cannot start a segment"):
            put(store, [6])
        disk.space_errno = None
        assert put(store, [6]) == [True]
        assert get(store, range(7)) == [payload_of(n) for n in range(7)]


def test_a_real_file_system_keeps_its_reserve(tiny_disk: Path) -> None:
    """256 KiB, 100 of them reserved: a store with a larger quota lives in what is left."""
    directory, reserve_nbytes = tiny_disk / "store", 100 << 10
    with opened(directory, min_free_nbytes=reserve_nbytes) as store:
        for n in range(60):
            assert put(store, [n]) == [True]
            assert FaultyDisk().space(store.backend._directory.fd).free_nbytes >= reserve_nbytes  # type: ignore[attr-defined]
        assert store.usage()["dropped_segments"] > 0
        answers = get(store, range(60))
        assert answers[59] == payload_of(59)
        assert all(answer in (payload_of(n), MISSING) for n, answer in enumerate(answers))


def test_of_the_segments_used_least_recently_the_one_with_fewest_hits_goes_first() -> None:
    """Of forty: the first four are its tenth; a segment that was set aside, or that this call has used, goes last."""
    found = [Segment(n, f"{n}", -1, 100, used_at=n, touched_at=n, hits=bytearray([1] * 9)) for n in range(40)]
    found[3].hits = bytearray([1, 0, 1])
    found[9].hits = bytearray()
    found[0].aside = True
    found[1].touched_at = 40

    def first(short_nbytes: int) -> list[int]:
        return [segment.sequence for segment in victims(found, short_nbytes, 0) or ()]

    assert first(0) == []
    assert first(100) == [3]
    assert first(101) == [3, 2]
    assert first(600) == [3, 2, 4, 5, 9, 6]
    assert first(4000)[-2:] == [1, 0]
    assert victims(found, 4001, 0) is None


def test_limits_say_how_much_must_go() -> None:
    limits = Limits(1 << 20, 64 << 10, min_free_nbytes=10 * PAGE_NBYTES, min_free_percent=10)
    assert limits.short_nbytes(0, PAGE_NBYTES, None) == 0
    assert limits.short_nbytes(1 << 20, PAGE_NBYTES, Space(1 << 30, 1)) == PAGE_NBYTES
    assert limits.short_nbytes(0, 1, Space(10 * PAGE_NBYTES, 1000)) == 1
    assert limits.short_nbytes(0, 1, Space(100_000, 1_000_001)) == 2


@pytest.mark.parametrize("records", [1, 30])
def test_a_segment_above_a_lowered_quota_is_no_damage_and_goes(tmp_path: Path, records: int) -> None:
    """The newest one, which a store goes on with, in one record or in many: the quota is kept from the start."""
    payload = bytes((300 << 10) // records)
    headers = [
        RecordHeader(key_of(n), bytes(16), 0, 1, bytes(8), len(payload), checksum(payload)) for n in range(records)
    ]
    with FileStore(tmp_path, quota_nbytes=4 << 20, segment_nbytes=1 << 20) as store:
        assert store.put(headers, [payload] * records) == headers
    with FileStore(tmp_path, quota_nbytes=256 << 10, segment_nbytes=SEGMENT_NBYTES) as store:
        usage = store.usage()
        assert (usage["damaged_segments"], usage["lost_nbytes"], usage["dropped_segments"]) == (0, 0, 1)
        assert usage["used_nbytes"] == 0
