"""The trainer's side: supervised steps, log-probabilities of sampled tokens, the policy-gradient update; and how far
two policies, and their routes, are from each other on tokens that one of them sampled.

Replay forces the experts of a pass; the weights of these experts still come from the router's current scores, so that
it keeps its gradient. ``R2`` replays the trainer's own choices when it computed the old log-probabilities, ``R3`` the
engine's choices when it sampled (arXiv 2510.11370, 2507.18071).

``behaviour`` is the engine's distribution, from which the tokens were drawn; ``policy`` the trainer's; ``d = log
policy(token) - log behaviour(token)`` of a sampled token. README.md has each figure's formula and source.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.func import functional_call

from bench.replay_study.rollout import Rollouts
from kvroute.capture.capture import RoutingCapture
from kvroute.replay.transformers import recorded, replay
from kvroute.routing import routing_spec_from_hf


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


GRADIENT_NORM_MAX = 1.0
BALANCE_WEIGHT = 0.01
"""The weight of the routers' load-balancing loss in supervised learning."""


class Mode(StrEnum):
    """Which experts a training pass uses: its own, those of the old policy's pass, or the rollout's."""

    NONE = "none"
    R2 = "r2"
    R3 = "r3"


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The result of a pass without gradient."""

    log_probs: torch.Tensor  # [batch, answer, vocabulary] float32
    used: torch.Tensor  # [batch, sequence - 1, layers, top_k] int64: the experts of that pass


@dataclass(frozen=True, slots=True)
class Update:
    """The means over one batch's optimizer steps.

    ``clip_fraction`` is the share of tokens whose gradient was clipped, ``moved`` the k3 estimate of the policy's
    distance from the old one before each step.
    """

    loss: float
    clip_fraction: float
    moved: float
    gradient_norm: float


class Trainer:
    """A model in training: float32 weights, and passes in float32; learning may round each pass to bfloat16."""

    def __init__(self, model: Any, *, learning_rate: float, micro_batch: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._micro_batch = micro_batch
        self._spec = routing_spec_from_hf(model.config, block_tokens=8)  # no measurement depends on it
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )

    def learn(
        self, tokens: torch.Tensor, prompt_tokens: int, learning_rate: float, *, rounded: bool = False
    ) -> torch.Tensor:
        """One supervised step on the answers of ``tokens`` ``[batch, sequence]``; returns the loss, on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        weights = dict(self.model.named_parameters())
        if rounded:
            weights = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        inputs = {"input_ids": tokens[:, :-1], "use_cache": False, "output_router_logits": True}
        output = functional_call(self.model, weights, (), inputs)
        logits = output.logits[:, prompt_tokens - 1 :].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, prompt_tokens:].flatten())
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss + BALANCE_WEIGHT * output.aux_loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self._optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def score(self, rollouts: Rollouts, routes: torch.Tensor | None) -> Scored:
        """Log-probabilities of the rollouts, with experts ``[batch, sequence - 1, layers, top_k]`` if given."""
        log_probs, used = [], []
        with RoutingCapture(self.model, self._spec) as capture:
            for part in torch.split(torch.arange(len(rollouts.tokens), device=self.device), self._micro_batch):
                capture.clear()
                log_probs.append(self._log_probs(rollouts, part, routes))
                used.append(recorded(capture).unflatten(0, (len(part), -1)))
        return Scored(torch.cat(log_probs), torch.cat(used))

    def reinforce(
        self,
        rollouts: Rollouts,
        advantages: torch.Tensor,  # [batch]
        old: torch.Tensor,  # [batch, answer, vocabulary] log-probabilities before the first step
        routes: torch.Tensor | None,  # [batch, sequence - 1, layers, top_k] int64
        *,
        order: torch.Tensor,  # [batch] a permutation: which sequences go into which step
        updates: int,
        clip: float,
    ) -> Update:
        """PPO's clipped objective over the batch in ``updates`` optimizer steps."""
        losses, clipped, moved, norms = [], [], [], []
        for chosen in order.chunk(updates):
            self._optimizer.zero_grad(set_to_none=True)
            for part in torch.split(chosen, self._micro_batch):
                policy = self._log_probs(rollouts, part, routes)
                d = log_ratios(policy, old[part], rollouts.answers[part])
                ratio, gain = d.exp(), advantages[part, None]
                free = ratio * gain
                bound = ratio.clamp(1 - clip, 1 + clip) * gain
                loss = -torch.minimum(free, bound).mean()
                torch.autograd.backward(loss * (len(part) / len(chosen)))
                weight = len(part) / len(order)
                losses.append(loss.detach() * weight)
                clipped.append((bound < free).float().mean() * weight)
                moved.append((torch.expm1(d.detach()) - d.detach()).mean() * weight)
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX))
            self._optimizer.step()
        return Update(
            loss=float(torch.stack(losses).sum()),
            clip_fraction=float(torch.stack(clipped).sum()),
            moved=float(torch.stack(moved).sum()),
            gradient_norm=float(torch.stack(norms).mean()),
        )

    def _log_probs(self, rollouts: Rollouts, part: torch.Tensor, routes: torch.Tensor | None) -> torch.Tensor:
        """Log-probabilities ``[part, answer, vocabulary]`` of some sequences."""
        with nullcontext() if routes is None else replay(self.model, routes[part], spec=self._spec):
            logits = self.model(input_ids=rollouts.tokens[part, :-1], use_cache=False).logits
        sampled: torch.Tensor = logits[:, rollouts.prompt_tokens - 1 :]
        return sampled.float().log_softmax(-1)


def replayed(mode: Mode, rollouts: Rollouts, old: Scored) -> torch.Tensor | None:
    """The experts ``[batch, sequence - 1, layers, top_k]`` that ``mode`` forces after the old policy's pass."""
    if mode is Mode.NONE:
        return None
    return old.used if mode is Mode.R2 else rollouts.rolled()
