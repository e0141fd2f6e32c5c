"""Nodes in two processes that are stopped, killed and started again.

Transfers that have to complete get a lease and retries that outlast a machine which stands still; those that have to
end get short ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from transfer_peer import PeerProcess

LEASE_S = 60.0
"""Of an offer that has to cross."""


@contextlib.contextmanager
def processes(directory: Path, **limits: float) -> Iterator[tuple[PeerProcess, PeerProcess]]:
    prefill = PeerProcess("prefill", f"ipc://{directory}/p", **limits)
    decode = PeerProcess("decode", **limits)
    try:
        yield prefill, decode
        decode.close()
        prefill.close()  # harmless when it was killed
    finally:
        for process in (decode, prefill):
            with contextlib.suppress(Exception):
                process.kill()


def right(done: dict[str, object]) -> bool:
    return done["wrong"] == done["twice"] == 0 and done["there"] == done["installed"]


def crosses(prefill: PeerProcess, decode: PeerProcess) -> str:
    """A fresh offer is pulled whole; its id."""
    fresh: str = prefill.ask("offer", request=9, blocks=3, lease_s=LEASE_S)
    decode.ask("pull", address=prefill.address, transfer=fresh, request=9, blocks=3)
    assert decode.ask_until("poll", lambda got: fresh in got)[fresh]["missing"] == 0
    return fresh


def test_decode_stopped_for_longer_than_the_lease(tmp_path: Path) -> None:
    """Goal: a stopped decode costs prefill one lease; its later messages are late, counted and refused.

    Method: SIGSTOP right after the pull was asked for, SIGCONT when prefill has released.
    """
    with processes(tmp_path, lease_s=0.7, retry_s=0.3, retries_max=200) as (prefill, decode):
        transfers = [prefill.ask("offer", request=n, blocks=200) for n in range(4)]
        for n, transfer in enumerate(transfers):
            decode.ask("pull", address=prefill.address, transfer=transfer, request=n, blocks=200)
        decode.stop()
        prefill.ask_until("poll", lambda got: len(got) == 4)
        decode.go_on()
        done = decode.ask_until("poll", lambda got: len(got) == 4)
        assert all(right(d) for d in done.values())
        assert all(d["installed"] + d["missing"] == 200 for d in done.values())
        assert all(d["reason"] for d in done.values() if d["missing"])
        crosses(prefill, decode)
        assert len({t for t, _, _ in prefill.ask_until("poll", lambda got: len(got) == 5)}) == 5
        assert prefill.ask("counters")["offers_in_flight"] == 0


def test_prefill_stopped_for_longer_than_the_lease(tmp_path: Path) -> None:
    """Goal: pulls from a stopped prefill end with a reason in bounded time, or complete when it goes on."""
    with processes(tmp_path, lease_s=0.7, retry_s=0.5, retries_max=9) as (prefill, decode):
        transfers = [prefill.ask("offer", request=n, blocks=200) for n in range(4)]
        prefill.stop()
        for n, transfer in enumerate(transfers):
            decode.ask("pull", address=prefill.address, transfer=transfer, request=n, blocks=200)
        done = decode.ask_until("poll", lambda got: len(got) == 4)
        assert {d["reason"] for d in done.values()} == {"timeout"}
        prefill.go_on()
        prefill.ask_until("poll", lambda got: len(got) == 4)
        crosses(prefill, decode)
        assert all(right(d) for d in decode.ask("poll").values())


def test_prefill_killed_during_transfers_and_restarted_at_its_address(tmp_path: Path) -> None:
    """Goal: kill -9 of prefill: every pull ends, what arrived is right, the next run serves at the same address."""
    limits = {"lease_s": 5.0, "retry_s": 0.2, "retries_max": 20}
    with processes(tmp_path, **limits) as (prefill, decode):
        transfers = [prefill.ask("offer", request=n, blocks=400) for n in range(6)]
        for n, transfer in enumerate(transfers):
            decode.ask("pull", address=prefill.address, transfer=transfer, request=n, blocks=400)
        prefill.kill()
        done = decode.ask_until("poll", lambda got: len(got) == 6)
        assert all(right(d) for d in done.values())
        assert all(d["reason"] or not d["missing"] for d in done.values())
        again = PeerProcess("prefill", f"ipc://{tmp_path}/p", **limits)
        try:
            crosses(again, decode)
        finally:
            again.close()


def test_decode_killed_during_transfers_and_restarted_with_its_identity(tmp_path: Path) -> None:
    """Goal: kill -9 of decode: its leases end, a new run under its name gets nothing of the old run's transfers, and
    all of its own.

    Method: the second process has the same identity, asks for a transfer of the first, then for one of its own. Each
    offer is pulled before the next is made: an offer that was not pulled when its lease ends has no owner.
    """
    limits = {"lease_s": 3.0, "retry_s": 0.2, "retries_max": 300}
    with contextlib.ExitStack() as ending:

        def start(role: str, address: str = "-", identity: str = "") -> PeerProcess:
            process = PeerProcess(role, address, identity, **limits)
            ending.callback(process.kill)
            return process

        prefill, first = start("prefill", f"ipc://{tmp_path}/p"), start("decode", identity="decode-0")
        transfers = []
        for n in range(3):
            transfers.append(prefill.ask("offer", request=n, blocks=400))
            first.ask("pull", address=prefill.address, transfer=transfers[n], request=n, blocks=400)
            prefill.ask_until("counters", lambda got, n=n: got["pulled"] == n + 1)
        first.kill()
        second = start("decode", identity="decode-0")
        second.ask("pull", address=prefill.address, transfer=transfers[0], request=0, blocks=400)
        fresh = crosses(prefill, second)
        done = second.ask_until("poll", lambda got: len(got) == 2)
        assert done[fresh]["missing"] == 0
        assert all(right(d) for d in done.values())
        assert done[transfers[0]]["installed"] == 0
        assert done[transfers[0]]["reason"] == "gone"
        prefill.ask_until("poll", lambda got: len(got) == 4)
        assert prefill.ask("counters")["offers_in_flight"] == 0
        second.close()
        prefill.close()
        assert os.listdir(tmp_path) == []
