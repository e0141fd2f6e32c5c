"""A store's own process: ``python -m cache_manager.storage.apart_process SOCKET_FD PARENT_PID ARENA_FD``.

Here a store may hang, crash or hold the interpreter's lock: who asks waits with a deadline, kills this process and
starts another. Messages are MessagePack, never pickle; records lie in the arena, which both processes map.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import msgspec

from cache_manager.child import Parent
from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, BoundedBackend, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.storage import open_store
from cache_manager.storage.arena import CALLS_MAX


class Open(msgspec.Struct, frozen=True, tag=True):
    """The first command. No ``url``: there is no store, and only what else the process can do is asked of it."""

    url: str
    arena_nbytes: int


class Put(msgspec.Struct, frozen=True, tag=True):
    headers: list[RecordHeader]
    offsets: list[int]  # in the arena
    replace: bool


class Get(msgspec.Struct, frozen=True, tag=True):
    keys: list[BlockKey]
    offsets: list[int]
    nbytes: list[int]


class Contains(msgspec.Struct, frozen=True, tag=True):
    keys: list[BlockKey]


class Delete(msgspec.Struct, frozen=True, tag=True):
    keys: list[BlockKey]


class Flush(msgspec.Struct, frozen=True, tag=True): ...


class Usage(msgspec.Struct, frozen=True, tag=True): ...


class Close(msgspec.Struct, frozen=True, tag=True):
    """End: what runs is finished, the store is closed."""


class Move(msgspec.Struct, frozen=True, tag=True):
    """Copy whole records between two shared regions, by name. Only the cache-transfer process can."""

    source: str
    target: str
    sources: list[int]
    targets: list[int]


Command = Open | Put | Get | Contains | Delete | Flush | Usage | Close | Move


class Asked(msgspec.Struct, frozen=True):
    number: int
    command: Command


class Failure(msgspec.Struct, frozen=True):
    """An exception: its type's name in :mod:`cache_manager.errors`, its message, and its fields as far as they fit."""

    kind: str
    message: str
    fields: dict[str, str | int]


class Answer(msgspec.Struct, frozen=True):
    """How a command ended. ``stored`` has, key by key, the number of the offered header that is stored now, the header
    of another record that is, or nothing."""

    number: int = 0
    stored: list[int | RecordHeader | None] = []
    found: list[RecordHeader | Absence] = []
    there: list[bool] = []
    usage: dict[str, int] = {}
    failure: Failure | None = None


encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
_decode_asked = msgspec.msgpack.Decoder(Asked).decode


class Process:
    """Answers commands, up to ``CALLS_MAX`` at a time, until it is told to close or its parent is gone."""

    def __init__(self, parent: Parent, arena_fd: int) -> None:
        self._parent, self._arena_fd = parent, arena_fd
        self._store: StorageBackend | None = None
        self._threads = ThreadPoolExecutor(CALLS_MAX, "calls")

    def serve(self) -> NoReturn:
        while (body := self._parent.receive()) is not None:
            self.take(_decode_asked(body))
        os._exit(1)  # stores are crash-safe, and nobody waits for an answer any more

    def take(self, asked: Asked) -> None:
        if isinstance(asked.command, Open):
            self.answer(asked)
        elif isinstance(asked.command, Close):
            self._threads.shutdown()
            self.answer(asked)
            os._exit(0)
        else:
            self._threads.submit(self.answer, asked)

    def answer(self, asked: Asked) -> None:
        try:
            answer = msgspec.structs.replace(self.done(asked.command), number=asked.number)
        except Exception as error:  # noqa: BLE001 - this process's loop edge: the asker gets the reason
            answer = Answer(asked.number, failure=_failure(error))
        self._parent.send(encode(answer))

    def done(self, command: Command) -> Answer:
        match command:
            case Open(url, nbytes):
                self._memory = memoryview(mmap.mmap(self._arena_fd, nbytes))
                self._store = open_store(url) if url else None
                bound = self._store.record_nbytes_max if isinstance(self._store, BoundedBackend) else sys.maxsize
                return Answer(usage={"record_nbytes_max": bound})
            case Close() if self._store is None:
                return Answer()
        assert self._store is not None, "a process without a store"
        match command:
            case Put(headers, offsets, replace):
                payloads = self._places(offsets, [header.payload_nbytes for header in headers])
                offered = {id(header): i for i, header in enumerate(headers)}
                answers = self._store.put(headers, payloads, replace=replace)
                return Answer(stored=[offered.get(id(each), each) for each in answers])
            case Get(keys, offsets, sizes):
                return Answer(found=self._store.get_into(keys, self._places(offsets, sizes)))
            case Contains(keys):
                return Answer(there=self._store.contains(keys))
            case Delete(keys):
                self._store.delete(keys)
            case Flush():
                self._store.flush()
            case Usage():
                return Answer(usage=dict(self._store.usage()))
            case Close():
                self._store.close()
        return Answer()

    def _places(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        ranges, end = list(zip(offsets, sizes, strict=True)), len(self._memory)
        assert all(0 <= at <= at + n <= end for at, n in ranges), "ranges of the arena"
        return [self._memory[at : at + n] for at, n in ranges]


def _failure(error: Exception) -> Failure:
    if not isinstance(error, KVRouteError):
        return Failure("StorageError", f"{type(error).__name__}: {error}", {})
    fields = {name: value if isinstance(value, int) else str(value) for name, value in vars(error).items()}
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == KVRouteError.__module__)
    return Failure(next(kinds), str(error), fields)


def main(process: type[Process]) -> NoReturn:
    fd, pid, arena_fd = map(int, sys.argv[1:4])
    process(Parent(fd, pid), arena_fd).serve()


if __name__ == "__main__":
    main(Process)
