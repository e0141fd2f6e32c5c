"""What do rows cost that cross from a prefill to a decode process?

``kvroute``: the whole protocol between two nodes in two processes: pull, sealed records, credit, checksum, install by
one copy into the landing blocks, ack and its answer. Against, in messages of the same size and with the same copy into
the landing blocks: ``raw``: a bare ZeroMQ socket with the same options that sends a frame a record on one request;
``raw + XXH3``: the same, summed before it is sent and after it came, as every system must that notices a flipped bit;
``joined``: a message's records in one frame, as kvroute sends them, here side by side from the start and not
summed; ``pickle``: the rows as one pickled object a message, as FastDeploy sends its multipart messages.

``python -m bench.transfer [--quick]``. Rounds are interleaved, the best counts.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import pickle
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from bench.harness import Table, best_ms
from cache_manager.keys import BlockKey, Namespace
from cache_manager.record import OfferedRecord, RecordHeader, checksum
from transfer.actions import Finished, OfferedBlock, WantedBlock
from transfer.curve import CurveClient, CurveServer, make_keys, read_keys, read_public
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.messages import BootId, Part, TransferId
from transfer.node import Node, new_transfer
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings
from transfer.zmq_sockets import dealer, router

BLOCK_TOKENS = 64
PART = Part("rows", b"f" * 16, BLOCK_TOKENS * 58 * 8, BLOCK_TOKENS)
NAMESPACE = Namespace("m", 1)
VALID = b"\xff" * 8
BLOCKS = 512
LIMITS = TransferLimits()
PATIENCE_S = 60.0
MESSAGE_RECORDS = min(LIMITS.records_max, LIMITS.records_nbytes_max // PART.nbytes)
"""In one message of kvroute's, and of those that it is compared with."""


def key_of(index: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % index).digest())


KEYS = [key_of(i) for i in range(BLOCKS)]


def settings(link: str, directory: Path, name: str, *, server: bool) -> ZmqSettings:
    curve = link.endswith("CURVE")
    keys = directory / "keys"
    bind = f"ipc://{directory}/{name}" if link == "ipc" else "tcp://127.0.0.1:*"
    if server:
        allowed = (
            CurveServer(read_keys(keys / "p.key_secret"), frozenset([read_public(keys / "d.key")])) if curve else None
        )
        return ZmqSettings(bind=bind, curve_server=allowed)
    return ZmqSettings(
        curve_client=CurveClient(read_keys(keys / "d.key_secret"), read_public(keys / "p.key")) if curve else None
    )


def pool() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (BLOCKS, PART.nbytes), dtype=np.uint8)


# ---------------------------------------------------------------- prefill's processes


def serve_node(pipe: Connection, link: str, directory: Path) -> None:
    """Offers as many requests as it is told to, before their time is taken: prefill has finished then."""
    rows = pool()
    node = Node(
        ZmqLink(settings(link, directory, "node", server=True)),
        Identity(BootId(secrets.token_bytes(16)), NAMESPACE, (PART,)),
        LIMITS,
    )
    pipe.send(node.address)
    while (asked := pipe.recv()) is not None:
        requests, blocks = asked
        node.poll()
        transfers = [new_transfer() for _ in range(requests)]
        records = [OfferedRecord(KEYS[i], PART.fingerprint, 1, 1, VALID, rows[i].data) for i in range(blocks)]
        for transfer in transfers:
            node.offer(transfer, [OfferedBlock(i, record.key, (record,)) for i, record in enumerate(records)])
        pipe.send(transfers)
    node.close()


