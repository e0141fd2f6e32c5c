"""Which rows of a sequence a trainer gets, and the checks of every batch and every id."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError
from kvroute.checks import whole
from kvroute.routes import Routes, Split
from kvroute.routes.cells import some_known
from kvroute.routes.fill import FillPlan, Missing
from kvroute.routes.layout import check_alike
from kvroute.routes.spans import UNKNOWN, by_position

if TYPE_CHECKING:
    import torch
    from torch import nn


_LAYER_NUMBER: Final = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


class ReplayError(InvalidInputError):
    """Routes that a trainer must not get, or a model that cannot take routes: nothing was replayed. Or rows that a
    router did not use, as a receipt says."""


MISSING: Final = -1
"""Every id of a missing row in a layer: the router then chooses for itself."""


def replaying(
    chunks: Sequence[nn.Module],
    layer_of: Callable[[str, Any], int],
    what: str,
    flag: str,
) -> dict[int, Any]:
    """The modules with a replay object by layer id, in increasing order, without those of multi-token prediction.

    ``layer_of(name, module)`` returns a module's layer. :class:`ReplayError` for two of ``what`` in one layer, and if
    there are none in a model that was built without ``flag``. With it, a pipeline stage may be without any.
    """
    routers = numbered(chunks, lambda module: getattr(module, "router_replay", None) is not None, layer_of, what)
    if not routers and not _replays(chunks, what, flag):
        raise ReplayError("model", f"{what}s with a replay object: {flag}", "none")
    return routers


def numbered(
    chunks: Sequence[nn.Module],
    wanted: Callable[[Any], bool],
    layer_of: Callable[[str, Any], int],
    what: str,
) -> dict[int, Any]:
    """The ``wanted`` modules by layer id, in increasing order, without those of multi-token prediction.

    ``layer_of(name, module)`` returns a module's layer. :class:`ReplayError` for two of ``what`` in one layer.
    """
    routers: dict[int, tuple[str, Any]] = {}
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if not wanted(module) or "mtp" in name.split("."):
                continue
            path = f"{number}.{name}" if len(chunks) > 1 else name
            layer = layer_of(path, module)
            if layer in routers:
                got = f"{routers[layer][0]} and {path}"
                raise ReplayError(f"layer {layer}", f"one {what}", got)
            routers[layer] = path, module
    return {layer: routers[layer][1] for layer in sorted(routers)}


def own_layer(path: str, router: Any) -> int:
    """The layer of a router of Megatron's, by its own number."""
    number = getattr(router, "layer_number", None)
    if number is None:
        raise ReplayError(path, "a layer number, as Megatron's layers set it", None)
    return int(number) - 1


def layer_in_name(path: str, _module: object) -> int:
    """The layer of a module inside numbered layers, by its name."""
    layer = _LAYER_NUMBER.search(path)
    if layer is None:
        wanted = "gates inside numbered layers"
        raise ReplayError("model", wanted, path or "one at the top")
    return int(layer[1])


def check_stage(layers: Sequence[int], routes: Sequence[Routes], split: Split) -> None:
    """:class:`ReplayError` unless each of a model's ``layers`` has a router in all ``routes``, and ``split`` cuts no
    layers: the model has those of its stage and no others."""
    if split.pp != 1:
        wanted = "pp=1: the model has the layers of its stage and no others"
        raise ReplayError("split", wanted, f"pp={split.pp}")
    for i, part in enumerate(routes):
        dense = [layer for layer in layers if layer not in part.routed_layers]
        if dense:
            wanted = f"a router in the routes of sample {i}, which have them on {part.routed_layers}"
            raise ReplayError(f"layer {dense[0]}", wanted, "one in the model alone")


def _replays(chunks: Sequence[nn.Module], what: str, flag: str) -> bool:
    """Whether the configuration of ``chunks`` has ``flag``, and no module called ``what`` is without replay."""
    modules = [(name.split("."), module) for chunk in chunks for name, module in chunk.named_modules()]
    if any(path[-1] == what and "mtp" not in path for path, _ in modules):
        return False
    return any(getattr(getattr(module, "config", None), flag, False) for _, module in modules)


def read_rows(tokens: int, field: str = "tokens") -> int:
    """How many of ``tokens`` tokens (at least one) were read by a forward pass and have a row: all but the last."""
    return whole(field, tokens, 1, error=ReplayError) - 1


