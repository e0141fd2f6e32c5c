"""The trainer's side: supervised steps, log-probabilities of sampled tokens, the policy-gradient update; and how far
two policies, and their routes, are from each other on tokens that one of them sampled.

Replay forces the experts of a pass; the weights of these experts still come from the router's current scores, so that
it keeps its gradient.

``behaviour`` is the engine's distribution, from which the tokens were drawn; ``policy`` the trainer's; ``d = log
policy(token) - log behaviour(token)`` of a sampled token. README.md has each figure's formula and source.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from bench.replay_study.rollout import Rollouts
from bench.replay_study.rows import Replayed
from kvroute.capture.capture import RoutingCapture, find_routers
from kvroute.replay.transformers import recorded
from kvroute.routing import routing_spec_from_hf


def log_ratios(policy: torch.Tensor, behaviour: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``d`` of each token ``[batch, answer]``; ``policy`` and ``behaviour`` are ``[batch, answer, vocabulary]``."""
    at = tokens[..., None]
    return (policy.gather(-1, at) - behaviour.gather(-1, at)).squeeze(-1)


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """The estimate ``exp(d) - 1 - d`` of each element; never negative."""
    return torch.expm1(log_ratio) - log_ratio


def clipped(d: torch.Tensor, gains: torch.Tensor, clip: float) -> torch.Tensor:
    """Where PPO's minimum takes the clipped term: bool, as ``d``. These tokens have no gradient."""
    ratio = d.exp()
    return ratio.clamp(1 - clip, 1 + clip) * gains < ratio * gains


