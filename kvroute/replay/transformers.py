"""Forces recorded routes on a transformers Mixture-of-Experts model, without touching its code.

Only the selection is replayed. Each router computes its scores as always; inside the router's own ``forward`` the one
top-k over its experts returns the recorded ids, with values gathered from the present scores. The family's next steps
(normalisation, scaling, bias) are its own code, so the weights are the current router's and carry their gradient. A
missing row, or layer of a row (all -1), takes the router's own choice, bit for bit.

R3 replays what the rollout routed: targets made by :func:`padded` or :func:`packed` from ``Routes``. R2 replays what
the trainer itself routed when it computed the old log probabilities: targets made by :func:`recorded` from a
``RoutingCapture`` of that pass.

    with replay(model, padded(routes, attention_mask)):
        loss(model(input_ids, attention_mask)).backward()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.capture import RoutingCapture, find_routers
from kvroute.replay.passes import one_pass
from kvroute.replay.rows import ReplayError, checked_ids, read_rows
from kvroute.replay.watching import note_installed, note_over
from kvroute.routes import Routes, RoutingWeights, Split, shard_packed, shard_padded
from kvroute.routes.fill import PaddedSide
from kvroute.routing import routing_spec_from_hf

_WHOLE: Final = Split()


def padded(
    routes: Sequence[Routes],
    mask: torch.Tensor | NDArray[Any],  # [batch, width]  bool or integers: 1 for a token, 0 for padding
    split: Split = _WHOLE,
) -> torch.Tensor:
    """Targets ``[batch, width, layers, top_k]`` int64 for ``input_ids`` ``[batch, width]`` with this attention mask.

    The mask says how many tokens each sample has, prompt and response, and on which side they are padded: one for the
    whole batch. The last sampled token, padding and all rows and layers that the routes lack are :data:`MISSING`.
    ``layers`` are the model's routed layers only, in order. ``split`` is this rank's part of the columns, if tokens are
    sharded.

    Raises :class:`ReplayError` for a mask that does not fit such a batch, ``RowError`` for unlike samples.
    """
    tokens, width, side = _padding(torch.as_tensor(mask), len(routes))
    return torch.from_numpy(
        shard_padded(routes, tokens, split, width=width, side=side, order="batch", missing="minus1", pad="minus1")
    )


def _padding(mask: torch.Tensor, samples: int) -> tuple[list[int], int, PaddedSide]:
    """How many tokens each sample has, the width of the batch, and the side that all are padded on."""
    is_bits = not mask.is_floating_point() and bool(((mask == 0) | (mask == 1)).all())
    if mask.dim() != 2 or len(mask) != samples or not is_bits:
        wanted = f"1 for tokens and 0 for padding, [{samples} samples, width]"
        raise ReplayError("mask", wanted, f"{mask.dtype} of shape {tuple(mask.shape)}")
    there = mask.bool().cpu()
    counts = there.sum(dim=1, keepdim=True)
    places = torch.arange(mask.shape[1])
    right = (there == (places < counts)).all(dim=1)
    left = (there == (places >= mask.shape[1] - counts)).all(dim=1)
    if not bool(right.all()) and not bool(left.all()):
        strange = ~(right | left)
        if not bool(strange.any()):  # each is padded on one side, and not all on the first one's
            strange = ~right if bool(right[0]) else ~left
        sample = int(strange.int().argmax())
        wanted = "tokens side by side, padded on the same side in all samples"
        raise ReplayError(f"mask of sample {sample}", wanted, there[sample].int().tolist())
    return counts[:, 0].tolist(), mask.shape[1], "right" if bool(right.all()) else "left"


def packed(
    routes: Sequence[Routes],
    tokens: Sequence[int],
    split: Split = _WHOLE,
) -> torch.Tensor:
    """Targets ``[sum(tokens), layers, top_k]`` int64 of samples laid end to end in one row of tokens.

    With a ``split``, only this rank's part of them, each sample padded as the split says.
    """
    return torch.from_numpy(shard_packed(routes, tokens, split, missing="minus1", pad="minus1"))


def packed_weights(weights: Sequence[RoutingWeights], tokens: Sequence[int]) -> torch.Tensor:
    """Constants ``[sum(tokens), layers, top_k]`` float32 beside ``packed([w.routes for w in weights], tokens)``: NaN
    where those are missing."""
    constants = [_constants(part, count) for part, count in zip(weights, tokens, strict=True)]
    return torch.from_numpy(np.concatenate(constants))


def padded_weights(weights: Sequence[RoutingWeights], mask: torch.Tensor | NDArray[Any]) -> torch.Tensor:
    """Constants ``[batch, width, layers, top_k]`` float32 beside ``padded([w.routes for w in weights], mask)``: NaN
    where those are missing."""
    tokens, width, side = _padding(torch.as_tensor(mask), len(weights))
    row_shape = weights[0].weights.shape[1:]
    out = np.full((len(weights), width, *row_shape), np.nan, np.float32)
    for i, (part, count) in enumerate(zip(weights, tokens, strict=True)):
        first = 0 if side == "right" else width - count
        out[i, first : first + count] = _constants(part, count)
    return torch.from_numpy(out)


def _constants(part: RoutingWeights, tokens: int) -> NDArray[np.float32]:
    """The weights of the rows of ``tokens`` tokens, NaN where there is none, as in the last token's row."""
    rows = read_rows(tokens)
    out = np.full((tokens, *part.weights.shape[1:]), np.nan, np.float32)
    start, stop = part.routes.start, min(part.routes.stop, rows)
    if start < stop:
        out[start:stop] = part.weights[: stop - start]
    return out


