"""The study itself: for each family and seed learn, measure the mismatch with every kind of rows, and reinforce."""

from __future__ import annotations

import gc
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
from bench.replay_study.rows import Labels, Replayed, Rows, labelled, replayed
from bench.replay_study.scales import MISMATCH, TRAINING, Options, Task, Tokens
from bench.replay_study.trainer import Scored, Trainer, Update, differing_routes, k3, log_ratios, measure, turn_gains

LEARNING_SHARE = 1 / 5
"""The share of ``--minutes`` for learning."""
WARM_UP, LAST_RATE = 0.1, 0.1
"""Supervised learning: the share of its steps in which the rate rises, and the rate's share left at the end."""
LONG_EVERY = 4
"""Of this many steps of learning one is on the long task."""
LOSSES_KEPT = 10
TRAINED = (Rows.NONE, Rows.RIGHT, Rows.EVICTED)
"""The rows that policy gradient is run with."""
State = dict[str, torch.Tensor]


class Study:
    """One run. ``results`` grow with it, and are written to ``path`` each time; ``say`` gets a line for each step."""

    def __init__(self, options: Options, setting: dict[str, Any], path: Path, say: Callable[[str], object]) -> None:
        self._options, self._scale, self._path, self._say = options, options.scale, path, say
        self._device = torch.device(options.device)
        self._started = time.perf_counter()
        self.results = Results(setting)

    def run(self) -> Results:
        """Run all phases. Without ``minutes`` everything except the seconds is the same for the same options."""
        seeds = range(self._options.seed, self._options.seed + self._scale.seeds)
        phases = self._options.phases
        models = [(family, seed) for family in self._options.families for seed in seeds]
        states: dict[tuple[str, int], State] = {}
        # On a GPU products of float32 are rounded to TF32, ten bits, which is a tenth of the time.
        torch.set_float32_matmul_precision("high")
        for family, seed in models:
            model = self._model(family, seed)
            if TRAINING in phases:
                states[family, seed] = {name: tensor.cpu() for name, tensor in model.start.items()}
            if MISMATCH in phases:
                self._measure(model)
            del model
            self._collect()
        if TRAINING in phases:
            self._reinforce_all(states)
        self.results.complete = True
        self._write("done")
        return self.results

    def _model(self, family: str, seed: int) -> Model:
        """A model that has learnt, or its weights of an earlier run."""
        model = Model(self._options, family, seed, self._device)
        kept = Path(self._options.state) / f"{family}-{seed}.pt" if self._options.state else None
        if kept is not None and kept.exists():
            model.start = torch.load(kept, map_location=self._device)
            model.reset()
            self._write(f"{family} {seed}: weights of an earlier run")
            return model
        self._learn(model)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.start, kept)
        return model

    def _collect(self) -> None:
        """Give the memory of a model and its graphs back."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---------------------------------------------------------------- learning

    def _learn(self, model: Model) -> None:
        scale, learning, seed = self._scale, self._scale.learning, model.seed
        draw = np.random.default_rng([seed, 1])
        minutes, models = self._options.minutes, len(self._options.families) * scale.seeds
        seconds = 60 * minutes * LEARNING_SHARE / models if minutes else float("inf")
        before = self._reward(model)
        started, trainer = time.perf_counter(), model.trainer()
        demonstrations = {task: Demonstrations(task, learning.errors, draw) for task in (scale.short, scale.long)}
        fewer = max(1, learning.batch * scale.short.sequence // scale.long.sequence)
        losses: list[torch.Tensor] = []
        steps = 0
        while (done := max(steps / learning.steps, (time.perf_counter() - started) / seconds)) < 1:
            rate = learning.learning_rate * min(1.0, (done + 1e-3) / WARM_UP) * (1 - (1 - LAST_RATE) * done)
            task, batch = (scale.long, fewer) if steps % LONG_EVERY == LONG_EVERY - 1 else (scale.short, learning.batch)
            tokens = torch.as_tensor(demonstrations[task].take(batch), device=self._device)
            losses.append(trainer.learn(tokens, task.prompt_tokens, rate, rounded=self._device.type == "cuda"))
            steps += 1
            if steps % 100 == 0:
                self._say(f"{model.name}: learning step {steps}, loss {float(losses[-1]):.3f}")
        model.keep()
        found = Learned(
            family=model.family,
            seed=seed,
            parameters=sum(p.numel() for p in model.trained.parameters()),
            steps=steps,
            seconds=time.perf_counter() - started,
            loss=float(torch.stack(losses[-LOSSES_KEPT:]).mean()),
            reward_before=before,
            reward_after=self._reward(model),
        )
        self.results.learned.append(found)
        self._write(f"{model.name}: learning, {steps} steps, loss {found.loss:.3f}, reward {found.reward_after:.3f}")

    def _reward(self, model: Model) -> float:
        r = self._scale.reinforcement
        prompts = self._scale.short.prompts(r.prompts * r.samples, np.random.default_rng([model.seed, 2]))
        return float(self._scale.short.rewards(model.roll(self._scale.short, prompts, 2).tokens.cpu().numpy()).mean())

    # ---------------------------------------------------------------- mismatch

    def _measure(self, model: Model) -> None:
        """The same rollouts with each kind of rows, at each lag; then rollouts of two versions."""
        scale = self._scale
        task = scale.long
        prompts = self._prompts(task, scale.measured, scale.samples, model.seed, 3)
        rollouts = self._timed(f"{model.name}: {len(prompts)} rollouts", lambda: model.roll(task, prompts, 3))
        rolled = rollouts.rolled()
        gains = self._gains(task, rollouts, scale.samples)
        trainer = model.trainer()
        done = 0
        for lag in scale.lags:
            while done < lag:
                done += self._advance(model, trainer, done, lag - done)
            # Where the weights are the same, rounding is all that is measured.
            torch.set_float32_matmul_precision("highest" if lag == 0 else "high")
            for rows in Rows:
                scored = trainer.score(rollouts, self._replayed(rows, task, rolled, [model.seed, 4]))
                figures = self._figures(rollouts, gains, scored, rolled, slice(None))
                self.results.measured.append(Measured(model.family, model.seed, lag, rows.value, "all", figures))
            self._write(f"{model.name}: mismatch at a lag of {lag}")
        torch.set_float32_matmul_precision("high")
        newest = {name: tensor.detach().clone() for name, tensor in model.trained.state_dict().items()}
        model.reset()
        self._measure_versions(model, prompts, newest)
        model.reset()

    def _measure_versions(self, model: Model, prompts: Tokens, newest: State) -> None:
        """Rollouts whose second half was sampled with newer weights, beside KV of the older: the trainer has those."""
        task, scale = self._scale.long, self._scale
        lag = max(scale.lags)

        def midway() -> None:
            model.trained.load_state_dict(newest)
            load_weights(model.engines, model.trained)

        rollouts = model.roll(task, prompts, 7, midway=midway)
        rolled = rollouts.rolled()
        gains = self._gains(task, rollouts, scale.samples)
        old_tokens = (task.sequence - 1) // 2
        # The distribution of a token comes from the step that read the token before it.
        old_answers = old_tokens - task.prompt_tokens + 1
        trainer = model.trainer()
        for labels in Labels:
            scored = trainer.score(rollouts, labelled(labels, rolled, old_tokens))
            for part, answers in (("older", slice(None, old_answers)), ("newer", slice(old_answers, None))):
                figures = self._figures(rollouts, gains, scored, rolled, answers)
                self.results.measured.append(Measured(model.family, model.seed, lag, labels.value, part, figures))
        self._write(f"{model.name}: mismatch of two versions")

    def _figures(
        self, rollouts: Rollouts, gains: torch.Tensor, scored: Scored, rolled: torch.Tensor, answers: slice
    ) -> dict[str, float]:
        """The figures of some of the answers' tokens, and of the routers at these positions; for all, at the prompt's
        too."""
        behaviour = rollouts.behaviour[:, answers]
        first = rollouts.prompt_tokens - 1
        used, engine = (
            (scored.used, rolled)
            if answers == slice(None)
            else (scored.used[:, first:][:, answers], rolled[:, first:][:, answers])
        )
        return measure(
            scored.log_probs[:, answers],
            behaviour,
            rollouts.answers[:, answers],
            gains[:, answers],
            used,
            engine,
            self._scale.reinforcement.clip,
        )

    def _advance(self, model: Model, trainer: Trainer, number: int, most: int) -> int:
        """Some optimizer steps on rollouts of the present weights, with right rows; returns how many."""
        r, task = self._scale.reinforcement, self._scale.short
        updates = min(r.updates, most)
        prompts = self._prompts(task, r.prompts, r.samples, model.seed, 8, number)
        rollouts = model.roll(task, prompts, 8, number)
        gains = self._gains(task, rollouts, r.samples)
        order = np.random.default_rng([model.seed, 9, number]).permutation(len(prompts))
        # As many sequences a step as in policy gradient.
        order = order[: len(order) * updates // r.updates]
        trainer.reinforce(
            rollouts,
            gains,
            rollouts.behaviour,
            Replayed(rollouts.rolled()),
            order=torch.as_tensor(order, device=self._device),
            updates=updates,
            clip=r.clip,
        )
        return updates

    # ---------------------------------------------------------------- policy gradient

    def _reinforce_all(self, states: dict[tuple[str, int], State]) -> None:
        todo = [(old, key, rows) for old in self._options.ratios for key in states for rows in TRAINED]
        model: Model | None = None
        steps = self._scale.reinforcement.steps
        for number, (old, (family, seed), rows) in enumerate(todo):
            if model is None or model.family != family:
                model = None
                self._collect()
                model = Model(self._options, family, seed, self._device)
            model.seed, model.start = seed, states[family, seed]
            model.reset()
            seconds = self._seconds_left() / (len(todo) - number)
            run = Run(family, rows.value, old, seed)
            self.results.runs.append(run)
            self._reinforce(model, run, rows, steps, seconds)
            if number == 0:  # the other runs are compared with the first, step by step
                steps = max(1, len(run.steps))

    def _seconds_left(self) -> float:
        if self._options.minutes is None:
            return float("inf")
        return 60 * self._options.minutes - (time.perf_counter() - self._started)

    def _reinforce(self, model: Model, run: Run, rows: Rows, steps: int, seconds: float) -> None:
        r, task = self._scale.reinforcement, self._scale.short
        started, trainer = time.perf_counter(), model.trainer()
        while len(run.steps) < steps and (not run.steps or time.perf_counter() - started < seconds):
            begun, number = time.perf_counter(), len(run.steps)
            prompts = self._prompts(task, r.prompts, r.samples, run.seed, 5, number)
            rollouts = model.roll(task, prompts, 5, number)
            rolled = rollouts.rolled()
            given = self._replayed(rows, task, rolled, [run.seed, 10, number])
            scored = trainer.score(rollouts, given)
            update = trainer.reinforce(
                rollouts,
                self._gains(task, rollouts, r.samples),
                rollouts.behaviour if run.old == "engine" else scored.log_probs,
                given,
                order=torch.as_tensor(
                    np.random.default_rng([run.seed, 6, number]).permutation(len(prompts)), device=self._device
                ),
                updates=r.updates,
                clip=r.clip,
            )
            run.steps.append(self._step(number, task, rollouts, rolled, scored, update, time.perf_counter() - begun))
            told = f"{model.name}: policy gradient, {run.rows}, ratio to the {run.old}'s, step {number}"
            self._write(f"{told}: reward {run.steps[-1].reward:.3f}, {run.steps[-1].seconds:.1f} s")
            if not math.isfinite(update.gradient_norm):
                break  # collapsed: nothing can be sampled from such weights

    def _step(
        self,
        number: int,
        task: Task,
        rollouts: Rollouts,
        rolled: torch.Tensor,
        scored: Scored,
        update: Update,
        seconds: float,
    ) -> Step:
        d = log_ratios(scored.log_probs, rollouts.behaviour, rollouts.answers)
        different = differing_routes(scored.used, rolled).any(-1)
        return Step(
            step=number,
            reward=float(task.rewards(rollouts.tokens.cpu().numpy()).mean()),
            kl=float(k3(d.double()).mean()),
            beyond_2=float((d.abs() > math.log(2)).float().mean()),
            tokens_differing=float(different.float().mean()),
            seconds=seconds,
            **asdict(update),
        )

    # ---------------------------------------------------------------- shared

    def _replayed(self, rows: Rows, task: Task, rolled: torch.Tensor, seed: list[int]) -> Replayed | None:
        one = int(np.random.SeedSequence(seed).generate_state(1)[0])
        return replayed(rows, rolled, task.cached_tokens, task.prompt_tokens, self._scale.page_tokens, one)

    def _gains(self, task: Task, rollouts: Rollouts, samples: int) -> torch.Tensor:
        """The advantage of each token of the answers, ``[batch, answer]``: its turn's."""
        rewards = torch.as_tensor(task.rewards(rollouts.tokens.cpu().numpy()))
        return turn_gains(rewards, samples).repeat_interleave(task.turn_tokens, dim=1).float().to(self._device)

    @staticmethod
    def _prompts(task: Task, count: int, samples: int, *seed: int) -> Tokens:
        """``count`` prompts, each repeated for its samples, side by side."""
        return np.repeat(task.prompts(count, np.random.default_rng(seed)), samples, axis=0)

    def _timed(self, what: str, work: Callable[[], Rollouts]) -> Rollouts:
        begun = time.perf_counter()
        found = work()
        self._say(f"{what}: {time.perf_counter() - begun:.1f} s")
        return found

    def _write(self, what: str) -> None:
        self.results.seconds = time.perf_counter() - self._started
        self.results.write(self._path)
        self._say(f"{self.results.seconds:6.1f} s  {what}")


