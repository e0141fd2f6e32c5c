"""What the hooks of a connector add to a forward pass in a CUDA graph: one launch over all layers, beside one a layer.

A connector hooks the engine's own routers (:class:`kvroute.capture.step_ids.StepIds`): the last hook of a pass stacks
the ids of all layers into one buffer. The peer copies each layer's ids there by itself, as vLLM's own capture does.
The floor is one copy of the same bytes. First the ids of both are compared with those that the routers gave. Needs a
CUDA GPU, torch and Triton.
"""

from __future__ import annotations

from typing import Any

import torch

import kvroute
from bench.gpu_capture import BLOCK_TOKENS, DEVICE, MODELS, TOP_K, Model, Pass, added, graph_of
from bench.harness import Table, asked, want_gpu, write_json
from kvroute.capture.step_ids import StepIds

QWEN = Model("48x8 of 128", 48, 128)
TOKENS = (8, 64, 256, 2048, 8192)
STACKED, COPIED, FLOOR = "one launch", "a copy a layer", "one copy of the bytes"


def measure(model: Model, tokens: int, rounds: int) -> dict[str, Any]:
    """Microseconds that each way adds to a pass of so many tokens."""
    batch = Pass(model, tokens)
    spec = kvroute.routing_spec(model.experts, TOP_K, range(model.layers), model.layers, BLOCK_TOKENS)
    step = StepIds(spec, tokens, DEVICE)
    hooks = [step.hook(layer) for layer in range(model.layers)]
    copied = torch.empty(tokens, model.layers, TOP_K, dtype=torch.int32, device=DEVICE)
    source = torch.empty_like(copied)

    def stacks() -> None:
        batch.work(lambda layer: hooks[layer](batch.ids[layer]))

    def copy_layer(layer: int) -> None:
        copied[:, layer] = batch.ids[layer]

    def copies() -> None:
        batch.work(copy_layer)

    def copies_once() -> None:
        batch.work()
        copied.copy_(source)

    base = graph_of(batch.work)
    pool = base.pool()
    graphs = {
        STACKED: graph_of(stacks, pool),
        COPIED: graph_of(copies, pool),
        FLOOR: graph_of(copies_once, pool),
    }
    wrong = 0
    for _ in range(3):
        batch.draw()
        step.begin()
        for name in (STACKED, COPIED):
            graphs[name].replay()
        torch.cuda.synchronize()
        ids = batch.ids.transpose(0, 1)
        taken = step.take(tokens)
        wrong += tokens if isinstance(taken, str) else int((taken != ids).any(dim=(1, 2)).sum())
        wrong += int((copied != ids).any(dim=(1, 2)).sum())
    base_us, more_us = added(base, graphs, rounds)
    return {"model": model.name, "tokens": tokens, "pass_us": base_us, "wrong": wrong, **more_us}


def main() -> None:
    args = asked(__doc__, 200)
    want_gpu()
    lines = [measure(model, tokens, args.rounds) for model in (QWEN, *MODELS) for tokens in TOKENS]
    ways = (STACKED, COPIED, FLOOR)
    table = Table(
        "microseconds added to a pass in a CUDA graph (medians)", ["rows, tokens", "pass", *ways, "ratio", "wrong"]
    )
    for line in lines:
        times = (f"{line[way]:.1f}" for way in ways)
        ratio = f"{line[COPIED] / line[STACKED]:.1f}"
        table.row(f"{line['model']}, {line['tokens']}", f"{line['pass_us']:.0f}", *times, ratio, str(line["wrong"]))
    table.print()
    write_json(args.json, machine=torch.cuda.get_device_name(), lines=lines)


if __name__ == "__main__":
    main()
