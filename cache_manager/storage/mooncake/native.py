"""The native Mooncake client, in a process of its own: ``python -m cache_manager.storage.mooncake.native``.

The native library ends the process that misuses it, holds the interpreter's lock for seconds in set-up and close, hangs
after ``fork`` and has no deadlines. Here it may (:mod:`cache_manager.storage.apart`). Only this module imports it.

An object is a record: its packed header, then the payload, which lies so in the arena: the header is written into the
margin in front of the payload. An object's name is the key's; it is written once and never changed: a record that takes
another's place is put when the older object has been removed, by force. A reader of the older one may just then get
bytes of whatever took its memory, so that what is read counts when its sums are right, never because of a result code:
its header's here, its payload's where it is used. What is no record of its key is read once more: when the same bytes
come again it is corrupt, otherwise it is a miss.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec

from cache_manager.errors import RecordError, StorageError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, checksum, pack_header, takes_the_place, unpack_header
from cache_manager.storage import apart_process
from cache_manager.storage.apart_process import Get, Put
from cache_manager.storage.mooncake import codes as code_of
from cache_manager.storage.mooncake.codes import describe, is_failure
from cache_manager.storage.mooncake.master import check_ready, pool_usage, reach
from cache_manager.storage.mooncake.settings import MooncakeSettings, native_environment, parse_address

FORMAT: Final = 2
HEADER_NBYTES_MAX: Final = 2048
"""Of a record here: bits for 15,000 rows. The margin has room for two: of a record that is put, and of an older one."""
LOCAL_BUFFER_NBYTES: Final = 16 << 20
FAILURES_MAX: Final = 3
"""Calls in a row that fail altogether, before another client is wanted."""
LARGE_NBYTES: Final = 1 << 20
"""Records above this are compared with the pool's size first: each one that it has no room for makes it evict."""
BACK_OFF_S: Final = 0.01
BACK_OFF_MAX_S: Final = 0.2
DOCTOR: Final = "`kvroute doctor` says what is missing and how to install it"


def connect(settings: MooncakeSettings) -> Any:
    """A native client that is set up, with the memory that it lends, if it does; :class:`StorageError` says why not.

    The master is asked first without the native library, which would wait for long.
    """
    s = settings
    local = reach(parse_address(s.master, "mooncake: master"))
    check_ready(s.admin_address)
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


