"""An engine whose rollouts are stored by a process of its own, which is stopped and killed at random."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from standing_still import send_signal

from cache_manager.errors import RowError
from kvroute.connector.ends import Ends
from kvroute.connector.rollouts_apart import RolloutsApart
from tests.machines.connector_house import House, Said

LOST = "rows: wanted a process that stores them"
"""The reason of an answer whose rows two processes, one after the other, were killed with."""


class ApartHouse(House):
    """As :class:`House`; a killed process costs no row, unless the next one is killed with the same question."""

    def __init__(self, seed: int, home: Path) -> None:
        super().__init__(seed, home)
        assert isinstance(self.rows._ends, Ends)
        taker = self.rows._ends._taker
        assert isinstance(taker, RolloutsApart)
        self.taker = taker
        self.stopped: int | None = None
        self.killed = 0  # since the last answers were judged
        self.kills = 0

    def url(self, home: Path, *, near: bool) -> tuple[str, str]:
        return f"apart:file://{home}/rollouts", f"file://{home}/rollouts"

    def odds(self) -> dict[str, int]:
        return super().odds() | {"is_killed": 1, "is_stopped": 3}

    def is_stopped(self) -> None:
        """The process stops, or goes on: what it was asked meanwhile it reads when its blocks may have new lives."""
        if self.stopped is not None:
            self._go_on()
        elif (pid := self.taker.pid) is not None and self._signal(pid, signal.SIGSTOP):
            self.stopped = pid

    def is_killed(self) -> None:
        if (pid := self.taker.pid) is not None and self._signal(pid, signal.SIGKILL):
            self.killed += 1
            self.kills += 1
            self.stopped = None

    def _go_on(self) -> None:
        if self.stopped is not None:
            self._signal(self.stopped, signal.SIGCONT)
        self.stopped = None

    def _signal(self, pid: int, number: int) -> bool:
        with suppress(ProcessLookupError):
            send_signal(pid, number)
            return True
        return False

    def collect(self) -> None:
        self._go_on()
        super().collect()
        self.killed = 0

    @contextmanager
    def may_lack(self, said: Said) -> Iterator[None]:
        """Rows of an answer may be missing, for the reason that it has, if two processes were killed with it."""
        try:
            yield
        except RowError as error:
            if self.killed < 2 or not (said.aborted or LOST in str(error)):
                raise

    def close(self) -> None:
        self._go_on()
        super().close()


__all__ = ["ApartHouse"]
