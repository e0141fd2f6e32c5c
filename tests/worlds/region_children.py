"""Real processes that make, attach to, write and lose regions, and the regions that the tests of this process make."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

from waiting import GIVE_UP_S

from cache_manager.regions import SharedRegion, list_regions
from cache_manager.regions.directory import DIRECTORY
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

NAMESPACE = b"namespace-of-16b"
LAYOUT = RecordLayout(
    (AuxBlockDataSpec("routing", (5, 4), "uint8", 70), AuxBlockDataSpec("weights_version", (), "uint32", 70))
)

PRELUDE = """
import os, signal, sys, time
import numpy as np
from cache_manager.errors import *
from cache_manager.regions import *
from cache_manager.regions.directory import DIRECTORY
from region_children import LAYOUT, NAMESPACE
say = lambda *words: print(*words, flush=True)
wait = sys.stdin.readline
"""


class Child:
    """A Python process that runs ``script`` after ``PRELUDE``, in a process group of its own."""

    def __init__(self, script: str, *args: object, before: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, "-P", "-c", PRELUDE + script, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def heard(self) -> list[str]:
        """The words of the next line that the child says; its error output when it has died instead."""
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line.split()

    def tell(self) -> None:
        """Let the child go on from its next ``wait()``."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_group(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> tuple[int, str]:
        """Let the child go on to its end: exit status, and what it printed on both streams."""
        out, err = self.process.communicate(timeout=GIVE_UP_S)
        return self.process.returncode, out + err


Start = Callable[..., Child]


def create(blocks: int = 4) -> SharedRegion:
    return SharedRegion.create(LAYOUT, blocks, tier="device", namespace=NAMESPACE)


def names() -> set[str]:
    return {info.name for info in list_regions()}


def rewrite(region: SharedRegion, at: int, raw: bytes) -> None:
    """Write into the region's file as another process would."""
    fd = os.open(DIRECTORY / region.name, os.O_RDWR)
    try:
        assert os.pwrite(fd, raw, at) == len(raw)
    finally:
        os.close(fd)
