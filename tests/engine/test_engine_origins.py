"""Every row that an engine hands out is of the pass that made the KV in use, whatever happened to either since.

Method: noise is drawn for every token of every pass and added to its embedding, as on hardware where a batch decides
the last bits: the same prefix gets other KV and other routes each time it is computed. The judge hooks the model, not
kvroute: it notes which experts each pass chose, under the bytes of V that the pass made in layer 0. After every step it
looks at the KV that a sequence would attend to, in the engine's own tensors, and requires the routes of exactly that
pass.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from engine_runs import Hook
from numpy.typing import NDArray
from torch import nn

from cache_manager.keys import Namespace
from cache_manager.stored import JobLimits
from paged_engine import text
from paged_engine.engine import Engine
from paged_engine.handover import DecodeEngine, PrefillEngine
from paged_engine.judge import RouterWatch
from paged_engine.models import build_model
from paged_engine.processes import until
from paged_engine.request import EngineConfig, Request
from paged_engine.sequence import State
from transfer import ZmqLink, ZmqSettings

TIGHT = EngineConfig(device_blocks=14, host_blocks=8, jobs=JobLimits(close_s=120.0))
DEADLINE_S = 120.0


class NoisyModel:
    """A model whose passes all differ, and the routes that each pass chose by the V it made."""

    def __init__(self) -> None:
        self.model = build_model("qwen3_moe", seed=0, vocab_size=text.VOCAB_SIZE)
        inner: Any = self.model.model
        self._rng = torch.Generator().manual_seed(0)
        self._watch = RouterWatch(self.model)
        self._values: torch.Tensor
        self._made: dict[bytes, NDArray[np.int32]] = {}
        inner.embed_tokens.register_forward_hook(self._add_noise)
        inner.layers[0].self_attn.v_proj.register_forward_hook(self._keep_values)
        self.model.register_forward_hook(self._note)

    def _add_noise(self, _module: nn.Module, _args: Any, embedded: torch.Tensor) -> torch.Tensor:
        return embedded + 0.1 * torch.randn(embedded.shape, generator=self._rng, dtype=embedded.dtype)

    def _keep_values(self, _module: nn.Module, _args: Any, values: torch.Tensor) -> None:
        self._values = values.detach().reshape(-1, values.shape[-1])

    def _note(self, *_: Any) -> None:
        for values, ids in zip(self._values.numpy(), self._watch.take(), strict=True):
            self._made[values.tobytes()] = ids

    def routes_of(self, values: torch.Tensor) -> NDArray[np.int32]:
        """The routes ``[n, layers, top_k]`` of the passes that made ``values [n, heads, v_dim]``."""
        flat = values.detach().reshape(len(values), -1).contiguous().numpy()
        return np.stack([self._made[each.tobytes()] for each in flat])


class Judge:
    """Counts rows judged, and those that were missing."""

    def __init__(self, noisy: NoisyModel) -> None:
        self._noisy = noisy
        self.right = self.missing = 0

    def look(self, engine: Engine) -> None:
        """At the rows of everything that runs."""
        size = engine.config.block_tokens
        for sequence in engine.scheduler.unfinished:
            if sequence.state is not State.RUNNING or not sequence.computed:
                continue
            at = np.arange(sequence.computed)
            slots = np.array(engine.manager.table(sequence.owner))[at // size] * size + at % size
            read = engine.manager.read(engine.spec.name, sequence.owner, 0, sequence.computed)
            expected = self._noisy.routes_of(engine.kv.layer(0)[1][torch.from_numpy(slots)])
            wrong = (read.values != expected).any(axis=(1, 2)) & read.valid
            assert not wrong.any(), f"rows_are_of_the_pass_that_made_the_kv: {sequence.owner} {np.flatnonzero(wrong)}"
            self.right += int(read.valid.sum())
            self.missing += int((~read.valid).sum())


def requests(life: int) -> list[Request]:
    """Prompts that begin alike in every life, in one or two samples, and now and then just the same again."""
    begin = text.opening(text.paragraphs()[0])[:37]
    turns = [text.turn(question)[: 6 + 3 * i] for i, question in enumerate(text.questions()[:5])]
    names = [f"{life}-{i}" for i in range(7)]
    return [
        Request(name, tuple(begin + turn), 16, n=1 + i % 2, temperature=0.9, seed=life)
        for i, (name, turn) in enumerate(zip(names, [*turns, turns[0], turns[1]], strict=True))
    ]


def test_rows_that_cross_are_of_the_pass_that_made_the_kv_that_crossed() -> None:
    """Goal: a decode engine never has rows of prefill's pass beside KV of its own, nor the reverse. Method: prompts
    cross of which decode has computed parts itself; prefill has lost rows of some blocks, so that decode computes them
    behind blocks that have come."""
    noisy, rng = NoisyModel(), random.Random(11)
    judge, room, namespace = Judge(noisy), replace(TIGHT, device_blocks=40), Namespace("noisy", weights_version=3)
    binding, connecting = ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*")), ZmqLink(ZmqSettings())
    chunks = replace(room, step_tokens=16)

    def lose() -> None:
        prefill.aux.forget(rng.sample(range(room.device_blocks), rng.choice([0, 20])))

    with (
        PrefillEngine(noisy.model, chunks, namespace, link=binding, observer=Hook(on_end=lose)) as prefill,
        DecodeEngine(noisy.model, room, namespace, link=connecting) as decode,
    ):
        for request in (request for life in range(2) for request in requests(life)):
            decode.add(request, prefill.lend(request))

            def step() -> bool:
                prefill.step()
                decode.step()
                judge.look(decode)
                return not decode.busy

            until(step, "decode has answered", DEADLINE_S)
        installed, recomputed = decode.aux.counters.rows_installed, decode.crossed.prefill_recomputed_tokens
    assert judge.right > 1_000
    assert judge.missing == 0
    assert min(installed, recomputed) > 20
