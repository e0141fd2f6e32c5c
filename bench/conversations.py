"""Long conversations inside vLLM: requests a minute, memory, bytes, and is every row right?

Each of ``--conversations`` has ``--turns``: what was said so far comes back as the next prompt, with some tokens more,
until it has ``--length`` tokens. The KV of all does not fit on the device: vLLM's offloading keeps it on the host.
Engines take turns, each with conversations of its own: one without rows, vLLM's own flag where it takes it (without
offloading, which it refuses beside its flag), and kvroute with rows in the response, in vLLM's own field, or left in a
rollout store by a process of its own. Those that say ``new`` ask for the rows of a turn's own tokens alone
(``routed_experts_prompt_start``, ``start``), the others for those of the whole conversation, each time. ``--ranks 2``
is DP 2 + EP.

Each row is judged: the routers choose by the token alone, by a wide margin, so that a table of the vocabulary says
which experts. Memory is that of all processes of an engine (proportional set size, so that shared memory counts once),
the most of every tenth turn. What is *sent* is what the engine sends along for the rows, an array as it is and all else
as JSON; *left* is what lies in the rollout store at the end.

Why to distrust it: on a CPU the models are tiny, and a forward pass is cheap beside everything else; engines with
several processes share few cores. Needs vLLM in the Python that runs it, with this checkout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.engines import FIELDS
from bench.harness import PeerError, Racer, Table, asked, print_ratios, race, write_json
from bench.vllm_gpu import FLAG, KVROUTE, OFFLOADING, Starter, transfer
from bench.vllm_models import CODE, COMMON, TOP_K, VOCABULARY, decide_by_token, seeded, unpacked
from bench.vllm_parallel import EP, ON_GPU, PLUGIN, Deployment, start
from bench.vllm_peers import HOST_OF_CPU, connector

SIZES: Mapping[str, Any] = {
    "hidden_size": 2048 if ON_GPU else 128,
    "intermediate_size": 2048 if ON_GPU else 128,
    "moe_intermediate_size": 768 if ON_GPU else 64,
    "num_attention_heads": 16 if ON_GPU else 2,
    "num_key_value_heads": 4 if ON_GPU else 1,
    "head_dim": 128 if ON_GPU else 32,
    "num_experts": 64 if ON_GPU else 16,
}
BLOCK = 16 if ON_GPU else 32
ON_HOST: Mapping[str, Any] = {} if ON_GPU else HOST_OF_CPU
STOCK = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
NAMED = {"weights": "bench", "weights_version": 0}


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine is asked for rows."""

    offloads: bool = True
    kvroute: bool = True
    flag: bool = False
    new: bool = False
    left: bool = False

    def config(self, home: Path, host_nbytes: int) -> dict[str, Any]:
        host = {"cpu_bytes_to_use": host_nbytes, **ON_HOST} if self.offloads else {}
        flag = FLAG if self.flag else {}
        if not (self.kvroute or self.offloads):
            return flag
        if not self.kvroute:
            return {"kv_transfer_config": connector("OffloadingConnector", STOCK, **host)}
        settings = NAMED | ({"rollouts": f"apart:{self.url(home)}"} if self.left else {})
        return flag | transfer(OFFLOADING if self.offloads else KVROUTE, settings, host)

    def url(self, home: Path) -> str:
        return f"file://{home}/rollouts"


WAYS = {
    "no rows": Way(kvroute=False),
    "vLLM's flag": Way(offloads=False, kvroute=False, flag=True),
    "vLLM's flag, new": Way(offloads=False, kvroute=False, flag=True, new=True),
    "kvroute, response, new": Way(new=True),
    "kvroute, own field": Way(flag=True),
    "kvroute, own field, new": Way(flag=True, new=True),
    "kvroute, left apart": Way(left=True),
    "kvroute, left apart, new": Way(left=True, new=True),
}


