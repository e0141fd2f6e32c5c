"""To see that a thread waits or that a process stands still, without guessing how long it takes to get there."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from waiting import GIVE_UP_S, until


def until_it_waits(thread: threading.Thread) -> bool:
    """Returns True when ``thread`` sleeps in the kernel and stays at the same instruction, False when it has ended.

    The caller releases the interpreter between two looks, so that a thread which waits only for that goes on.
    """
    give_up_s, before = time.monotonic() + GIVE_UP_S, None
    while thread.is_alive():
        assert time.monotonic() < give_up_s, f"{thread.name} neither waits nor ends"
        frame = sys._current_frames().get(thread.ident or 0)
        where = (id(frame), frame.f_lasti) if frame and _sleeps(thread.native_id) else None
        if where is not None and where == before:
            return True
        before = where
        time.sleep(0.002)
    return False


def send_signal(pid: int, number: int) -> None:
    """Send a signal. A process that is stopped stands still, with all its threads, when this returns.

    The kernel stops a process at its next turn: on a busy machine its threads may still answer meanwhile.
    """
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        until(lambda: _stands_still(Path(f"/proc/{pid}/task")), what=f"process {pid} does not stop")


def _sleeps(native_id: int | None) -> bool:
    return _state(Path(f"/proc/self/task/{native_id}")) == "S"


def _stands_still(tasks: Path) -> bool:
    try:
        return all(_state(task) in "TZ" for task in tasks.iterdir())
    except OSError:  # it has ended
        return True


def _state(task: Path) -> str:
    """The kernel's letter for what this thread does; ``Z`` when it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
