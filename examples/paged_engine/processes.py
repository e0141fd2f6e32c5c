"""Prefill and decode as processes: started, asked, ended."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from cache_manager.errors import KVRouteError

READY_S: Final = 180.0
"""How long a process that is not ready may do nothing at all; one that works is slow, not broken."""
READY_MAX_S: Final = 3600.0
END_S: Final = 60.0
SEEN_ENDED_S: Final = 2.0
"""How long a process that gives no answer has until its end is seen."""
LOG_MAX: Final = 3000
"""Characters of a failed process's log that its error shows."""
ASK_S: Final = 300.0

TIED: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; an exec keeps it
if os.getppid() != int(sys.argv[1]):  # ended before that
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(*command: str) -> list[str]:
    """The command, to be started by this process: the kernel kills it when the thread that started it ends."""
    return [sys.executable, "-S", "-E", "-c", TIED, str(os.getpid()), *command]


class ServerError(KVRouteError):
    """A server failed; the message has the end of its log."""


class Server:
    """One process on loopback, tied to this one: ``kvroute COMMAND FLAGS``. It may be started again after its end."""

    def __init__(self, command: str, directory: Path, flags: list[str]) -> None:
        self.command, self._log = command, directory / f"{command}.log"
        port = hold_port()
        self.url, self._flags = f"http://127.0.0.1:{port}", [*flags, "--port", str(port)]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            argv = tied(sys.executable, "-P", "-m", "kvroute.cli", self.command, *self._flags)
            nothing = subprocess.DEVNULL
            self.process = subprocess.Popen(argv, stdin=nothing, stdout=log, stderr=log)  # noqa: S603 - this Python

    def ask(self, path: str, body: object | None = None) -> tuple[int, Any]:
        """Status and JSON of an answer; status 0 without an answer."""
        try:
            with self.open(path, body) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())
        except OSError:
            return 0, {}

    def open(self, path: str, body: object | None = None) -> Any:
        """The answer, still to be read and closed."""
        given = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=given)  # noqa: S310 - our own http URL
        return urllib.request.urlopen(request, timeout=ASK_S)  # noqa: S310 - as above

    def counters(self) -> dict[str, Any]:
        status, found = self.ask("/counters")
        if status != 200:
            raise self._failed(f"/counters answered {status}: {found}")
        return dict(found)

    @property
    def quiet(self) -> bool:
        """Whether no block is held, and no request is in flight or computed."""
        found = self.counters()
        return found["free"] == found["of"] and not found["http"]["in_flight"] and not found["unfinished"]

    def wait_ready(self) -> None:
        """Return when it answers; :class:`ServerError` if it ends, or does nothing for ``READY_S``, before that."""
        began_s = worked_s = time.monotonic()
        cpu_s = 0.0
        while not self._ready():
            now_s, used_s = time.monotonic(), self._cpu_s()
            if used_s > cpu_s:
                cpu_s, worked_s = used_s, now_s
            if now_s - worked_s > READY_S or now_s - began_s > READY_MAX_S:
                raise self._failed(f"not ready after {now_s - began_s:.0f} s, {cpu_s:.0f} s of them on a processor")
            time.sleep(0.02)

    def check(self, within_s: float = 0.0) -> None:
        """Raise :class:`ServerError` if the process has ended, or does so in this time."""
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(within_s)
            raise self._failed(f"ended with status {status}")

    def _cpu_s(self) -> float:
        """Seconds that the process has had on a processor; 0 once it is gone."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _ready(self) -> bool:
        self.check()
        return self.ask("/healthz")[0] == 200

    def _failed(self, how: str) -> ServerError:
        log = self._log.read_text(errors="replace").rstrip()
        *earlier, last = log[-LOG_MAX:].splitlines() or ["nothing"]
        return ServerError("\n".join([f"{self.command}: {how}; it last said: {last}", *earlier]))

    def end(self) -> int:
        """Send SIGTERM; returns the exit status. A process that does not end in time is killed: status -9."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Pair:
    """Prefill and decode with the same flags, started together; they end with the block."""

    kind = Server

    def __init__(self, directory: Path, flags: list[str]) -> None:
        lends = f"tcp://127.0.0.1:{hold_port()}"
        self.prefill = self.kind("prefill", directory, [*flags, "--transfer-address", lends])
        try:
            self.decode = self.kind("decode", directory, [*flags, "--prefill", lends])
        except BaseException:
            self.prefill.kill()
            raise

    def check(self) -> None:
        """Raise :class:`ServerError` if one of them has ended; call it when one gave no answer."""
        self.prefill.check(SEEN_ENDED_S)
        self.decode.check(SEEN_ENDED_S)

    def wait_ready(self) -> None:
        self.prefill.wait_ready()
        self.decode.wait_ready()

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Two calls, as a client makes them. If prefill does not answer, decode computes the prompt."""
        status, handover = self.prefill.ask("/v1/completions", body)
        if 400 <= status < 500:
            return status, handover
        return self.decode.ask("/v1/completions", body | ({"handover": handover} if status == 200 else {}))

    def wait_quiet(self) -> bool:
        """Wait until every block is free again; returns whether that happened in time."""
        try:
            until(lambda: self.prefill.quiet and self.decode.quiet, "all blocks are back", END_S)
        except ServerError:
            return False
        return True

    def end(self) -> tuple[int, ...]:
        return self.decode.end(), self.prefill.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.prefill.kill()
        self.decode.kill()


def until(true: Callable[[], bool], what: str, within_s: float) -> None:
    """Return as soon as ``true()`` holds; :class:`ServerError` if it does not in time."""
    deadline_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline_s:
            raise ServerError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.02)


def hold_port() -> int:
    """A port reserved until this process ends; a server that gets its number can still bind it.

    The socket is bound first and made reusable after that: the system gives the port to nobody else, neither for port 0
    nor for an outgoing connection, and servers bind with SO_REUSEADDR.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    atexit.register(held.close)
    return int(held.getsockname()[1])
