"""The judge at the far end: transformers judges every layer of every row, in routes and as each trainer gets it.

No verdict here depends on kvroute. A row is right when a float32 forward pass of the weights over the very tokens of
the answer gives its experts what the row says; of a pass in whose midst the weights changed, the old weights up to some
token and the new ones behind it, over the keys and values that the old ones left.
"""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experts_seen import Seen
from far_trainers import TRAINERS, Trainer
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from kvroute import KVRouteError, Routes

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Weights:
    """A checkpoint, computed by transformers in float32, whose experts are listened to."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._model = AutoModelForCausalLM.from_pretrained(
            home, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        self._seen = Seen(self._model)
        self.layers = tuple(i for i, layer in enumerate(self._model.model.layers) if hasattr(layer.mlp, "experts"))
        self.num_layers = self._model.config.num_hidden_layers
        self.experts, self.top_k = self._model.config.num_experts, self._model.config.num_experts_per_tok

    def routed(self, tokens: Sequence[int], past: Any = None) -> tuple[Ids, Any]:
        """The experts that ``tokens`` are given to behind ``past``, sorted: ``[tokens, routed layers, top_k]``."""
        with torch.no_grad():
            out = self._model(torch.tensor([list(tokens)]), past_key_values=past, use_cache=True)
        return np.sort(self._seen.rows().astype(np.int64), axis=-1), out.past_key_values


@dataclass
class Tally:
    """Counts of cells, one for each layer of a row: how many were due, and their verdicts.

    ``missing`` counts by reason, ``wrong`` by where: in ``routes``, at a trainer, or in a label that is false.
    """

    answers: int = 0
    due: int = 0
    right: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    labelled: int = 0  # right rows, whose label is of the weights that made them
    given: int = 0  # cells that trainers got right
    words: int = 0  # cells that trainers got as their own word for what is missing
    refusals: int = 0  # calls that raised, where something was missing
    fields: int = 0  # right cells in vLLM's own field
    fieldless: int = 0  # answers without it

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def __str__(self) -> str:
        missing = dict(sorted(self.missing.items()))
        wrong = {name: count for name, count in self.wrong.items() if "(" not in name}
        wrong["at trainers"] = sum(self.wrong.values()) - sum(wrong.values())
        return (
            f"{self.answers} answers, {self.due} cells due, {self.right} right, {sum(self.missing.values())} missing "
            f"{missing}, wrong {wrong}; {self.labelled} rows labelled; trainers: {self.given} right, "
            f"{self.words} by their word, {self.refusals} refusals; field: {self.fields} right, "
            f"{self.fieldless} answers without"
        )


@dataclass(frozen=True)
class Truth:
    """What one answer's rows are, as far as the judge can explain them; ``[due, routed layers, ...]``."""

    ids: Ids
    right: Mask  # [due, layers]
    known: Mask  # [due, layers]
    by: list[set[str]]  # the weights that may have made each row


