"""The native engine, held at arm's length: a process, memory that it shares, and an end that always comes."""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from typing import Final

from cache_manager.spec import align
from transfer import mooncake_calls as calls
from transfer.errors import TransferError

PAGE_NBYTES: Final = 4096
REAPED_S: Final = 10.0
"""A killed process is gone at once; this is for a machine that swaps."""


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
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.setblocking(False)
        fds = (theirs.fileno(), arena.fd, wake_fd)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "transfer.mooncake_child", *map(str, fds)],
                env=_environment(timeout_s),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the parent's to handle
            )
        except BaseException:
            self._end.close()
            raise
        finally:
            theirs.close()
        self._end.send(calls.encode(start))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, wait_s: float) -> None:
        """Wait until it runs; :class:`TransferError` or :class:`MooncakeUnavailableError` says why it does not."""
        give_up_s = time.monotonic() + wait_s
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        while self.ready is None and not self.gone and (left_s := give_up_s - time.monotonic()) > 0:
            poll.poll(1e3 * left_s)
            assert self.take() == []
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
        if self.gone or self.ready is None or self.ready.error:
            return False
        try:
            self._end.send(calls.encode(write))
        except OSError:  # full, or gone, which take() notices
            return False
        return True

    def take(self) -> list[calls.Done]:
        """What has ended since the last call."""
        done: list[calls.Done] = []
        while not self.gone:
            try:
                packet = self._end.recv(calls.PACKET_NBYTES_MAX)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self.end()
                break
            answer = calls.decode_answer(packet)
            if isinstance(answer, calls.Done):
                done.append(answer)
            else:
                self.ready = answer
        return done

    def end(self) -> None:
        """Kill it and see it gone. Harmless the second time."""
        if self.gone:
            return
        self._process.kill()
        self._process.wait(REAPED_S)
        self.gone = True
        self._end.close()


def _environment(timeout_s: float) -> dict[str, str]:
    """What the operator has set stands, the rest is set for short waits."""
    seconds = str(max(5, math.ceil(timeout_s)))
    wanted = {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TRANSFER_TIMEOUT": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return {**wanted, **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}}
