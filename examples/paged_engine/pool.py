"""A temporary Mooncake pool on this machine: Mooncake's own master, and its client that lends memory.

Records are in the memory of neither process that stores them. Both end with the process that started them, however that
ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from cache_manager.errors import StorageError
from paged_engine.processes import ServerError, hold_port, until

START_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1


class Pool(NamedTuple):
    """The pool's URL and processes. The URL lends nothing: a client that opens it holds no segment."""

    url: str
    owner_pid: int
    master_pid: int


@contextmanager
def running_pool() -> Iterator[Pool]:
    """A new pool, which ends with the block; :class:`StorageError` when it does not start."""
    rpc, admin, client = hold_port(), hold_port(), hold_port()
    master_flags = f"--rpc_port={rpc} --rpc_address=127.0.0.1 --metrics_port={admin} --metrics_host=127.0.0.1"
    master_flags += " --rpc_thread_num=2 --client_ttl=5 --default_kv_lease_ttl=1000 --put_start_discard_timeout_sec=10"
    owner_flags = f"--master_server_address=127.0.0.1:{rpc} --metadata_server=P2PHANDSHAKE --host=127.0.0.1"
    owner_flags += f" --port={client} --global_segment_size=256MB"
    with ExitStack() as stack:
        master = _start(stack, "mooncake_master", master_flags, rpc, admin)
        owner = _start(stack, "mooncake_client", owner_flags, client)  # its port is open once the memory is lent
        yield Pool(f"mooncake://127.0.0.1:{rpc}/demo?admin=127.0.0.1:{admin}&host=127.0.0.1", owner, master)


def _start(stack: ExitStack, name: str, flags: str, *ports: int) -> int:
    """Start a program and wait for its ports; its process ends with this one, or with the stack."""
    program = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    remedy = "`kvroute doctor --require mooncake` says what is missing"
    if program is None:
        raise StorageError(f"no Mooncake pool: there is no {name}; {remedy}")
    die_with_the_parent = lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # noqa: E731
    silence = subprocess.DEVNULL
    started = subprocess.Popen(  # noqa: S603 (found beside the interpreter or on PATH)
        [program, *flags.split(), "--logtostderr"],
        stdin=silence,
        stdout=silence,
        stderr=silence,
        preexec_fn=die_with_the_parent,
        process_group=0,  # Ctrl-C is ours to handle
    )
    stack.callback(started.wait)
    stack.callback(started.kill)
    with suppress(ServerError):
        until(lambda: started.poll() is not None or all(map(_answers, ports)), name, START_S)
    if started.poll() is not None or not all(map(_answers, ports)):
        raise StorageError(f"no Mooncake pool: {name} does not start; {remedy}")
    return started.pid


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
