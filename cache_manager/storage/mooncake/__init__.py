"""Records in a Mooncake Store: memory of many machines, lent to one pool.

The native client has a process of its own (:mod:`.native`, by :mod:`cache_manager.storage.apart`). Nothing here imports
mooncake.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, checksum
from cache_manager.storage.apart import Apart, ApartSettings, ApartStore
from cache_manager.storage.apart_process import Put
from cache_manager.storage.mooncake.settings import MooncakeSettings
from cache_manager.storage.url import StoreUrl

NATIVE: Final = "cache_manager.storage.mooncake.native"
CLOSE_S: Final = 3.0
"""For handing memory back; it is taken after."""
GROUPS_MAX: Final = 65_536
"""Keys whose group is remembered; the oldest are forgotten first."""


def open_mooncake_store(url: StoreUrl) -> MooncakeStore:
    """``mooncake://HOST:PORT/PREFIX?segment=1GiB&...``, connected; ``docs/concepts/mooncake.md`` has the parameters."""
    return MooncakeStore(MooncakeSettings.from_url(url))


class MooncakeStore(ApartStore):
    """A ``StorageBackend`` in a Mooncake pool that other processes, and KV caches, share.

    Of what the pool fails to deliver beside other records, a call says miss (or not stored), and counts it; when all
    fail, :class:`StorageError` has the cause. After three such calls in a row, a missed deadline or a lost master,
    another client is connected, and until then :class:`StoreUnavailableError` is raised at once. ``put`` answers the
    header that the pool has, which it may evict at any time, and ``None`` where it has no room, or another writer is in
    the middle of the key. A replacement is no single step: between removal and put, other writers may store theirs, and
    the answer names it. ``usage`` is the whole pool's.

    ``counters`` besides those of :class:`Apart`: ``failed_reads``, ``failed_writes``, ``too_large``, ``refused`` (no
    room), ``torn`` (changed while they were read, twice).
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self.settings = settings
        self._groups: OrderedDict[BlockKey, str] = OrderedDict()
        self._naming = threading.Lock()
        self._lender = self._apart(settings, 1) if settings.segment_nbytes else None
        try:
            super().__init__(self._apart(replace(settings, segment_nbytes=0), settings.arena_nbytes))
        except BaseException:
            self._end_lender()
            raise

    @staticmethod
    def _apart(s: MooncakeSettings, arena_nbytes: int) -> Apart:
        limits = ApartSettings(
            call_s=s.timeout_ms / 1e3,
            set_up_s=s.connect_ms / 1e3,
            close_s=CLOSE_S,
            arena_nbytes=arena_nbytes,
        )
        return Apart(f"mooncake://{s.master}/{s.prefix}", limits, NATIVE, msgspec.json.encode(s).decode())

    @property
    def lender_pid(self) -> int | None:
        """Of the process that lends memory, if one does."""
        return self._lender.pid if self._lender else None

    def name_groups(self, groups: Mapping[BlockKey, str]) -> None:
        """Mooncake's eviction groups of records that are put next: the objects of one group are evicted together."""
        with self._naming:
            for key, group in groups.items():
                self._groups[key] = group
                self._groups.move_to_end(key)
            while len(self._groups) > GROUPS_MAX:
                self._groups.popitem(last=False)

    def _asked_to_put(self, headers: list[RecordHeader], offsets: list[int], replace: bool) -> Put:
        with self._naming:
            groups = [self._groups.get(header.key, "") for header in headers] if self._groups else []
        return Put(headers, offsets, replace, groups)

    get_unsummed = ApartStore.get_into
    """For code that sums payloads. A transfer that the native client gave up may write into the arena later."""

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Whole records only. One whose sum is wrong is read once more: it is corrupt when the same bytes come again,
        and else not there any more."""
        found = self.get_unsummed(keys, buffers)
        if wrong := _wrong(found, buffers):
            sums, again = {i: checksum(buffers[i]) for i in wrong}, list[RecordHeader | Absence]([])
            with suppress(StorageError):
                again = self.get_unsummed([keys[i] for i in wrong], [buffers[i] for i in wrong])
            for i, header in zip(wrong, again or [Absence.MISS] * len(wrong), strict=True):
                found[i] = header
            for i in _wrong(found, buffers):
                same = checksum(buffers[i]) == sums[i]
                found[i] = Absence.CORRUPT if same else Absence.MISS
                self.apart.count(torn=int(not same))
        return found

    def close(self) -> None:
        """End the client, then the process that lends memory, which hands it back."""
        super().close()
        self._end_lender()

    def _end_lender(self) -> None:
        if self._lender is not None:
            self._lender.close()


def _wrong(found: Sequence[RecordHeader | Absence], buffers: Sequence[memoryview]) -> list[int]:
    """Which payloads are not those that their headers prove."""
    pairs = enumerate(zip(found, buffers, strict=True))
    return [i for i, (h, buffer) in pairs if isinstance(h, RecordHeader) and checksum(buffer) != h.payload_xxh3]


__all__ = ["MooncakeSettings", "MooncakeStore", "open_mooncake_store"]
