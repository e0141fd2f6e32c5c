"""One line on a terminal that moves while a command works; where output is piped there is nothing of it."""

from __future__ import annotations

import shutil
import sys
import time
from threading import Event, Lock, Thread
from typing import Final, Self, TextIO

REDRAWN_S: Final = 0.2
ERASE: Final = "\r\x1b[K"


class Progress:
    """What a command is doing and for how many seconds, over the last line of ``out``, if that is a terminal.

    A thread draws the line, so that the seconds move while the command waits or imports. What is printed goes through
    :meth:`print`, above the line; the line is gone when the block ends. Without ``out`` it is standard output.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._started_s = time.perf_counter()
        self._what = ""
        self._lock = Lock()
        self._ended = Event()
        self._thread = Thread(target=self._redraw, name="kvroute-progress", daemon=True)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._started_s

    def say(self, what: str) -> None:
        """The moving line says this from now on; nothing where there is nothing to say. It costs next to nothing."""
        self._what = what

    def print(self, text: str) -> None:
        """Write ``text``, whole lines that stay, at once."""
        with self._lock:
            if self._thread.is_alive():
                text = f"{ERASE}{text}"
            self._out.write(text)
            self._out.flush()

    def _redraw(self) -> None:
        while not self._ended.wait(REDRAWN_S):
            width = shutil.get_terminal_size().columns - 1
            with self._lock:
                if self._what:
                    self._out.write(f"{ERASE}{f'{self.seconds:6.1f} s  {self._what}'[:width]}")
                    self._out.flush()

    def __enter__(self) -> Self:
        if self._out.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._what = ""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
            self.print(ERASE)


__all__ = ["Progress"]
