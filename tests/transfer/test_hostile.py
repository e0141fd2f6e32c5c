"""Peers that send whatever they like: the server goes on serving, its tables and its memory stay bounded."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transfer_peer import PATIENCE_S, PeerProcess
from transfer_rows import PART, ranges
from zmq_peers import clients
from zmtp import greeted

from transfer.messages import (
    MAGIC,
    MAJOR,
    PREFIX,
    Abort,
    Ack,
    Bye,
    Gone,
    Hello,
    Later,
    Outcome,
    Pull,
    Refuse,
    Renew,
    Welcome,
    encode,
)

GROWTH_NBYTES_MAX = 96 << 20
"""What a server's memory may grow under attack: allocators keep some of what they had."""

LIMITS = {"lease_s": 60.0, "peers_max": 32, "remembered_max": 64, "retry_s": 0.5, "retries_max": 240}
TRANSFER = secrets.token_bytes(16)


@pytest.fixture
def prefill() -> Iterator[PeerProcess]:
    process = PeerProcess("prefill", "tcp://127.0.0.1:*", **LIMITS)
    try:
        yield process
        process.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def resident_nbytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


def serves(prefill: PeerProcess, request: int = 7) -> None:
    """A good client gets every row of an offer, and the offer ends."""
    decode = PeerProcess("decode", "-", **LIMITS)
    try:
        transfer = prefill.ask("offer", request=request, blocks=20)
        decode.ask("pull", address=prefill.address, transfer=transfer, request=request, blocks=20)
        done = decode.ask_until("poll", lambda got: transfer in got)[transfer]
        assert (done["missing"], done["wrong"], done["twice"]) == (0, 0, 0)
        prefill.ask_until("poll", lambda got: [transfer, "acked", ""] in got)
        decode.close()
    finally:
        decode.kill()


def settled(prefill: PeerProcess, enough: Any) -> dict[str, Any]:
    counters: dict[str, Any] = prefill.ask_until("counters", enough)
    assert counters["alive"]
    assert counters["errors"] == 0
    return counters


def garbage(rng: random.Random) -> list[bytes]:
    """One message of nonsense: random, a true prefix before nonsense, a wrong version, a huge length, many frames."""
    kind = rng.randrange(16)
    body = rng.randbytes(rng.choice((0, 1, 7, 100, 5_000)))
    match rng.randrange(8):
        case 0:
            return [body]
        case 1:
            return [PREFIX.pack(MAGIC, MAJOR, kind, 0) + body]
        case 2:
            return [PREFIX.pack(MAGIC, rng.randrange(256), kind, rng.randrange(1 << 16)) + body]
        case 3:  # an array, a string, a map of four billion
            return [
                PREFIX.pack(MAGIC, MAJOR, kind, 0)
                + rng.choice((b"\xdd", b"\xdb", b"\xdf", b"\xc6"))
                + b"\xff" * 4
                + body
            ]
        case 4:  # nested without end
            return [PREFIX.pack(MAGIC, MAJOR, kind, 0) + b"\x91" * 100_000]
        case 5:
            return [rng.randbytes(10) for _ in range(rng.randrange(1, 200))]
        case 6:
            flipped = bytearray(encode(Pull(bytes(16), TRANSFER, 1, ranges(1, 50))))
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return [bytes(flipped)]
        case _:
            return [encode(Hello(rng.randbytes(16), rng.randbytes(16), [PART] * rng.randrange(1, 8)))]


def test_garbage_in_messages(prefill: PeerProcess) -> None:
    """Goal: 20,000 messages of nonsense from many identities: good clients are served all the same, tables are exactly
    bounded."""
    serves(prefill)
    before = resident_nbytes(prefill.pid)
    rng = random.Random(4)
    for _ in range(100):
        with clients(prefill.address, 2) as them:
            for _ in range(100):
                for client in them:
                    client.say(*garbage(rng))
            for client in them:
                client.hear_out()
    counters = settled(prefill, lambda got: got["link"]["received_messages"] >= 20_000)
    assert counters["bad_messages"] > 10_000
    assert counters["offers_in_flight"] == 0
    serves(prefill)
    assert resident_nbytes(prefill.pid) - before < GROWTH_NBYTES_MAX


def test_ten_thousand_connections_of_garbage(prefill: PeerProcess) -> None:
    """Goal: connections that come, speak nonsense and go leave nothing. Method: 10,000 raw ones, 50 at a time."""
    serves(prefill)
    host, port = prefill.address.removeprefix("tcp://").split(":")
    before = resident_nbytes(prefill.pid)
    rng = random.Random(5)
    beginnings = (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f",
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE",
        b"\x01\x00",
    )
    for _ in range(200):
        batch = [socket.create_connection((host, int(port)), timeout=PATIENCE_S) for _ in range(50)]
        for one in batch:
            with contextlib.suppress(OSError):  # cut off already: also fine
                one.sendall(rng.choice(beginnings) + rng.randbytes(rng.randrange(300)))
        for one in batch:
            one.close()
    serves(prefill)
    assert resident_nbytes(prefill.pid) - before < GROWTH_NBYTES_MAX
    descriptors = prefill.ask_until("descriptors", lambda got: got < 100)
    assert descriptors < 100


