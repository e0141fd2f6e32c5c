"""Damage at every place of a record and of a segment, while nobody looks, under a writer, and under a reader.

What is harmed is missing or corrupt, is counted, and its bytes are never served; what is beside it is itself or, where
the damage hides where it begins, missing.
"""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from cache_manager.errors import RecordError, StoreFormatError
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, check_record, header_nbytes, pack_header
from cache_manager.spec import ALIGNMENT, align
from cache_manager.storage.file import FileReader, FileStore, fsck
from cache_manager.storage.file.segment import PAGE_NBYTES
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put
from tests.storage.file_stores import RECORD_NBYTES, Clock, opened, reading, segments

H: Final = header_nbytes(LAYOUT)
BITMAP: Final = 8 * LAYOUT.valid_words * len(LAYOUT.specs)
FIELDS: Final = {  # of a record: where, and how many bytes
    "magic": (0, 4),
    "version": (4, 2),
    "header size": (6, 2),
    "payload size": (8, 8),
    "fingerprint": (16, 16),
    "key scope": (32, 8),
    "key digest": (40, 24),
    "generation": (64, 8),
    "origin": (72, 8),
    "payload sum": (80, 8),
    "valid rows": (88, 4),
    "bitmap size": (92, 4),
    "bitmap, first": (96, 1),
    "bitmap, last": (96 + BITMAP - 1, 1),
    "header padding": (96 + BITMAP, H - 4 - 96 - BITMAP),
    "header sum": (H - 4, 4),
    "payload, first": (H, 1),
    "payload, middle": (H + LAYOUT.nbytes // 2, 64),
    "payload, last": (H + LAYOUT.nbytes - 1, 1),
}
VICTIM, RECORDS = 2, 9  # six records in the first segment, three in the second
AT: Final = PAGE_NBYTES + VICTIM * RECORD_NBYTES


def change(path: Path, edit: Callable[[bytearray], None]) -> bool:
    """Edit a file in place, its inode kept, as another program would; whether any byte is another now."""
    raw = bytearray(path.read_bytes())
    before = bytes(raw)
    edit(raw)
    with path.open("r+b") as file:
        file.write(raw)
        file.truncate(len(raw))
    return raw != before


def flip_first(raw: bytearray, at: int, _nbytes: int) -> None:
    raw[at] ^= 0x10


def flip_last(raw: bytearray, at: int, nbytes: int) -> None:
    raw[at + nbytes - 1] ^= 0x01


def foreign(raw: bytearray, at: int, nbytes: int) -> None:
    """The bytes that the next record has there."""
    raw[at : at + nbytes] = raw[at + RECORD_NBYTES : at + RECORD_NBYTES + nbytes]


def short_write(raw: bytearray, at: int, _nbytes: int) -> None:
    """The record's write ended here; the space behind it is what an allocation leaves."""
    end = AT + RECORD_NBYTES
    raw[at:end] = bytes(end - at)


def cut(raw: bytearray, at: int, _nbytes: int) -> None:
    del raw[at:]


HARMS: Final = (flip_first, flip_last, foreign, short_write, cut)


@contextmanager
def harmed_while_closed(directory: Path, harm: Callable[[], None]) -> Iterator[RecordStore]:
    harm()
    with opened(directory) as store:
        yield store


@contextmanager
def harmed_under_a_writer(directory: Path, harm: Callable[[], None]) -> Iterator[RecordStore]:
    with opened(directory) as store:
        harm()
        yield store


@contextmanager
def harmed_under_a_reader(directory: Path, harm: Callable[[], None]) -> Iterator[RecordStore]:
    with reading(directory) as store:
        harm()
        yield store


@contextmanager
def harmed_before_a_reader(directory: Path, harm: Callable[[], None]) -> Iterator[RecordStore]:
    harm()
    with reading(directory) as store:
        yield store


WHEN: Final = (harmed_while_closed, harmed_under_a_writer, harmed_under_a_reader, harmed_before_a_reader)
OPEN: Final = (harmed_under_a_writer, harmed_under_a_reader)


def judge(store: RecordStore, victim: int, beside: set[int], *, harmless: bool = False) -> None:
    """Ask for all twice: the victim is never served, those ``beside`` are, all others are themselves or missing."""
    for _ in range(2):
        before = store.counters
        answers = get(store, range(RECORDS))
        after = store.counters
        for n, answer in enumerate(answers):
            assert isinstance(answer, Absence) or answer == payload_of(n)
        served = {n for n, answer in enumerate(answers) if not isinstance(answer, Absence)}
        assert beside <= served
        assert (victim in served) == harmless
        assert after.hits - before.hits == len(served)
        missed = after.misses - before.misses + after.corrupt - before.corrupt
        assert missed == RECORDS - len(served)
    assert store.counters.corrupt <= RECORDS


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("field", FIELDS)
def test_damage_anywhere_in_a_record_is_a_counted_miss(
    tmp_path: Path,
    field: str,
    harm: Callable[[bytearray, int, int], None],
    when: Callable[[Path, Callable[[], None]], object],
) -> None:
    """Under an open store a neighbour loses nothing, but for what a cut took; a bit costs it nothing ever before it."""
    where, nbytes = FIELDS[field]
    with opened(tmp_path) as store:
        assert all(put(store, range(RECORDS)))
    changed: list[bool] = []
    path = segments(tmp_path)[0]

    def do() -> None:
        changed.append(change(path, lambda raw: harm(raw, AT + where, nbytes)))

    with when(tmp_path, do) as store:  # type: ignore[attr-defined]
        beside = {0, 1, 6, 7, 8}
        if harm is not cut and (when in OPEN or where >= H or not changed[0]):
            beside |= {3, 4, 5}
        judge(store, VICTIM, beside, harmless=not changed[0])


def older_version(raw: bytearray) -> None:
    """A record that is sound in a version of the format before this one."""
    raw[AT + 4 : AT + 6] = struct.pack("<H", 0)
    raw[AT + H - 4 : AT + H] = zlib.crc32(raw[AT : AT + H - 4]).to_bytes(4, "little")


def another_record(raw: bytearray) -> None:
    raw[AT : AT + RECORD_NBYTES] = raw[AT + RECORD_NBYTES : AT + 2 * RECORD_NBYTES]


def another_payload(raw: bytearray) -> None:
    raw[AT + H : AT + RECORD_NBYTES] = payload_of(77)


def sealed_for_another_layout(raw: bytearray) -> None:
    """A sound record of the same key and size, whose layout is another."""
    header = header_of(VICTIM)
    other = RecordHeader(
        header.key, b"another layout!!", 0, 1, header.valid, header.payload_nbytes, header.payload_xxh3
    )
    raw[AT : AT + H] = pack_header(other)


def sealed_with_another_payload(raw: bytearray) -> None:
    """Header and payload agree, the key is the one that is asked for, and yet it is not what was put: a forgery.

    An open store remembers the sum. A store that is opened on it cannot know: sums are no signatures.
    """
    mine, sum_ = header_of(VICTIM), header_of(77).payload_xxh3
    forged = RecordHeader(mine.key, mine.fingerprint, 0, 1, mine.valid, mine.payload_nbytes, sum_)
    raw[AT : AT + RECORD_NBYTES] = pack_header(forged) + payload_of(77)


WHOLE: Final = (older_version, another_record, another_payload, sealed_for_another_layout)


@pytest.mark.parametrize(
    ("harm", "when"),
    [*itertools.product(WHOLE, WHEN), *itertools.product([sealed_with_another_payload], OPEN)],
)
def test_a_whole_record_that_is_not_the_one_put_is_a_counted_miss(
    tmp_path: Path, harm: Callable[[bytearray], None], when: Callable[[Path, Callable[[], None]], object]
) -> None:
    with opened(tmp_path) as store:
        assert all(put(store, range(RECORDS)))
    path = segments(tmp_path)[0]
    with when(tmp_path, lambda: change(path, harm) and None) as store:  # type: ignore[attr-defined]
        beside = {0, 1, 6, 7, 8} | ({3, 4, 5} if harm is not older_version or when in OPEN else set())
        judge(store, VICTIM, beside)


# Between records: bytes that no sum covers, and that nobody is given.


@pytest.mark.parametrize("kind", [FileStore, FileReader])
def test_the_padding_between_records_is_nobodys(tmp_path: Path, kind: type[FileStore | FileReader]) -> None:
    """Payloads of 4,100 bytes are padded to 4,160; junk there is neither served nor in anybody's way."""
    nbytes = 4100
    with opened(tmp_path) as store:
        assert all(
            store.backend.put([header_of(n, nbytes) for n in range(4)], [payload_of(n, nbytes) for n in range(4)])
        )
    padding = PAGE_NBYTES + H + nbytes
    assert align(nbytes, ALIGNMENT) > nbytes
    change(segments(tmp_path)[0], lambda raw: raw.__setitem__(slice(padding, padding + 28), b"j" * 28))
    backend = kind(tmp_path)
    buffers = [memoryview(bytearray(nbytes)) for _ in range(4)]
    found = backend.get_into([key_of(n) for n in range(4)], buffers)
    for n, (header, buffer) in enumerate(zip(found, buffers, strict=True)):
        assert isinstance(header, RecordHeader)
        check_record(header, key_of(n), LAYOUT.fingerprint, buffer)
        assert bytes(buffer) == payload_of(n, nbytes)
    with pytest.raises(RecordError):
        check_record(header_of(1, nbytes), key_of(1), LAYOUT.fingerprint, buffers[0])
    backend.close()


@pytest.mark.parametrize("where", [0, 1, 63, 64, H, RECORD_NBYTES])
@pytest.mark.parametrize("when", WHEN)
def test_junk_beyond_the_last_record_is_never_a_record(
    tmp_path: Path, where: int, when: Callable[[Path, Callable[[], None]], object]
) -> None:
    with opened(tmp_path) as store:
        assert all(put(store, range(RECORDS)))
    path = segments(tmp_path)[1]
    end = PAGE_NBYTES + 3 * RECORD_NBYTES

    def junk(raw: bytearray) -> None:
        raw[end:] = bytes(where) + b"KVRR" + b"junk" * 2000

    with when(tmp_path, lambda: change(path, junk) and None) as store:  # type: ignore[attr-defined]
        assert get(store, range(RECORDS)) == [payload_of(n) for n in range(RECORDS)]
        assert store.usage()["records"] == RECORDS
        if when in (harmed_while_closed, harmed_under_a_writer):
            assert all(put(store, range(RECORDS, RECORDS + 6)))
            assert get(store, range(RECORDS + 6)) == [payload_of(n) for n in range(RECORDS + 6)]


# The header page of a segment, and the marker.

PAGE_FIELDS: Final = {
    "magic": (0, 8),
    "version": (8, 2),
    "header bytes": (10, 2),
    "zero": (12, 4),
    "sequence": (16, 8),
    "store id": (24, 16),
    "created": (40, 8),
    "zeros": (48, PAGE_NBYTES - 52),
    "sum": (PAGE_NBYTES - 4, 4),
}


@pytest.mark.parametrize("field", PAGE_FIELDS)
@pytest.mark.parametrize("harm", [flip_first, flip_last])
@pytest.mark.parametrize("when", WHEN)
def test_a_damaged_page_costs_no_record_unless_its_age_counts(
    tmp_path: Path,
    field: str,
    harm: Callable[[bytearray, int, int], None],
    when: Callable[[Path, Callable[[], None]], object],
) -> None:
    """With a time to live nobody knows any more how old the records are, so that they are missing."""
    clock = Clock()
    with opened(tmp_path, clock=clock) as store:
        assert all(put(store, range(RECORDS)))
    path = segments(tmp_path)[0]
    with when(tmp_path, lambda: change(path, lambda raw: harm(raw, *PAGE_FIELDS[field])) and None) as store:  # type: ignore[attr-defined]
        assert get(store, range(RECORDS)) == [payload_of(n) for n in range(RECORDS)]
    if when in (harmed_before_a_reader, harmed_under_a_reader):
        with opened(tmp_path, ttl_s=60, clock=clock) as store:
            if field == "magic":  # all else is proven by the sum
                assert get(store, range(RECORDS)) == [payload_of(n) for n in range(RECORDS)]
                return
            assert get(store, range(RECORDS)) == [Absence.MISS] * 6 + [payload_of(n) for n in range(6, 9)]
            assert store.counters.misses == 6


def set_version(raw: bytearray, nbytes: int, version: int) -> None:
    """The page or marker of another version of the format, with a sum that holds."""
    raw[8:10] = struct.pack("<H", version)
    raw[nbytes - 4 : nbytes] = zlib.crc32(raw[: nbytes - 4]).to_bytes(4, "little")


@pytest.mark.parametrize("name", ["kvroute.store", "segment-0000000000000001.kvr"])
def test_a_store_of_an_older_format_is_refused_by_name_and_left_alone(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as store:
        assert all(put(store, range(RECORDS)))
    change(tmp_path / name, lambda raw: set_version(raw, 64 if name == "kvroute.store" else PAGE_NBYTES, 2))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "kvroute.lock"}
    for kind in (FileStore, FileReader):
        with pytest.raises(StoreFormatError, match=rf"{name}: version: wanted 3 or 4, got 2"):
            kind(tmp_path)
    if name == "kvroute.store":
        with pytest.raises(StoreFormatError, match="version: wanted 3 or 4, got 2"):
            fsck(tmp_path, repair=True)
    else:
        assert "version: wanted 3 or 4, got 2" in str(fsck(tmp_path, repair=True).segments[0].refused)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "kvroute.lock"}