def counted(field: str, tokens: int) -> int:
    """``tokens``; :class:`ReplayError` if that is not a number of tokens."""
    return whole(field, tokens, error=ReplayError)


def checked_ids(
    integers: torch.Tensor,  # [tokens, layers, top_k]  any integer dtype
    field: str,
    layers: Sequence[int],
    *,
    top_k: int | None = None,
    experts: int | None = None,
    missing: bool = False,
) -> torch.Tensor:
    """``integers`` as int64; :class:`ReplayError` unless all rows are of ``layers`` and name distinct experts.

    That is ``top_k`` of them, in ``[0, experts)``, if these are given. ``missing`` also accepts rows of -1.
    """
    import torch

    if integers.dim() != 3 or integers.shape[1] != len(layers) or integers.shape[2] != (top_k or integers.shape[2]):
        wanted = f"[tokens, {len(layers)} layers, top_k{f' {top_k}' if top_k else ''}]"
        got = f"{integers.dtype} of shape {tuple(integers.shape)}"
        raise ReplayError(field, f"integers {wanted}", got)
    if integers.is_floating_point() or integers.dtype == torch.bool:
        raise ReplayError(field, "integers", integers.dtype)
    ids = integers.to(torch.int64)  # torch knows neither max nor gather of uint16
    ordered = ids.sort(dim=-1).values
    low = ordered[..., 0]
    high = ordered[..., -1]
    outside = low < 0 if experts is None else (low < 0) | (high >= experts)
    wrong = outside | (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    if missing:
        wrong &= (low != MISSING) | (high != MISSING)
    if bool(wrong.any()):
        token, layer = wrong.nonzero()[0].tolist()
        wanted = "distinct ids, 0 or more" if experts is None else f"distinct ids in [0, {experts})"
        wanted += f", or {MISSING} throughout" if missing else ""
        raise ReplayError(f"{field} token {token} layer {layers[layer]}", wanted, ids[token, layer].tolist())
    return ids


def all_layers(
    routes: Routes,
    tokens: int,
    dtype: str,
    missing: Missing = "error",
    *,
    held: int = 0,
) -> NDArray[Any]:
    """The rows ``[held, tokens - 1)`` of all layers, for a trainer that adds the last one itself.

    It has the first ``held`` from earlier turns; ``routes`` need not have those.
    """
    if counted("held", held) > (rows := read_rows(tokens)):
        wanted = f"rows of earlier turns, fewer than {tokens} tokens"
        raise ReplayError("held", wanted, held)
    plan = FillPlan(routes.layout, "all", np.dtype(dtype), 1, missing)
    out = np.empty((rows - held, len(plan.layers), routes.top_k), plan.dtype)
    plan.fill(out, routes, held, missing)
    return out


def versions(routes: Routes, tokens: int) -> list[int]:
    """The weights version of each row of ``tokens`` tokens, in order; missing rows are left out.

    :class:`ReplayError` names the first row whose version is unknown, or the position that has no row.
    """
    rows = read_rows(tokens)
    kept = routes.slice(routes.start, max(routes.start, min(routes.stop, rows)))
    row_versions = by_position(kept.weights_versions, kept.start, kept.stop)[some_known(kept.mask)]
    if not len(row_versions):
        raise ReplayError("weights versions", "a row that has one", "no row")
    unknown = row_versions == UNKNOWN
    if unknown.any():
        row = kept.start + int(np.flatnonzero(some_known(kept.mask))[unknown.argmax()])
        wanted = "one, as the rollout knows it"
        raise ReplayError(f"weights version of row {row}", wanted, "none")
    versions: list[int] = row_versions.tolist()
    return versions


def check_batch(routes: Sequence[Routes], **counts: Sequence[Any]) -> None:
    """Raise unless there are samples, as many numbers in each of ``counts``, and all samples are of one model.

    :class:`ReplayError` names the counts; ``RowError`` the sample, the field and both values.
    """
    if not routes or any(len(numbers) != len(routes) for numbers in counts.values()):
        wanted = f"one number for each of {len(routes)} samples, at least one"
        raise ReplayError(", ".join(counts), wanted, " and ".join(str(len(numbers)) for numbers in counts.values()))
    check_alike(routes)
