"""The line that moves on a terminal, and nothing of it where output is piped."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import TextIO

import pytest
from waiting import until

from cache_manager.progress import ERASE, Progress


class Terminal:
    """A terminal of its own: what is written to ``out`` is read by :meth:`shown`."""

    def __init__(self) -> None:
        self._screen, end = os.openpty()
        self.out: TextIO = os.fdopen(end, "w")
        self.text = ""

    def shown(self, wanted: str) -> bool:
        """Whether ``wanted`` has come since the beginning."""
        self.text += os.read(self._screen, 4096).decode()
        return wanted in self.text

    def close(self) -> None:
        self.out.close()
        os.close(self._screen)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    there = Terminal()
    yield there
    there.close()


def test_a_terminal_shows_a_line_that_moves_and_is_gone_at_the_end(terminal: Terminal) -> None:
    """Goal: no silence. Method: a terminal of the system: what is said is drawn by itself, again with more seconds;
    printed lines stand above it; at the end the line is erased."""
    with Progress(terminal.out) as progress:
        progress.say("41/96 requests, 12,300 rows")
        until(lambda: terminal.shown(" s  41/96 requests, 12,300 rows"))
        before = terminal.text
        until(lambda: terminal.shown("rows") and terminal.text.count("rows") > before.count("rows"))
        progress.print("serving\n")
        until(lambda: terminal.shown(f"{ERASE}serving\r\n"))
        progress.say("a" * 500)
        until(lambda: terminal.shown("aaa"))
    until(lambda: terminal.shown("a" + ERASE))
    assert "a" * 200 not in terminal.text  # a line is cut at the terminal's width
    assert progress.seconds > 0


def test_a_pipe_gets_lines_alone() -> None:
    out = io.StringIO()
    with Progress(out) as progress:
        progress.say("41/96 requests")
        progress.print("serving\n")
    assert out.getvalue() == "serving\n"


def test_an_error_ends_the_line(terminal: Terminal) -> None:
    def work() -> None:
        with Progress(terminal.out) as progress:
            progress.say("working")
            until(lambda: terminal.shown("working"))
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        work()
    until(lambda: terminal.shown(f"working{ERASE}"))