def test_frames_of_impossible_length(prefill: PeerProcess) -> None:
    """Goal: a frame that says it has 2**62 bytes is neither waited for nor allocated; its sender is disconnected."""
    for header in (
        b"\x02" + struct.pack(">Q", 1 << 62),
        b"\x02" + struct.pack(">Q", (1 << 20) + 1),
        b"\x02" + b"\xff" * 8,
    ):
        with greeted(prefill.address) as peer:
            peer.sendall(b"\x01\x01x")
            with contextlib.suppress(ConnectionError):
                peer.sendall(header + bytes(1000))
                while peer.recv(4096):
                    pass
    assert resident_nbytes(prefill.pid) < 1 << 30
    serves(prefill)


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


def test_forged_and_replayed_messages_end_nothing(prefill: PeerProcess) -> None:
    """Goal: only the run that pulled a transfer ends it, once. Method: strangers that know its id, and its own messages
    repeated."""
    transfer = bytes.fromhex(prefill.ask("offer", request=1, blocks=2))
    want = ranges(1, 2)
    with clients(prefill.address, 3) as (owner, thief, mimic):
        assert isinstance(owner.hello(), Welcome)
        owner.say(encode(Pull(owner.boot_id, transfer, 5, want)))
        records = owner.hear()
        assert records.__class__.__name__ == "Records"

        assert isinstance(thief.hello(), Welcome)
        for message in (
            Pull(thief.boot_id, transfer, 9, want),
            Ack(thief.boot_id, transfer),
            Renew(thief.boot_id, transfer),
            Abort(thief.boot_id, transfer, "forged"),
        ):
            thief.say(encode(message))
            assert thief.hear() == Gone(transfer, Outcome.FOREIGN) if not isinstance(message, Abort) else True
        thief.say(encode(Bye(thief.boot_id)))
        mimic.boot_id = owner.boot_id  # knows even the owner's run, but is not at the owner's connection
        for message in (
            Ack(mimic.boot_id, transfer),
            Abort(mimic.boot_id, transfer, "forged"),
            Bye(mimic.boot_id),
        ):
            mimic.say(encode(message))
        for _ in range(2):
            assert isinstance(mimic.hear(), (Refuse, Gone))
        counters = settled(prefill, lambda got: got["stranger_messages"] >= 2)
        assert counters["offers_in_flight"] == 1
        assert counters["acked"] == counters["aborted"] == 0

        ack = encode(Ack(owner.boot_id, transfer))
        for epoch in (5, 4):  # its own words again, and older ones
            owner.say(encode(Pull(owner.boot_id, transfer, epoch, want)))
        for _ in range(5):
            owner.say(ack)
        assert [owner.hear() for _ in range(5)] == 5 * [Gone(transfer, Outcome.ACKED)]
        owner.say(encode(Pull(owner.boot_id, transfer, 6, want)))
        assert owner.hear() == Gone(transfer, Outcome.ACKED)
        counters = settled(prefill, lambda got: got["late_messages"] >= 5)
        assert counters["acked"] == 1
        assert counters["stale_messages"] >= 2
    assert prefill.ask("poll") == [[transfer.hex(), "acked", ""]]


def test_transfers_that_are_not_there_and_credit_without_end(prefill: PeerProcess) -> None:
    """Goal: made-up ids, ids pulled twice, absurd credit and epochs: an answer or a counter, and no memory kept."""
    transfer = bytes.fromhex(prefill.ask("offer", request=1, blocks=50))
    with clients(prefill.address, 2) as (owner, other):
        for client in (owner, other):
            client.hello()
        before = resident_nbytes(prefill.pid)
        for _ in range(3_000):
            other.say(encode(Pull(other.boot_id, secrets.token_bytes(16), 1, [])))
            while not isinstance(heard := other.hear(), Later):
                assert isinstance(heard, Gone)
        settled(prefill, lambda got: got["unknown_transfers"] >= 3_000)  # each waited, and no longer
        while not other.hears_nothing():
            assert isinstance(other.hear(), Gone)
        owner.say(encode(Pull(owner.boot_id, transfer, 1, ranges(1, 1, 255))))
        assert owner.hear().__class__.__name__ == "Absent"  # the first to pull owns it, so this comes before the others
        owner.say(encode(Pull(owner.boot_id, transfer, (1 << 31) - 1, ranges(1, 1) * 16_000)))
        other.say(encode(Pull(other.boot_id, transfer, 1, [])))
        while (heard := other.hear()) != Gone(transfer, Outcome.FOREIGN):
            assert isinstance(heard, (Later, Gone))
        assert resident_nbytes(prefill.pid) - before < GROWTH_NBYTES_MAX + (64 << 20)  # one credit's worth in sockets
    serves(prefill)


def test_more_names_than_seats(prefill: PeerProcess) -> None:
    """Goal: a hello from each of 300 identities keeps the table at its bound; one that owns a transfer stays."""
    transfer = bytes.fromhex(prefill.ask("offer", request=1, blocks=1))
    with clients(prefill.address, 1) as (owner,):
        owner.hello()
        owner.say(encode(Pull(owner.boot_id, transfer, 1, ranges(1, 1))))
        assert owner.hear().__class__.__name__ == "Records"
        for _ in range(30):
            with clients(prefill.address, 10) as crowd:
                for client in crowd:
                    assert isinstance(client.hello(), Welcome)
        assert prefill.ask("table_sizes")["peers"] <= LIMITS["peers_max"]
        owner.say(encode(Ack(owner.boot_id, transfer)))
        assert owner.hear() == Gone(transfer, Outcome.ACKED)
    serves(prefill)
