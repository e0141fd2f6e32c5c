"""Peers that send whatever they like: the server goes on serving, and its memory stays bounded."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_nodes import QUICK, fetched
from transfer_peer import PATIENCE_S, PeerProcess
from transfer_rows import identity_of, ranges
from zmq_peers import Client, malformed
from zmtp import greeted

from transfer.messages import Pull, TransferId, encode
from transfer.node import Node
from transfer.zmq_link import ZmqLink

GROWTH_NBYTES_MAX = 96 << 20
"""What a server's memory may grow under attack: allocators keep some of what they had."""


@pytest.fixture(scope="module")
def prefill() -> Iterator[PeerProcess]:
    process = PeerProcess("tcp://127.0.0.1:*", lease_s=60.0, retry_s=0.5, retries_max=240)
    yield process
    process.close()


def resident_nbytes(pid: int) -> int:
    (line,) = (at for at in Path(f"/proc/{pid}/status").read_text().splitlines() if at.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


def serves(prefill: PeerProcess) -> None:
    """A good client gets every row of an offer, and the offer ends."""
    decode, transfer = Node(ZmqLink(), identity_of(2), QUICK), TransferId(bytes.fromhex(prefill.lend(7, 20)))
    assert fetched(decode, prefill.address, transfer, 7, 20)
    prefill.ask_until("ended()", lambda got: got.get(transfer.hex()) == {"outcome": "acked"})
    assert decode.close()


def test_garbage_in_messages(prefill: PeerProcess) -> None:
    """Goal: nonsense from many peers costs no memory and no good client. Method: 10,000 messages under 100 names."""
    serves(prefill)
    before, dice = resident_nbytes(prefill.pid), random.Random(4)
    wrong = malformed(encode(Pull(bytes(16), bytes(16), 1, identity_of(1).digest, ranges(1, 1))))
    for n in range(100):
        with contextlib.closing(Client(prefill.address)) as client:
            for _ in range(100):
                client.say(*(dice.choice(wrong) if dice.random() < 0.5 else [dice.randbytes(dice.choice((7, 5_000)))]))
            client.hear_out()
            counters = prefill.ask("counters()")
            assert counters["bad_messages"] == 100 * n + 100
    assert counters["alive"]
    assert (counters["errors"], counters["offers_in_flight"]) == (0, 0)
    serves(prefill)
    assert resident_nbytes(prefill.pid) - before < GROWTH_NBYTES_MAX


def test_ten_thousand_connections_of_garbage(prefill: PeerProcess) -> None:
    """Goal: connections that come, speak nonsense and go leave nothing. Method: 10,000 raw ones, 50 at a time."""
    host, port = prefill.address.removeprefix("tcp://").split(":")
    before, dice, greeting = resident_nbytes(prefill.pid), random.Random(5), b"\xff" + bytes(8) + b"\x7f"
    beginnings = (b"", b"GET / HTTP/1.1\r\n\r\n", greeting, greeting + b"\x03\x00CURVE", b"\x01\x00")
    for _ in range(200):
        batch = [socket.create_connection((host, int(port)), timeout=PATIENCE_S) for _ in range(50)]
        for one in batch:
            with one, contextlib.suppress(OSError):  # cut off already: also fine
                one.sendall(dice.choice(beginnings) + dice.randbytes(dice.randrange(300)))
    serves(prefill)
    assert resident_nbytes(prefill.pid) - before < GROWTH_NBYTES_MAX
    prefill.ask_until("len(os.listdir('/proc/self/fd'))", lambda got: got < 100)


def test_heartbeats_that_ask_for_our_death(prefill: PeerProcess) -> None:
    """Goal: a peer's ZMTP heartbeat with the shortest time-to-live, a flood and silence do not end the process."""
    for _ in range(5):
        with greeted(prefill.address) as peer:
            ping = b"\x04PING" + struct.pack(">H", 1)
            prefill.stop()
            peer.sendall(bytes((4, len(ping))) + ping + (b"\x00\xc8" + bytes(200)) * 64)
            prefill.go_on()
            time.sleep(0.15)  # the time-to-live ends
    serves(prefill)