def recorded(capture: RoutingCapture) -> torch.Tensor:
    """Targets ``[tokens, layers, top_k]`` int64 of the last forward pass of ``capture``, on its device.

    A copy: clearing the capture does not change them. Raises ``CaptureError`` as ``RoutingCapture.topk_ids`` does.
    """
    return torch.stack(capture.topk_ids, dim=1).to(torch.int64)


@contextmanager
def replay(
    model: nn.Module,
    targets: torch.Tensor,  # [..., layers, top_k] any integer dtype; -1 = the router's own choice
    *,
    weights: torch.Tensor | None = None,  # [..., layers, top_k] float32, beside targets; NaN where those are -1
    spec: AuxBlockDataSpec | None = None,
) -> Iterator[None]:
    """Within the block, every routed layer of ``model`` uses the experts that ``targets`` names.

    With ``weights`` it sums their outputs by these, which are constants: without a gradient, and so only for a model
    whose routers are frozen.

    The leading axes of ``targets`` are the model's flattened tokens, ``[batch, sequence]`` batch by batch. Every
    forward pass inside the block takes the same targets, so the block is one micro-batch: with gradient checkpointing
    its backward pass too, because the recomputation routes again. A recomputation of the block's passes after the
    block, or in another micro-batch's, is an error, reentrant or not; one hook on each router stays to see it.

    ``spec`` (by default ``routing_spec_from_hf(model.config)``) says which layers route among how many experts. Leaving
    the block leaves the model as it was but for that hook. Not for ``torch.compile``, nor for kernels that fuse router
    and experts.

    Raises :class:`ReplayError` for targets that do not fit the model, for a token count that is not the batch's, for a
    router that does not select by exactly one ``torch.topk`` over its experts; and for weights that are not beside
    targets, or of a model with a router that is trained.
    """
    if spec is None:
        config: Any = model.config
        spec = routing_spec_from_hf(config, block_tokens=1)
    found = find_routers(model)
    layer_ids = spec.attrs["layer_ids"]
    if tuple(sorted(found)) != layer_ids:
        raise ReplayError("layers with a router", list(layer_ids), sorted(found))
    flat = targets if targets.dim() < 3 else targets.flatten(0, -3)
    experts = spec.attrs["num_experts"]
    top_k = spec.row_shape[1]
    ids = checked_ids(flat, "targets", layer_ids, top_k=top_k, experts=experts, missing=True)
    any_missing = bool((ids < 0).any())
    constants = None if weights is None else _checked_constants(found, ids, weights)
    batched = targets.dim() == 4  # [batch, width, layers, top_k]
    samples = np.arange(len(targets)).repeat(targets.shape[1]) if batched else None
    replayed = [layer for layer, router in found.items() if isinstance(vars(router).get("forward"), _Forced)]
    if replayed:
        raise ReplayError("model", "no replay in progress", f"one on layers {replayed}")
    try:
        for index, layer_id in enumerate(layer_ids):
            router = found[layer_id]
            where = f"router of layer {layer_id}"
            rows = ids[:, index].contiguous()
            own = None if constants is None else constants[:, index].contiguous()
            _Forced(router, where, rows, experts, any_missing, own).install()
        with one_pass(found):
            note_installed(found, ids, samples)
            yield
    finally:
        note_over(found)
        for router in found.values():
            if isinstance(forced := vars(router).get("forward"), _Forced):
                forced.remove()


