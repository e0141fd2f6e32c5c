"""The native Mooncake client, in a process of its own: ``python -m cache_manager.storage.mooncake.native``.

The native library ends the process that misuses it, holds the interpreter's lock for seconds in set-up and close, hangs
after ``fork`` and has no deadlines. In this process that does no harm (:mod:`cache_manager.storage.apart`). Only this
module imports it.

An object is a record as it lies in the arena: the payload, then its packed header. A *room* is the bytes of a payload
and the margin behind it.
An object is named by its key, written once and never changed: to replace a record, the older object is removed by
force, then the new one is put. A reader of the older one may then get other bytes from its memory. So a read counts
only if its sums are right, whatever the result code: the header's sum is checked here, the payload's where it is used.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec

from cache_manager.errors import RecordError, StorageError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, pack_header, takes_the_place, unpack_header
from cache_manager.storage import apart_process
from cache_manager.storage.mooncake import codes as code_of
from cache_manager.storage.mooncake.codes import describe, failure_of_call, is_failure
from cache_manager.storage.mooncake.master import pool_usage, reach
from cache_manager.storage.mooncake.settings import MooncakeSettings, native_environment, parse_address

FORMAT: Final = 3
HEADER_NBYTES_MAX: Final = 2048
"""Of a header here: bits for 15,000 rows."""
MARGIN_NBYTES: Final = 2 * HEADER_NBYTES_MAX
"""Room for the header of a record that is put, and for that of an older one."""
LOCAL_BUFFER_NBYTES: Final = 16 << 20
FAILURES_MAX: Final = 3
"""Calls in a row that fail for every record, before another client is connected."""
LARGE_NBYTES: Final = 1 << 20
"""Larger records are compared with the pool's size first: a record that the pool has no room for makes it evict."""
BACK_OFF_S: Final = 0.01
BACK_OFF_MAX_S: Final = 0.2
DOCTOR: Final = "`kvroute doctor` says what is missing and how to install it"


