"""Another process's reading of a region: rows of given generations, and anything else missing."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError, RegionError, RegionMismatchError
from cache_manager.publish import (
    GENERATION_END,
    GENERATION_SHIFT,
    Rows,
    gather,
    gather_slots,
    require_ordered_stores,
    window_of,
)
from cache_manager.regions.header import pack_namespace
from cache_manager.regions.shared import SharedRegion
from cache_manager.slots import integers


class RegionView:
    """A shared region attached to by name, read-only, for a process that does not own it.

    A block's row is handed out only if it was written for the generation that the caller names. Rows of another
    namespace than at attach are missing, until :meth:`follow` tells the view of a weight update. Rows stay readable
    when the owner has died or closed the region. Reads from any thread; :meth:`close` it when no thread reads.
    """

    __slots__ = ("_namespace", "_region")

    def __init__(self, name: str, *, namespace: bytes | None = None) -> None:
        """``namespace`` is the :attr:`Namespace.fingerprint` that the region is expected to have.

        Raises :class:`RegionMissingError` when there is no such region, :class:`RegionMismatchError` when it is damaged
        or of another namespace, and :class:`RegionError` on a machine that does not order stores.
        """
        require_ordered_stores("RegionView")
        self._region: SharedRegion | None = SharedRegion.attach(name)
        found = self._region.namespace
        if found is None or namespace not in (None, found):
            self._region.close()
            wanted = "a sound one" if namespace is None else namespace.hex()
            raise RegionMismatchError(name, "namespace", wanted, "none" if found is None else found.hex())
        self._namespace = found

    def read(
        self,
        name: str,
        blocks: Sequence[int] | NDArray[Any],
        start: int = 0,
        stop: int | None = None,
        *,
        generations: Sequence[int] | NDArray[Any],
    ) -> Rows:
        """Rows ``[start, stop)`` of a sequence that lies in ``blocks``, copied; ``generations`` has one for each block.

        Without ``stop``: to the end of the last block. Missing are rows of a block that is now in another generation,
        rows not yet committed, all rows of another namespace, and rows of a block that kept changing under the copy.
        """
        region = self._attached()
        namespace = self._namespace
        index = region.layout.index(name)
        tokens = region.layout.block_tokens
        ids, wanted = _pairs(region, blocks, generations)
        held, window = window_of(ids.size, start, stop, tokens)
        ids = ids[held]
        rows, bits, words = gather(region, index, ids)
        bits[words >> np.uint64(GENERATION_SHIFT) != wanted[held].astype(np.uint64)] = 0
        if region.namespace != namespace:
            bits[:] = 0
        bits[region.words[ids] != words] = 0  # changed by each reset, so none has come between copy and namespace
        return Rows.of(region.layout.specs[index], rows, bits, window)

    def read_slots(
        self,
        name: str,
        slots: Sequence[int] | NDArray[Any],
        *,
        generations: Sequence[int] | NDArray[Any],
    ) -> Rows:
        """The rows at ``slots [n]``, ``block * block_tokens + offset`` each, copied; ``generations [n]`` one for each.

        Rows are missing as in :meth:`read`. For the newest rows of many sequences, of which each block has one.
        """
        region = self._attached()
        namespace = self._namespace
        index = region.layout.index(name)
        tokens = region.layout.block_tokens
        places = integers(slots, "slots", "a flat sequence of slots")
        if places.size and places.min() < 0:
            raise InvalidInputError("slots", "0 or more", int(places.min()))
        blocks, wanted = _pairs(region, places // tokens, generations)
        rows, readable, words = gather_slots(region, index, blocks, places % tokens)
        readable &= words >> np.uint64(GENERATION_SHIFT) == wanted.astype(np.uint64)
        if region.namespace != namespace:
            readable[:] = False
        readable &= region.words[blocks] == words  # changed by each reset, as in read()
        return Rows.of_mask(region.layout.specs[index], rows, readable)

    def generations(self, blocks: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        """Which life each block is in now, ``[n]``."""
        region = self._attached()
        ids = _block_ids(region, blocks)
        return (region.words[ids] >> np.uint64(GENERATION_SHIFT)).astype(np.int64)

    def generation(self, block: int) -> int:
        """Which life one block is in now: for a thread that looks often."""
        region = self._attached()
        if not 0 <= block < region.blocks:
            raise InvalidInputError("block", f"an integer in [0, {region.blocks})", block)
        return int(region.words[block]) >> GENERATION_SHIFT

    def follow(self, namespace: bytes) -> None:
        """After a weight update: read rows of ``namespace`` from here on.

        Until the owner's rows are of that namespace, every row is missing.
        """
        pack_namespace(namespace)  # raises for anything but a fingerprint
        self._namespace = namespace

    @property
    def namespace(self) -> bytes:
        """The :attr:`Namespace.fingerprint` that rows are read in."""
        return self._namespace

    @property
    def regions(self) -> list[tuple[str, list[int]]]:
        """By what another process finds the same rows: the region's name, of no layers in particular."""
        return [(self._attached().name, [])]

    def close(self) -> None:
        """Detach from the region; a second call does nothing."""
        if self._region is not None:
            self._region.close()
            self._region = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _attached(self) -> SharedRegion:
        if self._region is None:
            raise RegionError("region view: wanted one that is open, got one that was closed")
        return self._region


def _pairs(region: SharedRegion, blocks: Any, generations: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block ids and their generations, ``[n]`` each, or :class:`InvalidInputError`."""
    ids = _block_ids(region, blocks)
    wanted = integers(generations, "generations", "one generation for each block", n=ids.size)
    _check_range(wanted, "generations", GENERATION_END)
    return ids, wanted


def _block_ids(region: SharedRegion, blocks: Any) -> NDArray[np.int64]:
    """Block ids ``[n]`` of the region, or :class:`InvalidInputError`."""
    ids = integers(blocks, "blocks", "a flat sequence of block ids")
    _check_range(ids, "blocks", region.blocks)
    return ids


def _check_range(values: NDArray[np.int64], field: str, end: int) -> None:
    if values.size and not (values.min() >= 0 and values.max() < end):
        raise InvalidInputError(field, f"integers in [0, {end})", f"{values.min()} to {values.max()}")
