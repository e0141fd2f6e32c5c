"""Runs TransferEngine in a killable child, which shares memory with its link."""

from __future__ import annotations

import math
import mmap
import os
import time
from typing import Final

from cache_manager.child import Child
from cache_manager.spec import align
from transfer import mooncake_calls as calls
from transfer.errors import TransferError

PAGE_NBYTES: Final = 4096


class MooncakeUnavailableError(TransferError):
    """The Mooncake wheel or a library that it needs is not here."""


class Arena:
    """Memory that a link and its engine's process both see. Pages that nobody wrote to cost nothing."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = align(nbytes, PAGE_NBYTES)
        self.fd = os.memfd_create("kvroute-link", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._memory = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._memory)

    def close(self) -> None:
        """Unmap it; views of it that somebody still has keep theirs."""
        os.close(self.fd)
        self.view.release()
        try:
            self._memory.close()
        except BufferError:  # the last view unmaps it
            return


class EngineProcess:
    """A process with one native engine. Used by one thread; no method but :meth:`wait_ready` and :meth:`end` waits.

    ``ready`` is ``None`` until the process has said how it stands. ``gone``: it ended, or was ended, and was reaped:
    it touches the arena no more.
    """

    def __init__(self, arena: Arena, start: calls.Start, wake_fd: int, timeout_s: float) -> None:
        self.ready: calls.Ready | None = None
        self.gone = False
        self._child = Child("transfer.mooncake_child", arena.fd, wake_fd, environment=_environment(timeout_s))
        self._child.send(calls.encode(start))

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_ready(self, wait_s: float) -> None:
        """Wait until it runs; :class:`TransferError` or :class:`MooncakeUnavailableError` says why it does not."""
        give_up_s = time.monotonic() + wait_s
        while self.ready is None and not self.gone and (left_s := give_up_s - time.monotonic()) > 0:
            assert self.take(left_s) == []
        ready = self.ready or calls.Ready(error=f"no answer within {wait_s} s" if not self.gone else "it ended")
        if ready.missing:
            raise MooncakeUnavailableError(
                f"mooncake: wanted TransferEngine, got {ready.error}; "
                "pip install 'kvroute[mooncake-cpu]', then kvroute doctor"
            )
        if ready.error:
            raise TransferError(f"Mooncake's TransferEngine did not start: {ready.error}")

    def write(self, write: calls.Write) -> bool:
        """Have bytes written; ``False``: not now. Who is told ``True`` is told of its end, unless ``gone`` is."""
        if self.gone or self.ready is None or self.ready.error or not self._child.writable:
            return False
        self._child.send(calls.encode(write))
        return True

    def take(self, wait_s: float = 0.0) -> list[calls.Done]:
        """What has ended since the last call; waits for something up to ``wait_s``."""
        done: list[calls.Done] = []
        while not self.gone:
            body = self._child.receive(0.0 if done else wait_s)
            if body is None:
                self.end()
            if not body:
                break
            answer = calls.decode_answer(body)
            if isinstance(answer, calls.Done):
                done.append(answer)
            else:
                self.ready = answer
                wait_s = 0.0
        return done

    def end(self) -> None:
        """Kill it and see it gone. Harmless the second time."""
        if not self.gone:
            self._child.end()
            self.gone = True


def _environment(timeout_s: float) -> dict[str, str]:
    """What the process has besides what the operator has set: short waits."""
    seconds = str(max(5, math.ceil(timeout_s)))
    return {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TRANSFER_TIMEOUT": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
    }
