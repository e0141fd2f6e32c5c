"""Putting records: into the arena, then into the pool; a pool that is full is asked again for a while."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from cache_manager.errors import RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, pack_header
from cache_manager.spec import align
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.calls import Calls, bytes_of
from cache_manager.storage.mooncake.codes import FULL, describe, is_bug
from cache_manager.storage.mooncake.groups import GroupNames
from cache_manager.storage.mooncake.hidden import Hidden
from cache_manager.storage.mooncake.master import pool_usage

LARGE_NBYTES: Final = 1 << 20
"""Records above this are compared with the pool's size first: each one that it has no room for makes it evict."""
BACK_OFF_S: Final = 0.01
BACK_OFF_MAX_S: Final = 0.2

Outgoing = tuple[BlockKey, bytes, memoryview]
"""A record on its way: key, packed header, payload."""


class Writer:
    """The puts of one store."""

    def __init__(self, calls: Calls, hidden: Hidden, groups: GroupNames) -> None:
        self._calls = calls
        self._link = calls.link
        self._hidden = hidden
        self._groups = groups

    def put(self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], give_up_s: float) -> list[bool]:
        todo: dict[BlockKey, Outgoing] = {}
        stored: dict[BlockKey, bool] = {}
        for header, payload in zip(headers, payloads, strict=True):
            view = bytes_of(payload)
            if view.nbytes != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, view.nbytes)
            stored[header.key] = False
            todo[header.key] = header.key, pack_header(header), view
        largest = max([len(packed) for _, packed, _ in todo.values()], default=0)
        self._calls.header_room = max(self._calls.header_room, largest)
        limit = self._record_nbytes_max(max([view.nbytes for _, _, view in todo.values()], default=0), give_up_s)
        for key in [key for key, packed, view in todo.values() if len(packed) + align(view.nbytes) > limit]:
            del todo[key]
            self._calls.count("too_large", 1)
        full_s = min(time.monotonic() + self._calls.settings.full_ms / 1e3, give_up_s)
        pause_s = BACK_OFF_S
        while True:
            self._hidden.remove([key for key in todo if key in self._hidden], give_up_s)
            later = {key: record for key, record in todo.items() if key in self._hidden}
            later |= self._put(todo, later, stored, give_up_s)
            if not later or time.monotonic() + pause_s > full_s or self._link.stopping.wait(pause_s):
                break
            todo, pause_s = later, min(2 * pause_s, BACK_OFF_MAX_S)
        self._calls.count("refused", len(later))
        return [stored[header.key] for header in headers]

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
        self,
        todo: Mapping[BlockKey, Outgoing],
        hidden: Mapping[BlockKey, object],
        stored: dict[BlockKey, bool],
        give_up_s: float,
    ) -> dict[BlockKey, Outgoing]:
        """Put what is not hidden; the records that the pool has no room for now."""
        full: dict[BlockKey, Outgoing] = {}

        def send(chunk: list[Outgoing]) -> list[int]:
            sizes = [len(packed) + view.nbytes for _, packed, view in chunk]
            offsets, start = self._calls.ranges(sizes, give_up_s)
            arena = self._link.arena.view
            try:
                for (_, packed, view), at, nbytes in zip(chunk, offsets, sizes, strict=True):
                    body = at + len(packed)
                    arena[at:body] = packed
                    arena[body : at + nbytes] = view
            except BaseException:
                self._link.arena.give(start)
                raise
            with self._link.lock:
                groups = self._groups.of([key for key, _, _ in chunk])
            request = wire.Put([self._calls.name(key) for key, _, _ in chunk], offsets, sizes, groups)
            codes = self._link.call(self._link.writes, request, start, give_up_s)
            self._link.arena.give(start)
            for record, code in zip(chunk, codes, strict=True):
                if is_bug(code):
                    raise AssertionError(f"put of {record[0].hex()}: {describe(code)}")
                stored[record[0]] = code == 0
                if code == FULL:
                    full[record[0]] = record
            return codes

        records = [record for key, record in todo.items() if key not in hidden]
        chunks = self._calls.by_bytes(records, lambda record: len(record[1]) + record[2].nbytes)
        self._calls.each("failed_writes", chunks, send)
        return full


__all__ = ["Writer"]
