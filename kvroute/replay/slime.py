"""Routes for slime and miles: whole samples, or handles from which each rank reads its own part on demand.

slime ships every sample's routes, of all layers, to every rank. Its replay list also takes objects with a method
``materialize_for_routing_replay(stage)``; :class:`LazyMicroBatch` makes those, one per router, so that a rank reads
only the tokens of its context and sequence part and the layers of its pipeline stage.

    cut = slime.split(tp, tp_rank, cp, cp_rank)
    read = lambda layers: fetch_shard(store, handles, tokens, cut, layers=layers)
    micro_batch = slime.LazyMicroBatch(read, layers)
    for replay, layer in zip(RoutingReplay.all_routing_replays, layers):      # the routers of this rank
        replay.record(micro_batch.layer(layer))
    RoutingReplay.register_lazy_resource(micro_batch)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.publish import Rows
from kvroute.replay.rows import ReplayError, all_layers, read_rows, versions
from kvroute.routes import Routes
from kvroute.routes.fill import Missing
from kvroute.routes.split import Cut, Split

if TYPE_CHECKING:
    import torch

Read = Callable[[tuple[int, ...]], NDArray[Any]]
"""``read(layers)``: this rank's rows of one micro-batch, ``[local tokens, layers, top_k]``, of exactly these layers in
this order, for example from a rollout store by ``fetch_shard(..., layers=layers)``. If it raises, nothing is kept, and
the next layer asks again."""

PAD_MULTIPLE: Final = 128
"""slime's default ``data_pad_size_multiplier``."""


def sample(routes: Routes, tokens: int, *, missing: Missing = "error") -> torch.Tensor:
    """slime's ``Sample.rollout_routed_experts``: int32 ``[tokens - 1, num_layers, top_k]``, dense layers zeros.

    slime adds the last row and padding itself. A hole, a row or a layer of one, is an error: slime cannot mark it.
    """
    import torch

    return torch.from_numpy(all_layers(routes, tokens, "int32", missing))


def miles_sample(
    routes: Routes,
    tokens: int,
    *,
    missing: Missing = "error",
) -> NDArray[np.int32]:
    """miles' ``rollout_routed_experts``: always int32, ``[tokens - 1, num_layers, top_k]``.

    miles reads a row of -1 as padding and gives it the experts ``0 .. top_k - 1``; it does not ask the router. So a
    hole is an error unless ``missing`` says otherwise.
    """
    return all_layers(routes, tokens, "int32", missing)


def miles_indexer_topk(rows: Rows, tokens: int) -> NDArray[np.int32]:
    """miles' ``rollout_indexer_topk``: int32 ``[tokens - 1, layers with an indexer, top_k]``, in C order.

    ``rows`` are those of an :func:`~kvroute.indexer.indexer_spec` from position 0 on; the positions of a row increase,
    and -1 fills it. miles reads a row of -1 alone as padding and gives it the positions ``0 .. top_k - 1``: a missing
    row is a :class:`ReplayError` that names it.
    """
    count = read_rows(tokens)
    values, valid = rows.values, rows.valid
    if values.dtype != np.int32 or values.ndim != 3 or len(values) < count:
        wanted = f"int32 [{count} or more, layers, top_k]"
        got = f"{values.dtype} {list(values.shape)}"
        raise ReplayError("indexer rows", wanted, got)
    if not valid[:count].all():
        wanted = "one: miles cannot mark its lack"
        raise ReplayError(f"indexer row {int(np.argmin(valid[:count]))}", wanted, "none")
    return np.ascontiguousarray(values[:count])


def weight_versions(routes: Routes, tokens: int) -> list[str]:
    """``Sample.weight_versions``: the versions that computed the rows, one entry per change."""
    return [str(version) for version, _ in groupby(versions(routes, tokens))]


def split(
    tp: int = 1,
    tp_rank: int = 0,
    cp: int = 1,
    cp_rank: int = 0,
    *,
    pp: int = 1,
    pp_rank: int = 0,
    sequence_parallel: bool = False,
    allgather_cp: bool = False,
    data_pad_size_multiplier: int = PAD_MULTIPLE,
) -> Split:
    """How slime and miles cut a packed micro-batch: each sample to a multiple of ``2 cp``, the tail of the rank's rows
    to one of ``tp * data_pad_size_multiplier``; with ``allgather_cp`` samples end to end, in ``cp`` equal parts."""
    layout: Cut = "contiguous" if allgather_cp else "zigzag"
    align = 2 * cp if cp > 1 and not allgather_cp else 1
    tail_align = tp * data_pad_size_multiplier
    return Split(tp, tp_rank, cp, cp_rank, sequence_parallel, pp, pp_rank, layout, align, tail_align)


class LazyMicroBatch:
    """The routes of one micro-batch on one rank, read when the first of its routers asks, for one pass at a time.

    ``layers`` are the rank's routed layers, counted from 0, in any order: ``read`` gets just these. The rows are held
    until every layer has asked for its own; then they are forgotten, and the backward pass reads them again. Not
    thread-safe. Raises :class:`ReplayError` for a layer that is given twice.
    """

    def __init__(
        self,
        read: Read,
        layers: Sequence[int],
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._read = read
        self._layers = tuple(layers)
        if len(set(self._layers)) < len(self._layers):
            raise ReplayError("layers", "each layer once", self._layers)
        self._device = device
        self._rows: NDArray[Any] | None = None  # [local tokens, layers, top_k]
        self._owed: set[int] = set()  # layers that have not asked yet in the current pass
        self._stage: str | None = None

    def layer(self, layer: int) -> LazyLayer:
        """The handle of the router of ``layer``; for ``RoutingReplay.record``."""
        if layer not in self._layers:
            raise ReplayError("layer", f"one of {list(self._layers)}", layer)
        return LazyLayer(self, layer)

    def begin_pass(self, stage: str) -> None:  # noqa: ARG002  # slime's signature: the stage whose rows may be dropped
        """slime begins another pass: forget the rows of an interrupted one."""
        self.close()

    def rows(self, layer: int, stage: str) -> torch.Tensor:
        """This rank's rows of ``layer``, ``[local tokens, top_k]`` int64 on the device; ``stage`` names the pass."""
        import torch

        if self._rows is None or stage != self._stage or layer not in self._owed:
            self.close()
            rows = self._read(self._layers)
            if rows.ndim != 3 or rows.shape[1] != len(self._layers):
                wanted = f"shape (local tokens, {len(self._layers)}, top_k)"
                raise ReplayError("rows", wanted, rows.shape)
            self._rows, self._owed, self._stage = rows, set(self._layers), stage
        ids = torch.from_numpy(self._rows[:, self._layers.index(layer)].astype(np.int64))
        self._owed.discard(layer)
        if not self._owed:
            self.close()
        return ids.to(self._device)

    def close(self) -> None:
        """Forget all rows; slime is done with the micro-batch. A second call is harmless."""
        self._rows = None
        self._stage = None
        self._owed.clear()


class LazyLayer:
    """An entry of a router's replay list, for one micro-batch, in place of a tensor."""

    def __init__(self, micro_batch: LazyMicroBatch, layer: int) -> None:
        self._micro_batch = micro_batch
        self._layer = layer

    def materialize_for_routing_replay(self, stage: str) -> torch.Tensor:
        """``[local tokens, top_k]`` int64; ``stage`` is ``"forward"`` or ``"backward"``."""
        return self._micro_batch.rows(self._layer, stage)
