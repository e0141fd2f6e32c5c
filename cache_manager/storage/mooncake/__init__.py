"""Records in a Mooncake Store: memory of many machines, lent to one pool.

The native client has a process of its own (:mod:`.native`, by :mod:`cache_manager.storage.apart`). Nothing here imports
mooncake.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, checksum
from cache_manager.storage.apart import ApartSettings, ApartStore
from cache_manager.storage.mooncake.settings import MooncakeSettings
from cache_manager.storage.url import StoreUrl

NATIVE: Final = "cache_manager.storage.mooncake.native"
CLOSE_S: Final = 3.0
"""Seconds to hand memory back; then the process is killed."""
LOOKS: Final = 3
"""Further reads of a damaged record: another writer may be replacing it."""


def open_mooncake_store(url: StoreUrl) -> MooncakeStore:
    """``mooncake://HOST:PORT/PREFIX?segment=1GiB&...``, connected; ``docs/concepts/mooncake.md`` has the parameters."""
    return MooncakeStore(MooncakeSettings.from_url(url))


class MooncakeStore(ApartStore):
    """A ``StorageBackend`` in a Mooncake pool, shared with other processes and KV caches.

    If the pool fails for some records of a call, these are misses (or not stored), and counted; if it fails for all,
    :class:`StorageError` has the cause. After three such calls in a row, a missed deadline or a lost master, another
    client is connected; until then :class:`StoreUnavailableError` is raised at once. ``put`` answers the header of the
    record in the pool, which may evict it at any time, or ``None`` if there is no room or another writer is in the
    middle of the key. A replacement takes two steps: between removal and put another writer may store its record, and
    the answer names that one. ``usage`` is the whole pool's.

    ``counters`` besides those of :class:`ApartStore`: ``failed_reads``, ``failed_writes``, ``too_large``, ``refused``
    (no room).
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._lender = ApartStore(*_apart(settings, 1)) if settings.segment_nbytes else None
        try:
            super().__init__(*_apart(replace(settings, segment_nbytes=0), settings.arena_nbytes))
        except BaseException:
            self._end_lender()
            raise

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], *, looks: int = LOOKS
    ) -> list[RecordHeader | Absence]:
        """Whole records only, checked in the caller's buffers: a transfer that the native client gave up may write into
        the arena later. A damaged one is read again, ``looks`` times at most."""
        found = super().get_into(keys, buffers)
        for i, header in enumerate(found):
            if isinstance(header, RecordHeader) and checksum(buffers[i]) != header.payload_xxh3:
                found[i] = Absence.CORRUPT
        corrupt = [i for i, header in enumerate(found) if header is Absence.CORRUPT]
        if corrupt and looks:
            again: list[RecordHeader | Absence] = [Absence.MISS] * len(corrupt)
            with suppress(StorageError):  # a look that fails costs no record that was found
                again = self.get_into([keys[i] for i in corrupt], [buffers[i] for i in corrupt], looks=looks - 1)
            for i, header in zip(corrupt, again, strict=True):
                found[i] = header
        return found

    def close(self) -> None:
        """End the client, then the process that lends memory, which hands it back."""
        try:
            super().close()
        finally:
            self._end_lender()

    def _end_lender(self) -> None:
        if self._lender is not None:
            self._lender.close()


def _apart(s: MooncakeSettings, arena_nbytes: int) -> tuple[str, ApartSettings, str, str]:
    limits = ApartSettings(
        call_s=s.timeout_ms / 1e3, set_up_s=s.connect_ms / 1e3, close_s=CLOSE_S, arena_nbytes=arena_nbytes
    )
    return f"mooncake://{s.master}/{s.prefix}", limits, NATIVE, msgspec.json.encode(s).decode()


__all__ = ["MooncakeSettings", "MooncakeStore", "open_mooncake_store"]
