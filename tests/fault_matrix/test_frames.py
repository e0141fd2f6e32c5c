"""Faults R17 and R23: any frames at all to the sockets of prefill and decode."""

from __future__ import annotations

import contextlib
import secrets

from budget import examples
from hypothesis import example, given
from hypothesis import strategies as st
from transfer_nodes import ended, lend
from transfer_rows import CanarySink, wanted
from zmq_peers import Client, Server

from cache_manager.record import HEADER_NBYTES_MIN
from tests.fault_matrix.wire import (
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
    PREFIX,
    Entry,
    Gone,
    Outcome,
    Records,
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


def malformed(good: bytes) -> dict[str, list[bytes]]:
    """Messages that are none, by what is wrong with them; ``good`` would be one."""
    _, _, kind, _ = PREFIX.unpack_from(good)
    body = good[PREFIX.size :]
    return {
        "empty": [b""],
        "garbage": [bytes(range(256))],
        "text": [b"GET / HTTP/1.1\r\n\r\n"],
        "a pickle": [b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93."],
        "a prefix alone": [good[: PREFIX.size]],
        "cut in the prefix": [good[:5]],
        **{f"cut at {at}": [good[:at]] for at in (PREFIX.size + 1, len(good) // 2, len(good) - 1)},
        "one byte more": [good + b"\0"],
        "a frame more": [good, b"bulk"],
        "many frames more": [good] * 100,
        "an empty frame first": [b"", good],
        "another protocol": [PREFIX.pack(b"KVRX", MAJOR, kind, 0) + body],
        "an older version": [PREFIX.pack(MAGIC, MAJOR - 1, kind, 0) + body],
        "a later version": [PREFIX.pack(MAGIC, MAJOR + 1, kind, 0) + body],
        "an unknown kind": [PREFIX.pack(MAGIC, MAJOR, 200, 0) + body],
        "an unknown tag": [PREFIX.pack(MAGIC, MAJOR, kind, 0) + body.replace(bytes([kind]), b"\x7f", 1)],
        "reserved bits": [PREFIX.pack(MAGIC, MAJOR, kind, 1) + body],
        "records without a frame": [encode(Records(bytes(16), 1, [Entry(0, 0, bytes(HEADER_NBYTES_MIN))]))],
    }


CONTROL = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda kind, body: PREFIX.pack(MAGIC, MAJOR, kind, 0) + body, st.integers(0, 255), st.binary(max_size=80)
    ),
    st.builds(lambda good, cut: good[:cut], st.sampled_from([HELLO, WELCOME]), st.integers(0, len(HELLO) - 1)),
    st.builds(flipped, st.sampled_from([HELLO, WELCOME]), st.integers(0, PREFIX.size - 1), st.integers(0, 7)),
).filter(no_message)
FRAMES = st.builds(lambda first, rest: [first, *rest], CONTROL, st.lists(st.binary(max_size=80), max_size=5))


def messages_like(good: bytes) -> st.SearchStrategy[list[list[bytes]]]:
    """Lists of frames, none of which is a message: any at all, and all that ``good`` becomes by one mistake."""
    return st.lists(FRAMES, min_size=1, max_size=6) | st.just(list(malformed(good).values()))


def test_r17_r23_any_frames_to_prefill_are_counted(prefill: Node) -> None:
    """Fault: frames by Hypothesis on a real socket. kvroute: the same connection is answered, rows cross afterwards."""
    with contextlib.closing(Client(prefill.address)) as peer:

        @examples(60)
        @example(list(malformed(HELLO).values()))
        @given(messages_like(HELLO))
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
        @example(list(malformed(WELCOME).values()))
        @given(messages_like(WELCOME))
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
