"""Rollouts: what an engine sampled, the distributions it sampled from, and the experts that it used.

Two engines roll out. :class:`PagedRollout` is the small paged engine of this package. :class:`BatchRollout` runs a
whole batch at once over transformers' own cache, which is what an accelerator wants. Both hand out
:class:`~kvroute.routes.Routes`, one a sequence, in which the row of the last sampled token is absent: no pass read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from bench.replay_study.models import ROUTES_BLOCK_TOKENS, routes_spec
from bench.replay_study.task import Tokens
from kvroute.capture.capture import RoutingCapture
from kvroute.replay.transformers import padded, recorded
from kvroute.routes import Routes

SEQUENCES_AT_ONCE = 64
"""In the small engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """A batch of sequences, each a prompt of ``prompt_tokens`` tokens and a sampled answer."""

    tokens: torch.Tensor  # [batch, sequence] int64, on the trainer's device
    prompt_tokens: int
    behaviour: torch.Tensor  # [batch, answer, vocabulary] float32 log-probabilities that were sampled from
    routes: tuple[Routes, ...]  # of the positions [0, sequence - 1) of each sequence

    @property
    def answers(self) -> torch.Tensor:
        """The sampled tokens ``[batch, answer]``."""
        return self.tokens[:, self.prompt_tokens :]

    def rolled(self) -> torch.Tensor:
        """The engine's experts as a trainer's targets: ``[batch, sequence - 1, layers, top_k]`` int64, none missing."""
        batch, tokens = len(self.tokens), self.tokens.shape[1] - 1
        targets = padded(self.routes, torch.ones(batch, tokens, dtype=torch.bool))
        assert bool((targets >= 0).all()), "an engine of the study hands out every row"
        return targets.to(self.tokens.device)


class RolloutEngine(Protocol):
    """Samples an answer of ``length`` tokens to each prompt at temperature 1, with the weights it was made with.

    ``seed`` decides what is drawn; the same prompt twice is two samples.
    """

    def __call__(self, prompts: Tokens, length: int, seed: int) -> Rollouts: ...


class PagedRollout:
    """The small engine over ``model``: paged attention, chunked prefill, a prefix cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lives = 0

    def __call__(self, prompts: Tokens, length: int, seed: int) -> Rollouts:
        from cache_manager.keys import Namespace
        from paged_engine.engine import Engine
        from paged_engine.request import EngineConfig, Request

        blocks = -(-(prompts.shape[1] + length) // ROUTES_BLOCK_TOKENS) * len(prompts)
        config = EngineConfig(
            block_tokens=ROUTES_BLOCK_TOKENS, device_blocks=blocks, step_tokens=512, sequences_max=SEQUENCES_AT_ONCE
        )
        self._lives += 1  # of other weights perhaps: nothing of the life before may be reused
        listener = _Listener(self._model)
        namespace = Namespace("replay-study", weights_version=self._lives)
        with listener, Engine(self._model, config, namespace, observer=listener) as engine:
            for number, prompt in enumerate(prompts.tolist()):
                engine.add(Request(str(number), tuple(prompt), length, temperature=1.0, seed=seed))
            outputs = sorted(engine.run(), key=lambda output: int(output.request.id))
        tokens = torch.tensor([output.sequence for output in outputs])
        behaviour = torch.stack([listener.of(f"{n}#0", prompts.shape[1], length) for n in range(len(prompts))])
        return Rollouts(tokens, prompts.shape[1], behaviour, tuple(output.routes for output in outputs))


class _Listener:
    """Keeps the log-probabilities that every token of the small engine is sampled from."""

    def __init__(self, model: Any) -> None:
        self._head = model.get_output_embeddings()
        self._spans: list[tuple[str, int]] = []
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def begin(self, spans: Sequence[Any]) -> None:
        self._spans = [(span.owner, len(span.tokens)) for span in spans]

    def end(self) -> None:
        self._spans = []

    def of(self, owner: str, start: int, length: int) -> torch.Tensor:
        """What the tokens at ``[start, start + length)`` were drawn from: ``[length, vocabulary]``."""
        return torch.stack([self._kept[owner, at] for at in range(start, start + length)])

    def __enter__(self) -> None:
        self._hook = self._head.register_forward_hook(self._keep)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _keep(self, _head: Any, _inputs: Any, logits: torch.Tensor) -> None:
        rows = logits[0].float().log_softmax(-1)
        self._kept.update(zip(self._spans, rows, strict=True))


class BatchRollout:
    """One batch over transformers' cache, prompt and then token by token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._spec = routes_spec(model)

    @torch.no_grad()
    def __call__(self, prompts: Tokens, length: int, seed: int) -> Rollouts:
        from transformers import DynamicCache

        model = self._model
        device = next(model.parameters()).device
        draw = torch.Generator(device).manual_seed(seed)
        batch = len(prompts)
        cache = DynamicCache(config=model.config)
        tokens = torch.as_tensor(prompts, device=device)
        given, rows, behaviour = tokens, [], []
        with RoutingCapture(model, self._spec) as capture:
            for _ in range(length):
                capture.clear()
                output = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                used = recorded(capture)
                rows.append(used.view(batch, -1, *used.shape[1:]))
                behaviour.append(output.logits[:, -1].float().log_softmax(-1))
                given = torch.multinomial(behaviour[-1].exp(), 1, generator=draw)
                tokens = torch.cat([tokens, given], dim=1)
        every = torch.cat(rows, dim=1).cpu().numpy()
        attrs = self._spec.attrs
        routes = tuple(
            Routes(ids, np.ones(len(ids), np.bool_), attrs["layer_ids"], attrs["num_experts"], attrs["num_layers"])
            for ids in every
        )
        return Rollouts(tokens, prompts.shape[1], torch.stack(behaviour, dim=1), routes)


__all__ = ["BatchRollout", "PagedRollout", "RolloutEngine", "Rollouts"]
