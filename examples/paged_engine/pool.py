"""A Mooncake pool on this machine for as long as it is wanted: a master, and a process that lends it memory.

``python -m paged_engine.pool`` is that process: it starts the master, lends a segment, says on stdout where the
pool is, and ends both when its stdin does, which is also when whoever started it has died. What another process stores
there is in this one's memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from cache_manager.errors import StorageError
from cache_manager.storage import open_store

SEGMENT: Final = "256MiB"
START_S: Final = 60.0
MASTER_START_S: Final = 20.0
STOP_S: Final = 15.0
PORT_TRIES_MAX: Final = 3
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Pool:
    """Where it is, and the processes that it lives in. The URL lends nothing: whoever opens it holds no segment."""

    url: str
    owner_pid: int
    master_pid: int


@contextmanager
def running_pool() -> Iterator[Pool]:
    """A pool of its own, which is gone when the block is left; :class:`StorageError` when it does not come up."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = subprocess.Popen(
        [sys.executable, "-P", "-m", "paged_engine.pool"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # Ctrl-C is ours to handle
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        said = json.loads(_first_line(owner.stdout))
        yield Pool(said["url"], owner.pid, said["master"])
    finally:
        owner.stdin.close()
        try:
            owner.wait(STOP_S)
        except subprocess.TimeoutExpired:
            owner.kill()  # the master ends with it
            owner.wait()
        owner.stdout.close()


def _first_line(answers: IO[str]) -> str:
    ready, _, _ = select.select([answers], [], [], START_S)
    line = answers.readline() if ready else ""
    if not line.startswith("{"):
        cause = (line + answers.read()).strip() if ready else f"nothing said within {START_S:.0f} s"
        raise StorageError(f"no Mooncake pool: {cause}; `kvroute doctor --require mooncake` says what is missing")
    return line


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_master() -> tuple[subprocess.Popen[bytes], int, int]:
    """A master on loopback, its RPC port and its admin port."""
    program = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise StorageError("there is no mooncake_master")
    for _ in range(PORT_TRIES_MAX):  # somebody else may take a port that was free
        rpc, admin = _free_port(), _free_port()
        command = [
            program,
            "--rpc_address=127.0.0.1",
            f"--rpc_port={rpc}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={admin}",
            "--rpc_thread_num=2",
            "--client_ttl=5",
            "--default_kv_lease_ttl=1000",
            "--put_start_discard_timeout_sec=10",
            "--logtostderr",
        ]
        silence = subprocess.DEVNULL
        master = subprocess.Popen(  # noqa: S603 (found beside the interpreter or on PATH)
            command, stdin=silence, stdout=silence, stderr=silence, preexec_fn=_die_with_the_parent
        )
        give_up_s = time.monotonic() + MASTER_START_S
        while master.poll() is None and time.monotonic() < give_up_s:
            if _answers(rpc) and _answers(admin):
                return master, rpc, admin
            time.sleep(0.02)
        master.kill()
        master.wait()
    raise StorageError("mooncake_master does not start")


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def main() -> int:
    """Be the pool until stdin ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        master, rpc, admin = _start_master()
        try:
            url = f"mooncake://127.0.0.1:{rpc}/demo?admin=127.0.0.1:{admin}&host=127.0.0.1"
            lender = open_store(f"{url}&segment={SEGMENT}")
            try:
                sys.stdout.write(json.dumps({"url": url, "master": master.pid}) + "\n")
                sys.stdout.flush()
                sys.stdin.read()
            finally:
                lender.close()
        finally:
            master.kill()
            master.wait()
    except StorageError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