class Model:
    """A trainer's model and its engine; ``start`` are the weights that have learnt."""

    def __init__(self, options: Options, family: str, seed: int, device: torch.device) -> None:
        self._scale = options.scale
        self.family, self.seed = family, seed
        self.trained = build_trained(family, options.scale.shapes[family], options.scale.long.vocab_size, seed, device)
        self.engines = build_engines(self.trained)
        self._rollout = Rollout(self.engines)
        self.start: State = {}

    @property
    def name(self) -> str:
        return f"{self.family} {self.seed}"

    def keep(self) -> None:
        """Take the present weights as the start."""
        self.start = {name: tensor.detach().clone() for name, tensor in self.trained.state_dict().items()}

    def reset(self) -> None:
        self.trained.load_state_dict(self.start)

    def trainer(self) -> Trainer:
        """A new optimizer for the present weights."""
        scale = self._scale
        return Trainer(self.trained, learning_rate=scale.reinforcement.learning_rate, micro_tokens=scale.micro_tokens)

    def roll(self, task: Task, prompts: Tokens, *seed: int, midway: Callable[[], None] | None = None) -> Rollouts:
        """Rollouts with the trainer's present weights."""
        load_weights(self.engines, self.trained)
        one = int(np.random.SeedSequence([self.seed, *seed]).generate_state(1)[0])
        return self._rollout(prompts, task.answer_tokens, one, midway)


class Demonstrations:
    """Makes many at once, because each makes its tokens one after another."""

    AHEAD = 32

    def __init__(self, task: Task, errors: float, draw: np.random.Generator) -> None:
        self._task, self._errors, self._draw = task, errors, draw
        self._made: Tokens = np.empty((0, task.sequence), np.int64)

    def take(self, count: int) -> Tokens:
        if len(self._made) < count:
            self._made = self._task.demonstrations(count * self.AHEAD, self._errors, self._draw)
        taken, self._made = self._made[:count], self._made[count:]
        return taken
