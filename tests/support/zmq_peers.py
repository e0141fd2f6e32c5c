"""A raw DEALER and a raw ROUTER, which say what they are told: the other end of a transfer, as an enemy has it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import zmq
from transfer_rows import PART, identity_of
from zmq.utils.monitor import recv_monitor_message

from transfer.curve import CurveClient
from transfer.messages import MINOR, Hello, Message, Refuse, Welcome, decode, encode

PATIENCE_S = 60.0
TURNED_AWAY = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Client:
    """A DEALER that says what it is told, and hears what comes."""

    def __init__(
        self,
        address: str,
        run: bytes | None = None,
        *,
        identity: bytes | None = None,
        curve: CurveClient | None = None,
    ) -> None:
        self.boot_id = run or secrets.token_bytes(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if identity is not None:
            self._socket.setsockopt(zmq.ROUTING_ID, identity)
        if curve is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.keys.secret)
        self._events = self._socket.get_monitor_socket(TURNED_AWAY)
        self._socket.connect(address)

    def hello(self) -> Message:
        self.say(encode(Hello(self.boot_id, identity_of(1).space, [PART], MINOR, 1 << 30)))
        return self.hear()

    def hear_out(self) -> None:
        """Returns when the server has acted on everything that was said: it answers in order."""
        answer = self.hello()
        while not (isinstance(answer, (Welcome, Refuse)) and answer.to == self.boot_id):
            answer = self.hear()

    def say(self, *frames: bytes) -> None:
        assert self._socket.poll(int(PATIENCE_S * 1000), zmq.POLLOUT), "the server takes nothing any more"
        self._socket.send_multipart(frames)

    def tries_to_say(self, *frames: bytes) -> bool:
        """Whether it was said; who has been turned away says nothing any more."""
        can = bool(self._socket.poll(0, zmq.POLLOUT))
        if can:
            self._socket.send_multipart(frames)
        return can

    def hear(self, timeout_s: float = PATIENCE_S) -> Message:
        assert self._socket.poll(int(timeout_s * 1000)), "no answer"
        return decode(self._socket.recv_multipart()[0])

    def hears_nothing(self) -> bool:
        return not self._socket.poll(200)

    def is_turned_away(self) -> None:
        """Returns when the server has refused the handshake or hung up."""
        assert self._events.poll(int(PATIENCE_S * 1000)), "nobody turns it away"
        recv_monitor_message(self._events)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(linger=0)
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
    """A ROUTER that hears what comes, and says what it is told to whoever it heard last."""

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
