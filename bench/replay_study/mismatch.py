"""How far two policies, and their routes, are from each other on tokens that one of them sampled.

``behaviour`` is the engine's distribution, from which the tokens were drawn; ``policy`` the trainer's; ``d = log
policy(token) - log behaviour(token)`` of a sampled token. README.md has each figure's formula and source.
"""

from __future__ import annotations

import math

import torch


def log_ratios(policy: torch.Tensor, behaviour: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``d`` of each token ``[batch, answer]``; ``policy`` and ``behaviour`` are ``[batch, answer, vocabulary]``."""
    at = tokens[..., None]
    return (policy.gather(-1, at) - behaviour.gather(-1, at)).squeeze(-1)


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """The estimate ``exp(d) - 1 - d`` of each element; never negative."""
    return torch.expm1(log_ratio) - log_ratio


def differing_routes(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two selections ``[..., layers, top_k]`` are not the same sets: bool ``[..., layers]``."""
    return (one.sort(-1).values != other.sort(-1).values).any(-1)


def measure(
    policy: torch.Tensor,  # [batch, answer, vocabulary] float32 log-probabilities of the trainer
    behaviour: torch.Tensor,  # [batch, answer, vocabulary] float32 log-probabilities of the engine
    tokens: torch.Tensor,  # [batch, answer] int64, drawn from behaviour
    used: torch.Tensor,  # [..., layers, top_k] the experts in the trainer's pass
    rolled: torch.Tensor,  # [..., layers, top_k] the experts in the engine's
) -> dict[str, float]:
    """The figures of one batch; ``tokens`` is the number of sampled tokens in the means."""
    d = log_ratios(policy, behaviour, tokens).double()
    behaviour, policy = behaviour.double(), policy.double()
    different = differing_routes(used, rolled)
    return {
        "kl": float((behaviour.exp() * (behaviour - policy)).sum(-1).mean()),
        "k3": float(k3(d).mean()),
        "beyond_e2": float((d.abs() > 2).double().mean()),
        "beyond_2": float((d.abs() > math.log(2)).double().mean()),
        "tokens_differing": float(different.any(-1).double().mean()),
        "routers_differing": float(different.double().mean()),
        "tokens": d.numel(),
    }
