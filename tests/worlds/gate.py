"""A store whose background calls stop at a gate until the test lets them go.

Calls of the main thread pass. With one store thread, every interleaving of the store and the scheduler is the test's
own choice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

from waiting import GIVE_UP_S, until

from cache_manager.jobs import Job, Phase
from cache_manager.testing.faults import FaultyStore


class Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._let_go = 0
        self._passed = 0
        self.waiting = 0

    def stop(self) -> None:
        """Called by the store: wait to be let go."""
        if threading.current_thread() is threading.main_thread():
            return
        with self._changed:
            self.waiting += self._let_go < sys.maxsize
            assert self._changed.wait_for(lambda: self._passed < self._let_go, GIVE_UP_S), "nobody opened the gate"
            self._passed += 1

    def let_go(self) -> None:
        """Let one of the calls that wait go on."""
        with self._changed:
            assert self.waiting, "no call waits"
            self.waiting -= 1
            self._let_go += 1
            self._changed.notify_all()

    def open(self) -> None:
        """Let every call go on, those to come as well."""
        with self._changed:
            self._let_go = sys.maxsize
            self.waiting = 0
            self._changed.notify_all()

    def settle(self, jobs: Iterable[Job]) -> None:
        """Return when every job that the store is at work for waits at the gate, and no thread is about to take one."""
        known = list(jobs)

        def settled() -> bool:
            phases = [job.phase for job in known]
            carrying = phases.count(Phase.CARRYING)
            return carrying == self.waiting and bool(carrying or Phase.QUEUED not in phases)

        until(settled, what="a store thread neither works nor waits")


class GatedStore(FaultyStore):
    """Stops at the gate before it reads or writes."""

    gate: Gate

    def put(self, headers, payloads, *, replace=False):
        self.gate.stop()
        return super().put(headers, payloads, replace=replace)

    def get_into(self, keys, buffers):
        self.gate.stop()
        return super().get_into(keys, buffers)
