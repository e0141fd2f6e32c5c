"""The judge of the demo. It does not rely on kvroute: it hooks the model's routers itself.

While the engine runs, the checker's own hooks record every top-k when it is computed, under a digest of the exact
tokens up to and including the one that was routed. Every row in the output must equal, bit for bit, one that was
recorded for its prefix. A second run of the sequence, by transformers alone, judges its tokens, and the rows of
prefixes that the checker never saw computed (by an earlier process, or by another one).

If it watched the sample it checks more: a token is sampled with the rows computed by then, so a position that was
computed again later, perhaps with other weights, must have the row that was *first* computed for that sample, and a
prompt the rows of the weights that sampled the first token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paged_engine.models import BATCH_MULTIPLE
from paged_engine.request import FinishReason, Output
from paged_engine.scheduler import Work
from paged_engine.sequence import Sequence as Sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of the rows of some sequences; verdicts can be added.

    ``rows_judged_by_recompute`` are rows that only a second run could judge. Of ``compared`` (row, layer) pairs, the
    second run chose the same set of experts in ``agreed``; of ``answers_wrong`` samples it has other tokens.
    ``slot_rows_wrong`` are rows that a buffer keyed by slot had wrong, for the same tokens.
    """

    answers_wrong: int = 0
    rows_expected: int = 0
    rows_wrong: int = 0
    rows_missing: int = 0
    rows_judged_by_recompute: int = 0
    compared: int = 0
    agreed: int = 0
    slot_rows_wrong: int = 0

    @property
    def agreement(self) -> float:
        return self.agreed / self.compared if self.compared else 1.0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class RouterWatch:
    """Hooks on the router modules of a transformers model: each layer's ids of the pass since :meth:`take`."""

    def __init__(self, model: nn.Module) -> None:
        named = model.named_modules()  # in the order of the layers
        routers = [each for name, each in named if "Router" in type(each).__name__ and ".layers." in name]
        self._ids: list[list[NDArray[np.int32]]] = [[] for _ in routers]
        self._hooks = [router.register_forward_hook(partial(self._keep, i)) for i, router in enumerate(routers)]

    def _keep(self, index: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._ids[index].append(output[2].detach().to(torch.int32).cpu().numpy().copy())

    def forget(self) -> None:
        for calls in self._ids:
            calls.clear()

    def take(self) -> NDArray[np.int32]:
        """Ids ``[tokens, layers, top_k]`` of the one pass since the last take."""
        seen = [list(calls) for calls in self._ids]
        self.forget()
        tokens = [[len(ids) for ids in calls] for calls in seen]
        if len(tokens[0]) != 1 or not tokens[0][0] or any(each != tokens[0] for each in tokens):
            raise AssertionError(f"routers routed {tokens} tokens in one pass")
        return np.stack([calls[0] for calls in seen], axis=1)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Checker:
    """Records every top-k and judges routes against them. It outlives engines and models: it watches one at a time."""

    def __init__(self) -> None:
        self._witnessed: list[dict[bytes, set[bytes]]] = [{}]  # one for each update of the weights
        self._first: dict[str, dict[int, tuple[int, bytes]]] = {}  # owner -> position -> update and row
        self.computed_differently: set[tuple[str, int]] = set()
        """Owner and position of rows whose second computation had another result."""
        self._watch: RouterWatch
        self.routed: NDArray[np.int32]
        """The routers' choices in the latest pass, ``[tokens, layers, top_k]``; padding is behind them."""

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """For the passes of ``model`` that :meth:`observe` stands around."""
        self._watch = RouterWatch(model)
        try:
            yield
        finally:
            self._watch.close()

    @contextmanager
    def observe(self, work: Sequence[Work]) -> Iterator[None]:
        """Record the routers' choices in a pass over ``work``, back to back; the tokens after it are padding."""
        self._watch.forget()  # passes by others in between
        spans = [(each.sequence.owner, tuple(each.sequence.tokens[: each.stop]), each.start) for each in work]
        yield
        self.routed = self._watch.take()
        rows = iter(self.routed)
        for owner, tokens, start in spans:
            first = self._first.setdefault(owner, {})
            for position, digest in enumerate(_prefix_digests(tokens, start), start):
                row = next(rows).tobytes()
                self._witnessed[-1].setdefault(digest, set()).add(row)
                if first.setdefault(position, (len(self._witnessed) - 1, row))[1] != row:
                    self.computed_differently.add((owner, position))

    def weights_changed(self) -> None:
        """From here on passes use other weights."""
        self._witnessed.append({})

    def judge(
        self, output: Output, second: SecondRun | None = None, by_slot: NDArray[np.int32] | None = None
    ) -> Verdict:
        """The verdict on one sample, which should have rows for all tokens but the last.

        Without a ``second`` run a row that was never recorded is wrong, and tokens are not judged. ``by_slot [tokens,
        layers, top_k]`` are the rows of the same tokens from a buffer keyed by slot, judged alike.
        """
        ids, valid = np.asarray(output.routes.ids).astype(np.int32), np.asarray(output.routes.valid)
        again, expected = np.full(ids.shape, -1, np.int32), len(output.sequence) - 1
        answer_wrong = wrong = judged_by_recompute = slot_wrong = 0
        if second is not None:
            again, logits = second(output.sequence)
            answer_wrong = not _sampled_from(logits, output)
        for position, digest in enumerate(_prefix_digests(output.sequence[: len(ids)], 0)):
            if not valid[position]:
                continue
            witnessed = self._sampled_with(digest, position, output)
            if not witnessed:
                judged_by_recompute += 1
                witnessed = {again[position].tobytes()}
            wrong += ids[position].tobytes() not in witnessed
            if by_slot is not None:
                slot_wrong += by_slot[position].tobytes() not in witnessed
        same = (np.sort(ids, axis=2) == np.sort(again[: len(ids)], axis=2)).all(axis=2)[valid]
        missing = expected - int(np.count_nonzero(valid[:expected]))
        agreed = int(np.count_nonzero(same))
        return Verdict(answer_wrong, expected, wrong, missing, judged_by_recompute, same.size, agreed, slot_wrong)

    def _sampled_with(self, digest: bytes, position: int, of: Output) -> set[bytes]:
        """The rows that are right at ``position``: empty if none was recorded."""
        prompt, first = len(of.request.prompt), self._first.get(f"{of.request.id}#{of.sample}", {})
        if position >= prompt and position in first:
            return {first[position][1]}
        # All samples of a request begin with the pass that computed its last prompt token, for the first of them.
        sampling = self._first.get(f"{of.request.id}#0", {}).get(prompt - 1)
        if position < prompt and sampling is not None:
            return self._witnessed[sampling[0]].get(digest, set())
        return set[bytes]().union(*(witnessed.get(digest, set()) for witnessed in self._witnessed))


class SecondRun:
    """Runs sequences through ``model`` once more, whole and unpaged, with transformers' own attention."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        model.set_attn_implementation("sdpa")  # type: ignore[operator]
        self._watch = RouterWatch(model)

    def __call__(self, tokens: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """The routers' choices for ``tokens``, ``[n, layers, top_k]``, and the logits ``[n, vocabulary]``."""
        padding = [0] * (-len(tokens) % BATCH_MULTIPLE)  # see there
        with torch.inference_mode():
            ids = torch.tensor([[*tokens, *padding]], device=next(self._model.parameters()).device)
            logits = self._model(input_ids=ids, use_cache=False).logits[0, : len(tokens)]
        return self._watch.take()[: len(tokens)], logits.cpu().numpy()


def _sampled_from(logits: NDArray[Any], output: Output) -> bool:
    """Whether each token of the output is the one that is sampled from the logits before it, and ends where it must."""
    sample = Sample(output.request, output.sample, 0, list(output.request.prompt))
    ends = [sample.sample_from(logits[len(sample.tokens) - 1]) for _ in output.tokens]
    end = None if output.reason is FinishReason.ABORT else output.reason
    return tuple(sample.tokens) == output.sequence and ends[:-1] == [None] * (len(ends) - 1) and ends[-1:] == [end]


def _prefix_digests(tokens: tuple[int, ...], start: int) -> list[bytes]:
    """One digest for each of the prefixes ``tokens[: start + 1]`` to ``tokens[:]``."""
    digest = hashlib.blake2b(np.asarray(tokens[:start], dtype="<i8").tobytes(), digest_size=16)
    digests = []
    for token in tokens[start:]:
        digest.update(int(token).to_bytes(8, "little", signed=True))
        digests.append(digest.digest())
    return digests
