"""Putting records: into the arena, then into the pool; a pool that is full is asked again for a while.

A name that exists is not written. The header of what it has is read then; an object that is to be replaced is removed,
and the record put again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from cache_manager.errors import RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, pack_header, takes_the_place, unpack_header
from cache_manager.spec import align
from cache_manager.storage.batch import flat, rounds
from cache_manager.storage.guard import HeldKeys
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.link import Link
from cache_manager.storage.mooncake.master import pool_usage

LARGE_NBYTES: Final = 1 << 20
"""Records above this are compared with the pool's size first: each one that it has no room for makes it evict."""
BACK_OFF_S: Final = 0.01
BACK_OFF_MAX_S: Final = 0.2
GROUPS_MAX: Final = 65_536
"""Keys whose group is remembered; the oldest are forgotten first."""


class Outgoing(NamedTuple):
    """A record on its way."""

    header: RecordHeader
    packed: bytes
    payload: memoryview
    nbytes: int


Answers = dict[BlockKey, RecordHeader]
"""What the pool is known to have."""


class Writer:
    """The puts of one store; of one key one at a time, because the native client bears no more."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._keys = HeldKeys()
        self._lock = threading.Lock()  # of the groups
        self._groups: OrderedDict[BlockKey, str] = OrderedDict()

    def name_groups(self, groups: Mapping[BlockKey, str]) -> None:
        with self._lock:
            for key, group in groups.items():
                self._groups[key] = group
                self._groups.move_to_end(key)
            while len(self._groups) > GROUPS_MAX:
                self._groups.popitem(last=False)

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], give_up_s: float, *, replace: bool
    ) -> list[RecordHeader | None]:
        records: list[Outgoing] = []
        for header, payload in zip(headers, payloads, strict=True):
            packed = pack_header(header)
            records.append(Outgoing(header, packed, flat(header, payload), len(packed) + header.payload_nbytes))
        link = self._link
        link.header_room = max([link.header_room, *(len(record.packed) for record in records)])
        large = any(record.nbytes > LARGE_NBYTES for record in records)
        limit = self._pool_nbytes(give_up_s) if large else link.arena.slot_nbytes
        answers: Answers = {}
        with self._keys.hold({header.key for header in headers}, wait_s=give_up_s - time.monotonic()):
            for once in rounds(header.key for header in headers):
                todo = {records[i].header.key: records[i] for i in once if align(records[i].nbytes) <= limit}
                link.count(too_large=len(once) - len(todo))
                self._put_all(todo, answers, give_up_s, replace=replace)
        return [answers.get(header.key) for header in headers]

    def _put_all(self, todo: dict[BlockKey, Outgoing], answers: Answers, give_up_s: float, *, replace: bool) -> None:
        """Put, and again for a while what the pool cannot take now: it is full, or an older object was in the way."""
        link = self._link
        full_s = min(time.monotonic() + link.settings.full_ms / 1e3, give_up_s)
        pause_s = BACK_OFF_S
        for key in todo:
            answers.pop(key, None)
        while todo:
            codes = dict(zip(todo, self._send(list(todo.values()), give_up_s), strict=True))
            answers |= {key: todo[key].header for key, code in codes.items() if code == 0}
            taken = [todo[key] for key, code in codes.items() if code == wire.EXISTS]
            removed = self._settle(taken, answers, give_up_s, replace=replace)
            todo = {key: todo[key] for key, code in codes.items() if code in wire.LATER and key not in answers}
            wait_s = 0.0 if removed else pause_s
            if not todo or time.monotonic() + wait_s > full_s or link.stopping.wait(wait_s):
                break
            pause_s = pause_s if removed else min(2 * pause_s, BACK_OFF_MAX_S)
        link.count(refused=len(todo))
        if todo and not answers and self._pool_nbytes(give_up_s) == 0:  # as it is for a while after its master is back
            raise StorageError("the Mooncake pool has no memory: none of its owners is there, or back yet")

    def _pool_nbytes(self, give_up_s: float) -> int:
        """What the pool has memory for, a slot of the arena at most, which is also the answer when it gives none."""
        most = self._link.arena.slot_nbytes
        with suppress(StorageError):
            usage = pool_usage(self._link.settings.admin_address, give_up_s - time.monotonic())
            return min(most, usage["capacity_nbytes"])
        return most

    def _send(self, records: Sequence[Outgoing], give_up_s: float) -> list[int]:
        """Put under new names; a code for each."""
        link = self._link

        def send(chunk: Sequence[Outgoing]) -> list[int]:
            with link.arena.lend([record.nbytes for record in chunk], give_up_s) as lent:
                arena = link.arena.view
                for (_, packed, payload, nbytes), at in zip(chunk, lent.offsets, strict=True):
                    body = at + len(packed)
                    arena[at:body] = packed
                    arena[body : at + nbytes] = payload
                keys = [record.header.key for record in chunk]
                request = wire.Put([link.name(key) for key in keys], lent.offsets, lent.nbytes, self._groups_of(keys))
                return link.call(link.writes, request, give_up_s, lent)

        codes = link.each(link.writes, records, lambda record: record.nbytes, send)
        if bugs := wire.BUGS.intersection(codes):
            raise AssertionError(f"put of {len(records)} records: {wire.describe(min(bugs))}")
        return codes

    def _groups_of(self, keys: Sequence[BlockKey]) -> list[str]:
        """``""`` for a key without a group; empty when no key has one."""
        if not self._groups:
            return []
        with self._lock:
            groups = [self._groups.get(key, "") for key in keys]
        return groups if any(groups) else []

    def _settle(self, taken: Sequence[Outgoing], answers: Answers, give_up_s: float, *, replace: bool) -> bool:
        """What becomes of records whose names exist: the older one stays, and is the answer, or is removed.

        Whether any was removed. One that somebody is writing, or that went meanwhile, is looked at again.
        """
        link = self._link
        heads: dict[BlockKey, bytes] = {}

        def look(chunk: Sequence[Outgoing]) -> list[int]:
            with link.arena.lend([len(record.packed) for record in chunk], give_up_s) as lent:
                names = [link.name(record.header.key) for record in chunk]
                codes = link.call(link.reads, wire.Head(names, lent.offsets, lent.nbytes), give_up_s, lent)
                for record, at, nbytes, code in zip(chunk, lent.offsets, lent.nbytes, codes, strict=True):
                    if code == nbytes:
                        heads[record.header.key] = bytes(link.arena.view[at : at + nbytes])
                return codes

        codes = link.each(link.reads, taken, lambda record: len(record.packed), look)
        older: list[BlockKey] = []
        for record, code in zip(taken, codes, strict=True):
            key = record.header.key
            stored = _header(heads.get(key, b""), key)
            if stored is not None and not takes_the_place(record.header, stored, replace=replace):
                answers[key] = stored
            elif code >= 0 or code == wire.INVALID:  # to be replaced; or shorter than a header: no record
                older.append(key)
        codes = link.ask(link.writes, wire.Remove, older, give_up_s)
        return not all(map(wire.is_failure, codes))


def _header(raw: bytes, key: BlockKey) -> RecordHeader | None:
    """The header of the record that an object begins with, or ``None`` where it is none of this key."""
    try:
        header = unpack_header(raw)
    except RecordError:
        return None
    return header if header.key == key else None


__all__ = ["Writer"]
