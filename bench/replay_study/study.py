"""The study itself: learn, measure the mismatch in every mode, then reinforce with and without replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.replay_study.models import build_engines, build_trained, load_weights
from bench.replay_study.results import Learned, Measured, Results, Run, Step
from bench.replay_study.rollout import Rollout, Rollouts
from bench.replay_study.scales import Options, Tokens
from bench.replay_study.trainer import (
    Mode,
    Scored,
    Trainer,
    Update,
    differing_routes,
    k3,
    log_ratios,
    measure,
    replayed,
)

FAMILY = "qwen3_moe"
LEARNING_SHARE = 1 / 3
"""The share of ``--minutes`` for learning."""
WARM_UP, LAST_RATE = 0.1, 0.1
"""Supervised learning: the share of its steps in which the rate rises, and the rate's share left at the end."""
LOSSES_KEPT = 10
State = dict[str, torch.Tensor]


class Study:
    """One run. ``results`` grow with it, and are written to ``path`` each time; ``say`` gets a line for each step."""

    def __init__(self, options: Options, setting: dict[str, Any], path: Path, say: Callable[[str], object]) -> None:
        self._options, self._scale, self._path, self._say = options, options.scale, path, say
        self._device = torch.device(options.device)
        self._started = time.perf_counter()
        self.results = Results(setting)
        scale = options.scale
        self._trained = build_trained(scale.shape, scale.task.vocab_size, options.seed, self._device)
        self._engines = build_engines(self._trained)
        self._rollout = Rollout(self._engines)

    def run(self) -> Results:
        """Run all phases. Without ``minutes`` everything except the seconds is the same for the same options."""
        self._learn()
        start = {name: tensor.detach().clone() for name, tensor in self._trained.state_dict().items()}
        for draw in range(self._scale.draws):
            self._measure(draw, start)
        self._reinforce_all(start)
        self.results.complete = True
        self._write("done")
        return self.results

    def _trainer(self, start: State | None = None) -> Trainer:
        """A new optimizer, for the present weights or those of ``start``."""
        if start is not None:
            self._trained.load_state_dict(start)
        scale = self._scale
        return Trainer(self._trained, learning_rate=scale.reinforcement.learning_rate, micro_batch=scale.micro_batch)

    def _roll(self, prompts: Tokens, *seed: int) -> Rollouts:
        """Rollouts with the trainer's present weights."""
        load_weights(self._engines, self._trained)
        one = int(np.random.SeedSequence(seed).generate_state(1)[0])
        return self._rollout(prompts, self._scale.task.length, one)

    # ---------------------------------------------------------------- learning

    def _learn(self) -> None:
        learning, task, seed = self._scale.learning, self._scale.task, self._options.seed
        draw = np.random.default_rng([seed, 1])
        started, trainer = time.perf_counter(), self._trainer()
        seconds = 60 * self._options.minutes * LEARNING_SHARE if self._options.minutes else float("inf")
        before = self._reward(seed)
        losses: list[torch.Tensor] = []
        steps = 0
        while (done := max(steps / learning.steps, (time.perf_counter() - started) / seconds)) < 1:
            rate = learning.learning_rate * min(1.0, (done + 1e-3) / WARM_UP) * (1 - (1 - LAST_RATE) * done)
            batch = task.demonstrations(learning.batch, learning.errors, draw)
            tokens, rounded = torch.as_tensor(batch, device=self._device), self._device.type == "cuda"
            losses.append(trainer.learn(tokens, task.prompt_tokens, rate, rounded=rounded))
            steps += 1
        self.results.learned.append(
            Learned(
                family=FAMILY,
                seed=seed,
                parameters=sum(p.numel() for p in self._trained.parameters()),
                steps=steps,
                seconds=time.perf_counter() - started,
                loss=float(torch.stack(losses[-LOSSES_KEPT:]).mean()),
                reward_before=before,
                reward_after=self._reward(seed),
            )
        )
        self._write(f"learning, {steps} steps, loss {self.results.learned[-1].loss:.3f}")

    def _reward(self, seed: int) -> float:
        r = self._scale.reinforcement
        prompts = self._scale.task.prompts(r.prompts * r.samples, np.random.default_rng([seed, 2]))
        return float(self._rewards(self._roll(prompts, seed)).mean())

    def _rewards(self, rollouts: Rollouts) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self._scale.task.rewards(rollouts.tokens.cpu().numpy())

    # ---------------------------------------------------------------- mismatch

    def _measure(self, draw: int, start: State) -> None:
        """One batch of rollouts, and every mode before and after an update on it."""
        seed = self._options.seed
        prompts = self._prompts(self._scale.measured, seed, 3, draw)
        rollouts, trainer = self._roll(prompts, seed, 3, draw), self._trainer()
        rolled = rollouts.rolled()
        native = trainer.score(rollouts, None)
        for mode in Mode:
            # In R2 the old policy's pass records and replays nothing, so it equals the pass without replay.
            old = trainer.score(rollouts, rolled) if mode is Mode.R3 else native
            self._keep(draw, "before", mode, rollouts, old, rolled)
            fresh = self._trainer(start)
            routes = replayed(mode, rollouts, old)
            self._update(fresh, rollouts, old, routes, np.random.default_rng([seed, 4, draw]))
            self._keep(draw, "after", mode, rollouts, fresh.score(rollouts, routes), rolled)
            self._trained.load_state_dict(start)
        self._write(f"draw {draw}: mismatch")

    def _keep(self, draw: int, when: str, mode: Mode, rollouts: Rollouts, found: Scored, rolled: Any) -> None:
        figures = measure(found.log_probs, rollouts.behaviour, rollouts.answers, found.used, rolled)
        self.results.measured.append(Measured(FAMILY, self._options.seed, draw, when, mode.value, figures))

    # ---------------------------------------------------------------- policy gradient

    def _reinforce_all(self, start: State) -> None:
        todo = [(seed, mode) for seed in range(self._scale.reinforcement.seeds) for mode in (Mode.NONE, Mode.R3)]
        steps = self._scale.reinforcement.steps
        for number, (seed, mode) in enumerate(todo):
            seconds = self._seconds_left() / (len(todo) - number)
            run = Run(FAMILY, mode.value, seed)
            self.results.runs.append(run)
            self._reinforce(run, mode, start, steps, seconds)
            if number == 0:  # the other runs are compared with the first, step by step
                steps = max(1, len(run.steps))

    def _seconds_left(self) -> float:
        if self._options.minutes is None:
            return float("inf")
        return 60 * self._options.minutes - (time.perf_counter() - self._started)

    def _reinforce(self, run: Run, mode: Mode, start: State, steps: int, seconds: float) -> None:
        scale, started, trainer = self._scale, time.perf_counter(), self._trainer(start)
        while len(run.steps) < steps and (not run.steps or time.perf_counter() - started < seconds):
            begun, number = time.perf_counter(), len(run.steps)
            prompts = self._prompts(scale.reinforcement.prompts, run.seed, 5, number)
            rollouts = self._roll(prompts, run.seed, 5, number)
            rolled = rollouts.rolled()
            old = trainer.score(rollouts, rolled if mode is Mode.R3 else None)
            draw = np.random.default_rng([run.seed, 6, number])
            update = self._update(trainer, rollouts, old, replayed(mode, rollouts, old), draw)
            d = log_ratios(old.log_probs, rollouts.behaviour, rollouts.answers)
            different = differing_routes(old.used, rolled).any(-1)
            run.steps.append(
                Step(
                    step=number,
                    reward=float(self._rewards(rollouts).mean()),
                    kl=float(k3(d).mean()),
                    tokens_differing=float(different.float().mean()),
                    seconds=time.perf_counter() - begun,
                    **asdict(update),
                )
            )
            told = f"policy gradient, {mode.value}, seed {run.seed}, step {number}"
            self._write(f"{told}: reward {run.steps[-1].reward:.3f}")
            if not math.isfinite(update.gradient_norm):
                break  # collapsed: nothing can be sampled from such weights

    def _update(
        self, trainer: Trainer, rollouts: Rollouts, old: Scored, routes: torch.Tensor | None, draw: np.random.Generator
    ) -> Update:
        r = self._scale.reinforcement
        rewards = self._rewards(rollouts).reshape(-1, r.samples)
        # GRPO: how much better than the other answers to the same prompt, in standard deviations.
        gains = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
        return trainer.reinforce(
            rollouts,
            torch.as_tensor(gains.reshape(-1), dtype=torch.float32, device=self._device),
            old.log_probs,
            routes,
            order=torch.as_tensor(draw.permutation(len(rollouts.tokens)), device=self._device),
            updates=r.updates,
            clip=r.clip,
        )

    def _prompts(self, count: int, *seed: int) -> Tokens:
        """``count`` prompts, each repeated for its samples, side by side."""
        prompts = self._scale.task.prompts(count, np.random.default_rng(seed))
        return np.repeat(prompts, self._scale.reinforcement.samples, axis=0)

    def _write(self, what: str) -> None:
        self.results.seconds = time.perf_counter() - self._started
        self.results.write(self._path)
        self._say(what)
