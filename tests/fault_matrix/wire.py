"""Nodes on real sockets for the fault matrix, and what is to hold of them whatever was said to them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from transfer_nodes import ended, lend, until
from transfer_rows import PART, SPACE, CanarySink, identity_of, wanted
from zmq_peers import Server

from transfer.limits import TransferLimits
from transfer.messages import (
    MINOR,
    Hello,
    Part,
    Pull,
    Welcome,
    encode,
)
from transfer.node import Node
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings

PATIENCE_S = 60.0
CALM = TransferLimits(lease_s=120.0, retry_s=60.0, credit_nbytes=4 * PART.nbytes)
"""Nothing is said twice, so that counts are exact; four records are on their way at most."""

HELLO = encode(Hello(bytes(16), SPACE, [PART], MINOR, 1 << 30))
WELCOME = encode(Welcome(bytes(16), SPACE, [PART], MINOR, 60_000, bytes(16)))


@contextlib.contextmanager
def prefill_node() -> Iterator[Node]:
    node = Node(ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*")), identity_of(1), CALM)
    try:
        yield node
        assert node.alive
        assert node.counters.node.errors == 0, node.last_error
    finally:
        assert node.close()


@contextlib.contextmanager
def decode_node() -> Iterator[Node]:
    node = Node(ZmqLink(), identity_of(secrets.randbits(64)), CALM)
    try:
        yield node
        assert node.alive
        assert node.counters.node.errors == 0, node.last_error
    finally:
        assert node.close()


def crosses(prefill: Node, request: int, count: int = 6) -> None:
    """A healthy peer, who was not there before, gets every row of an offer."""
    with decode_node() as healthy:
        transfer, sink = lend(prefill, request, count), CanarySink(request)
        healthy.pull(transfer, prefill.address, wanted(request, count), sink)
        assert ended(healthy, {transfer})[transfer].result.complete
        assert (sink.wrong, sink.twice, len(sink.there)) == (0, 0, count)


def bad(node: Node) -> int:
    return node.counters.node.bad_messages


def counts(node: Node, messages: int) -> None:
    """Each message was counted, and counted once."""
    until(lambda: bad(node), lambda got: got >= messages)
    assert bad(node) == messages


def welcome_for(hello: Hello, server: Server, part: Part = PART) -> bytes:
    return encode(Welcome(server.boot_id, SPACE, [part], MINOR, 120_000, hello.boot_id))


def first_pull(server: Server) -> Pull:
    """The pull of a decode node, who is welcomed if it says hello."""
    message = server.hear()
    while not isinstance(message, Pull):
        if isinstance(message, Hello):
            server.say(welcome_for(message, server))
        message = server.hear()
    return message
