"""A raw DEALER and a raw ROUTER, which send what a test tells them: a hostile other end of a transfer."""

from __future__ import annotations

import secrets

import zmq
from waiting import GIVE_UP_S

import transfer.messages as wire
from cache_manager.record import HEADER_NBYTES_MIN
from transfer.messages import MAGIC, MAJOR, PREFIX, Gone, Message, Outcome, Renew, decode, encode

PATIENCE_S = GIVE_UP_S


def malformed(good: bytes) -> list[list[bytes]]:
    """Invalid messages, each with one mistake; ``good`` is a valid one."""
    _, _, kind, _ = PREFIX.unpack_from(good)
    body, start = good[PREFIX.size :], PREFIX.pack(MAGIC, MAJOR, kind, 0)
    kinds = (b"KVRX", MAJOR, kind), (MAGIC, MAJOR - 1, kind), (MAGIC, MAJOR + 1, kind), (MAGIC, MAJOR, 200)
    return [
        *([b""], [bytes(range(256))], [b"GET / HTTP/1.1\r\n\r\n"]),
        [b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93."],  # a pickle
        *([good[:at]] for at in (PREFIX.size, 5, PREFIX.size + 1, len(good) // 2, len(good) - 1)),
        *([good + b"\0"], [good, b"bulk"], [good] * 100, [b"", good]),
        *([PREFIX.pack(*start, 0) + body] for start in kinds),
        [PREFIX.pack(MAGIC, MAJOR, kind, 1) + body],
        [start + body.replace(bytes([kind]), b"\x7f", 1)],
        *([start + huge + b"\xff" * 4] for huge in (b"\xdd", b"\xdb", b"\xdf", b"\xc6")),  # four billion of something
        [start + b"\x91" * 100_000],  # nested without end
        [encode(wire.Records(bytes(16), bytes(16), 1, 1, [wire.Entry(0, 0, bytes(HEADER_NBYTES_MIN))]))],
    ]


class Client:
    """A DEALER that sends what it is told, and receives messages."""

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self.boot_id = secrets.token_bytes(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if identity is not None:
            self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self._socket.connect(address)

    def is_answered(self) -> bool:
        """Whether the server answers what this client asks: an unknown transfer is gone."""
        asked = Renew(self.boot_id, secrets.token_bytes(16))
        self.say(encode(asked))
        return self.hear() == Gone(self.boot_id, asked.transfer, Outcome.UNKNOWN)

    def hear_out(self) -> None:
        """Returns when the server has acted on every message sent: it answers in order."""
        asked = Renew(self.boot_id, secrets.token_bytes(16))
        self.say(encode(asked))
        while self.hear() != Gone(self.boot_id, asked.transfer, Outcome.UNKNOWN):
            pass

    def say(self, *frames: bytes) -> None:
        assert self._socket.poll(int(PATIENCE_S * 1000), zmq.POLLOUT), "the server takes nothing any more"
        self._socket.send_multipart(frames)

    def hear(self) -> Message:
        assert self._socket.poll(int(PATIENCE_S * 1000)), "no answer"
        return decode(self._socket.recv_multipart()[0])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


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
