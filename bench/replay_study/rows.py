"""The rows that a trainer gets beside the same tokens: the engine's, and the ways in which these go wrong.

Everything starts from the rows of the engine that sampled, ``[batch, sequence - 1, layers, top_k]``. What an engine
returns for KV that came back is what its buffer holds at the new places: rows of pages of other tokens
(``bench/results/sglang-h100``: 23,370 of 83,008 rows of cached tokens, nearly as many as were loaded).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.capture import find_routers
from kvroute.replay.rows import MISSING
from kvroute.replay.transformers import replay

WRONG_SHARE: Final = 23_370 / 83_008
"""The share of cached tokens whose rows stock SGLang had wrong on an H100."""


class Rows(StrEnum):
    """Which rows a trainer replays."""

    NONE = "none"
    RIGHT = "right"
    MISSING = "missing"
    """Right, and missing where :attr:`EVICTED` is wrong: the router chooses there. What kvroute hands out."""
    EVICTED = "evicted"
    """Pages of cached tokens hold rows of other tokens."""
    PROMPT = "evicted-prompt"
    """The same if only the prompt was cached."""
    SHIFTED = "shifted"
    """Each token has the row of the token before it."""
    ZEROS = "zeros"
    """Expert 0 in every place where :attr:`MISSING` has no row."""


class Labels(StrEnum):
    """What a trainer replays of an answer whose second half was sampled with newer weights, which it has itself."""

    NONE = "none"
    BY_VERSION = "by-version"
    """The rows of its own weights; the router chooses for the others."""
    ONE = "one-label"
    """All rows, as if all were of its weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Targets of a trainer's passes over a batch."""

    targets: torch.Tensor  # [batch, sequence - 1, layers, top_k] int64; -1: the router's own choice
    zeroed: torch.Tensor | None = None  # [batch, sequence - 1] bool: rows of zeros

    @contextmanager
    def on(self, model: nn.Module, part: torch.Tensor, spec: AuxBlockDataSpec) -> Iterator[None]:
        """Force these rows of the sequences ``part`` on the routers of ``model``."""
        zeroed = nullcontext() if self.zeroed is None else _zeros(find_routers(model), self.zeroed[part].flatten())
        with replay(model, self.targets[part], spec=spec), zeroed:
            yield


@contextmanager
def _zeros(routers: Mapping[int, nn.Module], tokens: torch.Tensor) -> Iterator[None]:
    """Expert 0 in all places of ``tokens`` ``[tokens]`` bool, whose targets are ``0, 1, ...``.

    kvroute's replay refuses a row that names an expert twice. Expert 0 in every place is one expert with the sum of
    the places' weights, which are equal: this is done here, behind the router.
    """

    def alone(_router: nn.Module, _arguments: Any, answer: Any) -> Any:
        logits, weights, ids = answer
        first = torch.zeros_like(weights)
        first[:, 0] = weights.sum(-1)
        return logits, torch.where(tokens[:, None], first, weights), ids

    hooks = [router.register_forward_hook(alone) for router in routers.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def wrong_pages(
    batch: int, cached_tokens: int, page_tokens: int, draw: np.random.Generator, share: float = WRONG_SHARE
) -> NDArray[np.bool_]:
    """Which pages ``[batch, pages]`` of the cached tokens came back: in each sequence a run, ``share`` in the mean."""
    pages = cached_tokens // page_tokens
    wrong = np.zeros((batch, pages), np.bool_)
    for sequence in range(batch):
        count = min(pages, int(np.floor(share * pages + draw.random())))
        first = int(draw.integers(0, pages - count + 1))
        wrong[sequence, first : first + count] = True
    return wrong


def replayed(
    rows: Rows, rolled: torch.Tensor, cached_tokens: int, prompt_tokens: int, page_tokens: int, seed: int
) -> Replayed | None:
    """What a trainer replays of the engine's rows ``rolled``; ``None``: nothing. ``seed`` decides the pages.

    The same seed has the same pages in :attr:`Rows.EVICTED`, :attr:`Rows.MISSING` and :attr:`Rows.ZEROS`. At least two
    sequences.
    """
    batch, tokens = rolled.shape[:2]
    draw = np.random.default_rng(seed)
    wrong = wrong_pages(batch, prompt_tokens if rows is Rows.PROMPT else cached_tokens, page_tokens, draw)
    match rows:
        case Rows.NONE:
            return None
        case Rows.RIGHT:
            return Replayed(rolled)
        case Rows.SHIFTED:
            return Replayed(torch.cat([rolled[:, :1], rolled[:, :-1]], dim=1))
        case Rows.EVICTED | Rows.PROMPT:
            sources = np.arange(batch * tokens).reshape(batch, tokens)
            for sequence, page in np.argwhere(wrong):
                other = (sequence + int(draw.integers(1, batch))) % batch
                first, source = page * page_tokens, int(draw.integers(0, tokens // page_tokens)) * page_tokens
                start = other * tokens + source
                sources[sequence, first : first + page_tokens] = np.arange(start, start + page_tokens)
            held = rolled.flatten(0, 1)[torch.as_tensor(sources.reshape(-1), device=rolled.device)]
            return Replayed(held.unflatten(0, (batch, tokens)))
        case _:
            missing = torch.zeros(batch, tokens, dtype=torch.bool, device=rolled.device)
            cached = np.repeat(wrong, page_tokens, axis=1)
            missing[:, : cached.shape[1]] = torch.as_tensor(cached, device=rolled.device)
            if rows is Rows.MISSING:
                return Replayed(rolled.masked_fill(missing[..., None, None], MISSING))
            zeros = torch.arange(rolled.shape[-1], device=rolled.device)
            return Replayed(torch.where(missing[..., None, None], zeros, rolled), missing)


def labelled(labels: Labels, rolled: torch.Tensor, old_tokens: int) -> Replayed | None:
    """What a trainer replays if the rows of the first ``old_tokens`` tokens are of older weights than the rest."""
    if labels is Labels.NONE:
        return None
    if labels is Labels.ONE:
        return Replayed(rolled)
    current = rolled.clone()
    current[:, :old_tokens] = MISSING
    return Replayed(current)
