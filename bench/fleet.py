"""What does a fleet of engines cost that share a Mooncake pool, and what gives way first?

Three questions, three tables:

* **master**: keys and calls a second of a real ``mooncake_master`` on this machine, asked by 1 to 16 client processes
  in batches of 1 and 32 (objects of 64 bytes, so that the master is the load), and its CPU time a key, which other work
  on the machine hardly changes.
* **shapes**: bytes of rows and of KV a token, and in a GPU-hour, for models that are served.
* **fleet**: a simulation (:mod:`bench.fleet_simulation`) of 8 to 1,024 engines on a Mooncake trace, driven by those
  costs: hit rate, bytes over the network, the master's load, rows lost to eviction.

``--processes`` says how many clients ask at most; the default, 4, is for a machine that others use. ``--full`` is the
run whose numbers are in ``docs/scaling.md``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.fleet_simulation import BLOCK_TOKENS, Costs, Fleet, simulate
from bench.harness import ROOT, Peer, Table, asked, write_json
from bench.traces import requests
from cache_manager.storage.mooncake.settings import native_environment
from kvroute import routing_spec

sys.path.insert(0, str(ROOT / "tests" / "support"))  # the pool that the tests start
from mooncake_pool import Master, running_master, running_owner

FLEETS = (8, 32, 128, 512, 1024)
WHAT = ("exist", "put", "get")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its routers, and bytes of KV a token in bfloat16."""

    name: str
    experts: int
    top_k: int
    moe_layers: int
    layers: int
    kv_nbytes: int

    @property
    def row_nbytes(self) -> int:
        first = self.layers - self.moe_layers
        return routing_spec(self.experts, self.top_k, range(first, self.layers), self.layers, BLOCK_TOKENS).row_nbytes


def heads(layers: int, kv_heads: int, size: int) -> int:
    """K and V of every layer, two bytes a number."""
    return layers * kv_heads * size * 2 * 2


SHAPES = (
    Shape("Mixtral-8x7B", 8, 2, 32, 32, heads(32, 8, 128)),
    Shape("gpt-oss-120b", 128, 4, 36, 36, heads(36, 8, 64)),
    Shape("Qwen3-30B-A3B", 128, 8, 48, 48, heads(48, 4, 128)),
    Shape("Qwen3-235B-A22B", 128, 8, 94, 94, heads(94, 4, 128)),
    Shape("DeepSeek-V3", 256, 8, 58, 61, 61 * (512 + 64) * 2),  # MLA: a latent and a rotary part
    Shape("Kimi-K2", 384, 8, 60, 61, 61 * (512 + 64) * 2),
)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def ask_master(master: Master, peers: Sequence[Peer], what: str, batch: int, seconds: float) -> dict[str, Any]:
    """All peers at once."""
    assert master.process is not None
    question = {"what": what, "batch": batch, "begin_s": time.monotonic() + 0.5, "seconds": seconds}
    before_s = cpu_s(master.process.pid)
    with ThreadPoolExecutor(len(peers)) as pool:
        answers = list(pool.map(lambda peer: peer.ask(question), peers))
    used_s = cpu_s(master.process.pid) - before_s
    keys, calls = (sum(answer[name] for answer in answers) for name in ("keys", "calls"))
    return {
        "what": what,
        "batch": batch,
        "processes": len(peers),
        "keys_a_s": sum(answer["keys"] / answer["seconds"] for answer in answers),
        "calls_a_s": sum(answer["calls"] / answer["seconds"] for answer in answers),
        "master_us_a_key": 1e6 * used_s / keys,
        "master_us_a_call": 1e6 * used_s / calls,
    }


