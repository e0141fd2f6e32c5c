"""A store's own process: ``python -m cache_manager.storage.apart_process``.

Here a store may hang, crash or hold the interpreter's lock: the engine waits with a deadline, kills this process and
starts another. Questions and answers are MessagePack, never pickle; records lie in the arena, which both processes map.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from cache_manager import errors
from cache_manager.child import arguments, serve
from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, BoundedBackend
from cache_manager.record import RecordHeader
from cache_manager.storage import open_store

CALLS_MAX: Final = 4
"""Calls at a time; each has a channel and a slot of the arena."""
CALLS: Final[dict[str, tuple[Any, Any]]] = {  # what a question takes, and what its answer gives
    "open": (tuple[str, int], tuple[int, int]),  # URL, bytes of the arena; record_nbytes_max, margin_nbytes
    "put": (tuple[list[RecordHeader], int, list[int], bool], list[int | RecordHeader | None]),
    "get": (tuple[list[BlockKey], int, list[int], list[int]], list[RecordHeader | Absence]),
    "contains": (tuple[list[BlockKey]], list[bool]),
    "delete": (tuple[list[BlockKey]], Any),
    "flush": (tuple[()], Any),
    "usage": (tuple[()], dict[str, int]),
    "close": (tuple[()], Any),
    "copy": (tuple[str, str, list[int], list[int]], Any),  # regions, blocks: cache_manager.transfer_manager
    "work": (tuple[bytes], bytes),  # of a process of another kind, in a form of its own
}
"""Payloads are named by the slot's place in the arena, and theirs in the slot. ``put`` answers, key by key, the number
of the offered header if that is stored now, or the header of the other record that is, or nothing."""


class Failure(msgspec.Struct, frozen=True):
    """An exception: its type's name in :mod:`cache_manager.errors`, its message, and its fields."""

    kind: str
    message: str
    fields: dict[str, str | int] = {}

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if not isinstance(error, KVRouteError):
            return cls("StorageError", f"{type(error).__name__}: {error}")
        fields = {name: value if isinstance(value, int) else str(value) for name, value in vars(error).items()}
        kinds = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        return cls(next(kinds), str(error), fields)

    def error(self) -> KVRouteError:
        kind = getattr(errors, self.kind)
        error: KVRouteError = kind.__new__(kind, self.message)
        vars(error).update(self.fields)
        return error


encode: Final = msgspec.msgpack.encode
_QUESTION: Final = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_TAKES: Final = {what: msgspec.msgpack.Decoder(takes) for what, (takes, _) in CALLS.items()}
ANSWERS: Final = {
    what: msgspec.msgpack.Decoder(tuple[gives | None, Failure | None, dict[str, int]])  # type: ignore[valid-type]
    for what, (_, gives) in CALLS.items()
}
"""What a call gives, or why it gives nothing, and what the process has counted since its last answer."""


class Process:
    """Answers questions by methods of its own and of its store.

    If the store has a method ``counted``, its counts go along with every answer.
    """

    margin_nbytes = 0
    """Bytes of the arena behind each payload, which the store gets with it."""

    def __init__(self) -> None:
        self.store: Any = None
        serve(self.answer, self.tidy)

    def answer(self, body: bytes) -> bytes:
        counted: Callable[[], dict[str, int]] = getattr(self.store, "counted", dict)
        try:
            what, takes = _QUESTION.decode(body)
            owner = self if hasattr(self, what) else self.store
            arguments = _TAKES[what].decode(takes)
            gives = getattr(owner, what)(*arguments)
            return encode((gives, None, counted()))
        except Exception as error:  # noqa: BLE001 - this process's loop edge: the asker gets the reason
            return encode((None, Failure.of(error), counted()))

    def tidy(self) -> None:
        """Give back what is not needed any more; called now and then."""

    def open(self, url: str, nbytes: int) -> tuple[int, int]:
        (arena_fd,) = arguments()
        self.memory = memoryview(mmap.mmap(arena_fd, nbytes))
        self.store = self.opened(url)
        bound = self.store.record_nbytes_max if isinstance(self.store, BoundedBackend) else sys.maxsize
        return bound, self.margin_nbytes

    def opened(self, url: str) -> Any:
        """An object with the calls of a ``StorageBackend``, or ``None``."""
        return open_store(url) if url else None

    def put(
        self, headers: list[RecordHeader], at: int, places: list[int], replace: bool
    ) -> list[int | RecordHeader | None]:
        payloads = self.rooms(at, places, [header.payload_nbytes for header in headers])
        offered = {id(header): i for i, header in enumerate(headers)}
        return [offered.get(id(each), each) for each in self.store.put(headers, payloads, replace=replace)]

    def get(self, keys: list[BlockKey], at: int, places: list[int], sizes: list[int]) -> list[RecordHeader | Absence]:
        found: list[RecordHeader | Absence] = self.store.get_into(keys, self.rooms(at, places, sizes))
        return found

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def rooms(self, at: int, places: list[int], sizes: list[int]) -> list[memoryview]:
        """The payloads of a slot, with their margins."""
        rooms: list[memoryview] = []
        for place, nbytes in zip(places, sizes, strict=True):
            whole = nbytes + self.margin_nbytes
            first = at + place
            room = self.memory[first : first + whole]
            assert 0 <= nbytes == len(room) - self.margin_nbytes, "in the arena"
            rooms.append(room)
        return rooms


if __name__ == "__main__":
    Process()
