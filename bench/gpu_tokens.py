"""Tokens a second of engines at a realistic width, with rows captured and without, in turns; every row judged first.

transformers' continuous batching (5.23) on a Qwen3-MoE of the width of Qwen3-30B-A3B, as many layers as asked, seeded
weights, CUDA graphs. The judge's own copies of what each router answered, taken in the same graphs, say which row each
token must have. Needs a CUDA GPU, torch and Triton.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kvroute
from bench.harness import Table, asked, machine, write_json
from examples.transformers_continuous_batching import EmbeddedRoutes
from kvroute.capture.capture import find_routers

PAGE = 64


@dataclass(frozen=True)
class Load:
    """What is generated: ``sequences`` at once, of ``prompt`` random tokens and ``new`` generated ones."""

    sequences: int
    prompt: int
    new: int
    batch_tokens: int

    def prompts(self, vocabulary: int, seed: int) -> Any:
        return np.random.default_rng(seed).integers(10, vocabulary, (self.sequences, self.prompt)).tolist()


@dataclass
class Speed:
    """Of one turn."""

    tokens_s: float
    step_ms: float  # median of the passes that only decode


@dataclass
class Found:
    engine: str
    off: list[Speed] = field(default_factory=list)
    on: list[Speed] = field(default_factory=list)
    judged: int = 0
    wrong: int = 0
    missing: int = 0

    def ratio(self, of: str) -> float:
        """How many of ``off`` there are in ``on``, the median of the turns."""
        ratios = [getattr(a, of) / getattr(b, of) for a, b in zip(self.on, self.off, strict=True)]
        return float(np.median(ratios))


def wide_moe(layers: int, device: str, *, width: int = 2048) -> Any:
    """The shape of Qwen3-30B-A3B: 128 experts, 8 a token; seeded weights."""
    config = Qwen3MoeConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=3 * width,
        moe_intermediate_size=3 * width // 8,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 512),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


class Judge:
    """What each router answered for the token at each slot, by copies of its own beside the launch, in graphs too.

    Made before the manager captures its graphs; ``follow`` comes before it starts.
    """

    def __init__(self, model: Any, max_tokens: int) -> None:
        self.judged = self.wrong = self.missing = 0
        self._embedded: Any = None
        routers = find_routers(model)
        device = next(model.parameters()).device
        self._wide = torch.zeros(max_tokens, len(routers), 8, dtype=torch.int32, device=device)
        self._seen: dict[int, NDArray[np.int32]] = {}  # by slot
        self._hooks = [router.register_forward_hook(self._copy(i)) for i, router in enumerate(routers.values())]

    def follow(self, embedded: Any) -> None:
        """Each pass, and each end of a request."""
        self._embedded, engine = embedded, embedded.engine
        engine._generation_step = partial(self._passed, engine._generation_step)
        engine.scheduler.finish_request = partial(self._finished, engine.scheduler.finish_request)

    def _copy(self, layer: int) -> Callable[..., None]:
        def copy(_router: Any, _given: Any, answer: Any) -> None:
            self._wide[: len(answer[2]), layer] = answer[2]

        return copy

    def _passed(self, forward: Callable[..., None], *given: Any) -> None:
        slots = self._embedded.slots(self._embedded.engine.inputs_and_outputs)
        forward(*given)
        answered = self._wide[: len(slots)].to("cpu", copy=True).numpy()
        self._seen.update((slot, row) for slot, row in zip(slots.tolist(), answered, strict=True) if slot >= 0)

    def _finished(self, finish: Callable[[str], None], request: str) -> None:
        embedded = self._embedded
        table = list(embedded.allocator.block_table.get(request, ()))
        finish(request)
        routes = embedded.routes.pop(request)
        for position, (ids, valid) in enumerate(zip(routes.ids, routes.valid, strict=True)):
            wanted = self._seen[table[position // PAGE] * PAGE + position % PAGE]
            self.judged += 1
            self.missing += not valid
            self.wrong += bool(valid) and not np.array_equal(ids, wanted)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


@contextmanager
def batching(model: Any, load: Load, *, on: bool, judge: Judge | None = None) -> Iterator[Any]:
    """A manager of continuous batching, with rows embedded if ``on``; its graphs are captured."""
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=2 * load.sequences * -(-(load.prompt + load.new) // PAGE),
            max_batch_tokens=load.batch_tokens,
            max_requests_per_batch=load.sequences,
            use_cuda_graph=model.device.type == "cuda",
            use_async_batching=False,
        ),
    )
    with ExitStack() as closing:
        closing.callback(manager.destroy)
        if on:
            namespace = kvroute.Namespace("bench", weights_version=0)
            embedded = EmbeddedRoutes(manager, namespace, memory="shared", launched=True)
            closing.callback(embedded.close)
            if judge is not None:
                judge.follow(embedded)
        else:
            manager.warmup()
        closing.callback(manager.stop)
        manager.start()
        yield manager


def generate(manager: Any, load: Load, seed: int) -> Speed:
    """All of the load at once, to its end; passes are timed on the host, which waits for each."""
    engine, passes = manager.batch_processor, list[float]()
    forward = engine._generation_step

    def timed(model: Any) -> None:
        start = time.perf_counter()
        forward(model)
        if engine.inputs_and_outputs.num_request_in_batch == load.sequences:
            passes.append(1000 * (time.perf_counter() - start))

    engine._generation_step = timed
    start = time.perf_counter()
    waiting = set(manager.add_requests(load.prompts(manager.model.config.vocab_size, seed)))
    while waiting:
        answer = manager.get_result(timeout=120)
        assert answer is not None, "the engine answers"
        assert answer.error is None, answer.error
        waiting.discard(answer.request_id)
    seconds = time.perf_counter() - start
    engine._generation_step = forward
    return Speed(load.sequences * load.new / seconds, statistics.median(passes[len(passes) // 4 :]))


def in_batches(model: Any, load: Load, rounds: int) -> Found:
    """Continuous batching: judged once, then timed in turns, each with graphs of its own."""
    found = Found("transformers' continuous batching")
    judge = Judge(model, load.batch_tokens)
    with batching(model, load, on=True, judge=judge) as manager:
        generate(manager, load, seed=0)
    judge.close()
    found.judged, found.wrong, found.missing = judge.judged, judge.wrong, judge.missing
    for number in range(rounds):
        for on in (False, True) if number % 2 else (True, False):
            with batching(model, load, on=on) as manager:
                generate(manager, load, seed=2 * number + 1)  # what is compiled on first use
                (found.on if on else found.off).append(generate(manager, load, seed=2 * number + 2))
    return found


def table_of(f: Found) -> Table:
    columns = ("engine", "tokens/s off", "on", "on/off", "pass off, ms", "on", "on/off", "rows", "wrong", "missing")
    cells = []
    for of, digits in (("tokens_s", 0), ("step_ms", 2)):
        cells += [f"{statistics.median(getattr(s, of) for s in turns):.{digits}f}" for turns in (f.off, f.on)]
        cells.append(f"{f.ratio(of):.3f}")
    table = Table("tokens a second with capture off and on, medians of turns", columns)
    return table.row(f.engine, *cells, str(f.judged), str(f.wrong), str(f.missing))


def main() -> None:
    args = asked(
        *(__doc__, 3),
        layers=(16, "of the model"),
        width=(2048, "of the model"),
        sequences=(256, "at once"),
        prompt=(64, "tokens"),
        new=(128, "tokens"),
        batch_tokens=(4096, "of a pass at most"),
        device=("cuda", "cpu: TRITON_INTERPRET=1, for tests"),
    )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("wanted a CUDA GPU, torch sees none here")
    on = torch.cuda.get_device_name() if args.device == "cuda" else machine()
    model = wide_moe(args.layers, args.device, width=args.width)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    about = f"{on}, torch {torch.__version__}; Qwen3-MoE, {args.layers} layers, {billions:.1f} B weights, bfloat16"
    print(about, flush=True)
    load = Load(args.sequences, args.prompt, args.new, args.batch_tokens)
    found = in_batches(model, load, args.rounds)
    table_of(found).print()
    write_json(args.json, about=about, load=asdict(load), found=asdict(found))
    assert found.judged, "no row was judged"
    assert not found.wrong, f"{found.wrong} rows are wrong"


if __name__ == "__main__":
    main()
