"""Damaged, changing and replaced objects of a Mooncake pool: each costs its own record, and is counted."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from mooncake_pool import Master, Owner

from cache_manager.errors import NoSpaceError, StorageError
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, pack_header
from cache_manager.storage.mooncake import MooncakeStore
from cache_manager.storage.mooncake.link import Link
from cache_manager.storage.records import RecordStore
from cache_manager.testing.origins import Content, held, offer
from cache_manager.testing.records import BOTH, LAYOUT, get, header_of, key_of, payload_of, put
from tests.storage.mooncake_stores import (
    CALM_MS,
    name_of,
    opened,
)


@pytest.mark.parametrize("master", [60_000], indirect=True)  # a lease that ends on the way makes a miss of it
@pytest.mark.parametrize("lends", [False, True])
def test_a_damaged_object_is_a_counted_miss_and_can_be_stored_anew(
    lends: bool, calm: MooncakeStore, owner: Owner
) -> None:
    """Every offset class: header, bitmap, payload; a cut, an addition, another key's record, another version, junk.

    ``lends``: the store knows how large records are, and so hands them out where they were received."""
    whole = [pack_header(header_of(n)) + payload_of(n) for n in range(20)]
    header_nbytes = header_of(0).nbytes

    def flipped(n: int, at: int) -> bytes:
        return whole[n][:at] + bytes([whole[n][at] ^ 1]) + whole[n][at + 1 :]

    damaged = [
        *(flipped(n, at) for n, at in enumerate((0, 4, 6, 8, 20, 40, 70, 78, 100))),
        flipped(9, header_nbytes - 1),
        flipped(10, header_nbytes),
        flipped(11, len(whole[11]) - 1),
        whole[12][:-1],
        whole[13][: header_nbytes + 7],
        whole[14][:10],
        whole[15] + b"\0",
        whole[16] * 40,
        whole[3],
        whole[18][:4] + b"\x01\x00" + whole[18][6:],
        b"junk",
    ]
    for n, raw in enumerate(damaged):
        assert owner.ask("put", name_of(n), raw.decode("latin-1"), "") == 0
    store = RecordStore(calm, LAYOUT)
    if lends:
        assert put(store, [20])
        assert get(store, [20, 21]) == [payload_of(20), Absence.MISS]
        with calm.borrow([key_of(n) for n in (20, 11, 20, 21)]) as lent:  # the sum of 11 is wrong
            assert [bytes(each[1]) if isinstance(each, tuple) else each for each in lent] == [
                *(payload_of(20), damaged[11][header_nbytes:], payload_of(20), Absence.MISS)
            ]
        with pytest.raises(NoSpaceError, match="get_into"), calm.borrow([key_of(20), key_of(12)]):
            pass
    assert bool(calm.lent_nbytes_max) is lends
    assert get(store, range(20)) == [Absence.CORRUPT] * 20
    assert store.counters.corrupt == 20
    assert get(store, range(20)) == [Absence.MISS] * 20
    assert all(put(store, range(20)))
    assert get(store, range(20)) == [payload_of(n) for n in range(20)]


@pytest.mark.parametrize("master", [60_000], indirect=True)
@pytest.mark.parametrize("damaged", [False, True])
def test_a_second_look_that_fails_costs_no_record_that_was_found(
    damaged: bool, calm: MooncakeStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug that was found. A key is read once more where it stands twice in a batch, and where what came is damaged.

    Method: the pool answers one call, and no other."""
    put(RecordStore(calm, LAYOUT), [1, 2])
    numbers = [1, 3, 2] if damaged else [1, 2, 2]
    assert owner.ask("put", name_of(3), "junk", "") == 0
    calls, real = itertools.count(), Link.call

    def once(link: Link, *call: Any) -> list[int]:
        if next(calls):
            raise StorageError("on purpose")
        return real(link, *call)

    monkeypatch.setattr(Link, "call", once)
    room = [bytearray(LAYOUT.nbytes) for _ in numbers]
    found = calm.get_into([key_of(n) for n in numbers], [*map(memoryview, room)])
    absent = 1 if damaged else 2
    for at, (n, header) in enumerate(zip(numbers, found, strict=True)):
        if at == absent:
            assert header is Absence.MISS
        else:
            assert isinstance(header, RecordHeader)
            assert room[at] == payload_of(n)
    assert calm.counters.failed_reads == 1
    with pytest.raises(StorageError, match="on purpose"):
        calm.get_into([key_of(1)], [memoryview(room[0])])


def test_a_record_that_changes_between_two_looks_is_counted_by_a_number(
    calm: MooncakeStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug that was found: it was counted by a truth value, and so told as one."""
    assert owner.ask("put", name_of(1), "junk", "") == 0
    sums = itertools.count()
    monkeypatch.setattr("cache_manager.storage.mooncake.store.checksum", lambda _: next(sums))
    assert calm.get_into([key_of(1)], [memoryview(bytearray(LAYOUT.nbytes))]) == [Absence.MISS]
    assert repr(calm.counters.torn) == "1"


def test_headers_that_grow_while_records_are_borrowed(
    master: Master,
    owner: Owner,  # noqa: ARG001 - the pool's memory
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug that was found: the first put of larger headers, of another thread, made a slot too small for a loan.

    Method: the size changes between the looks at it that a read takes."""
    with opened(master, timeout_ms=CALM_MS, arena="1MiB") as backend:
        store = RecordStore(backend, LAYOUT)
        put(store, range(3))
        count = backend.lent_nbytes_max // LAYOUT.nbytes
        for looks in range(1, 5):
            sizes = itertools.chain(itertools.repeat(1024, looks), itertools.repeat(8192))
            monkeypatch.setattr(Link, "header_room", property(lambda _, sizes=sizes: next(sizes)), raising=False)
            assert get(store, range(count)) == [*(payload_of(n) for n in range(3)), *[Absence.MISS] * (count - 3)]


def test_a_record_that_others_read_can_be_deleted_and_replaced(master: Master, owner: Owner) -> None:
    """Goal: a lease keeps no record that was denied. Method: another process leases it on and on."""
    backend, other = opened(master, timeout_ms=CALM_MS), opened(master, timeout_ms=CALM_MS)
    old, new = Content(1, BOTH), Content(2, BOTH)
    assert offer(backend, [(1, old), (2, old)], replace=False) == [old, old]
    stop, asked = threading.Event(), threading.Event()

    def lease() -> None:
        while not stop.is_set():
            owner.ask("is_exist", name_of(1))
            owner.ask("is_exist", name_of(2))
            asked.set()

    reader = threading.Thread(target=lease, daemon=True)
    reader.start()
    try:
        assert asked.wait(60)
        backend.delete([key_of(1)])
        assert held(other, [1]) == [Absence.MISS]
        assert offer(backend, [(2, new)], replace=True) == [new]
        assert held(other, [1, 2]) == [Absence.MISS, new]
    finally:
        stop.set()
        reader.join(10)
    backend.close()
    other.close()


def test_a_damaged_object_gives_way_to_what_is_put(calm: MooncakeStore, owner: Owner) -> None:
    assert owner.ask("put", name_of(1), "junk", "") == 0
    assert owner.ask("put", name_of(2), "j" * 5000, "") == 0
    new = Content(2, BOTH)
    assert offer(calm, [(1, new), (2, new)], replace=False) == [new, new]
    assert held(calm, [1, 2]) == [new, new]
