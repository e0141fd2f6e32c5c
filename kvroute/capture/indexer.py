"""Takes what the indexers of a transformers sparse attention model choose while it runs, without touching its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.capture import layer_of
from kvroute.capture.errors import CaptureError
from kvroute.indexer import canonical


def find_indexers(model: nn.Module) -> dict[int, nn.Module]:
    """The module ``indexer`` of each decoder layer that has one, by layer id, in increasing order.

    Raises :class:`CaptureError` when there is none, and for two in one layer.
    """
    indexers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "indexer":
            continue
        layer = layer_of(name, "indexers")
        if layer in indexers:
            raise CaptureError("model", "one indexer a layer", name)
        indexers[layer] = module
    if not indexers:
        wanted = "layers with a child indexer"
        raise CaptureError("model", wanted, f"none in {type(model).__name__}")
    return dict(sorted(indexers.items()))


class IndexerCapture:
    """Holds the choices of the last forward pass of ``model``, of the layers of ``spec``, and turns them into rows.

    A hook keeps a reference to what each indexer answers, ``[batch, sequence, up to top_k]`` positions of the sequence.
    One capture serves one forward pass at a time; it is not thread-safe.

    Raises :class:`CaptureError` when the model's layers with an indexer are not ``spec.attrs["layer_ids"]``.
    """

    def __init__(self, model: nn.Module, spec: AuxBlockDataSpec) -> None:
        self.spec, indexers = spec, find_indexers(model)
        if tuple(indexers) != spec.attrs["layer_ids"]:
            raise CaptureError("layers with an indexer", list(spec.attrs["layer_ids"]), list(indexers))
        self._kept: dict[int, torch.Tensor] = {}
        self._calls = dict.fromkeys(indexers, 0)
        self.handles = [indexer.register_forward_hook(self._hook(layer)) for layer, indexer in indexers.items()]

    def _hook(self, layer: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _given: Any, answer: Any) -> None:
            self._kept[layer] = answer
            self._calls[layer] += 1

        return keep

    def rows(self, positions: ArrayLike) -> NDArray[np.int32]:
        """The rows ``[tokens, layers, top_k]`` of the pass since the last :meth:`clear`, in their one form.

        ``positions`` ``[tokens]`` are those of the pass's tokens in their sequences, batch by batch: what an indexer
        names behind them is masked by attention, and is none of a row. Raises :class:`CaptureError` for a layer that
        was not called once, and for an answer that is not one; ``RowError`` as :func:`~kvroute.indexer.canonical` does.
        """
        choices = list[torch.Tensor]()
        for layer, calls in self._calls.items():
            if calls != 1:
                wanted = "one call a pass"
                raise CaptureError(f"indexer of layer {layer}", wanted, f"{calls} calls")
            answer = self._kept[layer]
            if not isinstance(answer, torch.Tensor) or answer.dim() != 3 or answer.is_floating_point():
                got = answer.dtype if isinstance(answer, torch.Tensor) else type(answer).__name__
                wanted = "integers [batch, sequence, up to top_k]"
                raise CaptureError(f"indexer of layer {layer}", wanted, got)
            choices.append(answer.flatten(0, 1))
        shapes = {tuple(choice.shape) for choice in choices}
        if len(shapes) != 1:
            raise CaptureError("indexers", "answers of one shape", sorted(shapes))
        return canonical(torch.stack(choices, dim=1).cpu().numpy(), positions, self.spec.row_shape[1])

    def clear(self) -> None:
        """Forget the last forward pass and release its tensors."""
        self._kept.clear()
        self._calls = dict.fromkeys(self._calls, 0)

    def close(self) -> None:
        """Take the hooks off the model and forget the last pass; a second call is harmless."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["IndexerCapture", "find_indexers"]
