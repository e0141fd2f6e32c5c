"""Damaged, changing and replaced objects of a Mooncake pool: each costs its own record, and is counted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest
from mooncake_pool import Master, Owner
from mooncake_stores import CALM_MS, name_of, opened
from waiting import GIVE_UP_S

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, pack_header
from cache_manager.storage.apart import ApartStore
from cache_manager.storage.mooncake import LOOKS, MooncakeStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import BOTH, LAYOUT, Content, get, header_of, held, key_of, offer, payload_of, put

Found = list[RecordHeader | Absence]
LONG_LEASE = pytest.mark.parametrize("master", [60_000], indirect=True)
"""One that ends on the way makes a miss of a read."""


@LONG_LEASE
def test_a_damaged_object_is_a_counted_miss_and_can_be_stored_anew(calm: MooncakeStore, owner: Owner) -> None:
    """Every offset class: header, bitmap, payload; a cut, an addition, another key's record, another version, junk.

    The store answers the same whichever code computes the checksum: rollouts use it, too.
    """
    whole = [payload_of(n) + pack_header(header_of(n)) for n in range(20)]
    start = LAYOUT.nbytes

    def flipped(n: int, at: int) -> bytes:
        return whole[n][:at] + bytes([whole[n][at] ^ 1]) + whole[n][at + 1 :]

    damaged = [
        *(flipped(n, start + at) for n, at in enumerate((0, 4, 6, 8, 20, 40, 70, 78, 100))),
        flipped(9, len(whole[9]) - 1),
        flipped(10, start - 1),
        flipped(11, 0),
        whole[12][:-1],
        whole[13][: start + 7],
        whole[14][:10],
        whole[15] + b"\0",
        whole[16] * 40,
        whole[3],
        whole[18][: start + 4] + b"\x01\x00" + whole[18][start + 6 :],
        b"junk",
    ]
    for n, raw in enumerate(damaged):
        assert owner.ask("put", name_of(n), raw.decode("latin-1")) == 0
    room = [memoryview(bytearray(LAYOUT.nbytes)) for _ in range(20)]
    assert calm.get_into([key_of(n) for n in range(20)], room) == [Absence.CORRUPT] * 20
    store = RecordStore(calm, LAYOUT)
    assert get(store, range(20)) == [Absence.CORRUPT] * 20
    assert store.counters.corrupt == 20
    assert get(store, range(20)) == [Absence.MISS] * 20
    assert all(put(store, range(20)))
    assert get(store, range(20)) == [payload_of(n) for n in range(20)]


@LONG_LEASE
@pytest.mark.parametrize("looks", [1, LOOKS + 1])
@pytest.mark.parametrize("second", ["sound", "fails"])
def test_a_record_that_changes_while_it_is_read_is_read_again(
    looks: int, second: str, calm: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a record that is being replaced is not treated as damaged, and a failing look costs no record that was
    found.

    Method: the payload that comes is another one for a few looks, or the next look fails.
    """
    put(RecordStore(calm, LAYOUT), [1, 2])
    real, asked = ApartStore.get_into, itertools.count()

    def changing(store: ApartStore, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> Found:
        number = next(asked)
        if number and second == "fails":
            raise StorageError("on purpose")
        found = real(store, keys, buffers)
        if number < looks:
            buffers[0][0] ^= 1
        return found

    monkeypatch.setattr(ApartStore, "get_into", changing)
    room = [memoryview(bytearray(LAYOUT.nbytes)) for _ in range(2)]
    first = Absence.MISS if second == "fails" else header_of(1) if looks == 1 else Absence.CORRUPT
    assert calm.get_into([key_of(1), key_of(2)], room) == [first, header_of(2)]
    assert bytes(room[1]) == payload_of(2)
    assert first is not header_of(1) or bytes(room[0]) == payload_of(1)


@LONG_LEASE
def test_a_record_that_others_read_can_be_deleted_and_replaced(master: Master, owner: Owner) -> None:
    """Goal: a lease keeps no record that was denied. Method: another process renews its lease again and again."""
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
        assert asked.wait(GIVE_UP_S)
        backend.delete([key_of(1)])
        assert held(other, [1]) == [Absence.MISS]
        assert offer(backend, [(2, new)], replace=True) == [new]
        assert held(other, [1, 2]) == [Absence.MISS, new]
    finally:
        stop.set()
        reader.join(GIVE_UP_S)
    backend.close()
    other.close()


@LONG_LEASE
def test_a_damaged_object_gives_way_to_what_is_put(calm: MooncakeStore, owner: Owner) -> None:
    assert owner.ask("put", name_of(1), "junk") == 0
    assert owner.ask("put", name_of(2), "j" * 5000) == 0
    new = Content(2, BOTH)
    assert offer(calm, [(1, new), (2, new)], replace=False) == [new, new]
    assert held(calm, [1, 2]) == [new, new]
