"""A temporary Mooncake pool on this machine: Mooncake's own master, and its client that lends memory.

Records are in the memory of neither process that stores them. Both end with the process that started them, however that
ends.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from cache_manager.errors import StorageError
from paged_engine.processes import ServerError, hold_port, tied, until

START_S: Final = 300.0


class Pool(NamedTuple):
    """The pool's URL and processes. The URL lends nothing: a client that opens it holds no segment."""

    url: str
    owner_pid: int
    master_pid: int


def url_of(rpc: int, admin: int, prefix: str) -> str:
    return f"mooncake://127.0.0.1:{rpc}/{prefix}?admin=127.0.0.1:{admin}&host=127.0.0.1"


@contextmanager
def running_pool() -> Iterator[Pool]:
    """A new pool, which ends with the block; :class:`StorageError` when it does not start."""
    rpc, admin, client = hold_port(), hold_port(), hold_port()
    with running_master(rpc, admin, "--default_kv_lease_ttl=1000 --put_start_discard_timeout_sec=10") as master:
        flags = f"--master_server_address=127.0.0.1:{rpc} --metadata_server=P2PHANDSHAKE --host=127.0.0.1"
        flags += f" --port={client} --global_segment_size=256MB"
        with _running("mooncake_client", flags, client) as owner:  # its port is open once the memory is lent
            yield Pool(url_of(rpc, admin, "demo"), owner.pid, master.pid)


def running_master(rpc: int, admin: int, flags: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A master at these ports; :class:`StorageError` when it does not start."""
    at = f"--rpc_port={rpc} --rpc_address=127.0.0.1 --metrics_port={admin} --metrics_host=127.0.0.1"
    return _running("mooncake_master", f"{at} --rpc_thread_num=2 --client_ttl=5 {flags}", rpc, admin)


@contextmanager
def _running(name: str, flags: str, *ports: int) -> Iterator[subprocess.Popen[bytes]]:
    """A program, once its ports answer; killed at the end."""
    program = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    remedy = "`kvroute doctor --require mooncake` says what is missing"
    if program is None:
        raise StorageError(f"no Mooncake pool: there is no {name}; {remedy}")
    command, nothing = tied(program, *flags.split(), "--logtostderr"), subprocess.DEVNULL
    # In a process group of its own: Ctrl-C is for this process to handle.
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, process_group=0) as started:  # noqa: S603
        try:
            with suppress(ServerError):
                until(lambda: started.poll() is not None or all(map(_answers, ports)), name, START_S)
            if started.poll() is not None:
                raise StorageError(f"no Mooncake pool: {name} ended with status {started.returncode}; {remedy}")
            if not all(map(_answers, ports)):
                raise StorageError(f"no Mooncake pool: {name} has not answered within {START_S:.0f} s")
            yield started
        finally:
            started.kill()


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
