"""What does it cost to move rows, and rows with KV, from a prefill to a decode process?

``kvroute``: the whole protocol between two nodes in two processes: pull, sealed records, credit, checksum, install by
one copy into the landing blocks, until the engine learns that everything is in place. The floor, with the same bytes in
the same landing blocks, is ``raw``: a bare ZeroMQ socket with the same options that answers one request with a frame
for each record, without checksums or headers.

``python -m bench.transfer``. Turns are taken: the best of each counts, and the median of the turns' ratios.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import secrets
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import zmq

from bench.harness import Table, Timed, asked, take_turns, write_json
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
    """Makes the requested offers before the timed part, as after prefill. A thread serves the floor."""
    rows = pools(0)
    node = Node(ZmqLink(ZmqSettings(bind=bind_of(link, Path(directory), "node"))), identity())
    settings = ZmqSettings(bind=bind_of(link, Path(directory), "raw"))
    context = zmq.Context()
    raw = router(context, settings)
    raw.setsockopt(zmq.SNDHWM, 0)
    assert settings.bind is not None
    raw.bind(settings.bind)
    threading.Thread(target=serve_raw, args=(raw, rows), daemon=True).start()
    pipe.send((node.address, raw.getsockopt_string(zmq.LAST_ENDPOINT)))
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


def serve_raw(raw: zmq.Socket[bytes], rows: Pools) -> None:
    while True:
        peer, text = raw.recv_multipart()
        blocks, parts = map(int, text.split())
        frames = [rows[p][i].data for i in range(blocks) for p in range(parts)]
        while frames:
            count = max(1, MESSAGE_NBYTES // frames[0].nbytes)
            raw.send_multipart([peer, b"%d" % len(frames), *frames[:count]], copy=frames[0].nbytes < 256 << 10)
            del frames[:count]


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
    """Pulls with kvroute, and with the floor, over one link."""

    def __init__(self, link: str, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=serve, args=(far, link, str(directory)), daemon=True)
        self.process.start()
        self.address, raw = self.pipe.recv()
        self.over = threading.Event()
        self.node = Node(ZmqLink(), identity(), notify=self.over.set)
        self.context = zmq.Context()
        self.raw = dealer(self.context, ZmqSettings(), b"raw", raw)
        self.raw.setsockopt(zmq.RCVHWM, 0)
        self.raw.connect(raw)
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

    def race(self, rounds: int, blocks: int, parts: range) -> dict[str, list[float]]:
        """The milliseconds of each contestant's turns."""
        turns = {
            "kvroute": Timed(lambda: self.pull(blocks, parts), lambda: self.offer(blocks, parts)),
            "raw": Timed(lambda: self.ask_raw(blocks, parts)),
        }
        take_turns(rounds, turns.values())
        return {name: [1000 * each for each in timed.seconds] for name, timed in turns.items()}

    def close(self) -> None:
        self.raw.close()
        self.context.term()
        self.node.close()
        self.pipe.send(None)
        self.process.join(PATIENCE_S)


def main() -> None:
    chosen = asked(__doc__, 40, "few rounds", links=(["ipc", "tcp"], "which"))
    rounds = 5 if chosen.quick else chosen.rounds
    columns = ["link", "what", "kvroute", "raw", "x raw's time", "median turn", "of raw's speed"]
    table = Table("until everything is in place, ms of the best turn", columns)
    cases = (
        ("one block of rows", 1, range(1)),
        ("1 k tokens, rows", 16, range(1)),
        ("8 k tokens, rows", 128, range(1)),
        ("8 k tokens, rows and KV", 128, range(2)),
    )
    milliseconds = dict[str, dict[str, list[float]]]()
    for link in chosen.links:
        with tempfile.TemporaryDirectory() as directory:
            decode = Decode(link, Path(directory))
            decode.race(3, 1, range(1))
            for what, blocks, parts in cases:
                turns = decode.race(rounds * (10 if blocks == 1 else 1), blocks, parts)
                milliseconds[f"{link}: {what}"] = turns
                best = {name: min(each) for name, each in turns.items()}
                slower = best["kvroute"] / best["raw"]
                usual = median(one / other for one, other in zip(turns["kvroute"], turns["raw"], strict=True))
                table.row(
                    link,
                    what,
                    *(f"{ms:.3f}" for ms in best.values()),
                    *(f"{x:.2f}" for x in (slower, usual, 1 / slower)),
                )
            decode.close()
    table.print()
    write_json(chosen.json, milliseconds=milliseconds)


if __name__ == "__main__":
    main()
