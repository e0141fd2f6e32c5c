"""Python processes that have their imports behind them: each is forked from one that has loaded what takes seconds.

:class:`Nursery` is the way in. Run as a script, this file is the process that forks; it reads one request after another
from a socket, with the descriptors of the standard streams beside each.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

REQUEST_NBYTES_MAX = 1 << 20


class Born:
    """A process of a nursery; as much of :class:`subprocess.Popen` as tests need. Threads may wait side by side."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status.makefile("r")
        status.close()
        self.pid = int(self._status.readline())
        self.returncode: int | None = None
        self._reading = threading.Lock()
        weakref.finalize(self, self._status.close)  # not when the status was read: another thread may wait for it

    def poll(self) -> int | None:
        """The exit status, -N after signal N; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, within ``timeout`` seconds or :class:`subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._reading:
                if self.returncode is None:  # of two that wait, one reads
                    self.returncode = os.waitstatus_to_exitcode(int(self._status.readline()))
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Forks processes that have imported ``modules`` already."""

    def __init__(self, *modules: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno()), *modules],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**_without_pytest(os.environ), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()
        atexit.register(self.close)

    def start(
        self,
        arguments: Sequence[str],
        *,
        stdin: IO[Any] | int = subprocess.DEVNULL,
        stdout: IO[Any] | int = subprocess.DEVNULL,
        stderr: IO[Any] | int = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        warn: str = "",
    ) -> Born:
        """As ``python -P ARGUMENTS``, which begin with ``-m`` or ``-c``; ``warn`` is an action as of ``-W``."""
        request = {
            "arguments": list(arguments),
            "env": dict(env) if env is not None else _without_pytest(os.environ),
            "cwd": str(cwd or Path.cwd()),
            "warn": warn,
        }
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "r+b") as nothing:
            streams = [nothing if stream == subprocess.DEVNULL else stream for stream in (stdin, stdout, stderr)]
            numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
            socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs.fileno(), *numbers])
        return Born(ours)

    def run(self, arguments: Sequence[str], *, timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
        """As :func:`subprocess.run` with captured text; ``more`` is as in :meth:`start`."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            born = self.start(arguments, stdout=out, stderr=err, **more)
            try:
                status = born.wait(timeout)
            finally:
                born.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(list(arguments), status, out.read(), err.read())

    def close(self) -> None:
        """Forks no more; processes already forked live on."""
        self._socket.close()
        self._process.wait()


def _without_pytest(environment: Mapping[str, str]) -> dict[str, str]:
    """Pytest options of the outer run must not reach children that run pytest."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}


PYTEST = ("hypothesis.stateful", "pytest", "pytest_timeout", "xdist.plugin")
THIRD_PARTY = (*PYTEST, "msgspec", "numpy", "torch", "transformers", "xxhash", "zmq")
"""What takes long, and knows nothing of this project."""

ENGINE = (*THIRD_PARTY, "kvroute.cli", "paged_engine.drivers", "paged_engine.servers")
"""And the small engine with its commands."""


@cache
def nursery(*modules: str) -> Nursery:
    """The one of this process for these modules; it starts when it is first asked for, and ends with this process."""
    return Nursery(*modules)


def _next_request(listener: socket.socket) -> dict[str, Any]:
    """Returns in a new process for each request; the process that forks ends within."""
    while True:
        text, fds, _, _ = socket.recv_fds(listener, REQUEST_NBYTES_MAX, 4)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # the time of those that have ended is counted as ours
                pass
        if not text:
            os._exit(0)
        if os.fork():
            for fd in fds:
                os.close(fd)
            continue
        listener.close()
        status, *streams = fds
        if born := os.fork():
            os.write(status, b"%d\n" % born)
            for fd in streams:
                os.close(fd)
            os.write(status, b"%d\n" % os.waitpid(born, 0)[1])
            os._exit(0)
        os.close(status)
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
            os.close(fd)
        return dict(json.loads(text))


def _become(request: dict[str, Any]) -> None:
    """Run what is wanted, as the interpreter would have done."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    first = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
    if request["warn"]:
        warnings.simplefilter(request["warn"])
    how, what, *rest = request["arguments"]
    sys.argv = [how if how == "-c" else what, *rest]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as python -c does


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no collection of a child walks, and so copies, what was imported here
    _become(_next_request(socket.socket(fileno=int(sys.argv[1]))))
