"""Fault R16: stray clients at the sockets between prefill and decode, and peers of other layouts."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import threading

import msgspec
import pytest
from transfer_nodes import ended, lend, until
from transfer_rows import BLOCK_TOKENS, PART, SPACE, CanarySink, key_of, payload_of, ranges, wanted
from zmq_peers import Client, Server
from zmtp import greeted

from cache_manager.errors import RecordError
from cache_manager.record import OfferedRecord, RecordHeader, check_record, pack_header
from tests.fault_matrix.wire import (
    PATIENCE_S,
    counts,
    crosses,
    decode_node,
    first_pull,
    welcome_for,
)
from transfer.actions import Reason
from transfer.messages import (
    CONTROL_NBYTES_MAX,
    MINOR,
    Entry,
    Gone,
    Hello,
    Outcome,
    Part,
    Pull,
    Records,
    Refuse,
    TransferId,
    Welcome,
    encode,
)
from transfer.node import Node

OTHER_LAYOUT = msgspec.structs.replace(PART, fingerprint=b"o" * 16)


class HeldSink(CanarySink):
    """Holds its node up at the first record, until it is let go."""

    def __init__(self, request: int) -> None:
        super().__init__(request)
        self.entered, self.let_go = threading.Event(), threading.Event()

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        self.entered.set()
        assert self.let_go.wait(PATIENCE_S)
        return super().install(part, index, header, payload)


def is_cut_off(peer: socket.socket) -> bool:
    """Whether the server ends the connection; one that does not is a ``TimeoutError``."""
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
    return True


def test_r16_a_stray_client_costs_one_count(prefill: Node) -> None:
    """Fault: strays beside a transfer in flight, then a healthy peer. kvroute: counts them, and connects nowhere."""
    letters = bytes(range(1, 256))
    with socket.create_server(("127.0.0.1", 0)) as named, decode_node() as pulling:
        there = b"127.0.0.1:%d" % named.getsockname()[1]
        in_flight, sink = lend(prefill, 1, 40), HeldSink(1)
        pulling.pull(in_flight, prefill.address, wanted(1, 40), sink)
        assert sink.entered.wait(PATIENCE_S)

        identities = (None, b"no colon", b"\xff\xfe\xfd", there, b"tcp://" + there, b"a:b:c", letters)
        for number, identity in enumerate(identities, 1):
            with contextlib.closing(Client(prefill.address, identity=identity)) as stray:
                stray.say(b"stray")
                counts(prefill, number)
                assert isinstance(stray.hello(), Welcome), "what it says decides, not its name"
        with greeted(prefill.address) as largest:
            largest.sendall(b"\x02" + struct.pack(">Q", CONTROL_NBYTES_MAX) + bytes(CONTROL_NBYTES_MAX))
            counts(prefill, len(identities) + 1)
        with greeted(prefill.address) as larger:
            with contextlib.suppress(ConnectionError):
                larger.sendall(b"\x02" + struct.pack(">Q", CONTROL_NBYTES_MAX + 1) + bytes(1000))
            assert is_cut_off(larger)
        crosses(prefill, 2)

        assert prefill.counters.offers.records_sent < 40, "the transfer was in flight all the time"
        sink.let_go.set()
        assert ended(pulling, {in_flight})[in_flight].result.complete
        assert (sink.wrong, sink.twice, len(sink.there)) == (0, 0, 40)
        assert select.select([named], [], [], 0.2)[0] == [], "it connected to an address that a client named"
        counts(prefill, len(identities) + 1)


def header_of(request: int, index: int, part: Part = PART, payload: bytes | None = None) -> bytes:
    """A sealed header; of a true record unless ``part`` or ``payload`` say otherwise."""
    payload = payload_of(request, index) if payload is None else payload
    valid = b"\xff" * (BLOCK_TOKENS // 8)
    return pack_header(OfferedRecord(key_of(request, index), part.fingerprint, 1, 1, valid, payload).seal())


def test_layouts_are_compared_before_any_payload(prefill: Node) -> None:
    """Goal: no byte of another layout is taken for a row. Method: either side has one, and a record has one.

    A stranger's hello is refused by field, so that its pull is not served; a welcome of another layout ends the pull;
    a record's header is compared before its payload is summed: the payload here is none.
    """
    transfer = lend(prefill, 1, 2)
    with contextlib.closing(Client(prefill.address)) as other:
        other.say(encode(Hello(other.boot_id, SPACE, [OTHER_LAYOUT], MINOR, 1 << 30)))
        refuse = other.hear()
        assert isinstance(refuse, Refuse)
        assert (refuse.field, refuse.wanted, refuse.got) == ("rows.fingerprint", PART.fingerprint.hex(), "6f" * 16)
        other.say(encode(Pull(other.boot_id, transfer, 1, ranges(1, 1), 1 << 30)))
        refuse = other.hear()
        assert isinstance(refuse, Refuse)
        assert refuse.field == "hello"
        assert prefill.counters.offers.pulled == prefill.counters.offers.records_sent == 0

    one, two, sink = TransferId(secrets.token_bytes(16)), TransferId(secrets.token_bytes(16)), CanarySink(1)
    with contextlib.closing(Server()) as server, decode_node() as pulling:
        pulling.pull(one, server.address, wanted(1, 1), sink)
        hello = server.hear()
        assert isinstance(hello, Hello)
        server.say(welcome_for(hello, server, OTHER_LAYOUT))
        result = ended(pulling, {one})[one].result
        assert (result.reason, "rows.fingerprint: wanted" in result.detail) == (Reason.REFUSED, True)

    with contextlib.closing(Server()) as server, decode_node() as pulling:
        pulling.pull(two, server.address, wanted(1, 1), sink)
        pull = first_pull(server)
        header = header_of(1, 0, OTHER_LAYOUT, b"x" * PART.nbytes)
        server.say(encode(Records(two, pull.epoch, [Entry(0, 0, header)])), b"x" * PART.nbytes)
        until(lambda: pulling.counters.pulls.corrupt_records, lambda got: got == 1)
        server.say(encode(Gone(two, Outcome.EXPIRED)))
        assert ended(pulling, {two})[two].result.installed == 0
        assert not sink.there
    sealed = OfferedRecord(key_of(1, 0), OTHER_LAYOUT.fingerprint, 1, 1, b"\xff" * 8, payload_of(1, 0)).seal()
    with pytest.raises(RecordError, match="fingerprint"):
        check_record(sealed, key_of(1, 0), PART.fingerprint, b"no payload of any record")
