"""Putting records: into the arena, then into the pool; a pool that is full is asked again for a while.

A name that exists is not written. The header of what it has is read then; an object that is to be replaced is removed,
and the record put again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from cache_manager.errors import RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, pack_header, takes_the_place, unpack_header
from cache_manager.spec import align
from cache_manager.storage.batch import rounds
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.calls import Calls, bytes_of
from cache_manager.storage.mooncake.codes import EXISTS, FULL, INVALID, describe, is_bug
from cache_manager.storage.mooncake.groups import GroupNames
from cache_manager.storage.mooncake.master import pool_usage

LARGE_NBYTES: Final = 1 << 20
"""Records above this are compared with the pool's size first: each one that it has no room for makes it evict."""
BACK_OFF_S: Final = 0.01
BACK_OFF_MAX_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record on its way."""

    header: RecordHeader
    packed: bytes
    payload: memoryview

    @property
    def key(self) -> BlockKey:
        return self.header.key

    @property
    def nbytes(self) -> int:
        return len(self.packed) + self.payload.nbytes


Answers = dict[BlockKey, RecordHeader]
"""What the pool is known to have."""


class Writer:
    """The puts of one store; of one key one at a time, because the native client bears no more."""

    def __init__(self, calls: Calls, groups: GroupNames) -> None:
        self._calls = calls
        self._link = calls.link
        self._groups = groups
        self._busy: set[BlockKey] = set()
        self._free = threading.Condition()

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], give_up_s: float, *, replace: bool
    ) -> list[RecordHeader | None]:
        records: list[Outgoing] = []
        for header, payload in zip(headers, payloads, strict=True):
            view = bytes_of(payload)
            if view.nbytes != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, view.nbytes)
            records.append(Outgoing(header, pack_header(header), view))
        largest = max([len(record.packed) for record in records], default=0)
        self._calls.header_room = max(self._calls.header_room, largest)
        limit = self._record_nbytes_max(max([record.payload.nbytes for record in records], default=0), give_up_s)
        answers: Answers = {}
        with self._alone({header.key for header in headers}, give_up_s):
            for once in rounds(header.key for header in headers):
                todo = {records[i].key: records[i] for i in once}
                for record in list(todo.values()):
                    if len(record.packed) + align(record.payload.nbytes) > limit:
                        del todo[record.key]
                        self._calls.count("too_large", 1)
                self._put_all(todo, answers, give_up_s, replace=replace)
        return [answers.get(header.key) for header in headers]

    @contextmanager
    def _alone(self, keys: set[BlockKey], give_up_s: float) -> Iterator[None]:
        with self._free:
            if not self._free.wait_for(lambda: self._busy.isdisjoint(keys), max(give_up_s - time.monotonic(), 0)):
                raise StorageError("another thread's put of the same keys did not end in time")
            self._busy |= keys
        try:
            yield
        finally:
            with self._free:
                self._busy -= keys
                self._free.notify_all()

    def _put_all(self, todo: dict[BlockKey, Outgoing], answers: Answers, give_up_s: float, *, replace: bool) -> None:
        """Put, and again for a while what the pool cannot take now: it is full, or an older object was in the way."""
        full_s = min(time.monotonic() + self._calls.settings.full_ms / 1e3, give_up_s)
        pause_s = BACK_OFF_S
        for key in todo:
            answers.pop(key, None)
        while True:
            full, taken = self._put(list(todo.values()), answers, give_up_s)
            later, removed = self._settle(taken, answers, give_up_s, replace=replace)
            later |= full
            wait_s = 0.0 if removed else pause_s
            if not later or time.monotonic() + wait_s > full_s or self._link.stopping.wait(wait_s):
                break
            todo, pause_s = later, pause_s if removed else min(2 * pause_s, BACK_OFF_MAX_S)
        self._calls.count("refused", len(later))
        if later and not answers and self._has_no_memory(give_up_s):
            raise StorageError("the Mooncake pool has no memory: none of its owners is there, or back yet")

    def _has_no_memory(self, give_up_s: float) -> bool:
        """Whether the pool is not full but without owners, as it is for a while after its master has come back."""
        try:
            usage = pool_usage(self._calls.settings.admin_address, max(give_up_s - time.monotonic(), 0.1))
        except StorageError:
            return False
        return usage["capacity_nbytes"] == 0

    def _record_nbytes_max(self, largest_nbytes: int, give_up_s: float) -> int:
        """What a record may have, as far as it matters for records of at most ``largest_nbytes``."""
        limit = self._link.arena.nbytes // 2
        if largest_nbytes > LARGE_NBYTES:
            try:
                return min(
                    limit,
                    pool_usage(self._calls.settings.admin_address, give_up_s - time.monotonic())["capacity_nbytes"],
                )
            except StorageError:  # the pool answers for itself, then
                return limit
        return limit

    def _put(
        self, records: list[Outgoing], answers: Answers, give_up_s: float
    ) -> tuple[dict[BlockKey, Outgoing], list[Outgoing]]:
        """Put under new names; those that the pool has no room for now, and those whose names exist."""
        full: dict[BlockKey, Outgoing] = {}
        taken: list[Outgoing] = []

        def send(chunk: list[Outgoing]) -> list[int]:
            sizes = [record.nbytes for record in chunk]
            offsets, start = self._calls.ranges(sizes, give_up_s)
            arena = self._link.arena.view
            try:
                for record, at, nbytes in zip(chunk, offsets, sizes, strict=True):
                    body = at + len(record.packed)
                    arena[at:body] = record.packed
                    arena[body : at + nbytes] = record.payload
            except BaseException:
                self._link.arena.give(start)
                raise
            with self._link.lock:
                groups = self._groups.of([record.key for record in chunk])
            request = wire.Put([self._calls.name(record.key) for record in chunk], offsets, sizes, groups)
            codes = self._link.call(self._link.writes, request, start, give_up_s)
            self._link.arena.give(start)
            for record, code in zip(chunk, codes, strict=True):
                if is_bug(code):
                    raise AssertionError(f"put of {record.key.hex()}: {describe(code)}")
                if code == 0:
                    answers[record.key] = record.header
                elif code == FULL:
                    full[record.key] = record
                elif code == EXISTS:
                    taken.append(record)
            return codes

        self._calls.each("failed_writes", self._calls.by_bytes(records, lambda record: record.nbytes), send)
        return full, taken

    def _settle(
        self, records: list[Outgoing], answers: Answers, give_up_s: float, *, replace: bool
    ) -> tuple[dict[BlockKey, Outgoing], bool]:
        """What becomes of records whose names exist: the older one stays, or is removed.

        Answers those to try again, and whether any was removed. An object that somebody is writing, or that went
        meanwhile, is looked at again.
        """
        again: dict[BlockKey, Outgoing] = {}
        older: list[BlockKey] = []

        def look(chunk: list[Outgoing]) -> list[int]:
            sizes = [len(record.packed) for record in chunk]
            offsets, start = self._calls.ranges(sizes, give_up_s)
            request = wire.Head([self._calls.name(record.key) for record in chunk], offsets, sizes)
            codes = self._link.call(self._link.reads, request, start, give_up_s)
            try:
                heads = [bytes(self._link.arena.view[at : at + n]) for at, n in zip(offsets, sizes, strict=True)]
            finally:
                self._link.arena.give(start)
            for record, code, head in zip(chunk, codes, heads, strict=True):
                stored = _header(head, record.key) if code == len(head) else None
                if stored is not None and not takes_the_place(record.header, stored, replace=replace):
                    answers[record.key] = stored
                    continue
                if code >= 0 or code == INVALID:  # there, to be replaced; or shorter than a header: no record
                    older.append(record.key)
                again[record.key] = record
            return [0 if code == INVALID else code for code in codes]

        self._calls.each("failed_reads", self._calls.by_bytes(records, lambda record: len(record.packed)), look)
        return again, len(self._calls.remove(older, give_up_s)) < len(older)


def _header(raw: bytes, key: BlockKey) -> RecordHeader | None:
    """The header of the record that an object begins with, or ``None`` where it is none of this key."""
    try:
        header = unpack_header(raw)
    except RecordError:
        return None
    return header if header.key == key else None


__all__ = ["Writer"]
