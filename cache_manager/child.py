"""A child process of our own: whole messages both ways, requests with deadlines, and an end that always comes.

What may hang, crash or hold the interpreter's lock for seconds lives in a child. When that is lost, it is killed *and
reaped* before anybody hears of it: from then on it touches none of the memory that it shared. A child whose parent is
gone ends by itself.

A message is a length (u32, little-endian) and that many bytes, MessagePack where this is used.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

import msgspec

FRAME_NBYTES_MAX: Final = 16 << 20
ORPHAN_CHECK_MS: Final = 2_000
FRAME_S: Final = 1
LOOK_S: Final = 0.1
"""How often it is looked whether an idle child has ended, and whether a deadline is over."""

_LENGTH: Final = struct.Struct("<I")
_T = TypeVar("_T")


def send_frame(end: socket.socket, body: bytes) -> None:
    """Send one message whole; ``OSError`` when the other end is gone, and then part of it may be out."""
    assert len(body) <= FRAME_NBYTES_MAX, f"a message of {len(body)} bytes"
    end.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(end: socket.socket) -> bytes | None:
    """One message; ``None`` when the other end is gone or says a length that cannot be."""
    head = _exactly(end, _LENGTH.size)
    if head is None:
        return None
    (nbytes,) = _LENGTH.unpack(head)
    return _exactly(end, nbytes) if nbytes <= FRAME_NBYTES_MAX else None


def _exactly(end: socket.socket, nbytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < nbytes:
        try:
            part = end.recv(min(nbytes - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def _polled(end: socket.socket) -> select.poll:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return poll


class Parent:
    """In the child: the process ``pid`` that started it, at the socket ``fd``. One thread at a time receives."""

    def __init__(self, fd: int, pid: int) -> None:
        self._end = socket.socket(fileno=fd)
        self._pid = pid  # not getppid(): it may have ended before this line
        self._sending = threading.Lock()

    def receive(self) -> bytes | None:
        """The next message; ``None`` when the parent is gone."""
        poll = _polled(self._end)
        while not poll.poll(ORPHAN_CHECK_MS):
            if os.getppid() != self._pid:  # a fork of the parent may hold the socket open
                return None
        return receive_frame(self._end)

    def send(self, body: bytes) -> None:
        """From any thread. Where nobody listens any more nothing happens: :meth:`receive` tells it, too."""
        with self._sending, contextlib.suppress(OSError):
            send_frame(self._end, body)


class Child:
    """``python -m module SOCKET_FD PARENT_PID *fds``, descriptors of ours. Any thread sends, one at a time receives.

    What it prints goes where ours goes. A child reads its socket at once and writes whole messages: one that lets half
    a message wait for ``FRAME_S`` is stopped or wedged, and killed.
    """

    def __init__(self, module: str, *fds: int) -> None:
        self._sending = threading.Lock()
        self._end, theirs = socket.socketpair()
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._end.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", FRAME_S, 0))
        self._readable = _polled(self._end)
        passed, arguments = (theirs.fileno(), *fds), (theirs.fileno(), os.getpid(), *fds)
        path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self._end.close)
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", module, *map(str, arguments)],
                env={**os.environ, **path},
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the parent's to handle
            )
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, body: bytes) -> None:
        """Send one message; a child that does not take it is killed, and :meth:`receive` finds it gone."""
        try:
            with self._sending:
                send_frame(self._end, body)
        except OSError:
            self.kill()  # half a message may be out

    def receive(self, wait_s: float) -> bytes | None:
        """A message; ``b""`` when none began within ``wait_s``; ``None`` when it is gone or has stopped within one."""
        if not self._readable.poll(1e3 * wait_s):
            return b""
        try:
            return receive_frame(self._end)
        except OSError:  # FRAME_S is over
            return None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Kill and reap it: from here on nothing of it touches our memory. Its exit status; harmless again."""
        self._process.kill()
        status = self._process.wait()
        with self._sending:
            self._end.close()
        return status


class AskedChild(Generic[_T]):
    """A child that answers each numbered request with one message. Safe from several threads.

    Raises ``OSError``, and has ended the child, when the machine has no thread left to listen to it.

    A request's future ends with its answer, or with :meth:`_lost` when the child is gone and reaped. The child is ended
    when an answer is overdue, when it answers what it was not asked, and by :meth:`kill`. One thread receives.
    """

    def __init__(self, child: Child, name: str) -> None:
        self._child = child
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the next two
        self._waiting: dict[int, tuple[float, Future[_T]]] = {}  # deadline and future
        self._cause = ""  # why it has ended; it is reaped then
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)
        try:
            self._listener.start()
        except RuntimeError as error:
            child.end()
            raise OSError(f"{name}: {error}") from error

    def _decoded(self, body: bytes) -> tuple[int, _T | Exception]:
        """The number of the request that a message answers, and how its future ends."""
        raise NotImplementedError

    def _ended(self, cause: str, lost: int) -> None:
        """Called once, when the child is reaped, before the ``lost`` futures end."""

    def _lost(self, cause: str) -> Exception:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def gone(self) -> bool:
        """Whether it has ended and was reaped."""
        return bool(self._cause)

    @property
    def in_flight(self) -> int:
        with self._lock:
            return len(self._waiting)

    def ask(self, encode: Callable[[int], bytes], within_s: float = math.inf) -> Future[_T]:
        """Send the request that ``encode`` makes with its number; it is not sent where that raises."""
        number = next(self._numbers)
        body = encode(number)
        assert len(body) <= FRAME_NBYTES_MAX, f"a message of {len(body)} bytes"
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: the child is at work
        with self._lock:
            if not (cause := self._cause):
                self._waiting[number] = time.monotonic() + within_s, future
        if cause:
            future.set_exception(self._lost(cause))
        else:
            self._child.send(body)
        return future

    def kill(self) -> None:
        """End the child; its futures end when it is reaped. Harmless when it is gone."""
        self._child.kill()

    def join(self, wait_s: float | None = None) -> bool:
        """Wait until it is gone and its futures have ended; whether it is."""
        self._listener.join(wait_s)
        return self.gone

    def _listen(self) -> None:
        cause = ""
        try:
            while not cause:
                cause = self._receive()
        finally:
            status = self._child.end()
            with self._lock:
                self._cause = f"{cause or 'its listener failed'} (status {status})"
                lost, self._waiting = list(self._waiting.values()), {}
            self._ended(self._cause, len(lost))
            for _, future in lost:
                future.set_exception(self._lost(self._cause))

    def _receive(self) -> str:
        """Take one answer, if one comes within ``LOOK_S``; why the child has to go, or nothing."""
        body = self._child.receive(LOOK_S)
        if body is None:
            return "it has ended"
        cause = self._take(body) if body else ""
        with self._lock:
            overdue = any(deadline_s <= time.monotonic() for deadline_s, _ in self._waiting.values())
        return cause or ("it did not answer in time" if overdue else "")

    def _take(self, body: bytes) -> str:
        """End the future that a message answers; or why the child has to go."""
        try:
            number, answer = self._decoded(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return "its message was no answer"
        with self._lock:
            _, future = self._waiting.pop(number, (0.0, None))
        if future is None:
            return "it answered a question that was not asked"
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return ""


__all__ = ["FRAME_NBYTES_MAX", "AskedChild", "Child", "Parent", "receive_frame", "send_frame"]
