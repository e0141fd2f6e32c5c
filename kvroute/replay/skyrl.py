"""Routes for SkyRL: arrays of the captured prefix, every layer of the model, in the narrowest of SkyRL's dtypes; and
sampling supports.

SkyRL itself fills the positions after the prefix with ``0 .. top_k - 1``, and masks them. A hole *inside* the prefix, a
missing row or layer of one, cannot be marked, so it is an error here, or the prefix ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvroute.replay.rows import ReplayError, all_layers, check_batch, counted, read_rows
from kvroute.routes import Routes, SamplingSupport
from kvroute.routes.cells import some_known


def rollout_expert_indices(
    routes: Sequence[Routes],
    tokens: Sequence[int],
    *,
    holes: Literal["error", "cut"] = "error",
    loss_masks: Sequence[Sequence[int]] | None = None,
) -> list[NDArray[Any]]:
    """``GeneratorOutput["rollout_expert_indices"]``: an array ``[rows, num_layers, top_k]`` for each sample.

    ``rows`` are the positions from 0 on that have a row, at most ``tokens[i] - 1``. The dtype is the one that SkyRL
    requires: uint8 if the *largest id in the array* is below 256, else int16, else int32. The arrays are new, in C
    order and writable.

    With ``loss_masks``, SkyRL's for the responses, a sample that trains nothing and has no whole first row, because
    its generation failed, gets one row of the experts ``0 .. top_k - 1``: SkyRL takes no sample without a row.

    Raises :class:`ReplayError` for any other sample without a whole first row, and for a hole with rows after it unless
    ``holes`` is ``"cut"``: then the prefix ends at the hole, and the trainer does not get the later rows.
    """
    counts: dict[str, Sequence[Any]] = {"tokens": tokens}
    if loss_masks is not None:
        counts["loss_masks"] = loss_masks
    check_batch(routes, **counts)
    if holes not in ("error", "cut"):
        raise ReplayError("holes", "error or cut", repr(holes))
    trains = [True] * len(routes) if loss_masks is None else [bool(np.any(mask)) for mask in loss_masks]
    return [
        _prefix(part, count, i, holes, trains=trains[i])
        for i, (part, count) in enumerate(zip(routes, tokens, strict=True))
    ]


def rollout_sample_support(
    supports: Sequence[SamplingSupport],
    prompts: Sequence[int],
    loss_masks: Sequence[Sequence[int]],
    *,
    top_k: int,
) -> list[NDArray[np.int32]]:
    """``GeneratorOutput["rollout_sample_support"]``: an int32 array ``[response tokens, top_k]`` for each sample.

    A row has the ids that its token was drawn from, and then -1; the row of a token that was not drawn, as of an
    observation between two turns, is -1 throughout. ``prompts`` are the numbers of tokens before the responses,
    ``loss_masks`` SkyRL's for the responses, ``top_k`` the one of its sampling parameters. The arrays are new, in C
    order and writable.

    :class:`RowError` names the position of a token with a loss and without a support, for which SkyRL's step would fail
    without a name, and of one whose support has more than ``top_k`` ids, as where two are equally likely.
    ``ReplayError`` for no samples, for unequal numbers of them, and for supports behind the response.
    """
    if not supports or len(prompts) != len(supports) or len(loss_masks) != len(supports):
        wanted = f"one of each for {len(supports)} samples, at least one"
        got = f"{len(prompts)} and {len(loss_masks)}"
        raise ReplayError("prompts, loss_masks", wanted, got)
    arrays = []
    for i, (support, prompt, loss_mask) in enumerate(zip(supports, prompts, loss_masks, strict=True)):
        stop = counted("prompts", prompt) + len(loss_mask)
        if support.stop > stop:
            wanted = f"supports of the first {stop} tokens"
            raise ReplayError(f"sample {i}", wanted, f"some up to {support.stop}")
        support.check_losses(loss_mask, prompt)
        arrays.append(support.padded(top_k, prompt, stop))
    return arrays


def delta(routes: Routes, held: int, tokens: int) -> NDArray[Any]:
    """The argument of ``RoutedExpertTrace.record_generation`` for one turn: the rows ``[held, tokens - 1)``, complete.

    ``held`` is the trace's ``prompt_start``: the number of rows from earlier turns, which stay as they were sampled.
    ``tokens`` counts prompt and generated tokens up to the end of this turn.
    """
    return _narrowed(all_layers(routes, tokens, "int32", held=held))


def _prefix(
    routes: Routes,
    tokens: int,
    sample: int,
    holes: str,
    *,
    trains: bool,
) -> NDArray[Any]:
    rows = read_rows(tokens)
    gap = routes.first_gap(rows)
    end = rows if gap is None else gap[0]
    if not end and not trains:
        shape = (1, routes.num_layers, routes.top_k)
        return _narrowed(np.broadcast_to(np.arange(routes.top_k), shape).copy())
    if not end:
        got = "none" if gap is None or gap[1] is None else f"one without layer {gap[1]}"
        wanted = "a row at position 0: SkyRL takes prefixes"
        raise ReplayError(f"sample {sample}", wanted, got)
    behind = some_known(routes.mask)[max(end + 1 - routes.start, 0) : max(rows - routes.start, 0)]
    if holes == "error" and behind.any():
        later = int(behind.argmax()) + max(end + 1, routes.start)
        lack = "none" if gap is None or gap[1] is None else f"no layer {gap[1]}"
        wanted = f"no row behind position {end}, which has {lack}"
        raise ReplayError(f"sample {sample}", wanted, f"one at {later}")
    return _narrowed(routes.materialize(end))


def _narrowed(rows: NDArray[Any]) -> NDArray[Any]:
    highest = int(rows.max(initial=0))
    return rows.astype("uint8" if highest < 1 << 8 else "int16" if highest < 1 << 15 else "int32")
