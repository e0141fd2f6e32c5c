"""What putting, getting and removing share: records cut into native calls, ranges of the arena, names of objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, TypeVar

from cache_manager.errors import RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer
from cache_manager.spec import align
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.codes import describe, is_failure
from cache_manager.storage.mooncake.link import Link
from cache_manager.storage.mooncake.settings import MooncakeSettings

FORMAT: Final = 2
HEADER_ROOM_NBYTES: Final = 1024

_T = TypeVar("_T")


class Calls:
    """``header_room`` is what readers leave for a header: as much as the largest that was put here."""

    def __init__(self, settings: MooncakeSettings, link: Link) -> None:
        self.settings = settings
        self.link = link
        self.header_room = HEADER_ROOM_NBYTES

    def each(self, counter: str, chunks: list[list[_T]], call: Callable[[list[_T]], list[int]]) -> None:
        """Make the calls; raise when not one key got an answer, else count the keys that got none."""
        failed, answered = 0, 0
        error: StorageError | None = None
        for chunk in chunks:
            if error is None:
                try:
                    codes = call(chunk)
                except StorageError as stopped:
                    error = stopped
                else:
                    failures = [code for code in codes if is_failure(code)]
                    failed += len(failures)
                    answered += len(codes) - len(failures)
                    cause = failures[0] if failures else 0
                    continue
            failed += len(chunk)
        self.count(counter, failed)
        if failed and not answered:
            raise error or StorageError(f"Mooncake at {self.settings.master}: {describe(cause)}")

    def by_bytes(self, items: Sequence[_T], nbytes: Callable[[_T], int]) -> list[list[_T]]:
        """Chunks of ``KEYS_PER_CALL_MAX`` items and a quarter of the arena at most; a larger item has its own."""
        limit = self.link.arena.nbytes // 4
        chunks: list[list[_T]] = []
        room = 0
        for item in items:
            size = align(nbytes(item))
            if not chunks or len(chunks[-1]) == wire.KEYS_PER_CALL_MAX or size > room:
                chunks.append([])
                room = limit
            chunks[-1].append(item)
            room -= size
        return chunks

    def ranges(self, sizes: Sequence[int], give_up_s: float) -> tuple[list[int], int]:
        """Where each of a chunk's records lies in the arena, and the range that holds them all."""
        ends = list(accumulate([align(size) for size in sizes], initial=0))
        start = self.link.arena.take(ends.pop(), give_up_s)
        if start is None:
            raise StorageError("the Mooncake arena stayed full; a larger one is the parameter arena")
        return [start + at for at in ends], start

    def remove(self, keys: Sequence[BlockKey], give_up_s: float) -> list[BlockKey]:
        """Remove the objects of ``keys``; those that the pool failed to remove. What is not there is removed."""
        left: list[BlockKey] = []

        def send(chunk: list[BlockKey]) -> list[int]:
            codes = self.link.call(self.link.writes, wire.Remove([self.name(key) for key in chunk]), None, give_up_s)
            left.extend(key for key, code in zip(chunk, codes, strict=True) if is_failure(code))
            return codes

        self.each("failed_writes", by_count(keys), send)
        return left

    def name(self, key: BlockKey) -> str:
        return f"{self.settings.prefix}/{FORMAT}/{key.hex()}"

    def count(self, counter: str, by: int) -> None:
        if by:
            with self.link.lock:
                self.link.counts[counter] += by


def by_count(items: Sequence[_T]) -> list[list[_T]]:
    most = wire.KEYS_PER_CALL_MAX
    return [list(items[at : at + most]) for at in range(0, len(items), most)]


def bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise RecordError("payload", "contiguous bytes", f"strides {view.strides}")
    return view.cast("B")


__all__ = ["Calls", "by_count", "bytes_of"]
