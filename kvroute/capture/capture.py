"""Takes the top-k ids of a transformers Mixture-of-Experts model while it runs, without touching its code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cache_manager.spec import AuxBlockDataSpec
from cache_manager.step import Step
from kvroute.capture.errors import CaptureError
from kvroute.capture.hooks import WEIGHTS_PLACE, Hooks, Values
from kvroute.checks import check_ids
from kvroute.routing import routing_weights_spec

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_ROUTER_NAMES = ("gate", "router")
_ROUTER_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        layer_id = layer_of(name, "routers")
        if layer_id in routers:
            wanted = "one router a layer"
            raise CaptureError("model", wanted, f"{routers[layer_id][0]} and {name}")
        routers[layer_id] = (name, router)
    if not routers:
        wanted = "blocks with a child experts and a child gate or router"
        raise CaptureError("model", wanted, f"none in {type(model).__name__}")
    return {layer_id: routers[layer_id][1] for layer_id in sorted(routers)}


def check_weights(ids: AuxBlockDataSpec, weights: AuxBlockDataSpec) -> None:
    """Raise :class:`CaptureError` unless the spec ``weights`` is of the layers and places of ``ids``, in float32."""
    wanted = routing_weights_spec(ids)
    if replace(weights, name=wanted.name) != wanted:
        raise CaptureError("spec of weights", wanted, weights)


def hook_routers(
    routers: Mapping[int, nn.Module],
    hook: Callable[..., Callable[..., None]],
    weights: AuxBlockDataSpec | None,
) -> list[Any]:
    """The handles of hooks on each router, made by ``hook``, as :meth:`Hooks.hook` is: for its ids, and with a spec of
    ``weights`` for those."""
    handles = [router.register_forward_hook(hook(layer)) for layer, router in routers.items()]
    if weights is not None:
        for layer, router in routers.items():
            handles.append(router.register_forward_hook(hook(layer, weights.name, WEIGHTS_PLACE)))
    return handles


def layer_of(name: str, what: str) -> int:
    """The layer id in a module's name; :class:`CaptureError` if it has none."""
    layer = _LAYER.search(name)
    if layer is None:
        wanted = f"{what} inside numbered layers"
        raise CaptureError("model", wanted, name or "one at the top")
    return int(layer[1])


class RoutingCapture:
    """Holds the top-k ids of the last forward pass of ``model`` and turns them into routing rows.

    During a forward pass each router's hook only keeps a reference to its ids: nothing is copied. :meth:`rows` checks
    and copies them; :meth:`clear` prepares for the next pass. The model's results are not changed. One capture serves
    one forward pass at a time; it is not thread-safe.

    With ``weights``, a :func:`~kvroute.routing.routing_weights_spec`, the routers' weights are kept beside their ids.

    Raises :class:`CaptureError` when the model's layers with routers are not ``spec.attrs["layer_ids"]``, and for
    weights of another shape than the ids'.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: AuxBlockDataSpec,
        weights: AuxBlockDataSpec | None = None,
    ) -> None:
        self.spec = spec
        self.weights_spec = weights
        routers = find_routers(model)
        self.layer_ids: tuple[int, ...] = spec.attrs["layer_ids"]
        if tuple(sorted(routers)) != self.layer_ids:
            raise CaptureError("layers with a router", list(self.layer_ids), sorted(routers))
        top_k = spec.row_shape[1]
        values = [Values(spec.name, self.layer_ids, top_k, _ROUTER_DTYPES)]
        if weights is not None:
            check_weights(spec, weights)
            values.append(Values(weights.name, self.layer_ids, top_k, _WEIGHT_DTYPES))
        self._kept = Hooks(values)
        self.handles = hook_routers(routers, self._kept.hook, weights)
        """Torch's handles of the hooks on the model: one that is removed calls back no more."""

    @property
    def topk_ids(self) -> list[torch.Tensor]:
        """Each layer's ids ``[tokens, top_k]`` of the one forward pass since the last :meth:`clear`, not copied.

        Raises :class:`CaptureError` unless every layer routed exactly once, all of them the same number of tokens, and
        into memory of its own.
        """
        return self._kept.taken()[0][: len(self.layer_ids)]

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

    def weights(self) -> NDArray[np.float32]:
        """The weights ``[tokens, layers, top_k]`` of the same pass, in the places of :meth:`rows`' ids, bit for bit.

        A copy that belongs to the caller. Values of 16 bits are widened, which changes none. Raises
        :class:`CaptureError` as :attr:`topk_ids` does, and if the capture was made without a spec of weights.
        """
        if self.weights_spec is None:
            wanted = "a capture with their spec"
            raise CaptureError("weights", wanted, "one of ids alone")
        kept = self._kept.taken()[0][len(self.layer_ids) :]
        weights: NDArray[np.float32] = torch.stack(kept, dim=1).detach().float().cpu().numpy()
        return weights

    @contextmanager
    def step(self, begin: Callable[..., Step], slots: NDArray[Any]) -> Iterator[Step]:
        """A step of ``begin``, a ``begin_step``, at ``slots [tokens]``, around one forward pass.

        Leaving writes the pass's :meth:`rows`, and its :meth:`weights` if there is a spec of them, and commits; an
        exception, also one of ``rows``, commits nothing.
        """
        self.clear()
        with begin(slots) as step:
            yield step
            step.write(self.spec.name, self.rows())
            if self.weights_spec is not None:
                step.write(self.weights_spec.name, self.weights())
        self.clear()

    def clear(self) -> None:
        """Forget the last forward pass and release its tensors."""
        self._kept.clear()

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


__all__ = ["RoutingCapture", "find_routers"]