def serve_raw(pipe: Connection, link: str, directory: Path) -> None:
    """Answers ``mode, blocks`` with messages of as many records as kvroute's, each in a frame of its own."""
    rows = pool()
    context = zmq.Context()
    chosen = settings(link, directory, "raw", server=True)
    socket = router(context, replace(chosen, curve_server=None))
    if chosen.curve_server is not None:  # encrypted as ours, without a list of clients
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, chosen.curve_server.keys.secret)
    socket.setsockopt(zmq.SNDHWM, 0)
    assert chosen.bind is not None
    socket.bind(chosen.bind)
    pipe.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    encoder = msgspec.msgpack.Encoder()
    while True:
        peer, asked = socket.recv_multipart()
        mode, blocks = asked.decode().split()
        if mode == "end":
            break
        for at in range(0, int(blocks), MESSAGE_RECORDS):
            chunk = range(at, min(at + MESSAGE_RECORDS, int(blocks)))
            if mode == "pickle":
                socket.send_multipart(
                    [peer, pickle.dumps({"task_id": "0", "index": list(chunk), "rows": rows[at : chunk[-1] + 1]})]
                )
                continue
            sums = [checksum(rows[i].data) for i in chunk] if mode == "sum" else [0] * len(chunk)
            frames = [rows[i].data for i in chunk] if mode != "joined" else [rows[at : chunk[-1] + 1].data.cast("B")]
            socket.send_multipart([peer, encoder.encode([(0, i, bytes(128)) for i in chunk] + sums), *frames])
    socket.close(0)
    context.term()


# ---------------------------------------------------------------- decode's side


