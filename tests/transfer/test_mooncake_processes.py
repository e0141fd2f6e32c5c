"""Two nodes in two processes over the Mooncake link, each with its native engine in a third and a fourth.

Whatever is killed or stopped: every request ends complete or with a reason, no row is wrong, every block comes back,
nothing is left behind. The deadline of every wait is ``PATIENCE_S`` of the peer processes, 60 s.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transfer_peer import PATIENCE_S, PeerProcess

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="needs the mooncake wheel")
LIMITS = {"lease_s": 60.0, "retry_s": 0.3, "retries_max": 200}
BLOCKS = 300


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Stage:
    """The processes of a test; what they started ends with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines: set[int] = set()
        self._peers: list[PeerProcess] = []

    def start(self, role: str, identity: str = "", **limits: float) -> PeerProcess:
        address = f"ipc://{self.directory}/p" if role == "prefill" else "-"
        peer = PeerProcess(role, address, identity, "mooncake", **(LIMITS | limits))
        self._peers.append(peer)
        self.engines.add(peer.ask("link")["engine_pid"])
        return peer

    def end(self) -> None:
        """Close what lives, and see that no process is left; the memory has no name, and goes with the last of them."""
        for peer in reversed(self._peers):
            peer.close()
        give_up_s = time.monotonic() + PATIENCE_S
        while left := [pid for pid in self.engines if is_there(pid)]:
            assert time.monotonic() < give_up_s, f"engines {left} outlive their links"
            time.sleep(0.01)

    def kill(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(Exception):
                peer.kill()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    try:
        yield stage
        stage.end()
    finally:
        stage.kill()


def begin(
    prefill: PeerProcess, decode: PeerProcess, requests: range, blocks: int = BLOCKS, lease_s: float | None = None
) -> list[str]:
    transfers = [prefill.ask("offer", request=n, blocks=blocks, lease_s=lease_s) for n in requests]
    for n, transfer in zip(requests, transfers, strict=True):
        decode.ask("pull", address=prefill.address, transfer=transfer, request=n, blocks=blocks)
    return transfers


def ended(decode: PeerProcess, transfers: list[str], blocks: int = BLOCKS) -> dict[str, Any]:
    """How the transfers ended: right, each block there or missing, and what is missing with a reason."""
    everything = decode.ask_until("poll", lambda got: set(transfers) <= set(got))
    done = {t: everything[t] for t in transfers}
    for d in done.values():
        assert d["wrong"] == d["twice"] == 0
        assert d["there"] == d["installed"]
        assert d["installed"] + d["missing"] == blocks
        assert bool(d["missing"]) == bool(d["reasons"])
    return done


def all_come_back(prefill: PeerProcess, transfers: list[str]) -> dict[str, str]:
    """Wait until every offer was released once; how each was."""
    found = prefill.ask_until("poll", lambda got: len(got) >= len(transfers))
    assert sorted(t for t, _, _ in found) == sorted(transfers)
    assert prefill.ask("counters")["in_flight"] == 0
    return {t: outcome for t, outcome, _ in found}


def crosses(prefill: PeerProcess, decode: PeerProcess, request: int) -> str:
    """A fresh request goes through whole; its lease is long, whatever the test's is."""
    (transfer,) = begin(prefill, decode, range(request, request + 1), 20, LIMITS["lease_s"])
    assert ended(decode, [transfer], 20)[transfer]["missing"] == 0
    return transfer


def goes_by_the_engine(prefill: PeerProcess, decode: PeerProcess, request: int) -> list[str]:
    """Fresh requests until one's bulk was written by the engine again."""
    before, transfers = prefill.ask("link").get("messages_written", 0), []
    give_up_s = time.monotonic() + 2 * PATIENCE_S
    while prefill.ask("link").get("messages_written", 0) == before:
        assert time.monotonic() < give_up_s, "the engine is not used again"
        transfers.append(crosses(prefill, decode, request + len(transfers)))
        time.sleep(0.05)
    return transfers


def test_rows_cross_between_processes(stage: Stage) -> None:
    """Goal: whole transfers, by the engine, acknowledged; each offer released once.

    Nothing is asked for twice, so that every message that was written is one that decode takes. A write that takes
    longer than a second goes by ZeroMQ, as it may on a machine that stands still; the next goes by the engine again.
    """
    prefill, decode = stage.start("prefill"), stage.start("decode", retry_s=PATIENCE_S)
    transfers = begin(prefill, decode, range(4))
    assert all(d["missing"] == 0 and d["acknowledged"] for d in ended(decode, transfers).values())
    transfers += goes_by_the_engine(prefill, decode, 50)
    assert set(all_come_back(prefill, transfers).values()) == {"acked"}
    written = prefill.ask("link")["messages_written"]
    decode.ask_until("link", lambda got: got.get("messages_landed", 0) == written)


def test_prefill_killed_during_transfers_and_restarted_at_its_address(stage: Stage) -> None:
    """Goal: every pull ends, its engine ends with it, the next run serves at the same address, by the engine."""
    prefill, decode = stage.start("prefill"), stage.start("decode", retries_max=20)
    transfers = begin(prefill, decode, range(6))
    prefill.ask_until("counters", lambda got: got["session"]["records_sent"] > 0)
    prefill.kill()
    ended(decode, transfers)
    again = stage.start("prefill")
    fresh = goes_by_the_engine(again, decode, 50)
    assert set(all_come_back(again, fresh).values()) == {"acked"}


def test_decode_killed_during_transfers_and_restarted_with_its_identity(stage: Stage) -> None:
    """Goal: leases of the dead end, the new run gets nothing of the old and what is its own, by the engine."""
    prefill, first = stage.start("prefill", lease_s=3.0), stage.start("decode", "decode-0")
    transfers = []
    for n in range(3):  # each is pulled before its lease can end
        transfers += begin(prefill, first, range(n, n + 1))
        prefill.ask_until("counters", lambda got, n=n: got["session"]["pulled"] == n + 1)
    first.kill()
    second = stage.start("decode", "decode-0")
    second.ask("pull", address=prefill.address, transfer=transfers[0], request=0, blocks=BLOCKS)
    assert ended(second, transfers[:1])[transfers[0]]["installed"] == 0
    fresh = goes_by_the_engine(prefill, second, 50)
    outcomes = all_come_back(prefill, transfers + fresh)
    assert {outcomes[t] for t in fresh} == {"acked"}


@pytest.mark.parametrize("with_engine", [False, True], ids=["node", "node and engine"])
def test_decode_stopped_for_longer_than_the_lease(stage: Stage, with_engine: bool) -> None:
    """Goal: prefill loses one lease and goes on serving others meanwhile; what decode says afterwards is refused.

    Method: SIGSTOP right after the pull was asked for, once of decode alone, once of its native engine, too.
    """
    prefill, decode = stage.start("prefill", lease_s=0.7), stage.start("decode")
    other = stage.start("decode")
    engine = decode.ask("link")["engine_pid"]
    transfers = begin(prefill, decode, range(4))
    decode.stop()
    if with_engine:
        os.kill(engine, signal.SIGSTOP)
    fresh = crosses(prefill, other, 9)
    outcomes = all_come_back(prefill, [*transfers, fresh])
    assert outcomes[fresh] == "acked"
    if with_engine:
        os.kill(engine, signal.SIGCONT)
    decode.go_on()
    ended(decode, transfers)
    crosses(prefill, decode, 10)


def test_prefill_stopped_for_longer_than_the_lease(stage: Stage) -> None:
    """Goal: pulls end with a reason in bounded time, or complete; when it goes on, rows cross again."""
    prefill, decode = stage.start("prefill", lease_s=0.7), stage.start("decode", retry_s=0.5, retries_max=9)
    transfers = begin(prefill, decode, range(4))
    prefill.stop()
    done = ended(decode, transfers)
    assert {d["reason"] for d in done.values() if d["missing"]} <= {"timeout", "gone"}  # a lease may have ended before
    prefill.go_on()
    all_come_back(prefill, transfers)
    crosses(prefill, decode, 9)


@pytest.mark.parametrize("whose", ["prefill", "decode"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_native_engine_that_dies_costs_no_request(stage: Stage, whose: str, how: signal.Signals) -> None:
    """Goal: what its engine dies of does not end a node, no request fails, and another engine takes over.

    Method: end the native process of either side during transfers, by kill -9 and by a segmentation fault.
    """
    prefill, decode = stage.start("prefill"), stage.start("decode")
    transfers = begin(prefill, decode, range(6))
    side = prefill if whose == "prefill" else decode
    os.kill(side.ask("link")["engine_pid"], how)
    assert all(d["missing"] == 0 for d in ended(decode, transfers).values())
    side.ask_until("link", lambda got: got.get("engines_lost", 0) == 1 and got["engine_pid"] not in stage.engines)
    stage.engines.add(side.ask("link")["engine_pid"])
    transfers += goes_by_the_engine(prefill, decode, 50)
    assert set(all_come_back(prefill, transfers).values()) == {"acked"}


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_a_native_engine_that_hangs_costs_no_request(stage: Stage, whose: str) -> None:
    """Goal: a native engine that stands still delays, and fails nothing. Method: SIGSTOP before any transfer.

    A first write to a stopped engine keeps a native thread for 62 s; everything goes over ZeroMQ meanwhile.
    """
    prefill, decode = stage.start("prefill"), stage.start("decode")
    engine = (prefill if whose == "prefill" else decode).ask("link")["engine_pid"]
    os.kill(engine, signal.SIGSTOP)
    transfers = begin(prefill, decode, range(4))
    assert all(d["missing"] == 0 for d in ended(decode, transfers).values())
    assert set(all_come_back(prefill, transfers).values()) == {"acked"}
    assert prefill.ask("link")["writes_failed"] > 0
    os.kill(engine, signal.SIGCONT)
    crosses(prefill, decode, 9)
