"""Which of the ids that a router's hook gets are of this rank's own tokens, with several data-parallel ranks.

vLLM brings the tokens of all data-parallel ranks to all experts, before a layer's router or after it. Where sequences
are divided among tensor-parallel ranks too, each of those has a shard of its data-parallel rank's tokens.

============================  =================================  ===========================
a layer's tokens are gathered  whole                              in shards
============================  =================================  ===========================
behind its router             this rank's tokens                 this rank's shard
before its router             the tokens of all ranks in order   the shards of all ranks
============================  =================================  ===========================

The law: the layer says which of the four it is, never a number of tokens that happens to fit. The numbers are those of
the layer's own gather in the same call (``DPMetadata.local_sizes``), and the ids have to be as many; else the pass has
no ids. So a CUDA graph that repeats a hook repeats that gather with the same numbers. A hook keeps its rank's shard;
the shards of a data-parallel rank are joined once a pass, by :func:`join_of`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from cache_manager.errors import ConfigError
from kvroute.capture.step_ids import NO_ID

logger = logging.getLogger(__name__)

Keep = Callable[[Any], None]

GATHERS: Final = {"MoEPrepareAndFinalizeNaiveDPEPMonolithic": True, "MoEPrepareAndFinalizeNoDPEPMonolithic": False}
"""Whether vLLM's preparation of a kernel that routes inside brings all ranks' tokens together."""


class RankPlace(NamedTuple):
    """Which rank this is, of how many."""

    data: int
    data_size: int
    shard: int = 0  # among the tensor-parallel ranks that divide a sequence; 0 of 1: none do
    shards: int = 1

    @property
    def part(self) -> int:
        """Of this rank's part among those of a gather: data-parallel ranks in order, the shards of each in order."""
        return self.data * self.shards + self.shard


def own_part(ids: int, sizes: Sequence[int] | None, place: RankPlace, *, gathered: bool) -> slice | None:
    """Where this rank's part is among so many ``ids``; ``sizes`` are the tokens of each rank's part, in the order of a
    gather. ``None``: the ids are not those that the layer says."""
    if sizes is None or len(sizes) != place.data_size * place.shards:
        return None
    start = sum(sizes[: place.part]) if gathered else 0
    stop = start + sizes[place.part]
    whole = sum(sizes) if gathered else stop
    return slice(start, stop) if ids == whole else None


def place_of(config: Any, layers: Mapping[str, Any], tensor_rank: int) -> RankPlace | None:
    """This rank's place among those that the routed ``layers`` exchange tokens with; ``None``: each rank's routers have
    all of its tokens. ``config`` is vLLM's ``ParallelConfig``.

    Raises :class:`ConfigError` for layers that divide sequences differently, or whose layout is not known.
    """
    moe_configs = [getattr(layer, "moe_config", None) for layer in layers.values()]
    shards = {getattr(moe_config, "sp_size", 1) for moe_config in moe_configs} or {1}
    data_size = config.data_parallel_size
    if data_size == 1 and shards == {1}:
        return None
    if len(shards) > 1:
        wanted = "one number of shards of a sequence for all"
        raise ConfigError("layers with routers", wanted, sorted(shards))
    for name, layer in layers.items():
        if gathers(layer) is None:
            kinds = ", ".join(GATHERS)
            wanted = f"vLLM's own runner, or a kernel with one of {kinds}, beside several ranks of data"
            raise ConfigError(f"layer {name}", wanted, _kind(layer))
    (count,) = shards
    shard = tensor_rank if count > 1 else 0
    return RankPlace(config.data_parallel_rank, data_size, shard, count)


def gathers(layer: Any) -> bool | None:
    """Whether ``layer``, vLLM's ``MoERunner``, brings all ranks' tokens together before it routes; ``None``: it does
    not say."""
    if not hasattr(layer, "do_naive_dispatch_combine"):
        return None
    preparation = _preparation(layer)
    if preparation is None:
        return bool(layer.do_naive_dispatch_combine)
    return GATHERS.get(type(preparation).__name__)


def _preparation(layer: Any) -> Any:
    """What prepares the tokens for a kernel that routes inside; ``None``: a router chooses before the kernel."""
    method = layer.routed_experts.quant_method
    if not method.is_monolithic:
        return None
    return method if method.moe_kernel is None else method.moe_kernel.prepare_finalize


def _kind(layer: Any) -> str:
    preparation = None
    if hasattr(layer, "do_naive_dispatch_combine"):
        preparation = _preparation(layer)
    named = layer if preparation is None else preparation
    return type(named).__name__


def hook_of(name: str, layer: Any, place: RankPlace, keep: Keep) -> Keep:
    """A hook that hands ``keep`` this rank's part of a layer's ids; or none of them if they are not what the layer
    says, so that the pass has no ids. A shard, for which other ranks wait, has as many then that are none."""
    warned = False

    def keep_own(ids: torch.Tensor) -> None:
        nonlocal warned
        from vllm.forward_context import get_forward_context  # type: ignore[import-not-found]

        metadata = get_forward_context().dp_metadata
        sizes = None if metadata is None else metadata.local_sizes
        gathered = gathers(layer)
        part = None if gathered is None else own_part(len(ids), sizes, place, gathered=gathered)
        if gathered and len(set(sizes or ())) > 1 and _in_a_graph(ids):
            part = None  # a graph is replayed by steps in which all ranks have as many tokens
        if part is None and not warned:
            warned = True
            logger.warning(
                "no rows: layer %s has %d ids of ranks' %s tokens, gathered: %s", *(name, len(ids), sizes, gathered)
            )
        if part is not None:
            keep(ids[part])
        elif sizes and place.shards > 1 and len(sizes) == place.data_size * place.shards:  # others wait for the shard
            keep(ids.new_full((sizes[place.part], *ids.shape[1:]), NO_ID))
        else:
            keep(ids[:0])

    return keep_own


def _in_a_graph(ids: torch.Tensor) -> bool:
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()


def join_of(place: RankPlace | None, group: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What joins the shards ``[tokens, ...]`` of the ranks of ``group``, vLLM's tensor-parallel one, in their order;
    ``None``: there are none. Every rank of the group has to call it in each pass."""
    if place is None or place.shards == 1:
        return None
    return lambda shard: group.all_gather(shard, 0)


__all__ = ["GATHERS", "RankPlace", "gathers", "hook_of", "join_of", "own_part", "place_of"]