class Judge:
    """Knows the weights that an engine may have had, by name."""

    def __init__(self, homes: Mapping[str, Path]) -> None:
        torch.set_num_threads(1)
        self.weights = {name: Weights(home) for name, home in homes.items()}
        self._one = next(iter(self.weights.values()))

    def cells(self, routes: Routes, due: int) -> tuple[Ids, Mask]:
        """Ids ``[due, routed layers, top_k]`` sorted, and which of them the routes say that they know."""
        one = self._one
        ids = np.full((due, len(one.layers), one.top_k), -1, np.int64)
        known = np.zeros(ids.shape[:2], np.bool_)
        assert set(routes.layer_ids) <= set(one.layers), "a layer without a router"
        stop = min(routes.stop, due)
        rows, at = slice(routes.start, stop), [one.layers.index(layer) for layer in routes.layer_ids]
        ids[rows, at] = np.sort(routes.ids[: stop - routes.start].astype(np.int64), axis=-1)
        known[rows, at] = routes.known[: stop - routes.start]
        return ids, known

    def truth(self, tokens: Sequence[int], routes: Routes, before: str, after: str | None, over: int | None) -> Truth:
        """``after`` are weights that may have taken over from ``before`` in the midst.

        With ``over`` they had done so before, but KV of so many tokens may be of ``before``, whose rows are wrong then.
        """
        due = len(tokens) - 1
        ids, known = self.cells(routes, due)
        whole = {name: self.weights[name].routed(tokens[:due])[0] for name in {before, after or before}}
        same = {name: (ids == each).all(axis=-1) for name, each in whole.items()}
        made = {name: (each | ~known).all(axis=1) for name, each in same.items()}
        expected, by = whole[before].copy(), [set[str]() for _ in range(due)]
        if after is not None:
            cut, mixed = self._cut(tokens, ids, known, made[before], before, after, over)
            fits = ((mixed == ids[cut:]).all(axis=-1) | ~known[cut:]).all(axis=1)
            for at in range(cut, due):
                if fits[at - cut]:
                    by[at].add(after)
                    expected[at] = mixed[at - cut]
            expected[made[after]] = whole[after][made[after]]
        for name, each in made.items():
            for at in np.flatnonzero(each):
                if over is None or name != before:
                    by[at].add(name)
        if over is None:
            expected[made[before]] = whole[before][made[before]]
        right = (ids == expected).all(axis=-1) & known & np.array([bool(each) for each in by])[:, None]
        return Truth(expected, right, known, by)

    def _cut(
        self, tokens: Sequence[int], ids: Ids, known: Mask, made: Mask, before: str, after: str, over: int | None
    ) -> tuple[int, Ids]:
        """Where the weights changed, and what is routed from there: the cut that explains the most rows."""
        due, there = len(tokens) - 1, known.any(axis=1)
        if over is not None:
            tries: Sequence[int] = [over]
        else:
            foreign = np.flatnonzero(there & ~made)
            first = int(foreign[0]) if len(foreign) else due
            last = np.flatnonzero((there & made)[:first])
            tries = range(first, int(last[-1]) if len(last) else 0, -1)
        found: tuple[int, int, Ids] = -1, due, np.empty((0, *ids.shape[1:]), np.int64)
        tries = [cut for cut in tries if 0 < cut < due]
        kept = self.weights[before].routed(tokens[: max(tries)])[1] if tries else None
        for cut in tries:
            past = deepcopy(kept)
            if cut < max(tries):
                past.crop(cut - max(tries))  # so many from its end
            mixed, _ = self.weights[after].routed(tokens[cut:due], past)
            fits = int((((mixed == ids[cut:]).all(axis=-1) | ~known[cut:]).all(axis=1) & there[cut:]).sum())
            if fits > found[0]:
                found = fits, cut, mixed
            if fits == int(there[cut:].sum()):
                break
        return found[1], found[2]

    def judge(
        self,
        answer: Mapping[str, Any],
        before: str = "A",
        after: str | None = None,
        *,
        index: int = 0,
        over: int | None = None,
        labels: Mapping[int, str] | None = None,
        routes: Routes | None = None,
    ) -> Tally:
        """One completion: its routes, their labels, and what every trainer gets of them.

        ``labels``: whose weights each version is, for the versions that were given; any other is false.
        """
        told = answer["completions"][index]
        tokens = [*answer["prompt"], *told["tokens"]]
        due, layers = len(tokens) - 1, len(self._one.layers)
        tally = Tally(answers=1, due=due * layers)
        if routes is None:
            tally += self.fielded(told.get("own_field"), tokens, before, after, over)
        if routes is None and "routes" not in told:
            tally.missing[told["refused"].partition(":")[0]] += due * layers
            return tally
        found = Routes.from_json(told["routes"]) if routes is None else routes
        truth = self.truth(tokens, found, before, after, over)
        tally.right = int(truth.right.sum())
        tally.wrong["routes"] += int((truth.known & ~truth.right).sum())
        whole = truth.known.any(axis=1)
        tally.missing["rows"] += int((~whole).sum()) * layers
        tally.missing["layers of rows that are there"] += int((~truth.known & whole[:, None]).sum())
        if found.complete != bool(truth.known.all()) and len(found) >= due:
            tally.wrong["complete"] += 1
        for start, stop, version in found.weights_versions:
            for at in range(start, min(stop, due)):
                if whole[at]:
                    false = (labels or {}).get(version) not in truth.by[at]
                    tally.wrong["label"] += false
                    tally.labelled += not false
        tally += self.trained(found, truth, len(answer["prompt"]), len(told["tokens"]))
        tally.wrong = +tally.wrong
        tally.missing = +tally.missing
        return tally

    def fielded(self, packed: Any, tokens: Sequence[int], before: str, after: str | None, over: int | None) -> Tally:
        """vLLM's own field of an answer: of all its tokens, in stock's form, or none."""
        if packed is None:
            return Tally(fieldless=1)
        one, due = self._one, len(tokens) - 1
        if packed["dtype"] != "uint8" or packed["shape"] != [due, one.num_layers, one.top_k]:
            return Tally(wrong=Counter({"field's form": due}))
        array = np.frombuffer(b64decode(packed["data"]), np.uint8).reshape(packed["shape"])
        dense = [layer for layer in range(one.num_layers) if layer not in one.layers]
        valid = np.ones(due, np.bool_)
        routes = Routes(array[:, one.layers].copy(), valid, one.layers, one.experts, one.num_layers, 0)
        right = self.truth(tokens, routes, before, after, over).right
        wrong = Counter({"field": int((~right).sum()), "field's dense layers": int(array[:, dense].any())})
        return Tally(fields=int(right.sum()), wrong=+wrong)

    def trained(self, found: Routes, truth: Truth, prompt: int, response: int) -> Tally:
        """The same routes through every trainer's adapter, in each of its words. None trains on an empty response."""
        tally, complete = Tally(), bool(truth.known.all())
        for name, trainer in TRAINERS.items() if response else ():
            for word in trainer.words:
                try:
                    got = trainer.given(found, prompt, response, word)
                except KVRouteError:
                    tally.refusals += 1
                    if complete:
                        tally.wrong[f"{name} refuses what is complete"] += 1
                    elif word not in ("error", "cut"):
                        tally.wrong[f"{name} has no word"] += 1
                    continue
                right, spelled, wrong, lost = self._compared(got, truth, trainer, word)
                tally.given += right
                tally.words += spelled
                tally.wrong[f"{name}({word})"] += wrong
                tally.wrong[f"{name}({word}) lost"] += lost
        return tally

    def _compared(self, got: Any, truth: Truth, trainer: Trainer, word: str) -> tuple[int, int, int, int]:
        """Cells that are right, that are the word, that are neither, and the word in rows that the routes have whole.

        Dense layers have zeros, or the word.
        """
        one, rows = self._one, np.sort(np.asarray(got, np.int64), axis=-1)
        layers = one.layers if trainer.routed_only else tuple(range(one.num_layers))
        due = len(truth.ids)
        if rows.shape[1:] != (len(layers), one.top_k) or not (trainer.prefix or len(rows) >= due):
            return 0, 0, due, 0
        rows = rows[:due]
        there = truth.known.all(axis=1)[: len(rows)]
        spelled = trainer.spelled(word, np.arange(len(rows)), np.array(layers), one.experts, one.top_k)
        is_word = np.zeros(rows.shape[:2], np.bool_) if spelled is None else (rows == np.sort(spelled)).all(axis=-1)
        right = wrong = words = lost = 0
        for at, layer in enumerate(layers):
            if layer in one.layers:
                ok = (rows[:, at] == truth.ids[: len(rows), one.layers.index(layer)]).all(axis=-1)
                ok &= truth.right[: len(rows), one.layers.index(layer)] | is_word[:, at]
                right += int(ok.sum())
                words += int((is_word[:, at] & ~ok).sum())
                lost += int((is_word[:, at] & ~ok & there).sum())
                wrong += int((~ok & ~is_word[:, at]).sum())
            else:
                wrong += int((~(rows[:, at] == 0).all(axis=-1) & ~is_word[:, at]).sum())
        return right, words, wrong, lost


@contextmanager
def verdict(what: str, tally: Tally) -> Iterator[Tally]:
    """Prints the counts before it asserts anything; nothing may be wrong, and every cell is accounted for."""
    print(f"\n{what}: {tally}")
    assert tally.right + sum(tally.missing.values()) + tally.wrong["routes"] == tally.due
    yield tally
    assert not tally.wrong, tally


def summed(tallies: Sequence[Tally]) -> Tally:
    return sum(tallies, Tally())


def of_all(judge: Judge, answers: Sequence[Mapping[str, Any]], *weights: str | None, **more: Any) -> Tally:
    """Of every completion of every answer."""
    return summed(
        [
            judge.judge(answer, *weights, index=index, **more)  # type: ignore[arg-type]
            for answer in answers
            for index in range(len(answer["completions"]))
        ]
    )
