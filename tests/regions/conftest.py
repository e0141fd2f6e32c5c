"""Children for the region tests: real processes that make, attach to, write and lose regions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from cache_manager.regions import list_regions

PRELUDE = """
import os, signal, sys, time
import numpy as np
from cache_manager.errors import *
from cache_manager.regions import *
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

LAYOUT = RecordLayout((
    AuxBlockDataSpec("routing", (5, 4), "uint8", 70),
    AuxBlockDataSpec("weights_version", (), "uint32", 70),
))
NAMESPACE = b"namespace-of-16b"
say = lambda *words: print(*words, flush=True)
wait = sys.stdin.readline
"""


class Child:
    """A Python process that runs ``script`` after ``PRELUDE``, in a process group of its own."""

    def __init__(self, script: str, *args: object, before: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", PRELUDE + script, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def heard(self) -> list[str]:
        """The words of the next line that the child says; its error output when it has died instead."""
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line.split()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_group(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> tuple[int, str]:
        """Let the child go on to its end: exit status, and what it printed on both streams."""
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out + err


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts children; none outlives the test."""
    children: list[Child] = []

    def start(script: str, *args: object, before: tuple[str, ...] = ()) -> Child:
        children.append(Child(script, *args, before=before))
        return children[-1]

    yield start
    for one in children:
        if one.process.poll() is None:
            one.kill_group()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            stream.close()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    """Goal: the tests of this directory clean up. Method: no region that nobody uses is new when they have ended."""
    before = {info.name for info in list_regions()}
    yield
    assert [info.name for info in list_regions() if info.name not in before and not info.in_use] == []
