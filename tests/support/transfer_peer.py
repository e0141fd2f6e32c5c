"""A prefill or decode node in a process of its own, driven by lines of JSON; and the test's end of that.

``python transfer_peer.py prefill ADDRESS IDENTITY LIMITS``, or ``decode -`` and the same.
"""

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

PATIENCE_S = 60.0


class PeerProcess:
    """Starts the process and asks it; every wait is bounded."""

    def __init__(self, role: str, address: str = "-", identity: str = "", **limits: float) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, role, address, identity, json.dumps(limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.pid = self._process.pid
        self.address: str = self._answer()["address"]

    def ask(self, do: str, **what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()["answer"]

    def ask_until(self, do: str, enough: Any, **what: Any) -> Any:
        give_up_s = time.monotonic() + PATIENCE_S
        while not enough(answer := self.ask(do, **what)):
            assert time.monotonic() < give_up_s, f"{do}: only {answer}"
            time.sleep(0.01)
        return answer

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def close(self) -> None:
        """Ask it to end, and see that it did so properly."""
        if self._process.poll() is None:
            self.go_on()
            assert self.ask("close") is True
            assert self._process.wait(PATIENCE_S) == 0
        self._end()

    def _end(self) -> None:
        self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert ready, "the process does not answer"
        line = self._process.stdout.readline()
        assert line, f"the process ended: {self._process.wait(PATIENCE_S)}"
        return json.loads(line)


class _Prefill:
    def __init__(self, address: str, limits: Any) -> None:
        from transfer_rows import identity_of

        from transfer import Node, ZmqLink, ZmqSettings

        self.node = Node(ZmqLink(ZmqSettings(bind=address)), identity_of(secrets.randbits(64)), limits)
        self.address = self.node.address
        self.released: list[Any] = []

    def offer(self, request: int, blocks: int, lease_s: float | None = None) -> str:
        from transfer_nodes import lend

        return lend(self.node, request, blocks, lease_s).hex()

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def table_sizes(self) -> dict[str, int]:
        session = self.node._offers
        return {"peers": len(session._runs), "ended": len(session._ended)}

    def poll(self) -> list[Any]:
        self.released += [[r.transfer.hex(), r.outcome.value, r.detail] for r in self.node.poll()]
        return self.released


class _Decode:
    address = "-"

    def __init__(self, identity: str, limits: Any) -> None:
        from transfer_rows import identity_of

        from transfer import Node, ZmqLink, ZmqSettings

        self.node = Node(
            ZmqLink(ZmqSettings(identity=identity.encode() or None)), identity_of(secrets.randbits(64)), limits
        )
        self.sinks: dict[str, Any] = {}
        self.done: dict[str, Any] = {}

    def pull(self, address: str, transfer: str, request: int, blocks: int) -> None:
        from transfer_rows import CanarySink, wanted

        from transfer.messages import TransferId

        sink = self.sinks[transfer] = CanarySink(request)
        self.node.pull(TransferId(bytes.fromhex(transfer)), address, wanted(request, blocks), sink)

    def poll(self) -> dict[str, Any]:
        for event in self.node.poll():
            transfer, result = event.transfer.hex(), event
            sink = self.sinks[transfer]
            self.done[transfer] = {
                "installed": result.installed,
                "missing": len(result.missing),
                "reasons": sorted({m.reason.value for m in result.missing}),
                "reason": result.reason and result.reason.value,
                "there": len(sink.there),
                "wrong": sink.wrong,
                "twice": sink.twice,
            }
        return self.done


def main() -> None:
    import dataclasses

    from transfer.limits import TransferLimits

    role, address, identity, text = sys.argv[1:]
    limits = TransferLimits(**json.loads(text))
    peer: Any = _Prefill(address, limits) if role == "prefill" else _Decode(identity, limits)

    def say(**what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    say(address=peer.address)
    for line in sys.stdin:
        asked = json.loads(line)
        match asked.pop("do"):
            case "close":
                say(answer=peer.node.close())
                return
            case "counters":
                say(answer={**dataclasses.asdict(peer.node.counters), "alive": peer.node.alive})
            case do:
                say(answer=getattr(peer, do)(**asked))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
