"""What do rows, and rows with KV, cost that cross from a prefill to a decode process?

``kvroute``: the whole protocol between two nodes in two processes: pull, sealed records, credit, checksum, install by
one copy into the landing blocks, until the engine is told that all is in place. Its floors, with the same bytes in the
same landing blocks: ``raw``: a bare ZeroMQ socket with the same options that sends a frame a record on one request;
``socket``: a plain socket whose bytes are received where they belong. Neither sums anything, nor knows what it got.

``python -m bench.transfer``. Turns are taken, the best of each counts.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import zmq

from bench.harness import Table, asked, best_ms
from cache_manager.keys import BlockKey, Namespace
from cache_manager.record import OfferedRecord, RecordHeader
from transfer import (
    BootId,
    Finished,
    Identity,
    Node,
    OfferedBlock,
    Part,
    TransferId,
    WantedBlock,
    ZmqLink,
    ZmqSettings,
    new_transfer,
)
from transfer.zmq_sockets import dealer, router

BLOCK_TOKENS: Final = 64
PARTS: Final = (
    Part("rows", b"f" * 16, BLOCK_TOKENS * 58 * 8, BLOCK_TOKENS),
    Part("kv", b"k" * 16, 1 << 20, BLOCK_TOKENS),
)
BLOCKS: Final = 128
PATIENCE_S: Final = 60.0
MESSAGE_NBYTES: Final = 512 << 10
KEYS: Final = [BlockKey(hashlib.sha256(b"%d" % i).digest()) for i in range(BLOCKS)]

Pools = tuple[np.ndarray[Any, Any], ...]


def pools(seed: int | None) -> Pools:
    """One array a part, [blocks, bytes of a record] uint8: random, or zeros to land in."""
    shapes = [(BLOCKS, part.nbytes) for part in PARTS]
    if seed is None:
        return tuple(np.zeros(shape, np.uint8) for shape in shapes)
    return tuple(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8) for shape in shapes)


def identity() -> Identity:
    return Identity(BootId(secrets.token_bytes(16)), Namespace("m", 1), PARTS)


def bind_of(link: str, directory: Path, name: str) -> str:
    return f"ipc://{directory}/{name}" if link == "ipc" else "tcp://127.0.0.1:*"


# ---------------------------------------------------------------- prefill's process


def serve(pipe: Connection, link: str, directory: str) -> None:
    """Offers what it is told to, before time is taken: prefill has finished then. Two threads serve the floors."""
    rows = pools(0)
    node = Node(ZmqLink(ZmqSettings(bind=bind_of(link, Path(directory), "node"))), identity())
    settings = ZmqSettings(bind=bind_of(link, Path(directory), "raw"))
    context = zmq.Context()
    raw = router(context, settings)
    raw.setsockopt(zmq.SNDHWM, 0)
    assert settings.bind is not None
    raw.bind(settings.bind)
    if link == "ipc":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{directory}/plain")
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    for target, args in ((serve_raw, (raw, rows)), (serve_plain, (listener, rows))):
        threading.Thread(target=target, args=args, daemon=True).start()
    pipe.send((node.address, raw.getsockopt_string(zmq.LAST_ENDPOINT), listener.getsockname()))
    while (wanted := pipe.recv()) is not None:
        blocks, parts = wanted
        node.poll()
        transfer = new_transfer()
        records = [
            [OfferedRecord(KEYS[i], part.fingerprint, 1, 1, b"\xff" * 8, pool[i].data) for i in range(blocks)]
            for part, pool in zip(PARTS, rows, strict=True)
        ]
        offered = [
            OfferedBlock(i, KEYS[i], tuple(records[p][i] if p in parts else None for p in range(len(PARTS))))
            for i in range(blocks)
        ]
        node.offer(transfer, offered)
        pipe.send(transfer)
    node.close()


def asked_for(text: bytes) -> tuple[int, range]:
    """How many blocks, of the first so many parts."""
    blocks, parts = map(int, text.split())
    return blocks, range(parts)


def serve_raw(raw: zmq.Socket[bytes], rows: Pools) -> None:
    while True:
        peer, text = raw.recv_multipart()
        blocks, parts = asked_for(text)
        frames = [rows[p][i].data for i in range(blocks) for p in parts]
        while frames:
            count = max(1, MESSAGE_NBYTES // frames[0].nbytes)
            raw.send_multipart([peer, b"%d" % len(frames), *frames[:count]], copy=frames[0].nbytes < 256 << 10)
            del frames[:count]


def serve_plain(listener: socket.socket, rows: Pools) -> None:
    peer, _ = listener.accept()
    while text := peer.recv(64):
        blocks, parts = asked_for(text)
        for i in range(blocks):
            for p in parts:
                peer.sendall(rows[p][i].data)


# ---------------------------------------------------------------- decode's side


class Landing:
    """Landing blocks; a record is put in place by one copy."""

    def __init__(self, rows: Pools) -> None:
        self.rows = rows

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        del header
        self.rows[part][index] = np.frombuffer(payload, np.uint8)
        return True


class Decode:
    """Pulls over kvroute, and by its floors, over one link."""

    def __init__(self, link: str, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=serve, args=(far, link, str(directory)), daemon=True)
        self.process.start()
        self.address, raw, plain = self.pipe.recv()
        self.over = threading.Event()
        self.node = Node(ZmqLink(), identity(), notify=self.over.set)
        self.context = zmq.Context()
        self.raw = dealer(self.context, ZmqSettings(), b"raw", raw)
        self.raw.setsockopt(zmq.RCVHWM, 0)
        self.raw.connect(raw)
        self.plain = socket.socket(socket.AF_UNIX if link == "ipc" else socket.AF_INET)
        self.plain.connect(plain)
        self.rows = pools(None)
        self.transfer = TransferId(b"")

    def offer(self, blocks: int, parts: range) -> None:
        self.pipe.send((blocks, parts))
        self.transfer = self.pipe.recv()

    def pull(self, blocks: int, parts: range) -> None:
        wanted = [WantedBlock(i, KEYS[i], tuple(parts)) for i in range(blocks)]
        self.over.clear()
        self.node.pull(self.transfer, self.address, wanted, Landing(self.rows))
        assert self.over.wait(PATIENCE_S)
        (finished,) = self.node.poll()
        assert isinstance(finished, Finished)
        assert finished.complete, finished

    def ask_raw(self, blocks: int, parts: range) -> None:
        self.raw.send(b"%d %d" % (blocks, len(parts)))
        places = [self.rows[p][i] for i in range(blocks) for p in parts]
        while places:
            _, *frames = self.raw.recv_multipart(copy=False)
            for place, frame in zip(places, frames, strict=False):
                place[:] = np.frombuffer(frame.buffer, np.uint8)
            del places[: len(frames)]

    def ask_plain(self, blocks: int, parts: range) -> None:
        self.plain.sendall(b"%d %d" % (blocks, len(parts)))
        for i in range(blocks):
            for p in parts:
                left = memoryview(self.rows[p][i].data)
                while left.nbytes:
                    left = left[self.plain.recv_into(left) :]

    def race(self, rounds: int, blocks: int, parts: range) -> dict[str, float]:
        """Milliseconds of the best turn of each."""
        best = dict.fromkeys(("kvroute", "raw", "socket"), float("inf"))
        timed: dict[str, Callable[[], object]] = {
            "kvroute": lambda: self.pull(blocks, parts),
            "raw": lambda: self.ask_raw(blocks, parts),
            "socket": lambda: self.ask_plain(blocks, parts),
        }
        for _ in range(rounds):
            self.offer(blocks, parts)
            for name, ms in best_ms(1, timed).items():
                best[name] = min(best[name], ms)
        return best

    def close(self) -> None:
        self.plain.close()
        self.raw.close()
        self.context.term()
        self.node.close()
        self.pipe.send(None)
        self.process.join(PATIENCE_S)


def main() -> None:
    chosen = asked(__doc__, 40, "few rounds", links=(["ipc", "tcp"], "which"))
    rounds = 5 if chosen.quick else chosen.rounds
    table = Table(
        "until all is in place, ms of the best turn",
        [
            "link",
            "what",
            "kvroute",
            "raw",
            "socket",
            "x raw's time",
            "x socket's time",
            "of raw's speed",
            "of socket's",
        ],
    )
    cases = (
        ("one block of rows", 1, range(1)),
        ("1 k tokens, rows", 16, range(1)),
        ("8 k tokens, rows", 128, range(1)),
        ("8 k tokens, rows and KV", 128, range(2)),
    )
    for link in chosen.links:
        with tempfile.TemporaryDirectory() as directory:
            decode = Decode(link, Path(directory))
            decode.race(3, 1, range(1))
            for what, blocks, parts in cases:
                best = decode.race(rounds * (10 if blocks == 1 else 1), blocks, parts)
                slower = [best["kvroute"] / best[other] for other in ("raw", "socket")]
                times = [f"{best[name]:.3f}" for name in ("kvroute", "raw", "socket")]
                table.row(link, what, *times, *(f"{x:.2f}" for x in slower), *(f"{1 / x:.2f}" for x in slower))
            decode.close()
    table.print()


if __name__ == "__main__":
    main()
