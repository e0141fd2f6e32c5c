"""A store's own process: ``python -m cache_manager.storage.apart_process SOCKET_FD PARENT_PID ARENA_FD``.

Here a store may hang, crash or hold the interpreter's lock: who asks waits with a deadline, kills this process and
starts another. Messages are MessagePack, never pickle; records lie in the arena, which both processes map.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from typing import Any, Final, Literal, NoReturn

import msgspec

from cache_manager.child import Parent
from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, BoundedBackend
from cache_manager.record import RecordHeader
from cache_manager.storage import open_store

CALLS_MAX: Final = 4
"""Calls of the store at a time: each has a slot of the arena."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """The first command. No ``url``: there is no store, and only what else the process can do is asked of it."""

    url: str
    arena_nbytes: int


class Put(msgspec.Struct, frozen=True, tag=True):
    headers: list[RecordHeader]
    offsets: list[int]  # of the payloads, in the arena
    replace: bool
    groups: list[str] = []  # of a Mooncake pool


class Get(msgspec.Struct, frozen=True, tag=True):
    keys: list[BlockKey]
    offsets: list[int]
    nbytes: list[int]


class Call(msgspec.Struct, frozen=True, tag=True):
    """Any other call of a store. After ``close``, for which it waits until the others have ended, the process ends."""

    what: Literal["contains", "delete", "flush", "usage", "close"]
    keys: list[BlockKey] = []


class Move(msgspec.Struct, frozen=True, tag=True):
    """Copy whole records between two shared regions, by name. Only the cache-transfer process can."""

    source: str
    target: str
    sources: list[int]
    targets: list[int]


Command = Open | Put | Get | Call | Move


class Asked(msgspec.Struct, frozen=True):
    number: int
    command: Command


class Failure(msgspec.Struct, frozen=True):
    """An exception: its type's name in :mod:`cache_manager.errors`, its message, and its fields as far as they fit.

    ``ends``: only another process can do better.
    """

    kind: str
    message: str
    fields: dict[str, str | int] = {}
    ends: bool = False


class Answer(msgspec.Struct, frozen=True):
    """How a command ended. ``stored`` has, key by key, the number of the offered header that is stored now, the header
    of another record that is, or nothing. ``counts`` is what the process has counted since its last answer."""

    number: int = 0
    stored: list[int | RecordHeader | None] = []
    found: list[RecordHeader | Absence] = []
    there: list[bool] = []
    usage: dict[str, int] = {}
    counts: dict[str, int] = {}
    failure: Failure | None = None


encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
_decode_asked = msgspec.msgpack.Decoder(Asked).decode


class Process:
    """Answers commands until it is told to close or its parent is gone. Threads take turns at the socket: the one that
    receives a command answers it, and the next one receives."""

    margin_nbytes = 0
    """Free bytes of the arena that it wants in front of each payload."""
    ending: tuple[type[KVRouteError], ...] = ()
    """What the store raises when only another process can do better."""

    def __init__(self, parent: Parent, arena_fd: int) -> None:
        self._parent, self._arena_fd = parent, arena_fd
        self._receiving = threading.Lock()
        self._running = threading.Semaphore(CALLS_MAX + 1)
        self.store: Any = None

    def serve(self) -> NoReturn:
        for _ in range(CALLS_MAX):
            threading.Thread(target=self._take_turns, daemon=True).start()
        self._take_turns()

    def _take_turns(self) -> NoReturn:
        while True:
            with self._receiving:
                body = self._parent.receive()
                if body is None:
                    os._exit(1)  # stores are crash-safe, and nobody waits for an answer any more
                asked = _decode_asked(body)
                if isinstance(asked.command, Open):  # nothing else begins meanwhile
                    self._answer(asked)
                    continue
                if asked.command == Call("close"):
                    for _ in range(CALLS_MAX):  # one thread is here; the others end what they do
                        self._running.acquire()
                    self._answer(asked)
                    os._exit(0)
                self._running.acquire()
            self._answer(asked)
            self._running.release()

    def _answer(self, asked: Asked) -> None:
        try:
            answer = self.done(asked.command)
        except Exception as error:  # noqa: BLE001 - this process's loop edge: the asker gets the reason
            answer = Answer(failure=self._failure(error))
        self._parent.send(encode(msgspec.structs.replace(answer, number=asked.number, counts=self.counted())))

    def done(self, command: Command) -> Answer:
        match command:
            case Open(url, nbytes):
                self.memory = memoryview(mmap.mmap(self._arena_fd, nbytes))
                self.store = self.opened(url)
                bound = self.store.record_nbytes_max if isinstance(self.store, BoundedBackend) else sys.maxsize
                return Answer(usage={"record_nbytes_max": bound, "margin_nbytes": self.margin_nbytes})
            case Call("close") if self.store is None:
                return Answer()
        assert self.store is not None, "a process without a store"
        match command:
            case Put():
                return Answer(stored=self.put(command))
            case Get():
                return Answer(found=self.get(command))
            case Call("contains", keys):
                return Answer(there=self.store.contains(keys))
            case Call("delete", keys):
                self.store.delete(keys)
            case Call("usage"):
                return Answer(usage=dict(self.store.usage()))
            case Call(what):
                getattr(self.store, what)()
        return Answer()

    def opened(self, url: str) -> Any:
        """What has the calls of a ``StorageBackend``, or ``None``."""
        return open_store(url) if url else None

    def put(self, put: Put) -> list[int | RecordHeader | None]:
        payloads = self._places(put.offsets, [header.payload_nbytes for header in put.headers])
        offered = {id(header): i for i, header in enumerate(put.headers)}
        return [offered.get(id(each), each) for each in self.store.put(put.headers, payloads, replace=put.replace)]

    def get(self, get: Get) -> list[RecordHeader | Absence]:
        found: list[RecordHeader | Absence] = self.store.get_into(get.keys, self._places(get.offsets, get.nbytes))
        return found

    def counted(self) -> dict[str, int]:
        return {}

    def _places(self, offsets: list[int], sizes: list[int]) -> list[memoryview]:
        self.check(offsets, sizes)
        return [self.memory[at : at + n] for at, n in zip(offsets, sizes, strict=True)]

    def check(self, offsets: list[int], sizes: list[int]) -> None:
        """Every range, and the margin before it, lies in the arena."""
        margin, end = self.margin_nbytes, len(self.memory)
        assert all(margin <= at <= at + n <= end for at, n in zip(offsets, sizes, strict=True)), "ranges of the arena"

    def _failure(self, error: Exception) -> Failure:
        if not isinstance(error, KVRouteError):
            return Failure("StorageError", f"{type(error).__name__}: {error}")
        fields = {name: value if isinstance(value, int) else str(value) for name, value in vars(error).items()}
        kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == KVRouteError.__module__)
        return Failure(next(kinds), str(error), fields, isinstance(error, self.ending))


def main(process: type[Process]) -> NoReturn:
    fd, pid, arena_fd = map(int, sys.argv[1:4])
    process(Parent(fd, pid), arena_fd).serve()


if __name__ == "__main__":
    main(Process)
