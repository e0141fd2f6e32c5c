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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError
from cache_manager.storage import open_store
from paged_engine.processes import ServerError, hold_port, until

SEGMENT: Final = "256MiB"
START_S: Final = 60.0
STOP_S: Final = 15.0
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
        ready, _, _ = select.select([owner.stdout], [], [], START_S)
        line = owner.stdout.readline() if ready else f"nothing said within {START_S:.0f} s"
        if not line.startswith("{"):
            remedy = "`kvroute doctor --require mooncake` says what is missing"
            raise StorageError(f"no Mooncake pool: {line.strip()}; {remedy}")
        said = json.loads(line)
        yield Pool(said["url"], owner.pid, said["master"])
    finally:
        owner.stdin.close()
        try:
            owner.wait(STOP_S)
        except subprocess.TimeoutExpired:
            owner.kill()  # the master ends with it
            owner.wait()
        owner.stdout.close()


def _die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_master(rpc: int, admin: int) -> subprocess.Popen[bytes]:
    """A master on loopback, whose two ports answer."""
    program = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise StorageError("there is no mooncake_master")
    flags = {"rpc_address": "127.0.0.1", "rpc_port": rpc, "metrics_host": "127.0.0.1", "metrics_port": admin}
    flags |= {"rpc_thread_num": 2, "client_ttl": 5, "default_kv_lease_ttl": 1000, "put_start_discard_timeout_sec": 10}
    flags["logtostderr"] = "true"
    command, silence = [program, *(f"--{name}={value}" for name, value in flags.items())], subprocess.DEVNULL
    master = subprocess.Popen(  # noqa: S603 (found beside the interpreter or on PATH)
        command, stdin=silence, stdout=silence, stderr=silence, preexec_fn=_die_with_the_parent
    )
    try:
        until(lambda: master.poll() is not None or (_answers(rpc) and _answers(admin)), "mooncake_master", START_S / 3)
    except ServerError:
        master.kill()
        master.wait()
    if master.poll() is not None:
        raise StorageError("mooncake_master does not start")
    return master


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def main() -> int:
    """Be the pool until stdin ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    rpc, admin = hold_port(), hold_port()
    try:
        master = _start_master(rpc, admin)
        try:
            url = f"mooncake://127.0.0.1:{rpc}/demo?admin=127.0.0.1:{admin}&host=127.0.0.1"
            with open_store(f"{url}&segment={SEGMENT}"):
                sys.stdout.write(json.dumps({"url": url, "master": master.pid}) + "\n")
                sys.stdout.flush()
                sys.stdin.read()
        finally:
            master.kill()
            master.wait()
    except StorageError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