def connect(settings: MooncakeSettings) -> Any:
    """A native client after set-up, with the memory that it lends, if any; :class:`StorageError` says why not.

    The master is asked first without the native library, which would wait long.
    """
    s = settings
    local = reach(parse_address(s.master, "mooncake: master"))
    for name, value in native_environment(s.timeout_ms).items():
        os.environ.setdefault(name, value)
    output = os.open(s.log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StorageError(f"the Mooncake client cannot be loaded; {DOCTOR}: {error}") from error
    store = MooncakeDistributedStore()
    where = s.host or local, "P2PHANDSHAKE"
    if code := store.setup(*where, s.segment_nbytes, LOCAL_BUFFER_NBYTES, s.protocol, s.devices, s.master):
        raise StorageError(f"Mooncake set-up with master {s.master} answered {describe(code)}")
    return store


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Native:
    """The calls of a store by one native client; payloads are rooms of the arena, which is registered with it. Keys of
    a call are distinct. Safe from several threads."""

    def __init__(self, settings: MooncakeSettings, memory: memoryview) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._changed = threading.Condition()  # guards the counts and the next two
        self._putting: set[BlockKey] = set()
        self._failures = 0  # calls in a row
        self._store = connect(settings)
        if code := self._store.register_buffer(_address(memory), memory.nbytes):
            raise StorageError(f"Mooncake does not register the arena: {describe(code)}")
        self._checked("", self._store.batch_is_exist([f"{settings.prefix}/probe/{uuid.uuid4().hex}"]))

    def put(self, headers: list[RecordHeader], rooms: list[memoryview], *, replace: bool) -> list[RecordHeader | None]:
        stored: dict[int, RecordHeader] = {}
        todo: dict[int, int] = {}  # the size of each object
        large = max((header.payload_nbytes for header in headers), default=0) > LARGE_NBYTES
        pool_nbytes = self._pool_nbytes() if large else sys.maxsize
        for i, (header, room) in enumerate(zip(headers, rooms, strict=True)):
            packed = pack_header(header)
            nbytes = header.payload_nbytes
            if len(packed) <= HEADER_NBYTES_MAX and nbytes + len(packed) <= pool_nbytes:
                room[nbytes : nbytes + len(packed)] = packed
                todo[i] = nbytes + len(packed)
        self.count(too_large=len(headers) - len(todo))
        give_up_s = time.monotonic() + self.settings.full_ms / 1e3
        pause_s = BACK_OFF_S
        with self._alone([headers[i].key for i in todo]):
            while todo:
                objects = [(self._name(headers[i].key), _address(rooms[i]), nbytes) for i, nbytes in todo.items()]
                codes = dict(
                    zip(todo, self._checked("failed_writes", self._put(*zip(*objects, strict=True))), strict=True)
                )
                if bugs := code_of.BUGS.intersection(codes.values()):
                    raise AssertionError(f"put of {len(todo)} records: {describe(min(bugs))}")
                stored |= {i: headers[i] for i, code in codes.items() if code == 0}
                taken = [i for i, code in codes.items() if code == code_of.EXISTS]
                there, removed = self._settled(headers, rooms, replace, taken) if taken else ({}, False)
                stored |= there
                todo = {i: todo[i] for i, code in codes.items() if code in code_of.LATER and i not in there}
                if todo and not removed:  # the pool is full, or a writer is in the middle of the key
                    if time.monotonic() + pause_s > give_up_s:
                        break
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, BACK_OFF_MAX_S)
        self.count(refused=len(todo))
        if todo and not stored and not self._pool_nbytes():  # as for a while after its master is back
            raise StorageError("the Mooncake pool has no memory: none of its owners is there, or back yet")
        return [stored.get(i) for i in range(len(headers))]

    @contextmanager
    def _alone(self, keys: list[BlockKey]) -> Iterator[None]:
        """No other thread puts these keys meanwhile: the native client breaks on two puts of a name."""
        with self._changed:
            self._changed.wait_for(lambda: self._putting.isdisjoint(keys))
            self._putting |= {*keys}
        try:
            yield
        finally:
            with self._changed:
                self._putting -= {*keys}
                self._changed.notify_all()

    def _settled(
        self, headers: list[RecordHeader], rooms: list[memoryview], replace: bool, taken: list[int]
    ) -> tuple[dict[int, RecordHeader], bool]:
        """Decide about records whose names exist: the older one stays, and is the answer, or is removed.

        And whether any was removed. One that is being written, or went meanwhile, is tried again by the caller.
        """
        names = [self._name(headers[i].key) for i in taken]
        older = []
        there = {}
        places = [rooms[i][headers[i].payload_nbytes + HEADER_NBYTES_MAX :] for i in taken]
        found = self._store.get_into_ranges(
            list(map(_address, places)),
            [[name] for name in names],
            [[[0]] for _ in taken],
            [[[headers[i].payload_nbytes]] for i in taken],
            [[[headers[i].nbytes]] for i in taken],
        )
        codes = self._checked("failed_reads", [each[0][0] for each in found])
        for i, name, place, code in zip(taken, names, places, codes, strict=True):
            header = _header(place, max(code, 0), headers[i].key)
            if header and not takes_the_place(headers[i], header, replace=replace):
                there[i] = header
            elif code >= 0 or code == code_of.INVALID:  # to be replaced; or too short for a record
                older.append(name)
        return there, bool(older) and not all(map(is_failure, self._store.batch_remove(older, True)))

    def _put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Put in sessions: a plain put answers 0 for a name that exists, as if it had stored these bytes."""
        from mooncake.store import ReplicateConfig

        codes = list(self._store.batch_put_session_start(list(names), list(sizes), ReplicateConfig()))
        begun = [i for i, code in enumerate(codes) if code == 0]
        if not begun:
            return codes
        for i in begun:
            codes[i] = code_of.LOST
        try:
            moved = self._store.batch_put_from_multi_buffer_ranges(
                [names[i] for i in begun],
                [[addresses[i]] for i in begun],
                [[sizes[i]] for i in begun],
                [[0] for _ in begun],
            )
            for i, count in zip(begun, moved, strict=True):
                codes[i] = 0 if count == sizes[i] else min(count, code_of.LOST)
            whole = [i for i in begun if codes[i] == 0]
            ended = self._store.batch_put_session_end([names[i] for i in whole]) if whole else []
            for i, code in zip(whole, ended, strict=True):
                codes[i] = code
        finally:
            if left := [names[i] for i in begun if codes[i] != 0]:  # else no client could store them for a while
                self._store.batch_put_session_revoke(left)
        return codes

    def get_into(self, keys: list[BlockKey], rooms: list[memoryview]) -> list[RecordHeader | Absence]:
        """Distinct keys, as the native side answers only one of two equal names in a batch."""
        sizes = [len(room) - MARGIN_NBYTES for room in rooms]
        names = list(map(self._name, keys))
        addresses = list(map(_address, rooms))
        codes = self._store.batch_get_into(names, addresses, [size + HEADER_NBYTES_MAX for size in sizes])
        found: list[RecordHeader | Absence] = []
        for key, room, size, code in zip(keys, rooms, sizes, self._checked("failed_reads", codes), strict=True):
            header = _header(room[size:], max(code - size, 0), key)
            if header and header.payload_nbytes == size and size + header.nbytes == code:
                found.append(header)
            else:  # INVALID: larger than the room for it
                found.append(Absence.CORRUPT if code >= 0 or code == code_of.INVALID else Absence.MISS)
        return found

    def contains(self, keys: list[BlockKey]) -> list[bool]:
        codes = self._store.batch_is_exist(list(map(self._name, keys)))
        return [code == 1 for code in self._checked("failed_reads", codes)]

    def delete(self, keys: list[BlockKey]) -> None:
        """Remove by force: a lease does not keep an object; one that is being written stays."""
        codes = self._store.batch_remove(list(map(self._name, keys)), True)
        if left := sum(map(is_failure, self._checked("failed_writes", codes))):
            raise StorageError(f"the Mooncake pool failed to remove {left} of {len(keys)} records")

    def flush(self) -> None:
        """Nothing to wait for: the pool is memory, and has every record that ``put`` answered for."""

    def usage(self) -> dict[str, int]:
        return pool_usage(self.settings.admin_address)

    def close(self) -> None:
        """Does nothing: the process ends. The native close would take a second, and crash beside a call."""

    def _pool_nbytes(self) -> int:
        """Bytes of the pool's memory; no limit if the pool does not say."""
        with suppress(StorageError):
            return self.usage()["capacity_nbytes"]
        return sys.maxsize

    def count(self, **by: int) -> None:
        with self._changed:
            self.counts.update({name: number for name, number in by.items() if number})

    def counted(self) -> dict[str, int]:
        with self._changed:
            counts = self.counts
            self.counts = Counter()
        return dict(counts)

    def _name(self, key: BlockKey) -> str:
        return f"{self.settings.prefix}/{FORMAT}/{key.hex()}"

    def _checked(self, what: str, codes: list[int]) -> list[int]:
        """The codes of a call; raises if all of them are failures, or one is the master's."""
        failures = sum(map(is_failure, codes))
        self.count(**{what: failures})
        failure = failure_of_call(codes)
        with self._changed:
            if failure:
                self._failures += 1
                is_last = failure in code_of.MASTER or self._failures >= FAILURES_MAX
                kind = StoreUnavailableError if is_last else StorageError
                raise kind(f"Mooncake at {self.settings.master}: {describe(failure)}")
            if not failures:
                self._failures = 0
        return codes


def _header(memory: memoryview, nbytes: int, key: BlockKey) -> RecordHeader | None:
    """The header of this key's record in the first ``nbytes``, if there is one."""
    with suppress(RecordError):
        header = unpack_header(memory[:nbytes])
        return header if header.key == key else None
    return None


class Process(apart_process.Process):
    """A native client's process: one that makes calls, or one that lends memory and hands it back when it is closed."""

    margin_nbytes = MARGIN_NBYTES

    def opened(self, url: str) -> Any:
        settings = msgspec.json.decode(url, type=MooncakeSettings)
        return connect(settings) if settings.segment_nbytes else Native(settings, self.memory)


if __name__ == "__main__":
    Process()
