"""Faults R16, R17 and R23: strays, and any frames at all, at the sockets between prefill and decode."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from budget import examples
from hypothesis import example, given
from hypothesis import strategies as st
from transfer_nodes import PATIENCE_S, ended, fetched, lend, until
from transfer_rows import CanarySink, identity_of, ranges, wanted
from zmq_peers import Client, Server, malformed
from zmtp import greeted

from cache_manager.record import RecordHeader
from transfer.actions import Reason
from transfer.errors import RemoteProtocolError
from transfer.limits import TransferLimits
from transfer.messages import (
    CONTROL_NBYTES_MAX,
    MAGIC,
    MAJOR,
    PREFIX,
    Gone,
    Later,
    Outcome,
    Pull,
    TransferId,
    decode,
    encode,
)
from transfer.node import Node
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings

CALM = TransferLimits(lease_s=120.0, retry_s=60.0)
"""Nothing is said twice, so that counts are exact."""

PULL = encode(Pull(bytes(16), bytes(16), 1, identity_of(1).digest, ranges(1, 1)))
LATER = encode(Later(bytes(16), bytes(16), 1, 60_000))


@contextlib.contextmanager
def node_of(link: ZmqLink) -> Iterator[Node]:
    """A node whose thread must have survived the test without an error."""
    node = Node(link, identity_of(secrets.randbits(64)), CALM)
    try:
        yield node
        assert node.alive
        assert node.counters.errors == 0, node.last_error
    finally:
        assert node.close()


@pytest.fixture
def prefill() -> Iterator[Node]:
    with node_of(ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*"))) as node:
        yield node


def crosses(prefill: Node, request: int, count: int = 6) -> None:
    """A healthy peer, who was not there before, gets every row of an offer."""
    with node_of(ZmqLink()) as healthy:
        assert fetched(healthy, prefill.address, lend(prefill, request, count), request, count)


def counts(node: Node, messages: int) -> None:
    """Each message was counted, and counted once."""
    until(lambda: node.counters.bad_messages, lambda got: got >= messages)
    assert node.counters.bad_messages == messages


def pull_of(server: Server, transfer: TransferId) -> Pull:
    """The pull of ``transfer`` by a decode node."""
    message = server.hear()
    while not isinstance(message, Pull) or message.transfer != transfer:
        message = server.hear()
    return message


# ---------------------------------------------------------------- any frames


def no_message(frame: bytes) -> bool:
    with contextlib.suppress(RemoteProtocolError):
        decode(frame)
        return False
    return True


CONTROL = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda kind, body: PREFIX.pack(MAGIC, MAJOR, kind, 0) + body, st.integers(0, 255), st.binary(max_size=80)
    ),
    st.builds(lambda good, cut: good[:cut], st.sampled_from([PULL, LATER]), st.integers(0, len(LATER) - 1)),
    st.builds(
        lambda good, at, bit: bytes(b ^ (1 << bit if i == at else 0) for i, b in enumerate(good)),
        *(st.sampled_from([PULL, LATER]), st.integers(0, PREFIX.size - 1), st.integers(0, 7)),
    ),
).filter(no_message)
FRAMES = st.builds(lambda first, rest: [first, *rest], CONTROL, st.lists(st.binary(max_size=80), max_size=5))
SEVERAL = st.lists(FRAMES, min_size=1, max_size=6)


def test_r17_r23_any_frames_to_prefill_are_counted(prefill: Node) -> None:
    """Fault: frames by Hypothesis on a real socket. kvroute: the same connection is answered, rows cross afterwards."""
    with contextlib.closing(Client(prefill.address)) as peer:

        @examples(60)
        @example(malformed(PULL))
        @given(SEVERAL)
        def say(messages: list[list[bytes]]) -> None:
            before = prefill.counters.bad_messages
            for frames in messages:
                peer.say(*frames)
            assert peer.is_answered()
            counts(prefill, before + len(messages))

        say()
    crosses(prefill, 1)


def test_any_frames_to_decode_are_counted(prefill: Node) -> None:
    """Goal: as above, for frames from a server. Method: in the middle of a pull, which the server then ends."""
    with contextlib.closing(Server()) as server, node_of(ZmqLink()) as pulling:

        @examples(60)
        @example(malformed(LATER))
        @given(SEVERAL)
        def say(messages: list[list[bytes]]) -> None:
            before, transfer = pulling.counters.bad_messages, TransferId(secrets.token_bytes(16))
            pulling.pull(transfer, server.address, wanted(1, 1), CanarySink(1))
            pull = pull_of(server, transfer)
            for frames in messages:
                server.say(*frames)
            server.say(encode(Gone(pull.boot_id, transfer, Outcome.UNKNOWN)))
            assert ended(pulling, {transfer})[transfer].reason is Reason.GONE
            counts(pulling, before + len(messages))

        say()
        assert fetched(pulling, prefill.address, lend(prefill, 1, 3), 1, 3)


# ---------------------------------------------------------------- strays


class HeldSink(CanarySink):
    """Holds its node up at the first record, until it is let go."""

    def __init__(self, request: int) -> None:
        super().__init__(request)
        self.entered, self.let_go = threading.Event(), threading.Event()

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        self.entered.set()
        assert self.let_go.wait(PATIENCE_S)
        return super().install(part, index, header, payload)


def test_r16_a_stray_client_costs_one_count(prefill: Node) -> None:
    """Fault: strays beside a transfer in flight, then a healthy peer. kvroute: counts them, and connects nowhere."""
    letters = bytes(range(1, 256))
    with socket.create_server(("127.0.0.1", 0)) as named, node_of(ZmqLink()) as pulling:
        there = b"127.0.0.1:%d" % named.getsockname()[1]
        in_flight, sink = lend(prefill, 1, 40), HeldSink(1)
        pulling.pull(in_flight, prefill.address, wanted(1, 40), sink)
        assert sink.entered.wait(PATIENCE_S)
        identities = (None, b"no colon", b"\xff\xfe\xfd", there, b"tcp://" + there, b"a:b:c", letters)
        for number, identity in enumerate(identities, 1):
            with contextlib.closing(Client(prefill.address, identity=identity)) as stray:
                stray.say(b"stray")
                counts(prefill, number)
                assert stray.is_answered(), "what it says decides, not its name"
        with greeted(prefill.address) as largest:
            largest.sendall(b"\x02" + struct.pack(">Q", CONTROL_NBYTES_MAX) + bytes(CONTROL_NBYTES_MAX))
            counts(prefill, len(identities) + 1)
        for nbytes in (CONTROL_NBYTES_MAX + 1, 1 << 62, (1 << 64) - 1):  # neither waited for nor allocated
            with greeted(prefill.address) as larger, contextlib.suppress(ConnectionError):
                larger.sendall(b"\x01\x01x\x02" + struct.pack(">Q", nbytes) + bytes(1000))
                while larger.recv(4096):  # a server that does not end the connection is a TimeoutError
                    pass
        crosses(prefill, 2)
        assert prefill.counters.offers_in_flight == 1, "the transfer was in flight all the time"
        sink.let_go.set()
        assert ended(pulling, {in_flight})[in_flight].complete
        assert (sink.wrong, sink.twice, len(sink.there)) == (0, 0, 40)
        assert select.select([named], [], [], 0.2)[0] == [], "it connected to an address that a client named"
        counts(prefill, len(identities) + 1)
