"""The native engine's own process: ``python -m transfer.mooncake_child SOCKET_FD PARENT_PID ARENA_FD WAKE_FD``.

A first write to a peer that is stopped keeps its caller for a minute, the end of an engine stops every thread of its
process for up to a second, and a batch that is asked about once too often is a segmentation fault (all seen with
0.3.13). Here only this process bears it. The link that started it waits with deadlines and kills it when it closes.
Nothing else in ``transfer`` imports mooncake.

Each target has a thread, so that one that hangs holds up nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import sys
import threading
import time
from typing import Any, Final, NoReturn

from cache_manager.child import Parent
from transfer import mooncake_calls as calls

CHECK_S: Final = 0.0002
IDLE_S: Final = 60.0
TARGETS_MAX: Final = 64


class Child:
    """Answers one socket until the other end is gone."""

    def __init__(self, link: Parent, arena_fd: int, wake_fd: int) -> None:
        self._link = link
        self._arena_fd = arena_fd
        self._wake_fd = wake_fd
        self._entering = threading.Lock()
        self._queues: dict[str, queue.SimpleQueue[calls.Write]] = {}
        self._engine: Any = None
        self._memory: mmap.mmap | None = None
        self._base = 0

    def serve(self) -> NoReturn:
        while (body := self._link.receive()) is not None:
            match calls.decode_asked(body):
                case calls.Start() as start:
                    self._say(self._start(start))
                case calls.Write() as write:
                    self._queue(write)
        os._exit(0)  # without the engine's own end, which takes a second and hands nothing back

    def _start(self, start: calls.Start) -> calls.Ready:
        assert self._engine is None
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            return calls.Ready(error=str(error), missing=True)
        engine = TransferEngine()
        if code := engine.initialize(start.host, "P2PHANDSHAKE", start.protocol, start.device):
            return calls.Ready(error=f"TransferEngine.initialize on {start.host} answered {code}")
        self._memory = mmap.mmap(self._arena_fd, start.arena_nbytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if start.registered and (code := engine.register_memory(self._base, start.arena_nbytes)):
            return calls.Ready(error=f"register_memory of {start.arena_nbytes} bytes answered {code}")
        self._engine = engine
        return calls.Ready(engine.get_rpc_port(), self._base)

    def _queue(self, write: calls.Write) -> None:
        assert self._memory is not None
        assert write.offset >= 0
        assert write.nbytes > 0
        assert write.offset + write.nbytes <= len(self._memory)
        with self._entering:
            waiting = self._queues.get(write.target)
            if waiting is None and len(self._queues) < TARGETS_MAX:
                waiting = self._queues[write.target] = queue.SimpleQueue()
                threading.Thread(target=self._write, args=(write.target, waiting), daemon=True).start()
            if waiting is not None:
                waiting.put(write)
                return
        self._say(calls.Done(write.number, -1))

    def _write(self, target: str, waiting: queue.SimpleQueue[calls.Write]) -> None:
        """A target's thread, until it has had nothing to do for a while."""
        batches: dict[int, int] = {}  # number of a write -> what the engine calls it
        while (writes := self._next(target, waiting, bool(batches))) is not None:
            for write in writes:
                batch = int(
                    self._engine.transfer_submit_write(target, self._base + write.offset, write.address, write.nbytes)
                )
                if batch == 0:
                    self._say(calls.Done(write.number, -1))
                else:
                    batches[write.number] = batch
            for number, batch in list(batches.items()):
                if status := int(self._engine.transfer_check_status(batch)):
                    del batches[number]  # the engine has forgotten it: asked again, it crashes
                    self._say(calls.Done(number, status))
            if batches:
                time.sleep(CHECK_S)

    def _next(self, target: str, waiting: queue.SimpleQueue[calls.Write], busy: bool) -> list[calls.Write] | None:
        """The writes that wait; ``None``: there was none for long, and the next one gets another thread."""
        writes: list[calls.Write] = []
        with contextlib.suppress(queue.Empty):
            writes.append(waiting.get_nowait() if busy else waiting.get(timeout=IDLE_S))
            while True:
                writes.append(waiting.get_nowait())
        if writes or busy:
            return writes
        with self._entering:
            if not waiting.empty():
                return writes
            del self._queues[target]
            return None

    def _say(self, answer: calls.Ready | calls.Done) -> None:
        self._link.send(calls.encode(answer))
        with contextlib.suppress(BlockingIOError):  # woken so often that it wakes anyway
            os.eventfd_write(self._wake_fd, 1)


if __name__ == "__main__":
    Child(Parent(*map(int, sys.argv[1:3])), *map(int, sys.argv[3:])).serve()
