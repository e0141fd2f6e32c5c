"""Rollouts: the tokens that an engine sampled, the distributions, and the experts that it used.

A whole batch runs at once, token by token, prompts too. Its KV lies in buffers of a fixed size, so that a step is the
same work in the same memory each time: on a GPU it is a CUDA graph, which takes two milliseconds where launching it
takes thirty. kvroute's capture keeps each step's ids inside the graph. Each sequence has its
:class:`~kvroute.routes.Routes`, without a row for the last sampled token, which no pass read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from transformers import AttentionInterface

from bench.replay_study.scales import Tokens
from kvroute.capture.capture import RoutingCapture
from kvroute.replay.transformers import padded, recorded
from kvroute.routes import Routes
from kvroute.routing import routing_spec_from_hf

DECODE: Final = "kvroute_decode"
"""The name of :func:`decode_attention` in transformers."""
WIDTHS: Final = (64, 256, 512, *range(1024, 9216, 1024))
"""The numbers of positions that a step may look at: the first that is enough is taken."""


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
        targets = padded(self.routes, torch.ones(batch, tokens, dtype=torch.bool)).to(self.tokens.device)
        assert bool((targets >= 0).all()), "the study's engine returns every row"
        return targets


class Positions:
    """Where the steps of a batch are: the position of the token that is read, and the KV of each layer."""

    def __init__(self, batch: int, sequence: int, device: torch.device) -> None:
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.width = sequence
        self._sequence = sequence
        self._batch = batch
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a step's ``[batch, heads, 1, head_dim]``; returns all positions below ``width``."""
        if layer not in self._held:
            shapes = [(self._batch, part.shape[1], self._sequence, part.shape[3]) for part in (key, value)]
            self._held[layer] = key.new_zeros(shapes[0]), value.new_zeros(shapes[1])
        keys, values = self._held[layer]
        keys.index_copy_(2, self.position, key)
        values.index_copy_(2, self.position, value)
        return keys[:, :, : self.width], values[:, :, : self.width]


