"""Damaged, changing and replaced objects of a Mooncake pool: each costs its own record, and is counted."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from mooncake_pool import Master, Owner

from cache_manager.errors import StorageError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, checksum, pack_header
from cache_manager.storage.apart_process import Get
from cache_manager.storage.mooncake import MooncakeSettings, MooncakeStore
from cache_manager.storage.mooncake.codes import LOST, MASTER
from cache_manager.storage.mooncake.native import Native
from cache_manager.storage.records import RecordStore
from cache_manager.testing.origins import Content, held, offer
from cache_manager.testing.records import BOTH, LAYOUT, get, header_of, key_of, payload_of, put
from tests.storage.mooncake_stores import (
    CALM_MS,
    name_of,
    opened,
)


@pytest.mark.parametrize("master", [60_000], indirect=True)  # a lease that ends on the way makes a miss of it
def test_a_damaged_object_is_a_counted_miss_and_can_be_stored_anew(calm: MooncakeStore, owner: Owner) -> None:
    """Every offset class: header, bitmap, payload; a cut, an addition, another key's record, another version, junk."""
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
    assert get(store, range(20)) == [Absence.CORRUPT] * 20
    assert store.counters.corrupt == 20
    assert get(store, range(20)) == [Absence.MISS] * 20
    assert all(put(store, range(20)))
    assert get(store, range(20)) == [payload_of(n) for n in range(20)]


class Pool:
    """Stands for the native client of a pool that answers reads by turns: ``says`` has their codes."""

    def __init__(self, memory: bytearray, objects: dict[str, bytes], says: Callable[[int], int | None]) -> None:
        self.memory, self.objects, self.says = memory, objects, says
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.reads = itertools.count()

    def batch_get_into(self, names: list[str], places: list[int], sizes: list[int]) -> list[int]:
        if (code := self.says(next(self.reads))) is not None:
            return [code] * len(names)
        for name, place in zip(names, places, strict=True):
            at = place - self.start
            self.memory[at : at + len(self.objects[name])] = self.objects[name]
        return [len(self.objects[name]) for name in names]


def native(objects: dict[int, bytes], says: Callable[[int], int | None] = lambda _: None) -> tuple[Native, Pool]:
    """A client that is connected to a pool of these objects."""
    memory = bytearray(1 << 20)
    found = Native.__new__(Native)
    pool = Pool(memory, {name_of(n): raw for n, raw in objects.items()}, says)
    vars(found).update(settings=MooncakeSettings("h:1", "test"), memory=memoryview(memory), counts=Counter())
    vars(found).update(_lock=threading.Lock(), _failures=0, _header_nbytes=192, _store=pool, _address=pool.start)
    return found, pool


def asked(*numbers: int) -> Get:
    offsets = [4096 + i * 16384 for i in range(len(numbers))]
    return Get([key_of(n) for n in numbers], offsets, [LAYOUT.nbytes] * len(numbers))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_second_look_that_fails_costs_no_record_that_was_found(damaged: bool) -> None:
    """A bug that was found. A key is read once more where it stands twice in a batch, and where what came is damaged.

    Method: the pool answers one call, and no other."""
    objects = {n: pack_header(header_of(n)) + payload_of(n) for n in (1, 2)} | {3: b"junk"}
    client, _ = native(objects, lambda number: LOST if number else None)
    get, absent = (asked(1, 3, 2), 1) if damaged else (asked(1, 2, 2), 2)
    for at, (key, place, header) in enumerate(zip(get.keys, get.offsets, client.get(get), strict=True)):
        if at == absent:
            assert header is Absence.MISS
        else:
            assert isinstance(header, RecordHeader)
            assert checksum(client.memory[place : place + LAYOUT.nbytes]) == header.payload_xxh3
            assert header.key == key
    assert client.counted() == {"failed_reads": 1}
    with pytest.raises(StorageError, match="TRANSFER_FAIL"):
        client.get(asked(1))
    with pytest.raises(StoreUnavailableError, match="TRANSFER_FAIL"):  # the third in a row
        client.get(asked(1))


def test_a_record_that_changes_between_two_looks_is_a_counted_miss() -> None:
    """Method: other bytes come each time; then the same ones twice."""
    client, pool = native({1: b"junk"})
    pool.says = lambda number: pool.objects.update({name_of(1): b"junk%d" % number})
    assert client.get(asked(1)) == [Absence.MISS]
    assert client.counted() == {"torn": 1}
    pool.says = lambda _: None
    assert client.get(asked(1)) == [Absence.CORRUPT]
    assert client.counted() == {}


def test_a_record_of_another_key_is_corrupt() -> None:
    client, _ = native({1: pack_header(header_of(3)) + payload_of(3)})
    assert client.get(asked(1)) == [Absence.CORRUPT]


@pytest.mark.parametrize("master", [60_000], indirect=True)
def test_a_payload_of_which_a_bit_is_wrong_is_corrupt(calm: MooncakeStore, owner: Owner) -> None:
    """The store's own answer, not that of the ``RecordStore`` before it: rollouts ask it, too. Method: one that stays
    as it is, and one that is another at the second look."""
    whole = pack_header(header_of(1)) + payload_of(1)
    raw = whole[:-1] + bytes([whole[-1] ^ 1])
    assert owner.ask("put", name_of(1), raw.decode("latin-1"), "") == 0
    put(RecordStore(calm, LAYOUT), [2])
    room = [memoryview(bytearray(LAYOUT.nbytes)) for _ in range(2)]
    assert calm.get_into([key_of(1), key_of(2)], room) == [Absence.CORRUPT, header_of(2)]
    real = calm.get_unsummed
    looks = itertools.count()

    def changing(keys: list[BlockKey], buffers: list[memoryview]) -> list[RecordHeader | Absence]:
        found = real(keys, buffers)
        buffers[0][0] = next(looks)
        return found

    calm.get_unsummed = changing  # type: ignore[method-assign]
    assert calm.get_into([key_of(1)], room[:1]) == [Absence.MISS]
    assert calm.counters["torn"] == 1


def test_headers_of_another_size_are_found_at_the_second_look() -> None:
    """Method: records with bitmaps of other sizes; payloads lie in their places, and the neighbours as they were."""
    larger = msgspec.structs.replace(header_of(1), valid=bytes(1000))
    client, _ = native({1: pack_header(larger) + payload_of(1), 2: pack_header(header_of(2)) + payload_of(2)})
    for _ in range(2):
        get = asked(1, 2, 1)
        assert client.get(get) == [larger, header_of(2), larger]
        found = [bytes(client.memory[at : at + LAYOUT.nbytes]) for at in get.offsets]
        assert found == [payload_of(1), payload_of(2), payload_of(1)]
    assert client.counted() == {}


@pytest.mark.parametrize("code", sorted(MASTER))
def test_a_master_that_is_gone_ends_the_client_at_once(code: int) -> None:
    client, _ = native({}, lambda _: code)
    with pytest.raises(StoreUnavailableError, match=f"code {code}"):
        client.get(asked(1))


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
