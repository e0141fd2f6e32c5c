"""Rollouts: the tokens that an engine sampled, the distributions, and the experts that it used.

A whole batch runs at once with transformers' own cache. Each sequence has its :class:`~kvroute.routes.Routes`, without
a row for the last sampled token, which no pass read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from bench.replay_study.scales import Tokens
from kvroute.capture.capture import RoutingCapture
from kvroute.replay.transformers import padded, recorded
from kvroute.routes import Routes
from kvroute.routing import routing_spec_from_hf


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """A batch of sequences, each a prompt of ``prompt_tokens`` tokens and a sampled answer."""

    tokens: torch.Tensor  # [batch, sequence] int64, on the trainer's device
    prompt_tokens: int
    behaviour: torch.Tensor  # [batch, answer, vocabulary] float32 log-probabilities at sampling
    routes: tuple[Routes, ...]  # positions [0, sequence - 1) of each sequence

    @property
    def answers(self) -> torch.Tensor:
        """The sampled tokens ``[batch, answer]``."""
        return self.tokens[:, self.prompt_tokens :]

    def rolled(self) -> torch.Tensor:
        """The engine's experts as a trainer's targets: ``[batch, sequence - 1, layers, top_k]`` int64, none missing."""
        batch, tokens = len(self.tokens), self.tokens.shape[1] - 1
        targets = padded(self.routes, torch.ones(batch, tokens, dtype=torch.bool))
        assert bool((targets >= 0).all()), "the study's engine returns every row"
        return targets.to(self.tokens.device)


class Rollout:
    """Samples an answer of ``length`` tokens to each prompt at temperature 1, with the current weights of ``model``.

    ``seed`` decides the draws; the same prompt twice gives two samples.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._spec = routing_spec_from_hf(model.config, block_tokens=8)  # no measurement depends on it

    @torch.no_grad()
    def __call__(self, prompts: Tokens, length: int, seed: int) -> Rollouts:
        model = self._model
        device = next(model.parameters()).device
        draw = torch.Generator(device).manual_seed(seed)
        cache = DynamicCache(config=model.config)
        tokens = torch.as_tensor(prompts, device=device)
        given, rows, behaviour = tokens, [], []
        with RoutingCapture(model, self._spec) as capture:
            for _ in range(length):
                capture.clear()
                output = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                rows.append(recorded(capture).unflatten(0, (len(prompts), -1)))
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
