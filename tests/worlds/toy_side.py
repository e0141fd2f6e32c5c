"""A prefill or a decode engine in a process of its own, told line by line: ``python -m toy_side JSON``.

The argument has the arguments of :class:`toy_crossing.ToyCrossing`, and its weights. Each line has the arguments of its
``ask``. A request with ``early`` answers twice: its ticket when the first chunk is computed, and the whole when a line
comes after that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nursery import nursery
from standing_still import send_signal
from toy_crossing import ToyCrossing
from toy_engine import judge
from toy_lent import early_ticket
from toy_pair import PREFILL
from waiting import GIVE_UP_S

from kvroute.connector import missing, routes


class Side:
    """The process, from outside."""

    def __init__(self, *, weights: int = 0, **said: Any) -> None:
        given, self._lines = os.pipe()
        self._answers, told = os.pipe()
        argument = json.dumps({"weights": weights, **said})
        born = nursery("toy_crossing")
        self.process = born.start(
            ["-m", "toy_side", argument], stdin=given, stdout=told, stderr=sys.__stderr__.fileno()
        )
        os.close(given)
        os.close(told)
        self._read = os.fdopen(self._answers)
        self._write = os.fdopen(self._lines, "w")

    def tell(self, **asked: Any) -> None:
        self._write.write(json.dumps(asked) + "\n")
        self._write.flush()

    def hear(self) -> Any:
        return json.loads(self._read.readline())

    def ask(self, **asked: Any) -> Any:
        self.tell(**asked)
        return self.hear()

    def hang(self) -> None:
        """Stand still, from when this returns."""
        send_signal(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(GIVE_UP_S)

    def close(self) -> None:
        self._write.close()
        if self.process.poll() is None:
            self.go_on()
        try:
            self.process.wait(GIVE_UP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._read.close()


@contextmanager
def sides(**limits: Any) -> Iterator[tuple[Side, ToyCrossing]]:
    """A prefill engine in a process of its own and a decode engine here, which has these ``limits``."""
    first, second = Side(weights=PREFILL), ToyCrossing(limits=limits)
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def main() -> None:
    said = json.loads(sys.argv[1])
    weights = said.pop("weights")
    toy = ToyCrossing(**said)
    toy.weights = weights

    def answer(told: Mapping[str, Any]) -> None:
        print(json.dumps(told), flush=True)

    def early() -> None:
        """Once, between two chunks of a prompt: the ticket by which another side can fetch."""
        toy.between = lambda: None
        answer({"ticket": early_ticket(toy)})
        sys.stdin.readline()

    for line in sys.stdin:
        asked = json.loads(line)
        if asked.pop("early", False):
            toy.between = early
        makers, told = asked.pop("makers", None), toy.ask(**asked)
        if asked.get("lends"):
            answer({"ticket": told["kv_transfer_params"]["kvroute"]["transfer"]})
            continue
        tokens = [*asked["tokens"], *asked.get("more", ())]
        answer({"judged": judge(routes(told), tokens, makers), "missing": missing(told)})
    toy.close()


if __name__ == "__main__":
    main()