class Landing:
    """Landing blocks; a record is put in place by one copy."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows = rows
        self.first_s = self.last_s = 0.0

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        del part, header
        self.rows[index] = np.frombuffer(payload, np.uint8)
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        return True


class Decode:
    """Pulls over kvroute, and what it is compared with, over one link."""

    def __init__(self, link: str, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes, addresses = [], [], []
        for serve in (serve_node, serve_raw):
            near, far = context.Pipe()
            process = context.Process(target=serve, args=(far, link, directory), daemon=True)
            process.start()
            self.pipes.append(near)
            self.processes.append(process)
            addresses.append(near.recv())
        self.address, raw = addresses
        chosen = settings(link, directory, "", server=False)
        self.over = threading.Event()
        self.node = Node(
            ZmqLink(chosen),
            Identity(BootId(secrets.token_bytes(16)), NAMESPACE, (PART,)),
            LIMITS,
            notify=self.over.set,
        )
        self.context = zmq.Context()
        self.raw = dealer(self.context, chosen, b"raw", raw)
        self.raw.setsockopt(zmq.RCVHWM, 0)
        self.raw.connect(raw)
        self.rows = np.zeros((BLOCKS, PART.nbytes), np.uint8)
        self.first_ms: dict[str, float] = {}
        self.rows_ms = float("inf")  # of kvroute: until the last row is in place, without the ack
        self.transfers: list[TransferId] = []

    def offer(self, requests: int, blocks: int) -> None:
        self.pipes[0].send((requests, blocks))
        self.transfers = self.pipes[0].recv()

    def pull(self, blocks: int) -> None:
        """Everything that was offered, at once, to the end of the last one's protocol."""
        transfers, self.transfers = self.transfers, []
        start_s = time.perf_counter()
        sinks = [Landing(self.rows) for _ in transfers]
        wanted = [WantedBlock(i, KEYS[i], (0,)) for i in range(blocks)]
        for transfer, sink in zip(transfers, sinks, strict=True):
            self.node.pull(transfer, self.address, wanted, sink)
        left = len(transfers)
        while left:
            assert self.over.wait(PATIENCE_S)
            self.over.clear()
            for event in self.node.poll():
                assert isinstance(event, Finished)
                assert event.result.complete, event.result
                left -= 1
        self._first("kvroute", sinks[0].first_s - start_s)
        self.rows_ms = min(self.rows_ms, 1000 * (max(sink.last_s for sink in sinks) - start_s))

    def ask_raw(self, mode: str, requests: int, blocks: int) -> None:
        start_s = time.perf_counter()
        for _ in range(requests):
            self.raw.send(f"{mode} {blocks}".encode())
        first = 0.0
        for _ in range(requests):
            got = 0
            while got < blocks:
                if mode == "pickle":
                    message = pickle.loads(self.raw.recv())  # noqa: S301 - our own child's; that is what it costs
                    self.rows[message["index"]] = message["rows"]
                    got += len(message["index"])
                else:
                    control, *bulk = self.raw.recv_multipart(copy=False)
                    entries = msgspec.msgpack.decode(control.buffer)
                    count = len(entries) // 2
                    views = [frame.buffer for frame in bulk]
                    if mode == "joined":
                        views = [views[0][i * PART.nbytes : (i + 1) * PART.nbytes] for i in range(count)]
                    for i, view in enumerate(views):
                        if mode == "sum":
                            assert checksum(view) == entries[count + i]
                        self.rows[entries[i][1]] = np.frombuffer(view, np.uint8)
                    got += count
                first = first or time.perf_counter()
        self._first(mode, first - start_s)

    def _first(self, name: str, seconds: float) -> None:
        self.first_ms[name] = min(self.first_ms.get(name, float("inf")), 1000 * seconds)

    def race(self, rounds: int, requests: int, blocks: int) -> dict[str, float]:
        """Milliseconds of the best round of each, and of the first row in ``first_ms``."""
        self.first_ms, self.rows_ms = {}, float("inf")
        best = {name: float("inf") for name in ("kvroute", "raw", "sum", "joined", "pickle")}
        for _ in range(rounds):
            self.offer(requests, blocks)
            timed: dict[str, Callable[[], object]] = {
                "kvroute": lambda: self.pull(blocks),
                "raw": lambda: self.ask_raw("raw", requests, blocks),
                "sum": lambda: self.ask_raw("sum", requests, blocks),
                "joined": lambda: self.ask_raw("joined", requests, blocks),
                "pickle": lambda: self.ask_raw("pickle", requests, blocks),
            }
            for name, ms in best_ms(1, timed).items():
                best[name] = min(best[name], ms)
        return best

    def close(self) -> None:
        self.raw.send(b"end 0")
        self.raw.close()
        self.context.term()
        self.node.close()
        self.pipes[0].send(None)
        for process in self.processes:
            process.join(PATIENCE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--links", default="ipc,tcp,tcp+CURVE", help="which, with commas between (all)")
    chosen = parser.parse_args()
    rounds = 5 if chosen.quick else 25
    sizes = Table(
        "rows of one request: MB/s until the last is in place (acked: until the ack was answered), ms to the first",
        [
            "link",
            "tokens",
            "kvroute",
            "raw",
            "raw + XXH3",
            "joined",
            "pickle",
            "x raw",
            "x raw + XXH3",
            "x joined",
            "x pickle",
            "x raw, acked",
            "first row",
            "raw's first",
        ],
    )
    flights = Table(
        "requests of one block (64 tokens): us a request",
        ["link", "in flight", "kvroute", "raw", "overhead"],
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for side in "pd":
            make_keys(directory / "keys", side)
        for link in chosen.links.split(","):
            decode = Decode(link, directory)
            decode.race(2, 1, BLOCKS)
            for tokens in (1024, 8192, 32_768):
                blocks = tokens // BLOCK_TOKENS
                best = decode.race(rounds, 1, blocks)
                speed = {n: blocks * PART.nbytes / ms / 1e3 for n, ms in best.items()}
                speed["kvroute"] = blocks * PART.nbytes / decode.rows_ms / 1e3
                ratios = [f"{best[other] / decode.rows_ms:.2f}" for other in ("raw", "sum", "joined", "pickle")]
                ratios.append(f"{best['raw'] / best['kvroute']:.2f}")
                first = decode.first_ms
                sizes.row(
                    link,
                    f"{tokens:,}",
                    *(f"{speed[n]:.0f}" for n in ("kvroute", "raw", "sum", "joined", "pickle")),
                    *ratios,
                    f"{first['kvroute']:.2f}",
                    f"{first['raw']:.2f}",
                )
            for requests in (1, 8, 64):
                best = decode.race(rounds, requests, 1)
                us = {n: 1000 * ms / requests for n, ms in best.items()}
                flights.row(
                    link,
                    str(requests),
                    f"{us['kvroute']:.0f}",
                    f"{us['raw']:.0f}",
                    f"{us['kvroute'] - us['raw']:.0f}",
                )
            decode.close()
    sizes.print()
    flights.print()


if __name__ == "__main__":
    main()
