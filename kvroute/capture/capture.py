"""Takes the top-k ids of a transformers Mixture-of-Experts model while it runs, without touching its code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import nn

from cache_manager.spec import AuxBlockDataSpec
from cache_manager.step import Step
from kvroute.capture.errors import CaptureError
from kvroute.capture.hooks import Hooks, Values
from kvroute.checks import check_ids

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_ROUTER_NAMES = ("gate", "router")
_ROUTER_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def find_routers(model: nn.Module) -> dict[int, nn.Module]:
    """The router module of each decoder layer that has one, by layer id, in increasing order.

    In transformers >= 5 a Mixture-of-Experts block has a child ``experts`` and a child ``gate`` or ``router`` that
    answers ``(logits, weights, ids)``; the layer id is the number after ``layers`` in the module's name.

    Raises :class:`CaptureError` when the model has no such block, or two in one layer (a vision and a text router).
    """
    routers: dict[int, tuple[str, nn.Module]] = {}
    for name, block in model.named_modules():
        children = dict(block.named_children())
        router = next((children[n] for n in _ROUTER_NAMES if n in children), None)
        if router is None or "experts" not in children:
            continue
        layer = _LAYER.search(name)
        if layer is None:
            raise CaptureError("model", "routers inside numbered layers", name or "one at the top")
        layer_id = int(layer[1])
        if layer_id in routers:
            raise CaptureError("model", "one router a layer", f"{routers[layer_id][0]} and {name}")
        routers[layer_id] = (name, router)
    if not routers:
        wanted = "blocks with a child experts and a child gate or router"
        raise CaptureError("model", wanted, f"none in {type(model).__name__}")
    return {layer_id: routers[layer_id][1] for layer_id in sorted(routers)}


class RoutingCapture:
    """Holds the top-k ids of the last forward pass of ``model`` and turns them into routing rows.

    During a forward pass each router's hook only keeps a reference to its ids: nothing is copied. :meth:`rows` checks
    and copies them; :meth:`clear` prepares for the next pass. The model's results are not changed. One capture serves
    one forward pass at a time; it is not thread-safe.

    Raises :class:`CaptureError` when the model's layers with routers are not ``spec.attrs["layer_ids"]``.
    """

    def __init__(self, model: nn.Module, spec: AuxBlockDataSpec) -> None:
        self.spec = spec
        routers = find_routers(model)
        self.layer_ids: tuple[int, ...] = spec.attrs["layer_ids"]
        if tuple(sorted(routers)) != self.layer_ids:
            raise CaptureError("layers with a router", list(self.layer_ids), sorted(routers))
        self._kept = Hooks([Values(spec.name, self.layer_ids, spec.row_shape[1], _ROUTER_DTYPES)])
        self._hooks = [routers[layer].register_forward_hook(self._kept.hook(layer)) for layer in self.layer_ids]

    @property
    def topk_ids(self) -> list[torch.Tensor]:
        """Each layer's ids ``[tokens, top_k]`` of the one forward pass since the last :meth:`clear`, not copied.

        Raises :class:`CaptureError` unless every layer routed exactly once, all of them the same number of tokens, and
        into memory of its own.
        """
        return self._kept.taken()[0]

    def rows(self) -> NDArray[Any]:
        """The rows ``[tokens, layers, top_k]`` of the forward pass since the last :meth:`clear`, in the spec's dtype.

        Tokens are in the order of the model's flattened input (``[batch, sequence]``: batch by batch); ids within a
        row are in the router's order. The array is a copy that belongs to the caller.

        Raises :class:`CaptureError` as :attr:`topk_ids` does, and ``RowError``, naming the token and the layer, for an
        id outside ``[0, num_experts)`` or twice in a row. On an accelerator this waits for the pass.
        """
        ids = torch.stack(self.topk_ids, dim=1).cpu().numpy()
        check_ids(ids, self.spec.attrs["num_experts"], self.layer_ids)
        return self.spec.rows(ids, tokens=len(ids))

    @contextmanager
    def step(self, begin: Callable[..., Step], slots: NDArray[Any]) -> Iterator[Step]:
        """A step of ``begin``, a ``begin_step``, at ``slots [tokens]``, around one forward pass.

        Leaving writes the pass's :meth:`rows` and commits; an exception, also one of ``rows``, commits nothing.
        """
        self.clear()
        with begin(slots) as step:
            yield step
            step.write(self.spec.name, self.rows())
        self.clear()

    def clear(self) -> None:
        """Forget the last forward pass and release its tensors."""
        self._kept.clear()

    def close(self) -> None:
        """Take the hooks off the model and forget the last pass; a second call is harmless."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["RoutingCapture", "find_routers"]
