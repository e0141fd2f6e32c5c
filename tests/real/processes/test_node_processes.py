"""Nodes in two processes that are stopped, killed and started again.

Transfers that have to complete get a lease and retries that outlast a machine which stands still; those that have to
end get short ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_nodes import QUICK, fetched
from transfer_peer import PeerProcess
from transfer_rows import identity_of

from transfer.messages import TransferId
from transfer.node import Node
from transfer.zmq_link import ZmqLink


@contextlib.contextmanager
def processes(directory: Path, **limits: float) -> Iterator[tuple[PeerProcess, PeerProcess]]:
    """A prefill, and a decode that has a name."""
    with contextlib.ExitStack() as ending:
        prefill = PeerProcess(f"ipc://{directory}/p", **limits)
        ending.callback(prefill.kill)
        decode = PeerProcess(identity="decode-0", **limits)
        ending.callback(decode.kill)
        yield prefill, decode
        decode.close()
        prefill.close()  # harmless when it was killed


def lends_and_pulls(prefill: PeerProcess, decode: PeerProcess, count: int, blocks: int) -> list[str]:
    transfers = [prefill.lend(n, blocks) for n in range(count)]
    for n, transfer in enumerate(transfers):
        decode.pull(prefill, transfer, n, blocks)
    return transfers


def crosses(prefill: PeerProcess, decode: PeerProcess) -> str:
    """A fresh offer is pulled whole; its id."""
    fresh = prefill.lend(9, 3, lease_s=60.0)
    decode.pull(prefill, fresh, 9, 3)
    done = decode.ask_until("ended()", lambda got: fresh in got)[fresh]
    assert done == {"right": True, "installed": 3, "missing": 0, "reason": None}
    return fresh


def all_come_back(prefill: PeerProcess, count: int) -> None:
    """Each offer has ended, and nothing is lent."""
    prefill.ended(count)
    assert prefill.ask("counters()")["offers_in_flight"] == 0


def test_decode_stopped_for_longer_than_the_lease(tmp_path: Path) -> None:
    """Goal: a stopped decode costs prefill one lease; its later messages are late, counted and refused. Method: SIGSTOP
    right after the pull was asked for, SIGCONT when prefill has released."""
    with processes(tmp_path, lease_s=0.7, retry_s=0.3, retries_max=200) as (prefill, decode):
        lends_and_pulls(prefill, decode, 4, 200)
        decode.stop()
        prefill.ended(4)
        decode.go_on()
        for done in decode.ended(4).values():
            assert done["right"]
            assert done["installed"] + done["missing"] == 200
            assert bool(done["reason"]) == bool(done["missing"])
        crosses(prefill, decode)
        all_come_back(prefill, 5)


def test_prefill_stopped_for_longer_than_the_lease(tmp_path: Path) -> None:
    """Goal: pulls from a stopped prefill end with a reason in bounded time, or complete when it goes on."""
    with processes(tmp_path, lease_s=0.7, retry_s=0.5, retries_max=9) as (prefill, decode):
        transfers = [prefill.lend(n, 200) for n in range(4)]
        prefill.stop()
        for n, transfer in enumerate(transfers):
            decode.pull(prefill, transfer, n, 200)
        assert {done["reason"] for done in decode.ended(4).values()} == {"timeout"}
        prefill.go_on()
        prefill.ended(4)
        crosses(prefill, decode)
        assert all(done["right"] for done in decode.ended(5).values())


def test_peers_that_come_and_go_are_all_answered(tmp_path: Path) -> None:
    """Goal: no peer is taken for one that has just gone. Method: two hundred, one after another; the server's
    process uses its descriptors again."""
    with processes(tmp_path, lease_s=60.0) as (prefill, _):
        for n in range(200):
            decode = Node(ZmqLink(), identity_of(2 + n), QUICK)
            transfer = TransferId(bytes.fromhex(prefill.lend(n, 1)))
            assert fetched(decode, prefill.address, transfer, n, 1)
            assert decode.close()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_process_killed_during_transfers_and_restarted_under_its_name(tmp_path: Path, who: str) -> None:
    """Goal: kill -9 of either side: every pull and every lease ends, what arrived is right, and the next run serves at
    once. A decode of the same name gets nothing of the old run's transfers, and all of its own."""
    limits = {"lease_s": 3.0, "retry_s": 0.2, "retries_max": 20 if who == "prefill" else 300}
    with processes(tmp_path, **limits) as (prefill, decode):
        if who == "prefill":
            lends_and_pulls(prefill, decode, 6, 400)
            prefill.kill()
            assert all(done["right"] for done in decode.ended(6).values())
            assert all(done["reason"] or not done["missing"] for done in decode.ended(6).values())
            again = PeerProcess(f"ipc://{tmp_path}/p", **limits)
            try:
                crosses(again, decode)
            finally:
                again.close()
            return
        for n in range(3):  # each is pulled before the next is made: an offer that was not pulled has no owner
            transfer = prefill.lend(n, 400)
            decode.pull(prefill, transfer, n, 400)
            prefill.ask_until("counters()", lambda got, n=n: got["pulled"] == n + 1)
        decode.kill()
        second = PeerProcess(identity="decode-0", **limits)
        try:
            second.pull(prefill, transfer, 2, 400)
            crosses(prefill, second)
            done = second.ended(2)[transfer]
            assert (done["right"], done["installed"], done["reason"]) == (True, 0, "gone")
            all_come_back(prefill, 4)
        finally:
            second.close()
