"""What does a receipt of the routers cost a training step?

A step is forward and backward of ``--micro-batches`` micro-batches of ``--tokens`` tokens through an OLMoE of
transformers, 4 layers of 64 experts, top 8, with kvroute's replay. Contestants take turns, on one thread: the step
alone, the step with a watch and its receipt, and the watch's own work alone: the same rows become due, routers that do
nothing hand the same ids to its hooks, and a receipt is made and checked. The ratio of the second to the first has the
noise of a whole step, so the third one's share is what to read. Megatron's routers return a map ``[tokens, experts]``,
whose comparison costs more than that of ids: its own work is measured beside, without Megatron.

Distrust: a CPU, a small model. A larger one makes more of a step and hardly more of a receipt; on a GPU the launches of
the comparisons count, which are not measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import OlmoeConfig, OlmoeForCausalLM

from bench.harness import Table, Timed, asked, router_ids, take_turns, write_json
from kvroute.replay import transformers as replay
from kvroute.replay import watch
from kvroute.routes import Layout, Routes
from kvroute.routes.routes import checked_routes

LAYERS, EXPERTS, TOP_K, SAMPLES = 4, 64, 8, 4


def model_of() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 512, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = OlmoeConfig(
        vocab_size=1024,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        eos_token_id=0,
        **sizes,
    )
    return OlmoeForCausalLM._from_config(config, attn_implementation="sdpa")


def samples_of(tokens: int, seed: int) -> tuple[list[Routes], list[int]]:
    """The samples of one micro-batch, end to end."""
    counts = [tokens // SAMPLES] * SAMPLES
    layout = Layout(tuple(range(LAYERS)), EXPERTS, LAYERS, TOP_K)
    routes = [
        checked_routes(
            layout, router_ids(count - 1, LAYERS, TOP_K, EXPERTS, seed=seed + i), np.ones(count - 1, np.bool_)
        )
        for i, count in enumerate(counts)
    ]
    return routes, counts


def contestants(tokens: int, micro_batches: int) -> dict[str, Callable[[], object]]:
    model = model_of()
    batches = [samples_of(tokens, seed=SAMPLES * number) for number in range(micro_batches)]
    targets = [replay.packed(*batch) for batch in batches]
    inputs = torch.arange(tokens)[None] % 1024
    embedded = model.get_input_embeddings()

    def micro_batch(number: int) -> None:
        with replay.replay(model, targets[number]):
            logits = model(inputs_embeds=embedded(inputs), use_cache=False).logits
            logits.float().log_softmax(dim=-1)[..., 0].sum().backward()

    def step() -> None:
        model.zero_grad()
        for number in range(micro_batches):
            micro_batch(number)

    def step_with_receipt() -> None:
        model.zero_grad()
        with watch(model) as replayed:
            for number, batch in enumerate(batches):
                replayed.packed(*batch)
                micro_batch(number)
            replayed.receipt().check()

    ids = [[rows[:, layer].contiguous() for layer in range(LAYERS)] for rows in targets]
    maps = [
        [torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, each.clamp(min=0), True) for each in by_layer]
        for by_layer in ids
    ]

    def work(routers: nn.Module, used: list[list[torch.Tensor]]) -> None:
        """What a watch does in a step whose routers ``used`` these, by micro-batch and layer."""
        with watch(routers) as replayed:
            for batch, by_layer in zip(batches, used, strict=True):
                replayed.packed(*batch)
                routers(by_layer)
            replayed.receipt().check()

    def work_on_maps() -> None:
        name = "megatron.core.transformer.moe.router"  # where a watch looks for Megatron's class
        sys.modules[name] = SimpleNamespace(TopKRouter=TopKRouter)  # type: ignore[assignment]
        try:
            work(of_megatron, maps)
        finally:
            del sys.modules[name]

    of_transformers, of_megatron = OfTransformers(), OfMegatron()
    return {
        "step": step,
        "step with a receipt": step_with_receipt,
        "the receipt's own work, ids": lambda: work(of_transformers, ids),
        "the receipt's own work, Megatron's map": work_on_maps,
    }


class Passes(nn.Module):
    """Stands for the experts of transformers: takes ids, and does nothing."""

    def forward(self, hidden: object, ids: torch.Tensor, weights: object) -> None: ...


class OfTransformers(nn.Module):
    """Blocks as transformers has them, which do nothing: what is left is the watch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": nn.Identity(), "experts": Passes()}) for _ in range(LAYERS))

    def forward(self, used: list[torch.Tensor]) -> None:
        for layer, ids in zip(self.layers, used, strict=True):
            layer.get_submodule("experts")(None, ids, None)


class TopKRouter(nn.Module):
    """Stands for Megatron's router: returns the map that it gets."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer_number = layer + 1
        self.config = SimpleNamespace(num_moe_experts=EXPERTS)

    def forward(self, used: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, used


class OfMegatron(nn.Module):
    """Routers as Megatron has them, which do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(TopKRouter(layer) for layer in range(LAYERS))

    def forward(self, used: list[torch.Tensor]) -> None:
        for router, routing_map in zip(self.routers, used, strict=True):
            router(routing_map)


def main() -> None:
    args = asked(__doc__, 9, tokens=(2048, "of a micro-batch"), micro_batches=(2, "of a step"))
    torch.set_num_threads(1)
    timed = {name: Timed(run) for name, run in contestants(args.tokens, args.micro_batches).items()}
    for each in timed.values():
        each.run()
    take_turns(args.rounds, timed.values())
    base = timed["step"].cpu_seconds
    title = f"a step of {args.micro_batches} x {args.tokens} tokens, {LAYERS} layers of {EXPERTS} experts, top {TOP_K}"
    table = Table(title, ["what", "CPU ms, median", "of a step, median [quartiles]", "target"])
    for name, each in timed.items():
        ratios = [mine / its for mine, its in zip(each.cpu_seconds, base, strict=True)]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        target = "below 0.01" if "own work" in name else "1.01" if "with" in name else ""
        table.row(name, f"{each.microseconds(0.5) / 1e3:.2f}", f"{middle:.4f} [{low:.4f} .. {high:.4f}]", target)
    table.print()
    write_json(args.json, cpu_seconds={name: each.cpu_seconds for name, each in timed.items()})


if __name__ == "__main__":
    main()
