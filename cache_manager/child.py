"""A child process of our own: questions with deadlines, and an end that always comes.

What may hang, crash or hold the interpreter's lock for seconds lives in a child. Each channel to it is a socket pair
with a thread of the child at its end, which answers one question after another. A child that is late, sends something
other than an answer or has ended is killed, and *reaped* before it counts as gone: from then on it cannot touch the
memory that it shared. A child whose parent is gone ends by itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Final, NoReturn

from cache_manager.errors import StoreUnavailableError

FRAME_NBYTES_MAX: Final = 16 << 20
ORPHAN_CHECK_S: Final = 2.0
FRAME_S: Final = 1
"""A child reads its sockets at once and writes whole messages: if half a message waits longer, the child hangs."""


class LostError(StoreUnavailableError):
    """A child has not answered, and was killed."""


class Child:
    """``python -m module PARENT_PID CHANNELS *channels *fds``; it inherits ``fds``, stdout and stderr.

    Raises ``OSError`` if no process can be started. One thread calls :meth:`wait`; any thread may call the rest, with
    one question per channel at a time. A socket closes with its last reference: a thread may still be reading it.
    """

    def __init__(self, module: str, channels: int, *fds: int) -> None:
        self.gone = threading.Event()
        self._lock = threading.Lock()  # a reaped process is never killed: its pid may be reused
        self.cause = ""
        """Why it was killed; it answers no question then."""
        self._ends: list[Connection] = []
        with ExitStack() as theirs:
            passed = []
            for _ in range(channels):
                our, their = socket.socketpair()
                passed.append(theirs.enter_context(their).fileno())
                time_limit = struct.pack("ll", FRAME_S, 0)
                for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                    our.setsockopt(socket.SOL_SOCKET, option, time_limit)
                self._ends.append(Connection(our.detach()))
            arguments = os.getpid(), channels, *passed, *fds
            directories = [directory for directory in sys.path if directory]
            path = {"PYTHONPATH": os.pathsep.join(directories)}
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", module, *map(str, arguments)],
                env={**os.environ, **path},
                pass_fds=(*passed, *fds),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the parent's to handle
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, channel: int, body: bytes, within_s: float) -> bytes:
        """The answer. If none comes in time the child is killed, and :class:`LostError` says why. An interrupted call
        kills it too, so that no other caller gets its answer."""
        end = self._ends[channel]
        readable = select.poll()
        readable.register(end, select.POLLIN)
        try:
            if self.cause or readable.poll(0):  # a late answer would be taken for this question's
                raise LostError("it has ended, or said what it was not asked")
            end.send_bytes(body)
            if not readable.poll(1e3 * within_s):
                raise LostError("it did not answer in time")
            return end.recv_bytes(FRAME_NBYTES_MAX)
        except (OSError, EOFError) as error:
            self.kill(cause := f"it has ended {error}".rstrip())
            raise LostError(cause) from error
        except BaseException as error:
            self.kill(str(error) or type(error).__name__)
            raise

    def kill(self, cause: str) -> None:
        """Kill the child; harmless when it is gone."""
        with self._lock:
            self.cause = self.cause or cause
            if not self.gone.is_set():
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended, and reap it: from here on it cannot touch our memory. Returns its exit status."""
        with suppress(ChildProcessError):  # where SIGCHLD is ignored
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            status = self._process.wait()
            self.gone.set()
        return status


def arguments() -> list[int]:
    """In the child: the descriptors that the parent passed on, behind its channels."""
    channels = int(sys.argv[2])
    behind = sys.argv[3 + channels :]
    return [int(argument) for argument in behind]


def serve(answer: Callable[[bytes], bytes], tidy: Callable[[], None] = lambda: None) -> NoReturn:
    """In the child: answer every question, with one thread per channel, until the parent is gone; ``tidy`` every
    ``ORPHAN_CHECK_S``."""
    parent = int(sys.argv[1])  # not getppid(): the parent may have ended before this line
    channels = int(sys.argv[2])
    for fd in sys.argv[3 : 3 + channels]:
        end = Connection(int(fd))
        thread = threading.Thread(target=_answer, args=(end, answer), daemon=True)
        thread.start()
    while os.getppid() == parent:  # a fork of the parent may hold the sockets open
        time.sleep(ORPHAN_CHECK_S)
        tidy()
    os._exit(1)


def _answer(end: Connection, answer: Callable[[bytes], bytes]) -> NoReturn:
    try:
        while True:
            end.send_bytes(answer(end.recv_bytes()))
    except (EOFError, OSError):  # the parent no longer listens
        os._exit(1)
    except BaseException:  # noqa: BLE001 - a thread that ends would leave the parent waiting for its answer
        traceback.print_exc()
        os._exit(1)


__all__ = ["FRAME_NBYTES_MAX", "Child", "LostError", "arguments", "serve"]