class Native:
    """The calls of a store by one native client; the arena is registered with it. Safe from several threads."""

    def __init__(self, settings: MooncakeSettings, memory: memoryview) -> None:
        self.settings, self.memory = settings, memory
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the counts and the next two
        self._putting: set[BlockKey] = set()
        self._failures = 0  # calls in a row
        self._header_nbytes = 192  # of the record that was read last
        self._store = connect(settings)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if code := self._store.register_buffer(self._address, memory.nbytes):
            raise StorageError(f"Mooncake does not register the arena: {describe(code)}")
        self._try_out()

    def _try_out(self) -> None:
        """Ask for, put, get and remove a small object: set-up is good with a master of another version, too."""
        name, wanted = [f"{self.settings.prefix}/probe/{uuid.uuid4().hex}"], os.urandom(64)
        code = self._store.batch_is_exist(name)[0]
        what = "are its version and ours equal?"
        if code == 0:
            self.memory[:64] = wanted
            code, what = self._stored(name, [self._address], [64], [])[0], "of the first write"
            if code == 0:
                self.memory[:64] = bytes(64)
                code = min(self._store.batch_get_into(name, [self._address], [64])[0], 0)
                self._store.batch_remove(name, True)
        if is_failure(code) or (code == 0 and self.memory[:64] != wanted):
            raise StorageError(f"Mooncake at {self.settings.master} answered {describe(code)}; {what}")

    def count(self, **by: int) -> None:
        with self._lock:
            self.counts.update({name: number for name, number in by.items() if number})

    def counted(self) -> dict[str, int]:
        with self._lock:
            counts, self.counts = self.counts, Counter()
        return dict(counts)

    def put(self, put: Put) -> list[int | RecordHeader | None]:
        headers, packed = put.headers, [pack_header(header) for header in put.headers]
        sizes = [len(head) + header.payload_nbytes for head, header in zip(packed, headers, strict=True)]
        room = self._pool_nbytes() if max(sizes, default=0) > LARGE_NBYTES else len(self.memory)
        todo = [i for i, head in enumerate(packed) if len(head) <= HEADER_NBYTES_MAX and sizes[i] <= room]
        self.count(too_large=len(headers) - len(todo))
        for i in todo:
            self.memory[put.offsets[i] - len(packed[i]) : put.offsets[i]] = packed[i]
        stored: dict[BlockKey, int | RecordHeader] = {}
        give_up_s, pause_s = time.monotonic() + self.settings.full_ms / 1e3, BACK_OFF_S
        while todo:
            with self._alone([headers[i].key for i in todo]) as keys:
                once = {key: todo[at] for key, at in keys.items()}
                for key in once:
                    stored.pop(key, None)
                codes = self._put(put, list(once.values()), packed)
                stored |= {key: once[key] for key, code in zip(once, codes, strict=True) if code == 0}
                taken = [i for i, code in zip(once.values(), codes, strict=True) if code == code_of.EXISTS]
                removed = self._settle(put, taken, packed, stored) if taken else False
            again = {i for i, code in zip(once.values(), codes, strict=True) if code in code_of.LATER}
            left = [i for i in todo if once.get(headers[i].key) != i or (i in again and headers[i].key not in stored)]
            if len(left) == len(todo) and not removed:  # the pool is full, or somebody is in the middle of the key
                if time.monotonic() + pause_s > give_up_s:
                    break
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, BACK_OFF_MAX_S)
            todo = left
        self.count(refused=len(todo))
        if todo and not stored and self._pool_nbytes() == 0:  # as it is for a while after its master is back
            raise StorageError("the Mooncake pool has no memory: none of its owners is there, or back yet")
        return [stored.get(header.key) for header in headers]

    @contextmanager
    def _alone(self, keys: list[BlockKey]) -> Iterator[dict[BlockKey, int]]:
        """Where each key that nobody else puts now stands first: the native client does not bear two puts of a name."""
        with self._lock:
            mine = {key: at for at, key in reversed([*enumerate(keys)]) if key not in self._putting}
            self._putting |= mine.keys()
        try:
            yield mine
        finally:
            with self._lock:
                self._putting -= mine.keys()

    def _put(self, put: Put, once: list[int], packed: list[bytes]) -> list[int]:
        """A code for each of these records, whose keys differ."""
        names = [self._name(put.headers[i].key) for i in once]
        places = [self._address + put.offsets[i] - len(packed[i]) for i in once]
        sizes = [len(packed[i]) + put.headers[i].payload_nbytes for i in once]
        codes = self._stored(names, places, sizes, [put.groups[i] for i in once] if put.groups else []) if once else []
        if bugs := code_of.BUGS.intersection(codes):
            raise AssertionError(f"put of {len(once)} records: {describe(min(bugs))}")
        return self._checked("failed_writes", codes)

    def _settle(
        self, put: Put, taken: list[int], packed: list[bytes], stored: dict[BlockKey, int | RecordHeader]
    ) -> bool:
        """What becomes of records whose names exist: the older one stays, and is the answer, or is removed.

        Whether any was removed. One that somebody is writing, or that went meanwhile, is looked at again.
        """
        names, counts = [self._name(put.headers[i].key) for i in taken], [len(packed[i]) for i in taken]
        starts, zeros = [put.offsets[i] - 2 * HEADER_NBYTES_MAX for i in taken], [[[0]] for _ in taken]
        places = [self._address + at for at in starts]
        found = self._store.get_into_ranges(places, [[n] for n in names], zeros, zeros, [[[n]] for n in counts])
        codes, older = self._checked("failed_reads", [each[0][0] for each in found]), []
        for i, name, at, code in zip(taken, names, starts, codes, strict=True):
            header, there = put.headers[i], None
            with suppress(RecordError):
                there = unpack_header(self.memory[at : at + max(code, 0)])
            if there and there.key == header.key and not takes_the_place(header, there, replace=put.replace):
                stored[header.key] = there
            elif code >= 0 or code == code_of.INVALID:  # to be replaced; or shorter than a header: no record
                older.append(name)
        return bool(older) and not all(map(is_failure, self._store.batch_remove(older, True)))

    def _stored(self, names: list[str], places: list[int], sizes: list[int], groups: list[str]) -> list[int]:
        """In sessions: a plain put answers 0 for a name that exists, as if it had stored these bytes."""
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        if any(groups):
            config.group_ids = groups
        codes = list(self._store.batch_put_session_start(names, sizes, config))
        begun = [i for i, code in enumerate(codes) if code == 0]
        if not begun:
            return codes
        for i in begun:
            codes[i] = code_of.LOST
        try:
            mine = [names[i] for i in begun]
            moved = self._store.batch_put_from_multi_buffer_ranges(
                mine, [[places[i]] for i in begun], [[sizes[i]] for i in begun], [[0] for _ in begun]
            )
            for i, count in zip(begun, moved, strict=True):
                codes[i] = 0 if count == sizes[i] else min(count, code_of.LOST)
            whole = [i for i in begun if codes[i] == 0]
            ended = self._store.batch_put_session_end([names[i] for i in whole]) if whole else []
            for i, code in zip(whole, ended, strict=True):
                codes[i] = code
        finally:
            if left := [names[i] for i in begun if codes[i] != 0]:  # else nobody could store them for a while
                self._store.batch_put_session_revoke(left)
        return codes

    def get(self, get: Get) -> list[RecordHeader | Absence]:
        answers: list[RecordHeader | Absence] = [Absence.MISS] * len(get.keys)
        todo = list(range(len(get.keys)))
        while todo:  # the native side answers one of two equal names in a batch
            once = list({get.keys[i]: i for i in reversed(todo)}.values())
            try:
                unsound = self._read(get, once, answers, self._header_nbytes)
                again = self._read(get, list(unsound), answers, HEADER_NBYTES_MAX) if unsound else {}
            except StorageError:
                if len(todo) == len(get.keys) and not any(isinstance(each, RecordHeader) for each in answers):
                    raise
                again = {}  # what was not found is a miss beside others, and is counted
            for i, came in again.items():
                same = came != code_of.EXPIRED and unsound[i] in (came, code_of.INVALID)
                answers[i] = Absence.CORRUPT if same else Absence.MISS
                self.count(torn=int(not same))
            todo = [i for i in todo if i not in set(once)]
        return answers

    def _read(
        self, get: Get, once: list[int], answers: list[RecordHeader | Absence], header_nbytes: int
    ) -> dict[int, int]:
        """Read what is a record into its place, its header into ``answers``; of what is none, the sum of what came.

        That is ``INVALID`` where more came than there was room for, ``EXPIRED`` where the lease ended on the way.
        """
        starts = [get.offsets[i] - header_nbytes for i in once]
        names = [self._name(get.keys[i]) for i in once]
        codes = self._store.batch_get_into(
            names, [self._address + at for at in starts], [header_nbytes + get.nbytes[i] for i in once]
        )
        unsound: dict[int, int] = {}
        for i, at, code in zip(once, starts, self._checked("failed_reads", codes), strict=True):
            if code in (code_of.INVALID, code_of.EXPIRED):
                unsound[i] = code
            elif code >= 0:
                raw, place = self.memory[at : at + code], get.offsets[i]
                try:
                    header = unpack_header(raw[:HEADER_NBYTES_MAX])
                except RecordError:
                    unsound[i] = checksum(raw)
                    continue
                payload = raw[header.nbytes :]
                if header.key != get.keys[i] or not header.payload_nbytes == payload.nbytes == get.nbytes[i]:
                    unsound[i] = checksum(raw)
                    continue
                if header.nbytes != header_nbytes:
                    self.memory[place : place + payload.nbytes] = bytes(payload)
                    self._header_nbytes = header.nbytes
                answers[i] = header
        return unsound

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        codes = self._store.batch_is_exist([self._name(key) for key in keys])
        return [code == 1 for code in self._checked("failed_reads", codes)]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """By force: a lease does not keep an object; one that is being written stays."""
        codes = self._store.batch_remove([self._name(key) for key in dict.fromkeys(keys)], True)
        if left := sum(map(is_failure, self._checked("failed_writes", codes))):
            raise StorageError(f"the Mooncake pool failed to remove {left} of {len(keys)} records")

    def flush(self) -> None:
        """Nothing to wait for: the pool is memory, and has every record that ``put`` answered for."""

    def usage(self) -> Mapping[str, int]:
        return pool_usage(self.settings.admin_address)

    def close(self) -> None:
        """Nothing: the process ends. The native close would take a second, and be a crash beside a call."""

    def _name(self, key: BlockKey) -> str:
        return f"{self.settings.prefix}/{FORMAT}/{key.hex()}"

    def _pool_nbytes(self) -> int:
        """What the pool has memory for; as much as the arena has where it does not say so."""
        with suppress(StorageError):
            return pool_usage(self.settings.admin_address)["capacity_nbytes"]
        return len(self.memory)

    def _checked(self, what: str, codes: list[int]) -> list[int]:
        """The codes of a call; raises when none of them is an answer."""
        failures = [code for code in codes if is_failure(code)]
        self.count(**{what: len(failures)})
        master = max(code_of.MASTER.intersection(failures), default=0)
        with self._lock:
            if master or (failures and len(failures) == len(codes)):
                self._failures += 1
                last = master or self._failures >= FAILURES_MAX
                kind = StoreUnavailableError if last else StorageError
                raise kind(f"Mooncake at {self.settings.master}: {describe(master or failures[0])}")
            self._failures = self._failures if failures else 0
        return codes


class Lender:
    """A native client that lends memory to the pool, makes no calls, and hands its memory back when it is closed."""

    def __init__(self, settings: MooncakeSettings) -> None:
        self.close: Callable[[], object] = connect(settings).close


class Process(apart_process.Process):
    """A native client's process: one that makes calls, or one that lends memory."""

    margin_nbytes = 2 * HEADER_NBYTES_MAX
    ending = (StoreUnavailableError,)

    def opened(self, url: str) -> Native | Lender:
        settings = msgspec.json.decode(url, type=MooncakeSettings)
        return Lender(settings) if settings.segment_nbytes else Native(settings, self.memory)

    def put(self, put: Put) -> list[int | RecordHeader | None]:
        self.check(put.offsets, [header.payload_nbytes for header in put.headers])
        stored: list[int | RecordHeader | None] = self.store.put(put)
        return stored

    def get(self, get: Get) -> list[RecordHeader | Absence]:
        self.check(get.offsets, get.nbytes)
        found: list[RecordHeader | Absence] = self.store.get(get)
        return found

    def counted(self) -> dict[str, int]:
        return self.store.counted() if isinstance(self.store, Native) else {}


if __name__ == "__main__":
    apart_process.main(Process)
