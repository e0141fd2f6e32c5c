"""A node in a process of its own, which a test asks for values of Python expressions; and the test's end of that."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from standing_still import send_signal
from waiting import GIVE_UP_S

PATIENCE_S = GIVE_UP_S


class PeerProcess:
    """Starts the process and asks it; every wait is bounded. Without an address to bind it pulls only."""

    def __init__(self, bind: str = "", identity: str = "", **limits: float) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, bind, identity, json.dumps(limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.pid = self._process.pid
        self.address: str = self._answer()

    def ask(self, what: str) -> Any:
        """The value of an expression of ``node``, ``lend``, ``pull``, ``ended`` and ``counters``: see ``serve``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def ask_until(self, what: str, enough: Any) -> Any:
        give_up_s = time.monotonic() + PATIENCE_S
        while not enough(answer := self.ask(what)):
            assert time.monotonic() < give_up_s, f"{what}: only {answer}"
            time.sleep(0.01)
        return answer

    def lend(self, request: int, blocks: int, lease_s: float | None = None) -> str:
        transfer: str = self.ask(f"lend(node, {request}, {blocks}, {lease_s}).hex()")
        return transfer

    def pull(self, prefill: PeerProcess, transfer: str, request: int, blocks: int) -> None:
        self.ask(f"pull({prefill.address!r}, {transfer!r}, {request}, {blocks})")

    def ended(self, count: int) -> dict[str, Any]:
        """How the first ``count`` transfers have ended, by id."""
        ended: dict[str, Any] = self.ask_until("ended()", lambda got: len(got) >= count)
        assert len(ended) == count
        return ended

    def stop(self) -> None:
        send_signal(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def close(self) -> None:
        """Ask it to end, and see that it did so properly."""
        if self._process.poll() is None:
            self.go_on()
            assert self.ask("node.close()") is True
            self._process.stdin.close()  # type: ignore[union-attr]
            assert self._process.wait(PATIENCE_S) == 0
        self._end()

    def _end(self) -> None:
        self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()  # type: ignore[union-attr]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert ready, "the process does not answer"
        line = self._process.stdout.readline()
        assert line, f"the process ended: {self._process.wait(PATIENCE_S)}"
        return json.loads(line)


def serve(bind: str, identity: str, limits: str) -> None:
    import dataclasses

    from transfer_nodes import lend
    from transfer_rows import CanarySink, identity_of, wanted

    from transfer import Node, ZmqLink, ZmqSettings
    from transfer.actions import Finished
    from transfer.limits import TransferLimits
    from transfer.messages import TransferId

    settings = ZmqSettings(bind=bind or None, identity=identity.encode() or None)
    node = Node(ZmqLink(settings), identity_of(secrets.randbits(64)), TransferLimits(**json.loads(limits)))
    sinks: dict[str, CanarySink] = {}
    found: dict[str, Any] = {}

    def pull(address: str, transfer: str, request: int, blocks: int) -> None:
        sinks[transfer] = CanarySink(request)
        node.pull(TransferId(bytes.fromhex(transfer)), address, wanted(request, blocks), sinks[transfer])

    def ended() -> dict[str, Any]:
        for event in node.poll():
            if isinstance(event, Finished):
                sink, reason = sinks[event.transfer.hex()], event.reason and event.reason.value
                right = sink.wrong == sink.twice == 0 and len(sink.there) == event.installed
                ends = {"right": right, "installed": event.installed, "missing": len(event.missing), "reason": reason}
            else:
                ends = {"outcome": event.outcome.value}
            found[event.transfer.hex()] = ends
        return found

    def counters() -> dict[str, Any]:
        return {**dataclasses.asdict(node.counters), "alive": node.alive}

    names = {"node": node, "lend": lend, "pull": pull, "ended": ended, "counters": counters, "os": os}
    print(json.dumps(node.address if bind else ""), flush=True)
    for line in sys.stdin:
        print(json.dumps(eval(json.loads(line), names)), flush=True)  # noqa: S307 - a test's own words


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(*sys.argv[1:])
