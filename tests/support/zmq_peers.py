"""A raw DEALER and a raw ROUTER, which send what a test tells them: a hostile other end of a transfer."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import zmq
from transfer_rows import PART, identity_of

from transfer.messages import Hello, Message, Refuse, Welcome, decode, encode

PATIENCE_S = 60.0


class Client:
    """A DEALER that sends what it is told, and receives messages."""

    def __init__(
        self,
        address: str,
        run: bytes | None = None,
        *,
        identity: bytes | None = None,
    ) -> None:
        self.boot_id = run or secrets.token_bytes(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if identity is not None:
            self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self._socket.connect(address)

    def hello(self) -> Message:
        self.say(encode(Hello(self.boot_id, identity_of(1).space, [PART])))
        return self.hear()

    def hear_out(self) -> None:
        """Returns when the server has acted on every message sent: it answers in order."""
        answer = self.hello()
        while not (isinstance(answer, (Welcome, Refuse)) and answer.to == self.boot_id):
            answer = self.hear()

    def say(self, *frames: bytes) -> None:
        assert self._socket.poll(int(PATIENCE_S * 1000), zmq.POLLOUT), "the server takes nothing any more"
        self._socket.send_multipart(frames)

    def hear(self, timeout_s: float = PATIENCE_S) -> Message:
        assert self._socket.poll(int(timeout_s * 1000)), "no answer"
        return decode(self._socket.recv_multipart()[0])

    def hears_nothing(self) -> bool:
        return not self._socket.poll(200)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@contextlib.contextmanager
def clients(address: str, count: int = 1) -> Iterator[list[Client]]:
    them = [Client(address) for _ in range(count)]
    try:
        yield them
    finally:
        for client in them:
            client.close()


class Server:
    """A ROUTER that receives messages, and sends what it is told to the peer that it heard last."""

    def __init__(self) -> None:
        self.boot_id = secrets.token_bytes(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._client = b""

    def hear(self) -> Message:
        assert self._socket.poll(int(PATIENCE_S * 1000)), "nobody asks"
        self._client, control, *_ = self._socket.recv_multipart()
        return decode(control)

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._client, *frames])

    def close(self) -> None:
        self._socket.close()
        self._context.term()