def _checked_constants(
    routers: Mapping[int, nn.Module],
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """``weights`` as ``[tokens, layers, top_k]``; :class:`ReplayError` unless each known id has one, and no other."""
    for layer, router in routers.items():
        trained = [name for name, parameter in router.named_parameters() if parameter.requires_grad]
        if trained:
            wanted = "frozen parameters, as weights are constants"
            got = f"{', '.join(trained)} with a gradient"
            raise ReplayError(f"router of layer {layer}", wanted, got)
    flat = weights if weights.dim() < 3 else weights.flatten(0, -3)
    if flat.shape != ids.shape or flat.dtype != torch.float32:
        got = f"{flat.dtype} {list(flat.shape)}"
        raise ReplayError("weights", f"float32 {list(ids.shape)}, as the targets", got)
    wrong = flat.isfinite() != (ids >= 0).to(flat.device)
    if bool(wrong.any()):
        token, layer, _ = wrong.nonzero()[0].tolist()
        where = f"weights of token {token} layer {list(routers)[layer]}"
        wanted = "finite weights beside known ids, and NaN beside others"
        raise ReplayError(where, wanted, flat[token, layer].tolist())
    return flat


class _Forced:
    """Stands in for one router's ``forward`` while its routes ``ids`` ``[tokens, top_k]`` are replayed."""

    def __init__(
        self,
        router: nn.Module,
        where: str,
        ids: torch.Tensor,
        num_experts: int,
        any_missing: bool,
        weights: torch.Tensor | None,
    ) -> None:
        self._router = router
        self._weights = weights
        self.where = where
        self.ids = ids
        self.num_experts = num_experts
        self.any_missing = any_missing
        self._shadowed = vars(router).get("forward")  # an own forward of this one module, as accelerate sets
        self._forward: Callable[..., Any] = router.forward

    def install(self) -> None:
        self._router.forward = self

    def remove(self) -> None:
        if self._shadowed is None:
            del self._router.forward
        else:
            self._router.forward = self._shadowed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Selection(self) as selection:
            answer = self._forward(*args, **kwargs)
        if selection.selected != 1:
            wanted = f"exactly one top-{self.ids.shape[1]} of {self.num_experts} experts"
            got = f"{selection.selected} in {type(self._router).__name__}"
            raise ReplayError(self.where, wanted, got)
        if not isinstance(answer, tuple) or len(answer) < 3:
            wanted = "an answer (logits, weights, ids)"
            raise ReplayError(self.where, wanted, type(answer).__name__)
        return answer if self._weights is None else self._with_constants(answer, self._weights)

    def _with_constants(
        self,
        answer: tuple[Any, ...],
        weights: torch.Tensor,
    ) -> tuple[Any, ...]:
        """The answer with these weights in place of its own, which stay where no row is known."""
        own = answer[1]
        if own.reshape(-1, own.shape[-1]).shape != weights.shape:
            wanted = f"weights {list(weights.shape)} in its answer"
            raise ReplayError(self.where, wanted, list(own.shape))
        constants = weights.to(own.device).to(own.dtype).reshape(own.shape)
        if self.any_missing:
            constants = torch.where(constants.isnan(), own, constants)
        return (answer[0], constants, *answer[2:])


class _Selection(TorchFunctionMode):
    """Replaces the ids of the top-k over all experts by given ones; all other functions run unchanged."""

    def __init__(self, forced: _Forced) -> None:
        super().__init__()
        self.selected = 0
        self._of = forced
        # Group-limited routers blank the groups that they do not choose. After a drift of the router a recorded expert
        # may be in one of those: its score is the one before the blanks.
        self._blanked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else (kwargs or {})["input"]
            experts = self._of.num_experts
            top_k = self._of.ids.shape[1]
            if scores.dim() == 2 and scores.shape[1] == experts and answer[1].shape[1] == top_k:
                return self._select(scores, answer)
        elif func in (torch.masked_fill, torch.Tensor.masked_fill) and answer.dim() == 2:
            self._blanked.append((answer, self._before_blanks(args[0])))
        return answer

    def _select(self, scores: torch.Tensor, native: Any) -> Any:
        self.selected += 1
        if len(scores) != len(self._of.ids):
            wanted = f"{len(self._of.ids)} tokens, as the targets have"
            raise ReplayError(self._of.where, wanted, len(scores))
        ids = self._of.ids.to(scores.device)
        values = self._before_blanks(scores)
        if self._of.any_missing:
            known = ids >= 0
            ids = torch.where(known, ids, native[1])
            return type(native)((torch.where(known, values.gather(1, ids), native[0]), ids))
        return type(native)((values.gather(1, ids), ids))

    def _before_blanks(self, scores: torch.Tensor) -> torch.Tensor:
        return next((whole for blanked, whole in self._blanked if blanked is scores), scores)
