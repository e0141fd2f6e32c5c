"""What a sampler draws a token from, computed anew from a model's logits: top-k, top-p and min-p."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

DOUBT: Final = 1e-6
"""Two float32 computations of one probability may differ by so much."""


class Due(NamedTuple):
    """One token's support, the log probability of each of its ids over it, and how near others came.

    ``doubt`` is the smallest distance, in probability, by which an id is in or out: below an engine's own error a
    support proves nothing.
    """

    ids: list[int]
    logprobs: dict[int, float]
    doubt: float


def due(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float = 1.0,
    min_p: float = 0.0,
    joint: bool = False,
) -> Due:
    """The support of a draw from ``logits`` ``[vocabulary]``, float32, without ties.

    Top-p counts probabilities among those that top-k and min-p have left, as in vLLM; ``joint``: among all, as in
    SGLang.
    """
    scaled = logits / temperature
    ordered = torch.softmax(scaled, 0).sort(descending=True)
    probs = ordered.values
    least = min_p * probs[0]
    kept = (torch.arange(len(probs)) < top_k) & (probs >= least)
    counted = probs if joint else torch.where(kept, probs, torch.zeros(())) / probs[kept].sum()
    before = counted.cumsum(0) - counted  # an id is in while those before it have no more than top-p
    doubts = [probs[top_k - 1] - probs[top_k]]
    if min_p:
        doubts.append((probs - least).abs().min())
    if top_p < 1:
        kept &= before < top_p
        doubts.append((before[:top_k] - top_p).abs().min())
    ids = sorted(ordered.indices[kept].tolist())
    over = torch.log_softmax(scaled[ids], 0).tolist()
    return Due(ids, dict(zip(ids, over, strict=True)), float(min(doubts)))


def judged(model: Any, answer: dict[str, Any], *, joint: bool = False) -> tuple[int, int, float]:
    """Of an answer's supports: how many are right, how many wrong, and the largest error of a log probability.

    ``answer`` has ``prompt`` and ``tokens``, ``start``, ``counts`` and ``ids`` of supports, ``logprobs`` of the tokens,
    and ``sampling``. A support within float32's error of its bounds is not counted.
    """
    tokens = [*answer["prompt"], *answer["tokens"]]
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device=model.device)).logits[0].float().cpu()
    names = ("temperature", "top_k", "top_p", "min_p")
    sampling = {name: answer["sampling"][name] for name in names if name in answer["sampling"]}
    right = wrong = first = 0
    error = 0.0
    for i, count in enumerate(answer["counts"]):
        ids = answer["ids"][first : first + count]
        first += count
        position = answer["start"] + i
        expected = due(logits[position - 1], joint=joint, **sampling)
        if expected.doubt < DOUBT:
            continue
        if ids != expected.ids:
            wrong += 1
            continue
        right += 1
        error = max(error, abs(answer["logprobs"][i] - expected.logprobs[tokens[position]]))
    return right, wrong, error