def turn_gains(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """GRPO's advantages of ``rewards`` ``[batch, turns]``, as many ``samples`` of each prompt side by side.

    They say how much better a turn is than that of the other answers to its prompt, in standard deviations.
    """
    grouped = rewards.unflatten(0, (-1, samples))
    above = grouped - grouped.mean(1, keepdim=True)
    gains: torch.Tensor = above / (grouped.std(1, correction=0, keepdim=True) + 1e-6)
    return gains.flatten(0, 1)


def differing_routes(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two selections ``[..., layers, top_k]`` are not the same sets: bool ``[..., layers]``."""
    return (one.sort(-1).values != other.sort(-1).values).any(-1)


QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)


def measure(
    policy: torch.Tensor,  # [batch, answer, vocabulary] float32 log-probabilities of the trainer
    behaviour: torch.Tensor,  # [batch, answer, vocabulary] float32 log-probabilities of the engine
    tokens: torch.Tensor,  # [batch, answer] int64, drawn from behaviour
    gains: torch.Tensor,  # [batch, answer] advantages
    used: torch.Tensor,  # [..., layers, top_k] the experts in the trainer's pass
    rolled: torch.Tensor,  # [..., layers, top_k] the experts in the engine's
    clip: float,
) -> dict[str, float]:
    """The figures of one batch; ``tokens`` is the number of sampled tokens in the means."""
    d = log_ratios(policy, behaviour, tokens).double()
    behaviour, policy = behaviour.double(), policy.double()
    different = differing_routes(used, rolled)
    ordered = d.exp().flatten().sort().values
    ratios = {f"ratio_{share:g}": float(ordered[round(share * (len(ordered) - 1))]) for share in QUANTILES}
    return {
        "kl": float((behaviour.exp() * (behaviour - policy)).sum(-1).mean()),
        "k3": float(k3(d).mean()),
        **ratios,
        "beyond_e2": float((d.abs() > 2).double().mean()),
        "beyond_2": float((d.abs() > math.log(2)).double().mean()),
        "clip_fraction": float(clipped(d, gains.double(), clip).double().mean()),
        "tokens_differing": float(different.any(-1).double().mean()),
        "routers_differing": float(different.double().mean()),
        "tokens": d.numel(),
    }


GRADIENT_NORM_MAX = 1.0
BALANCE_WEIGHT = 0.01
"""The weight of the routers' load-balancing loss in supervised learning, of a family that has one."""
BIAS_RATE = 1e-3
"""How far a step moves the biases of routers that are balanced by these (arXiv 2412.19437, section 2.1.2)."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The result of a pass without gradient."""

    log_probs: torch.Tensor  # [batch, answer, vocabulary] float32
    used: torch.Tensor  # [batch, sequence - 1, layers, top_k] int16: the experts of that pass


@dataclass(frozen=True, slots=True)
class Update:
    """The means over one batch's optimizer steps.

    ``clip_fraction`` is the share of tokens whose gradient was clipped, ``moved`` the k3 estimate of the policy's
    distance from the one in the ratio's denominator, before each step.
    """

    loss: float
    clip_fraction: float
    moved: float
    gradient_norm: float


class Trainer:
    """A model in training: float32 weights, and passes in float32; learning may round each pass to bfloat16."""

    def __init__(self, model: Any, *, learning_rate: float, micro_tokens: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._micro_tokens = micro_tokens
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
        inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
        balanced = getattr(self.model.config, "router_aux_loss_coef", None) is not None
        if balanced:
            inputs["output_router_logits"] = True
        with RoutingCapture(self.model, self._spec) as capture:
            output = functional_call(self.model, weights, (), inputs)
            chosen = capture.topk_ids
        logits = output.logits[:, prompt_tokens - 1 :].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, prompt_tokens:].flatten())
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss + BALANCE_WEIGHT * output.aux_loss if balanced else loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self._optimizer.step()
        if not balanced:
            self._balance(chosen)
        return loss.detach()

    @torch.no_grad()
    def _balance(self, chosen: list[torch.Tensor]) -> None:
        """Raise the biases of experts that were chosen less than others, and lower the others'."""
        for router, ids in zip(find_routers(self.model).values(), chosen, strict=True):
            bias: Any = router.e_score_correction_bias
            load = torch.zeros_like(bias).scatter_add_(
                0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=bias.dtype)
            )
            bias.add_(BIAS_RATE * (load.mean() - load).sign())

    @torch.no_grad()
    def score(self, rollouts: Rollouts, replayed: Replayed | None) -> Scored:
        """Log-probabilities of the rollouts, with the rows that are replayed, if any are."""
        log_probs, used = [], []
        with RoutingCapture(self.model, self._spec) as capture:
            for part in self._parts(rollouts, torch.arange(len(rollouts.tokens), device=self.device)):
                capture.clear()
                log_probs.append(self._log_probs(rollouts, part, replayed))
                used.append(recorded(capture).to(torch.int16).unflatten(0, (len(part), -1)))
        return Scored(torch.cat(log_probs), torch.cat(used))

    def reinforce(
        self,
        rollouts: Rollouts,
        gains: torch.Tensor,  # [batch, answer] advantages
        old: torch.Tensor,  # [batch, answer, vocabulary] log-probabilities in the ratio's denominator
        replayed: Replayed | None,
        *,
        order: torch.Tensor,  # [batch] a permutation: which sequences go into which step
        updates: int,
        clip: float,
    ) -> Update:
        """PPO's clipped objective over the batch in ``updates`` optimizer steps."""
        losses, shares, moved, norms = [], [], [], []
        for chosen in order.chunk(updates):
            self._optimizer.zero_grad(set_to_none=True)
            for part in self._parts(rollouts, chosen):
                policy = self._log_probs(rollouts, part, replayed)
                d = log_ratios(policy, old[part], rollouts.answers[part])
                ratio, gain = d.exp(), gains[part]
                loss = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
                torch.autograd.backward(loss * (len(part) / len(chosen)))
                weight = len(part) / len(order)
                losses.append(loss.detach() * weight)
                shares.append(clipped(d.detach(), gain, clip).float().mean() * weight)
                moved.append(k3(d.detach()).mean() * weight)
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX))
            self._optimizer.step()
        return Update(
            loss=float(torch.stack(losses).sum()),
            clip_fraction=float(torch.stack(shares).sum()),
            moved=float(torch.stack(moved).sum()),
            gradient_norm=float(torch.stack(norms).mean()),
        )

    def _parts(self, rollouts: Rollouts, sequences: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``sequences`` in micro-batches."""
        together = max(1, self._micro_tokens // rollouts.tokens.shape[1])
        parts: tuple[torch.Tensor, ...] = torch.split(sequences, together)
        return parts

    def _log_probs(self, rollouts: Rollouts, part: torch.Tensor, replayed: Replayed | None) -> torch.Tensor:
        """Log-probabilities ``[part, answer, vocabulary]`` of some sequences."""
        with nullcontext() if replayed is None else replayed.on(self.model, part, self._spec):
            logits = self.model(input_ids=rollouts.tokens[part, :-1], use_cache=False).logits
        sampled: torch.Tensor = logits[:, rollouts.prompt_tokens - 1 :]
        return sampled.float().log_softmax(-1)