def measure_master(most: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-fleet-")))
        master = stack.enter_context(running_master(5_000))
        stack.enter_context(running_owner(master, logs / "segment", 1 << 30))
        peers: list[Peer] = []
        for processes in [n for n in (1, 2, 4, 8, 16) if n <= most]:
            while len(peers) < processes:
                name = f"client{len(peers)}"
                env = native_environment(10_000)
                peers.append(Peer(Path(sys.executable), "bench.peers.master_load", logs / name, env, master.address))
                stack.callback(peers[-1].close)
            for batch in (1, 32):
                for what in WHAT:
                    took = [ask_master(master, peers, what, batch, seconds) for _ in range(rounds)]
                    found.append({name: _middle([each[name] for each in took]) for name in took[0]})
                    print(f"  {processes} processes, {what}, batches of {batch}", file=sys.stderr, flush=True)
    return found


def _middle(values: list[Any]) -> Any:
    return median(values) if isinstance(values[0], float) else values[0]


def costs_of(measured: Sequence[Mapping[str, Any]]) -> Costs:
    """The master's CPU time a key in batches of 32, of the run with most processes."""
    last = {each["what"]: each["master_us_a_key"] / 1e6 for each in measured if each["batch"] == 32}
    return Costs(exist_s=last["exist"], put_s=last["put"], get_s=last["get"])


def show_master(measured: Sequence[Mapping[str, Any]]) -> None:
    columns = ["clients", "batch", "call", "keys/s", "calls/s", "master us/key", "master us/call"]
    table = Table("a Mooncake master, asked by processes on its own machine", columns)
    for each in measured:
        table.row(
            *(str(each["processes"]), str(each["batch"]), each["what"]),
            *(f"{each['keys_a_s']:,.0f}", f"{each['calls_a_s']:,.0f}"),
            *(f"{each['master_us_a_key']:.2f}", f"{each['master_us_a_call']:.1f}"),
        )
    table.print()


def show_shapes(tokens_s: Sequence[int]) -> list[dict[str, Any]]:
    columns = ["model", "rows B/token", "KV B/token", "rows / KV", *(f"rows GB/GPU-h at {n}/s" for n in tokens_s)]
    columns += [f"KV GB/GPU-h at {n}/s" for n in tokens_s]
    table = Table("bytes by model, rows of routing and KV in bfloat16; tokens a second of one GPU are assumed", columns)
    found = []
    for shape in SHAPES:
        hour = [3600 * n / 1e9 for n in tokens_s]
        rows = [f"{shape.row_nbytes * each:,.1f}" for each in hour]
        kv = [f"{shape.kv_nbytes * each:,.0f}" for each in hour]
        share = f"{100 * shape.row_nbytes / shape.kv_nbytes:.2f} %"
        table.row(shape.name, f"{shape.row_nbytes:,}", f"{shape.kv_nbytes:,}", share, *rows, *kv)
        found.append({"model": shape.name, "row_nbytes": shape.row_nbytes, "kv_nbytes": shape.kv_nbytes})
    table.print()
    return found


def show_fleet(trace: Sequence[Mapping[str, Any]], sizes: Sequence[int], costs: Costs, shape: Shape) -> list[Any]:
    columns = ["engines", "cells", "block", "to", "groups", "hits", "own", "pool", "again", "no rows", "lost"]
    columns += ["Gb/s an engine", "calls/s", "keys/s", "load", "wait p99, ms"]
    title = f"{shape.name}: engines with 40 GB of their own and 100 GB lent each, {len(trace)} requests a trace"
    table = Table(title, columns)
    found = []
    for engines in sizes:
        for cells, affine, groups, tokens in (
            *((1, False, True, BLOCK_TOKENS), (1, False, True, 64), (1, False, False, BLOCK_TOKENS)),
            (1, True, True, BLOCK_TOKENS),
            *((n, affine, True, BLOCK_TOKENS) for n in (4, 16) if 8 * n <= engines for affine in (False, True)),
        ):
            block_nbytes = BLOCK_TOKENS * (shape.kv_nbytes + shape.row_nbytes)
            fleet = Fleet(
                engines=engines,
                own_blocks=int(40e9 / block_nbytes),
                lent_blocks=int(100e9 / block_nbytes),
                kv_nbytes=BLOCK_TOKENS * shape.kv_nbytes,
                rows_nbytes=BLOCK_TOKENS * shape.row_nbytes,
                costs=costs,
                cells=cells,
                groups=groups,
                records_a_block=BLOCK_TOKENS // tokens,
                affine=affine,
                common=1,
            )
            it = simulate(trace, fleet)
            part = {name: getattr(it, name) / it.asked for name in ("own", "pooled", "computed_again", "without_rows")}
            gbit_s = 8e-9 * it.remote_nbytes / it.seconds / engines
            table.row(
                *(str(engines), str(cells), str(tokens), "its prefix" if affine else "any", "yes" if groups else "no"),
                *(f"{it.hit_rate:.4f}", *(f"{part[name]:.4f}" for name in part), f"{it.rows_evicted:,}"),
                *(f"{gbit_s:.2f}", f"{it.calls / it.seconds:,.0f}", f"{it.keys / it.seconds:,.0f}"),
                *(f"{it.load:.3f}", f"{1e3 * it.wait_s(0.99):.2f}"),
            )
            numbers = {k: v for k, v in asdict(it).items() if k != "waits_s"}
            found.append({**asdict(fleet), **numbers, "hit_rate": it.hit_rate, "load": it.load})
        print(f"  {engines} engines", file=sys.stderr, flush=True)
    table.print()
    return found


def main() -> None:
    args = asked(
        *(__doc__, 3),
        trace=(Path, "a Mooncake trace, a JSON object a line; without it, no simulation"),
        requests=(1000, "only the first N of the trace"),
        engines=([8, 32, 128], "sizes of the fleet"),
        processes=(4, "clients that ask the master at most"),
        seconds=(1.0, "of each measurement of the master"),
        costs=(Path, "the JSON of an earlier run, whose master is not measured again"),
        tokens=([1_000, 10_000], "tokens a second of one GPU"),
        model=("Qwen3-235B-A22B", "one of the table of shapes"),
        full=(False, "16 clients, 8 to 1,024 engines, the whole trace: an hour"),
    )
    if args.full:
        args.processes, args.engines, args.requests = 16, list(FLEETS), None
    if args.costs:
        measured = json.loads(args.costs.read_text())["master"]
    else:
        measured = measure_master(args.processes, args.seconds, args.rounds)
    show_master(measured)
    found = {"master": measured, "shapes": show_shapes(args.tokens), "fleet": []}
    if args.trace:
        shape = next(shape for shape in SHAPES if shape.name == args.model)
        trace = requests(args.trace, args.requests)
        found["fleet"] = show_fleet(trace, args.engines, costs_of(measured), shape)
    write_json(args.json, **found)


if __name__ == "__main__":
    main()