def test_a_store_of_version_three_is_read_and_its_segments_get_indexes(tmp_path: Path) -> None:
    """Goal: what was stored by the release before is there. Method: its pages and marker, no index and no journal."""
    with opened(tmp_path) as store:
        assert all(put(store, range(RECORDS)))
    change(tmp_path / "kvroute.store", lambda raw: set_version(raw, 64, 3))
    for path in tmp_path.glob("*.journal"):
        path.unlink()
    for path in segments(tmp_path):

        def as_it_was(
            raw: bytearray, end: int = PAGE_NBYTES + (6 if path == segments(tmp_path)[0] else 3) * RECORD_NBYTES
        ):
            raw[end:] = bytes(-end % PAGE_NBYTES)
            set_version(raw, PAGE_NBYTES, 3)

        change(path, as_it_was)
    assert fsck(tmp_path).sound
    for opener in (reading, opened, opened, reading):
        with opener(tmp_path) as store:
            assert get(store, range(RECORDS)) == [payload_of(n) for n in range(RECORDS)]
            if opener is opened:
                assert b"KVRINDEX" in segments(tmp_path)[0].read_bytes()
                assert store.usage()["damaged_segments"] == 0
                assert put(store, [RECORDS]) == [True]


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 48, PAGE_NBYTES - 1, PAGE_NBYTES, PAGE_NBYTES + 1, AT, AT + 1, 30_000])
@pytest.mark.parametrize("when", WHEN)
def test_a_segment_cut_anywhere_serves_what_is_whole(
    tmp_path: Path, keep: int, when: Callable[[Path, Callable[[], None]], object]
) -> None:
    with opened(tmp_path) as store:
        assert all(put(store, range(RECORDS)))
    path = segments(tmp_path)[0]
    keep = min(keep, path.stat().st_size)
    with when(tmp_path, lambda: os.truncate(path, keep)) as store:  # type: ignore[attr-defined]
        whole = {n for n in range(6) if PAGE_NBYTES + (n + 1) * RECORD_NBYTES <= keep}
        answers = get(store, range(RECORDS))
        assert {n for n, answer in enumerate(answers) if not isinstance(answer, Absence)} == whole | {6, 7, 8}
        assert all(answers[n] == payload_of(n) for n in whole | {6, 7, 8})
