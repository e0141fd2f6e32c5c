"""The judge of the demo. It does not rely on kvroute: it hooks the model's routers itself.

While the engine runs, the checker's own hooks record every top-k when it is computed, under a digest of the exact
tokens up to and including the one that was routed. Every row in the output must equal, bit for bit, one that was
recorded for its prefix. Rows of prefixes that the checker never saw computed (an earlier process left them in the
store) are judged against a second run of the sequence, by transformers alone.

If it knows the sample of the rows it checks more: a token is sampled with the rows computed by then, so a position that
was computed again later, perhaps with other weights, must have the row that was *first* computed for that sample, and a
prompt the rows of the weights that sampled the first token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

if TYPE_CHECKING:
    from paged_engine.request import Output
    from paged_engine.scheduler import Work

PASS_MULTIPLE: Final = 16
"""Second runs are padded at the end to this multiple, so that float32 sums go in the same order; see the models."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of the rows of some sequences; verdicts can be added.

    ``rows_judged_by_recompute`` are rows that only a second run could judge. Of ``compared`` (row, layer) pairs, the
    second run chose the same set of experts in ``agreed``.
    """

    rows_expected: int = 0
    rows_wrong: int = 0
    rows_missing: int = 0
    rows_judged_by_recompute: int = 0
    compared: int = 0
    agreed: int = 0

    @property
    def agreement(self) -> float:
        return self.agreed / self.compared if self.compared else 1.0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class RouterWatch:
    """Hooks on the router modules of a transformers model: each layer's ids of the pass since :meth:`take`."""

    def __init__(self, model: nn.Module) -> None:
        routers = []
        for name, module in model.named_modules():
            if "Router" in type(module).__name__ and (layer := re.search(r"\.layers\.(\d+)\.", name)):
                routers.append((int(layer[1]), module))
        routers.sort(key=lambda found: found[0])
        self._ids: list[list[NDArray[np.int32]]] = [[] for _ in routers]
        self._hooks = [module.register_forward_hook(self._keep(i)) for i, (_, module) in enumerate(routers)]

    def _keep(self, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._ids[index].append(output[2].detach().to(torch.int32).cpu().numpy().copy())

        return hook

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
    """Records every top-k and judges routes against them. It outlives engines and models: attach it to each."""

    def __init__(self) -> None:
        self._witnessed: list[dict[bytes, set[bytes]]] = [{}]  # one for each update of the weights
        self._first: dict[str, dict[int, tuple[int, bytes]]] = {}  # owner -> position -> update and row
        self._differently: set[tuple[str, int]] = set()
        self._watch: RouterWatch | None = None
        self._spans: list[tuple[str, tuple[int, ...], int]] = []

    def attach(self, model: nn.Module) -> None:
        """Watch only ``model`` from now on."""
        self.detach()
        self._watch = RouterWatch(model)

    def detach(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def begin(self, work: Sequence[Work]) -> None:
        """A forward pass over ``work``, back to back, is about to run."""
        if self._watch is not None:
            self._watch.forget()  # passes by others in between
        self._spans = [(each.sequence.owner, tuple(each.sequence.tokens[: each.stop]), each.start) for each in work]

    def end(self) -> None:
        """The pass has run: record its routers' choices. The tokens after the work in the batch are padding."""
        if self._watch is None:
            raise AssertionError("the checker is attached to no model")
        rows = iter(self._watch.take())
        for owner, tokens, start in self._spans:
            first = self._first.setdefault(owner, {})
            for position, digest in enumerate(_prefix_digests(tokens, start), start):
                row = next(rows).tobytes()
                self._witnessed[-1].setdefault(digest, set()).add(row)
                if first.setdefault(position, (len(self._witnessed) - 1, row))[1] != row:
                    self._differently.add((owner, position))

    def weights_changed(self) -> None:
        """From here on passes use other weights."""
        self._witnessed.append({})

    @property
    def rows_computed_differently(self) -> int:
        """Positions, over all samples, whose second computation had another result."""
        return len(self._differently)

    def judge(
        self,
        output: Output,
        expected: int | None = None,
        again: NDArray[np.int32] | None = None,
        *,
        owned: bool = False,
    ) -> Verdict:
        """The verdict on one sample's routes, which should have ``expected`` rows: all but the last token's.

        ``again`` are the ids ``[>= expected, layers, top_k]`` of a second run; without one, a row that was never
        recorded is wrong. ``owned``: the sample is of the engine that was watched, and its rows must be those that its
        tokens were sampled with.
        """
        ids, valid = np.asarray(output.routes.ids).astype(np.int32), np.asarray(output.routes.valid)
        again = np.full(ids.shape, -1, np.int32) if again is None else again
        expected = len(output.sequence) - 1 if expected is None else expected
        wrong = judged_by_recompute = 0
        for position, digest in enumerate(_prefix_digests(output.sequence[: len(ids)], 0)):
            if not valid[position]:
                continue
            witnessed = self._sampled_with(digest, position, output if owned else None)
            if not witnessed:
                judged_by_recompute += 1
                witnessed = {again[position].tobytes()}
            wrong += ids[position].tobytes() not in witnessed
        same = (np.sort(ids, axis=2) == np.sort(again[: len(ids)], axis=2)).all(axis=2)[valid]
        missing = expected - int(np.count_nonzero(valid[:expected]))
        return Verdict(expected, wrong, missing, judged_by_recompute, same.size, int(np.count_nonzero(same)))

    def _sampled_with(self, digest: bytes, position: int, of: Output | None) -> set[bytes]:
        """The rows that are right at ``position``: empty if none was recorded."""
        if of is not None:
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

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """The ids ``[len(tokens), layers, top_k]`` that the routers choose for ``tokens``."""
        padding = [0] * (-len(tokens) % PASS_MULTIPLE)
        with torch.inference_mode():
            ids = torch.tensor([[*tokens, *padding]], device=next(self._model.parameters()).device)
            self._model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return self._watch.take()[: len(tokens)]


def _prefix_digests(tokens: tuple[int, ...], start: int) -> list[bytes]:
    """One digest for each of the prefixes ``tokens[: start + 1]`` to ``tokens[:]``."""
    digest = hashlib.blake2b(np.asarray(tokens[:start], dtype="<i8").tobytes(), digest_size=16)
    digests = []
    for token in tokens[start:]:
        digest.update(int(token).to_bytes(8, "little", signed=True))
        digests.append(digest.digest())
    return digests