def decode_attention(
    module: Any,
    query: torch.Tensor,  # [batch, heads, 1, head_dim]
    key: torch.Tensor,  # [batch, kv_heads, 1, head_dim]
    value: torch.Tensor,  # [batch, kv_heads, 1, value_dim]
    attention_mask: torch.Tensor | None,  # none is made for an attention that transformers does not know
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention ``[batch, 1, heads, value_dim]`` of one token to those before it, whose KV is in
    ``module.positions``."""
    assert attention_mask is None
    positions: Positions = module.positions
    keys, values = positions.keep(module.layer_idx, key, value)
    batch, heads = query.shape[:2]
    grouped = query.reshape(batch, keys.shape[1], heads // keys.shape[1], query.shape[3])
    scores = torch.matmul(grouped, keys.transpose(2, 3)).float() * scaling
    later = torch.arange(positions.width, device=query.device) > positions.position
    shares = scores.masked_fill(later, -torch.inf).softmax(-1).to(values.dtype)
    return torch.matmul(shares, values).reshape(batch, 1, heads, -1), None


AttentionInterface.register(DECODE, decode_attention)


class _Decoding:
    """A batch's steps: buffers that every step reads and writes, and its graphs on a GPU."""

    def __init__(self, model: Any, batch: int, sequence: int, vocab_size: int) -> None:
        self._model = model
        self._spec = routing_spec_from_hf(model.config, block_tokens=8)  # no measurement depends on it
        device = next(model.parameters()).device
        self._device = device
        layers, top_k = self._spec.row_shape
        self.positions = Positions(batch, sequence, device)
        self.tokens = torch.zeros(batch, sequence, dtype=torch.int64, device=device)
        self.forced = torch.full((batch, sequence), -1, dtype=torch.int64, device=device)
        self.draws = torch.zeros(batch, sequence, dtype=torch.float64, device=device)
        self.behaviour = torch.zeros(batch, sequence, vocab_size, device=device)
        self.ids = torch.zeros(batch, sequence, layers, top_k, dtype=torch.int16, device=device)
        self._widths = [width for width in WIDTHS if width < sequence] + [sequence]
        self._graphs: dict[int, Any] = {}

    def run(self, steps: int, midway: Callable[[], None] | None) -> None:
        """``steps`` steps from position 0; ``midway`` is called before the one in the middle."""
        self._attach()
        with torch.no_grad(), RoutingCapture(self._model, self._spec) as capture:
            if self._device.type == "cuda" and not self._graphs:
                self._record(capture)
            self.positions.position.zero_()
            for step in range(steps):
                if midway is not None and step == steps // 2:
                    with torch.enable_grad():
                        midway()
                width = next(width for width in self._widths if width > step)
                if width in self._graphs:
                    self._graphs[width].replay()
                else:
                    self._step(capture, width)

    def _attach(self) -> None:
        for module in self._model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
                module.positions = self.positions

    def _record(self, capture: RoutingCapture) -> None:
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries take their memory before the capture
            for width in self._widths:
                self.positions.position.zero_()
                self._step(capture, width)
        torch.cuda.current_stream().wait_stream(side)
        pool: Any = torch.cuda.graph_pool_handle()
        for width in self._widths:
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(capture, width)
            self._graphs[width] = graph
        capture.clear()

    def _step(self, capture: RoutingCapture, width: int) -> None:
        """Read the token at the position; its successor is the forced one, or is sampled."""
        self.positions.width = width
        position = self.positions.position
        capture.clear()
        given = self.tokens.index_select(1, position)
        output = self._model(input_ids=given, position_ids=position[None], use_cache=False, logits_to_keep=1)
        log_probs = output.logits[:, -1].float().log_softmax(-1)
        self.behaviour.index_copy_(1, position, log_probs[:, None])
        self.ids.index_copy_(1, position, recorded(capture).to(torch.int16)[:, None])
        sums = log_probs.double().exp().cumsum(-1)
        sampled = (sums <= self.draws.index_select(1, position) * sums[:, -1:]).sum(-1, keepdim=True)
        following = position + 1
        planned = self.forced.index_select(1, following)
        self.tokens.index_copy_(1, following, torch.where(planned >= 0, planned, sampled))
        position.copy_(following)


class Rollout:
    """Samples an answer of ``length`` tokens to each prompt at temperature 1, with the current weights of ``model``.

    ``seed`` decides the draws; the same prompt twice gives two samples.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.model.config._attn_implementation = DECODE
        self._decodings: dict[tuple[int, int], _Decoding] = {}

    def __call__(self, prompts: Tokens, length: int, seed: int, midway: Callable[[], None] | None = None) -> Rollouts:
        """``midway`` is called once, between two steps in the middle of the sequence."""
        config = self.model.config
        batch, prompt_tokens = prompts.shape
        sequence = prompt_tokens + length
        found = self._decodings.get((batch, sequence))
        if found is None:
            found = _Decoding(self.model, batch, sequence, config.vocab_size)
            self._decodings[batch, sequence] = found
        device = found.tokens.device
        given = torch.as_tensor(prompts, device=device)
        found.forced.fill_(-1)
        found.forced[:, :prompt_tokens] = given
        draws = np.random.default_rng(seed).random((batch, sequence))
        found.draws.copy_(torch.as_tensor(draws, device=device))
        found.tokens[:, :prompt_tokens] = given
        found.run(sequence - 1, midway)
        spec = routing_spec_from_hf(config, block_tokens=8)
        every = found.ids[:, :-1].cpu().numpy().astype(spec.dtype)
        attrs = spec.attrs
        routes = tuple(
            Routes(ids, np.ones(len(ids), np.bool_), attrs["layer_ids"], attrs["num_experts"], attrs["num_layers"])
            for ids in every
        )
        sampled = found.behaviour[:, prompt_tokens - 1 : -1].clone()
        return Rollouts(found.tokens[:, :sequence].clone(), prompt_tokens, sampled, routes)
