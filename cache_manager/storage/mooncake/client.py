"""One native client, held at arm's length: a child process, requests with deadlines, and an end that always comes."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.arena import Arena
from cache_manager.storage.mooncake.codes import describe

SEND_S_MAX: Final = 1.0
"""A child reads its socket at once, and writes whole frames; one that does not is stopped or wedged."""
LOOK_S: Final = 0.25
"""How often the listener looks whether an idle child has ended."""

DOCTOR: Final = "`kvroute doctor` says what is missing and how to install it"


def native_environment(timeout_ms: int) -> dict[str, str]:
    """The child's environment: what the operator has set stands, the rest is set for short waits."""
    seconds = str(max(-(-timeout_ms // 1000), 1))
    wanted = {
        "MC_LOG_LEVEL": "ERROR",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # each costs 4 s
        "MC_RPC_TIMEOUT_MS": str(timeout_ms),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_LANES_PER_PEER": "16",  # transfers to a hung peer time out lane by lane
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return {**wanted, **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}}


class ClientLostError(StorageError):
    """The child process ended, or was killed, before it answered."""


class NativeClient:
    """A child process with one native client in it. Safe from several threads.

    A request's future ends with the native call's codes, or with :class:`ClientLostError` when the process is gone
    *and reaped*: whatever memory the call used is untouched from then on. Nothing here waits without a limit.

    Answers are received by a thread that waits for one of them, which spares it the switch from another thread, and
    for the others' by the listener: whoever holds ``_receiving``. Who lets it go while answers are outstanding calls
    the listener.
    """

    def __init__(self, arena: Arena | None, timeout_ms: int, log: Path | None) -> None:
        self._arena_nbytes = arena.nbytes if arena else 0
        self._lock = threading.Lock()  # numbers and futures
        self._sending = threading.Lock()
        self._waiting: dict[int, Future[list[int]]] = {}
        self._number = 0
        self._gone = False
        self._receiving = threading.Lock()
        self._ended = False  # the child's end of the socket; written by who holds _receiving
        self._look = threading.Event()
        self._end, theirs = socket.socketpair()
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._end.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(SEND_S_MAX), 0))
        self._readable = select.poll()
        self._readable.register(self._end, select.POLLIN)
        fds = (theirs.fileno(), *((arena.fd,) if arena else ()))
        command = [sys.executable, "-P", "-m", "cache_manager.storage.mooncake.child", str(fds[0]), str(fds[-1])]
        output = open(log, "ab") if log else subprocess.DEVNULL  # noqa: SIM115 - closed below
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                env=native_environment(timeout_ms),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # Ctrl-C is the parent's to handle
            )
        except BaseException:
            self._end.close()
            raise
        finally:
            theirs.close()
            if not isinstance(output, int):
                output.close()
        threading.Thread(target=self._listen, name="kvroute-mooncake", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether the process has ended and was reaped."""
        return self._gone

    @property
    def in_flight(self) -> int:
        with self._lock:
            return len(self._waiting)

    def set_up(
        self, *, master: str, host: str, protocol: str, devices: str, segment_nbytes: int, wait_s: float
    ) -> None:
        """Connect; :class:`StorageError` says why not, and the process is gone then or soon."""
        request = wire.SetUp(master, host, protocol, devices, segment_nbytes, self._arena_nbytes)
        try:
            code = self.call(request, wait_s)[0]
        except StorageError as error:
            self.kill()
            if "ImportError" in str(error) or "ModuleNotFoundError" in str(error):
                raise StorageError(f"the Mooncake client cannot be loaded; {DOCTOR} ({error})") from error
            raise StorageError(f"no connection to the Mooncake master at {master}: {error}") from error
        if code:
            self.kill()
            raise StorageError(f"Mooncake set-up with master {master} answered {describe(code)}")

    def submit(self, request: wire.Request) -> Future[list[int]]:
        """Send a request; its future ends with codes or with a :class:`StorageError`."""
        future: Future[list[int]] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._gone:
                future.set_exception(ClientLostError("the native Mooncake client has ended"))
                return future
            self._number += 1
            number = self._number
            self._waiting[number] = future
        try:
            with self._sending:
                wire.send(self._end, wire.Asked(number, request))
        except OSError:
            self.kill()  # half a frame may be out; the listener ends the future
        return future

    def wait(self, future: Future[list[int]], wait_s: float) -> list[int]:
        """The codes of a future of this client; ``TimeoutError`` when there are none within ``wait_s``."""
        give_up_s = time.monotonic() + wait_s
        if self._receiving.acquire(blocking=False):
            try:
                while not (future.done() or self._ended) and (left_s := give_up_s - time.monotonic()) > 0:
                    self._receive(left_s)
            finally:
                self._stop_receiving()
        return future.result(max(give_up_s - time.monotonic(), 0))

    def call(self, request: wire.Request, wait_s: float) -> list[int]:
        """Send a request and wait; for requests that use no range of the arena."""
        future = self.submit(request)
        try:
            return self.wait(future, wait_s)
        except TimeoutError:
            raise StorageError(f"no answer to {type(request).__name__} within {wait_s:.1f} s") from None

    def close(self, wait_s: float) -> None:
        """Close the native client and end the process: properly within ``wait_s``, by force after."""
        if not self._gone:
            try:
                self.call(wire.Close(), wait_s)
            except StorageError:
                self.kill()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process; its futures end when it is reaped. Harmless when it is gone."""
        self._process.kill()

    def _listen(self) -> None:
        try:
            while not self._ended:
                self._look.wait(LOOK_S)
                self._look.clear()
                self._receiving.acquire()
                try:
                    self._receive(0)
                    while self._waiting and not self._ended:
                        self._receive(LOOK_S)
                finally:
                    self._stop_receiving()
        finally:
            self._process.kill()
            self._process.wait()  # from here on nothing of it touches the arena
            with self._lock:
                self._gone = True
                lost, self._waiting = list(self._waiting.values()), {}
            with self._sending:
                self._end.close()
            for future in lost:
                future.set_exception(ClientLostError("the native Mooncake client ended in the middle of a call"))

    def _receive(self, wait_s: float) -> None:
        """One answer, if one comes within ``wait_s``. Held: _receiving."""
        if self._ended or not self._readable.poll(1e3 * wait_s):
            return
        answer = None
        try:
            answer = wire.receive_answer(self._end)
        except OSError:  # SEND_S_MAX is over in the middle of a frame
            self.kill()
        finally:
            self._ended = answer is None
        if answer is not None:
            with self._lock:
                future = self._waiting.pop(answer.number)
            if answer.error:
                future.set_exception(StorageError(f"native client: {answer.error}"))
            else:
                future.set_result(answer.codes)

    def _stop_receiving(self) -> None:
        """Held: _receiving, and not from here on. Whoever found it held has its future in ``_waiting`` already."""
        self._receiving.release()
        if self._waiting or self._ended:
            self._look.set()
