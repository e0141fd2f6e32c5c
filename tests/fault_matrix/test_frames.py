"""Fault R23: any frames at all, to the sessions, to their sockets, and to sockets that speak CURVE."""

from __future__ import annotations

import contextlib
import random
import secrets
from pathlib import Path

from budget import examples
from curve_links import client as curve_client
from curve_links import key_directory, pair_of, result_of, serving
from hypothesis import given
from hypothesis import strategies as st
from transfer_nodes import ended, lend, until
from transfer_rows import PART, SPACE, CanarySink, identity_of, ranges, wanted
from zmq_peers import Client, Server

from tests.fault_matrix.wire import (
    CALM,
    HELLO,
    WELCOME,
    bad,
    counts,
    crosses,
    decode_node,
    first_pull,
)
from transfer.actions import Reason
from transfer.errors import RemoteProtocolError
from transfer.messages import (
    MAGIC,
    MAJOR,
    MINOR,
    PREFIX,
    Gone,
    Hello,
    Outcome,
    Pull,
    TransferId,
    Welcome,
    decode,
    encode,
)
from transfer.node import Node


def no_message(frame: bytes) -> bool:
    with contextlib.suppress(RemoteProtocolError):
        decode(frame)
        return False
    return True


def flipped(message: bytes, at: int, bit: int) -> bytes:
    """``message`` with a wrong bit in its prefix."""
    return bytes(b ^ (1 << bit if i == at else 0) for i, b in enumerate(message))


CONTROL = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda kind, body: PREFIX.pack(MAGIC, MAJOR, kind, 0) + body, st.integers(0, 255), st.binary(max_size=80)
    ),
    st.builds(lambda good, cut: good[:cut], st.sampled_from([HELLO, WELCOME]), st.integers(0, len(HELLO) - 1)),
    st.builds(flipped, st.sampled_from([HELLO, WELCOME]), st.integers(0, PREFIX.size - 1), st.integers(0, 7)),
).filter(no_message)
MESSAGES = st.lists(
    st.builds(lambda first, rest: [first, *rest], CONTROL, st.lists(st.binary(max_size=80), max_size=5)),
    min_size=1,
    max_size=6,
)
"""Lists of frames, none of which begins with a control frame of the protocol."""


def test_r23_any_frames_to_prefill_are_counted(prefill: Node) -> None:
    """Fault: frames by Hypothesis on a real socket. kvroute: the same connection is answered, rows cross afterwards."""
    with contextlib.closing(Client(prefill.address)) as peer:

        @examples(60)
        @given(MESSAGES)
        def say(messages: list[list[bytes]]) -> None:
            before = bad(prefill)
            for frames in messages:
                peer.say(*frames)
            assert isinstance(peer.hello(), Welcome)
            counts(prefill, before + len(messages))

        say()
    crosses(prefill, 1)


def test_any_frames_to_decode_are_counted(prefill: Node) -> None:
    """Goal: the same for what a server says. Method: in the middle of a pull, whose end it then tells."""
    with contextlib.closing(Server()) as server, decode_node() as pulling:

        @examples(60)
        @given(MESSAGES)
        def say(messages: list[list[bytes]]) -> None:
            before, transfer = bad(pulling), TransferId(secrets.token_bytes(16))
            pulling.pull(transfer, server.address, wanted(1, 1), CanarySink(1))
            first_pull(server)
            for frames in messages:
                server.say(*frames)
            server.say(encode(Gone(transfer, Outcome.UNKNOWN)))
            assert ended(pulling, {transfer})[transfer].result.reason is Reason.GONE
            counts(pulling, before + len(messages))

        say()
        transfer, sink = lend(prefill, 1, 3), CanarySink(1)
        pulling.pull(transfer, prefill.address, wanted(1, 3), sink)
        assert ended(pulling, {transfer})[transfer].result.complete


def test_with_curve_a_stranger_is_not_even_heard(tmp_path: Path) -> None:
    """Goal: with CURVE on, who has no key on the list gets nothing and does no harm. Method: no key, an unlisted one,
    and a listed one for another server; each says garbage, hello, and a pull of what is really on offer.
    """
    keys = key_directory(tmp_path)
    prefill = Node(serving(keys, "alice"), identity_of(1), CALM)
    transfer = lend(prefill, 1, 3)
    rng = random.Random(23)
    for curve in (None, pair_of(keys, "stranger"), pair_of(keys, "alice", server="bob")):
        with contextlib.closing(Client(prefill.address, curve=curve)) as peer:
            messages = [[rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(1, 5))] for _ in range(20)]
            messages.append([encode(Hello(peer.boot_id, SPACE, [PART], MINOR, 1 << 30))])
            messages.append([encode(Pull(peer.boot_id, transfer, 1, ranges(1, 1), 1 << 30))])
            for message in messages:
                peer.tries_to_say(*message)  # it is turned away before, within or after these
            peer.is_turned_away()
            assert peer.hears_nothing()
    assert prefill.counters.node.arrivals == bad(prefill) == 0
    done, sink = result_of(prefill, curve_client(keys, "alice"), 2)
    assert done.result.complete
    assert (sink.wrong, len(sink.there)) == (0, 3)
    until(
        lambda: prefill.counters.offers_in_flight, lambda got: got == 1
    )  # what was offered to nobody else is still there
    assert prefill.counters.offers.pulled == 1
    assert prefill.counters.node.errors == 0
    assert prefill.close()
