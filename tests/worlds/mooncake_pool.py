"""A real Mooncake pool on loopback: the demo's master, and owners of segments in processes of their own.

They end with the process that started them, also when that is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from standing_still import send_signal
from waiting import GIVE_UP_S

from paged_engine import pool
from paged_engine.processes import hold_port, tied

START_S = GIVE_UP_S
LEASE_MS = 60

OWNER = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

master = sys.argv[1]
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
segments = []
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "segment":  # replaces the segment before, with all that was in it
        if segments:
            assert store.unmount_segment(segments) == 0
        path, nbytes = arguments
        with open(path, "wb") as file:
            file.truncate(nbytes)
        answer = store.mount_segment(path, nbytes)
        assert answer["ret"] == 0, answer
        segments = answer["segment_ids"]
        answer = 0
    elif name in ("put", "pin"):
        key, text = arguments
        config = ReplicateConfig()
        config.with_hard_pin = name == "pin"
        answer = store.put(key, text.encode("latin-1"), config)
    else:
        answer = getattr(store, name)(*arguments)
    print(json.dumps(answer), flush=True)
store.close()
os._exit(0)
"""


class Master:
    """``mooncake_master`` on ports of its own, which a restart keeps."""

    def __init__(self, lease_ms: int = LEASE_MS) -> None:
        self.rpc, self.admin, self.lease_ms = hold_port(), hold_port(), lease_ms
        self.broken = False
        self._running = ExitStack()

    def start(self) -> None:
        flags = f"--default_kv_lease_ttl={self.lease_ms} --put_start_discard_timeout_sec=6"
        flags += " --eviction_high_watermark_ratio=1.0"  # makes room when there is none, and not before
        self._pid = self._running.enter_context(pool.running_master(self.rpc, self.admin, flags)).pid

    def signal(self, number: int) -> None:
        self.broken = True
        send_signal(self._pid, number)

    def kill(self) -> None:
        self.broken = True
        self._running.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc}"

    def url(self, prefix: str = "test", **parameters: object) -> str:
        return pool.url_of(self.rpc, self.admin, prefix) + "".join(f"&{name}={v}" for name, v in parameters.items())


class Owner:
    """A process that lends a segment to the pool, and runs commands on the pool."""

    def __init__(self, master: Master) -> None:
        self.broken = False
        environment = {**os.environ, "MC_LOG_LEVEL": "ERROR", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
        self.process = subprocess.Popen(
            tied(sys.executable, "-c", OWNER, master.address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            process_group=0,
        )

    def ask(self, name: str, *arguments: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def segment(self, file: Path, nbytes: int) -> None:
        """Lend a segment of this size; the content of an earlier segment is lost."""
        assert self.ask("segment", str(file), nbytes) == 0

    def signal(self, number: int) -> None:
        self.broken = True
        send_signal(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()  # also a stopped one
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def running_master(lease_ms: int = LEASE_MS) -> Iterator[Master]:
    master = Master(lease_ms)
    master.start()
    try:
        yield master
    finally:
        master.kill()


@contextmanager
def running_owner(master: Master, file: Path, nbytes: int) -> Iterator[Owner]:
    owner = Owner(master)
    try:
        owner.segment(file, nbytes)
        yield owner
    finally:
        owner.end()


class Pools:
    """Masters, each with an owner, that tests share; a master that a test has broken is not used again.

    When an owner lends another segment, everything that an earlier test left in the pool is gone.
    """

    def __init__(self) -> None:
        self._running: dict[int, tuple[Master, Owner, ExitStack]] = {}

    def pool(self, lease_ms: int) -> tuple[Master, Owner]:
        if lease_ms not in self._running:
            with ExitStack() as stack:
                master = stack.enter_context(running_master(lease_ms))
                owner = Owner(master)
                stack.callback(owner.end)
                self._running[lease_ms] = master, owner, stack.pop_all()
        return self._running[lease_ms][:2]

    def end_broken(self) -> None:
        for lease_ms, (master, owner, _) in list(self._running.items()):
            if master.broken or owner.broken:
                self._running.pop(lease_ms)[2].close()

    def close(self) -> None:
        while self._running:
            self._running.popitem()[1][2].close()
