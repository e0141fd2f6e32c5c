"""The open extents of a store and how records are found and read in them, for the writer and for readers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cache_manager.errors import StoreFormatError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader
from cache_manager.storage.disk import IOV_MAX, Disk, Room, read_all
from cache_manager.storage.guard import ClosingStore, OpenCheck
from cache_manager.storage.slots.directory import StoreDirectory
from cache_manager.storage.slots.extent import USES_MAX, Extent, open_extent, read_heads
from cache_manager.storage.slots.index import LOCAL, NOWHERE, ORDINAL_BITS, KeyIndex
from cache_manager.storage.slots.limits import is_older

_RUN_MAX: Final = IOV_MAX // 2
_LOOKS_MAX: Final = 4

Wanted = tuple[Extent, int, list[int], list[Room], bytearray]
"""Neighbours that are read in one call: extent, first slot, positions in the call, room for bytes, and their heads."""

Found = list[RecordHeader | Absence]


class Shelf(ClosingStore):
    """What the writer and a reader have in common. ``lock`` guards everything in memory and is never held over I/O."""

    def __init__(self, path: Path, disk: Disk, ttl_s: float | None, clock: Callable[[], float]) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.guard = OpenCheck(path, self.lock)
        self.index = KeyIndex()
        self.calls = 0  # that have used records
        self.failed_reads = 0
        self.refused: dict[str, str] = {}
        """Files with an extent's name that are none, or cannot be read now, and why; they are left alone."""
        self._disk = disk
        self._ttl_s = ttl_s
        self._clock = clock
        self._suspects: set[int] = set()  # slots that the disk did not give back

    @contextmanager
    def looking(self) -> Iterator[None]:
        """With the lock, in an open store; ``StoreClosedError``."""
        self.guard.check()
        with self.lock:
            self.guard.check()
            yield

    def find_all(self, keys: Iterable[BlockKey]) -> list[int]:
        """The slots of records that are not too old, or ``NOWHERE``. Held: lock."""
        slots = self.index.find_all(keys)
        if (ttl_s := self._ttl_s) is not None:
            now_s = self._clock()
            for i, slot in enumerate(slots):
                if slot != NOWHERE:
                    extent = self.index.extents[slot >> ORDINAL_BITS]
                    if is_older(extent.created_ms(slot & LOCAL), now_s, ttl_s):
                        slots[i] = NOWHERE
        return slots

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self.looking():
            return [slot != NOWHERE for slot in self.find_all(keys)]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> Found:
        """Read records straight into the callers' buffers; neighbours that are asked for in their order in one call.

        A record whose head has changed while it was read is looked up again. One that the disk does not give back is a
        miss, counted in ``failed_reads``, and is asked for again the next time.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        found: Found = [Absence.MISS] * len(keys)
        numbers: Sequence[int] = range(len(keys))
        for _ in range(_LOOKS_MAX):
            changed: list[int] = []
            self.guard.check()
            with self.lock:  # looking(), without what a generator costs each read
                self.guard.check()
                runs = self._plan(numbers, self.find_all([keys[i] for i in numbers]), buffers, found)
            for run in runs:
                self._read(run, found, changed)
            if not changed:
                break
            self._look_again()
            numbers = changed
        return found

    def _plan(
        self, numbers: Sequence[int], slots: Sequence[int], buffers: Sequence[memoryview], found: Found
    ) -> list[Wanted]:
        """What to read in which calls; ``found`` gets what no disk has to be asked. Held: lock."""
        self.calls += 1
        planned: list[tuple[Extent, int, list[int], list[Room]]] = []
        positions: list[int] = []
        vector: list[Room] = []
        after, pad, nbytes, uses = NOWHERE, None, 0, bytearray()
        for i, slot in zip(numbers, slots, strict=True):
            if slot == NOWHERE:
                continue
            local = slot & LOCAL
            if slot != after or not local or len(positions) == _RUN_MAX:
                extent = self.index.extents[slot >> ORDINAL_BITS]
                extent.used_at = self.calls
                nbytes, uses = extent.shape.layout[1], extent.uses
                pad = bytearray(extent.shape.step - nbytes)
                positions, vector = [], []
                planned.append((extent, local, positions, vector))
            elif pad:
                vector.append(pad)
            if (count := uses[local]) < USES_MAX:
                uses[local] = count + 1
            if buffers[i].nbytes != nbytes:
                found[i], after = Absence.CORRUPT, NOWHERE
                if positions:
                    continue
                planned.pop()
                continue
            positions.append(i)
            vector.append(buffers[i])
            after = slot + 1
        wanted = []
        for extent, local, positions, vector in planned:
            at = local * extent.shape.head_nbytes
            wanted.append(
                (extent, local, positions, vector, extent.heads[at : at + len(positions) * extent.shape.head_nbytes])
            )
        return wanted

    def _read(self, run: Wanted, found: Found, changed: list[int]) -> None:
        """Read what was planned; ``changed`` gets those whose heads are others by now."""
        extent, local, positions, vector, heads = run
        shape, slot = extent.shape, extent.ordinal << ORDINAL_BITS | local
        nbytes = (len(positions) - 1) * shape.step + shape.layout[1]
        try:
            whole = read_all(self._disk, extent.fd, vector, extent.payload_at(local), nbytes) == nbytes
            now = self._heads_now(extent, local, len(positions)) if whole else b""
        except OSError:
            whole = False
        if not whole:
            if len(positions) > 1:  # the file was cut, or a sector is bad: find out whose
                for k, i in enumerate(positions):
                    own = heads[k * shape.head_nbytes : (k + 1) * shape.head_nbytes]
                    self._read(
                        (extent, local + k, [i], [vector[2 * k if shape.step > shape.layout[1] else k]], own),
                        found,
                        changed,
                    )
                return
            with self.lock:
                self.failed_reads += 1
                self._suspects.add(slot)
            return
        unpack, head_nbytes, (fingerprint, payload_nbytes, _), at = (
            shape.head.unpack_from,
            shape.head_nbytes,
            shape.layout,
            0,
        )
        same = now == heads
        for i in positions:
            if same or now[at : at + head_nbytes] == heads[at : at + head_nbytes]:
                _, _, generation, origin, sum_, key, valid, _ = unpack(heads, at)
                found[i] = RecordHeader(key, fingerprint, generation, origin, valid, payload_nbytes, sum_)
            else:
                changed.append(i)
            at += head_nbytes
        if self._suspects:
            with self.lock:
                self._suspects.difference_update(range(slot, slot + len(positions)))

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        """The heads of slots whose payloads have just been read."""
        raise NotImplementedError

    def _look_again(self) -> None:
        """What was looked up has changed."""

    def _open(self, directory: StoreDirectory, name: str, flags: int, nbytes_max: float) -> Extent | None:
        """An extent with its heads; ``None`` where it is gone, or refused and remembered as such."""
        path = str(self.path / name)
        try:
            extent = open_extent(self._disk, directory.open(name, flags), name, path, nbytes_max)
            read_heads(self._disk, extent)
        except FileNotFoundError:
            return None
        except (StoreFormatError, OSError) as error:
            self.refused[name] = str(error)
            return None
        self.refused.pop(name, None)
        return extent


def open_flags(*, writes: bool) -> int:
    return os.O_RDWR if writes else os.O_RDONLY
