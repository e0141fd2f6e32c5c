"""A server of an engine, from its first answer until it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nursery import Born
from waiting import GIVE_UP_S

START_S = GIVE_UP_S


@contextmanager
def answering(process: subprocess.Popen[bytes] | Born, url: str, log: Path) -> Iterator[None]:
    """``process``, which leads a session of its own, answers at ``url``; at the end all of its session is killed."""
    give_up_s = time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < give_up_s, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()  # noqa: S310 (our own)
                break
            except OSError:
                time.sleep(0.2)
        yield
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes] | Born) -> None:
    """Kills a server, its engine and its workers, as a machine without free memory does."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own, which was started here
    process.wait()
