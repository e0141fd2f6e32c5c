"""The fetch of one rank of a trainer: only the rows of its tokens, in the layers of its pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike, NDArray

from cache_manager.errors import InvalidInputError, RowError
from cache_manager.ports import Absence
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.port import RolloutStore
from kvroute.routes import Split, shard_packed, union
from kvroute.routes.fill import Filler, Missing


def fetch_shard(
    store: RolloutStore,
    handles: Sequence[RolloutHandle],
    tokens: Sequence[int],
    split: Split,
    dtype: DTypeLike = "int64",
    missing: Missing = "error",
    *,
    layers: Sequence[int] | None = None,
    pad: Filler = "spread",
    ep: int = 1,
) -> NDArray[Any]:
    """:func:`~kvroute.routes.shard_packed` of rollouts in a store: ``[local tokens, layers, top_k]``.

    ``layers`` are layer ids, in the order of the result; by default those of the stage that have a router.
    ``tokens[i]`` is how many tokens sequence ``i`` has. Raises :class:`RowError` for a rollout that is not there, and
    :class:`InvalidInputError` for a stage without routed layers, and for a given layer without a router.
    """
    if len(handles) != len(tokens) or not handles:
        wanted = f"one number for each of {len(handles)} handles, at least one"
        raise InvalidInputError("tokens", wanted, len(tokens))
    for i, handle in enumerate(handles):
        if not isinstance(handle, RolloutHandle):
            wanted = "a RolloutHandle, of empty routes for a sample without rows"
            raise InvalidInputError(f"handle of sequence {i}", wanted, type(handle).__name__)
    stage = split.layers(handles[0].layout.num_layers) if layers is None else tuple(layers)
    if layers is not None:
        routed = handles[0].layout.routed_layers
        dense = [layer for layer in stage if layer not in routed]
        if dense:
            wanted = f"some of {list(routed)}, which have a router"
            raise InvalidInputError("layers", wanted, dense)
    shards = split.packed(tokens)
    parts = []
    for i, handle in enumerate(handles):
        ranges = [(max(s.start, handle.start), min(s.stop, handle.stop)) for s in shards if s.sequence == i]
        # A rank without tokens of this sequence, or with padding only, still needs the layout of its rows.
        spans = [span for span in ranges if span[0] < span[1]] or [(handle.start, handle.start)]
        # A stage whose layers are all missing is not a stage without routers.
        layout = handle.layout
        lost = set(stage).isdisjoint(layout.layer_ids) and not set(stage).isdisjoint(layout.missing_layers)
        fetched = store.get(handle, layout.layer_ids[:1] if lost else stage, spans)
        if isinstance(fetched, Absence):
            wanted = "routes that are there and whole"
            raise RowError(f"rollout {handle.rollout_id}", wanted, fetched.value)
        parts.append(union(fetched) if len(fetched) > 1 else fetched[0])
    return shard_packed(parts, tokens, split, "moe" if layers is None else stage, dtype, missing, pad=pad, ep=ep)