def build(home: Path, layers: int, length: int) -> NDArray[np.int64]:
    """A checkpoint whose routers choose by the token; the experts by token, ``[vocabulary, layers, top_k]``, sorted.

    Each router is the first one with its experts exchanged: no token would be far from the borders of many others.
    """
    config = Qwen3MoeConfig(num_hidden_layers=layers, **{**COMMON, **SIZES, "max_position_embeddings": 2 * length})
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = seeded(Qwen3MoeForCausalLM, config, 0.3, 0.02)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        first, *others = (layer.mlp.gate.weight for layer in model.model.layers)
        for router in others:
            router.copy_(first[torch.randperm(len(first), generator=draw)])
        decide_by_token(model, TOP_K, draw)
        code = model.model.embed_tokens.weight[:, :CODE]
        scores = [code @ layer.mlp.gate.weight[:, :CODE].T for layer in model.model.layers]
        chosen = np.sort(torch.stack(scores, 1).topk(TOP_K).indices.cpu().numpy(), -1)
    model.to(torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(home)
    del model, code, scores
    if ON_GPU:
        torch.cuda.empty_cache()  # the engines need the memory
    return chosen


@dataclass
class Counts:
    """Of one engine, over all its turns."""

    right: int = 0
    missing: int = 0
    wrong: int = 0
    cached: int = 0
    tokens: int = 0
    sent_nbytes: int = 0
    pss_nbytes: int = 0
    turns: int = 0


MEMORY_EVERY = 10
"""Turns between two looks at the memory, which take longer than a turn."""


@dataclass
class Conversations:
    """An engine's own conversations, a turn at a time."""

    way: Way
    home: Path
    deployment: Deployment
    chosen: NDArray[np.int64]
    said: list[list[int]]
    counts: Counts = field(default_factory=Counts)

    def turn(self, rng: np.random.Generator, more: int, reply: int) -> Mapping[str, float]:
        """The numbers of this turn. ``more`` tokens come to each conversation, and an answer of ``reply`` tokens."""
        starts = [max(0, len(tokens) - 1) if self.way.new else 0 for tokens in self.said]
        self.said = [[*tokens, *rng.integers(5, VOCABULARY, more).tolist()] for tokens in self.said]
        shares = self.deployment.each(partial(self._asked, starts, reply))
        for rank, share in enumerate(shares):
            for number, answer in zip(range(rank, len(self.said), len(shares)), share["answers"], strict=True):
                self.said[number] = self.said[number] + answer["tokens"]
                self._count(self.said[number], starts[number], answer)
        self.counts.turns += 1
        if self.counts.turns % MEMORY_EVERY == 0 or not self.counts.pss_nbytes:
            self.counts.pss_nbytes = max(self.counts.pss_nbytes, memory_of(self.deployment))
        seconds = max(share["seconds"] for share in shares)
        cpu_s = sum(share["cpu_s"] for share in shares)
        return {
            "requests/min": 60 * len(self.said) / seconds,
            "tokens/s": len(self.said) * reply / seconds,
            "tokens/CPU s": len(self.said) * reply / cpu_s,
        }

    def _asked(self, starts: Sequence[int], reply: int, rank: int, engine: Any) -> dict[str, Any]:
        own = slice(rank, None, len(self.deployment.ranks))
        question: dict[str, Any] = {"prompts": self.said[own], "tokens": reply}
        if self.way.flag:
            question["starts"] = starts[own]
        elif self.way.kvroute:
            question["extra"] = [{"kv_transfer_params": {"kvroute": {"start": start}}} for start in starts[own]]
        if self.way.left:
            question["rollouts"] = self.way.url(self.home)
        return dict(engine.ask(question))

    def _count(self, tokens: Sequence[int], start: int, answer: Mapping[str, Any]) -> None:
        """Judge the rows of the tokens from ``start`` on that the model read, which is all but the last."""
        counts = self.counts
        counts.cached += answer["cached"] or 0
        counts.tokens += len(tokens)
        counts.sent_nbytes += answer["sent_nbytes"]
        if answer["rows"] is None:
            counts.missing += len(tokens) - 1 - start
            return
        ids = np.sort(unpacked(answer["rows"]["ids"]).astype(np.int64), -1)
        valid = unpacked(answer["rows"]["valid"])
        wanted = self.chosen[np.asarray(tokens[:-1])][start:]
        same = (ids == wanted).all((1, 2))
        counts.right += int((same & valid).sum())
        counts.missing += int((~valid).sum())
        counts.wrong += int((~same & valid).sum())


def memory_of(deployment: Deployment) -> int:
    """The proportional set size of all processes of a deployment."""
    nbytes = 0
    for rank in deployment.ranks:
        for process in [psutil.Process(rank.pid), *psutil.Process(rank.pid).children(recursive=True)]:
            with suppress(psutil.Error):
                nbytes += process.memory_full_info().pss
    return nbytes


def nbytes_below(home: Path) -> int:
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


def main() -> None:
    args = asked(
        *(__doc__, 100),
        ways=("", "of these, separated by '; ': " + "; ".join(WAYS)),
        turns=(100, "of each conversation"),
        conversations=(4, "of each engine"),
        length=(32768, "tokens at the end of each"),
        reply=(16, "tokens of an answer"),
        layers=(24 if ON_GPU else 4, "of the model"),
        ranks=(1, "2 is DP 2 + EP"),
        device=(0.5, "the share of all conversations' KV that fits on a device"),
    )
    names = args.ways.split("; ") if args.ways else list(WAYS)
    more = args.length // args.turns - args.reply
    blocks = args.conversations * (args.length // BLOCK + 1)
    head = SIZES["head_dim"] * SIZES["num_key_value_heads"] * args.layers * 2 * (2 if ON_GPU else 4)
    on_device = max(args.length // BLOCK + 9, int(args.device * blocks) // args.ranks)
    options: dict[str, Any] = {
        "max_model_len": args.length + args.reply + BLOCK,
        "max_num_seqs": args.conversations,
        "num_gpu_blocks_override": on_device,
        **({"kv_cache_memory_bytes": on_device * BLOCK * head} if ON_GPU else {}),
        "block_size": BLOCK,
        "gpu_memory_utilization": 0.05,
        "dtype": "bfloat16" if ON_GPU else "float32",
        "enforce_eager": not ON_GPU,
        "enable_prefix_caching": True,
        **(EP if args.ranks > 1 else {}),
    }
    with ExitStack() as stack:
        starter = Starter(stack, ranks=PLUGIN)
        chosen = build(starter.home / "model", args.layers, args.length)
        options["model"] = str(starter.home / "model")
        homes = {name: starter.home / f"of {name}" for name in names}

        def start_way(name: str) -> Deployment | PeerError:
            homes[name].mkdir()
            config = WAYS[name].config(homes[name], 2 * blocks * BLOCK * head // args.ranks)
            try:
                return start(starter, name, args.ranks, options | config, {})
            except PeerError as error:  # the others go on
                return error

        with ThreadPoolExecutor(len(names) if ON_GPU else 1) as threads:
            started = dict(zip(names, threads.map(start_way, names), strict=True))
        racers, told = [], dict[str, Conversations]()
        for name, deployment in started.items():
            racer = Racer(name, None)
            racers.append(racer)
            if isinstance(deployment, PeerError):
                racer.failed = str(deployment)
                continue
            empty = [list[int]() for _ in range(args.conversations)]
            told[name] = Conversations(WAYS[name], homes[name], deployment, chosen, empty)
            racer.turn = partial(told[name].turn, np.random.default_rng(0), more, args.reply)
        race(racers, args.turns)
        title = f"{args.conversations} conversations of {args.turns} turns, {args.length} tokens, {args.ranks} ranks"
        fields: Mapping[str, tuple[str, Callable[[float], float]]] = {"requests/min": ("requests/min", float), **FIELDS}
        print_ratios(title, racers, racers[0].name, fields)
        table = Table(title, ["rows", "right", "missing", "wrong", "hit", "MiB", "sent, bytes a token", "left, MiB"])
        for name, each in told.items():
            counts = each.counts
            generated = args.conversations * args.turns * (more + args.reply)
            numbers = [counts.right, counts.missing, counts.wrong]
            table.row(
                name,
                *map(str, numbers),
                f"{counts.cached / counts.tokens:.3f}",
                f"{counts.pss_nbytes / 2**20:.0f}",
                f"{counts.sent_nbytes / generated:.1f}",
                f"{nbytes_below(each.home) / 2**20:.1f}",
            )
        table.print()
        write_json(
            args.json,
            columns=table.columns,
            rows=table.rows,
            turns={racer.name: racer.found for racer in racers},
            failed={racer.name: racer.failed for racer in racers if racer.failed},
        )


if __name__ == "__main__":
    main()
