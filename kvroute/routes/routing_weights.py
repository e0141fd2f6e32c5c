"""Routing weights: by how much each expert's output counts, beside the ids of the same pass, bit for bit.

A weight carries no gradient. Only a trainer whose routers are frozen may take weights as constants; any other computes
its own from the replayed ids, and gets :attr:`RoutingWeights.routes` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray
from pybase64 import b64encode_as_string

from cache_manager.errors import RowError
from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routes.routes import Routes
from kvroute.routes.wire import from_base64

WEIGHTS_FORMAT: Final = "kvroute.routing_weights/1"
WEIGHTS_SUM_NBYTES: Final = 16


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RoutingWeights:
    """Routes, and a float32 weight for each of their ids: of one pass, or neither.

    ``weights[i, l, k]`` belongs to ``routes.ids[i, l, k]``. Where that is missing the weight is NaN, all ones in
    binary. The array is a read-only copy.

    Raises :class:`RowError` for arrays that do not fit, for another dtype, which would be rounded, and for a weight of
    a known id that is not finite; the error names the position and the layer id.
    """

    routes: Routes
    weights: NDArray[np.float32]  # [n, layers, top_k]

    def __post_init__(self) -> None:
        given = np.asarray(self.weights)
        ids = self.routes.ids
        if given.shape != ids.shape or given.dtype != np.float32:
            wanted = f"float32 {list(ids.shape)}"
            got = f"{given.dtype} {list(given.shape)}"
            raise RowError("routing weights", wanted, got)
        weights = given.copy()
        weights.view(np.uint32)[~self.routes.known] = np.iinfo(np.uint32).max
        wrong = self.routes.known & ~np.isfinite(weights).all(axis=2)
        if wrong.any():
            row, layer = (int(i) for i in np.argwhere(wrong)[0])
            where = f"position {self.routes.start + row} layer {self.routes.layer_ids[layer]}"
            wanted = "finite numbers"
            raise RowError(f"routing weights of {where}", wanted, weights[row, layer].tolist())
        weights.flags.writeable = False
        object.__setattr__(self, "weights", weights)

    @classmethod
    def from_rows(
        cls,
        spec: AuxBlockDataSpec,
        ids: Rows,
        weights: Rows,
        start: int = 0,
        **more: Any,
    ) -> RoutingWeights:
        """What ``AuxBlocks.read`` returned for the ids of ``spec`` and for their weights, at the same positions.

        A row that lacks one of both is missing. ``more`` is for :meth:`Routes.from_rows`.
        """
        if len(ids.valid) != len(weights.valid):
            wanted = f"{len(ids.valid)}, as there are ids"
            raise RowError("routing weights rows", wanted, len(weights.valid))
        both = Rows(ids.values, ids.valid & weights.valid)
        return cls(Routes.from_rows(spec, both, start, **more), weights.values)

    def to_json(self) -> dict[str, str]:
        """The weights as a JSON object, to be sent beside ``routes.to_json()``: ``format``, and ``record``, the base64
        of 16 bytes and of the float32 bits ``[n, layers, top_k]``, little endian.

        The 16 bytes are an XXH3-128 over the positions, the ids and the weights: with other ids they do not fit.
        """
        bits = self.weights.astype("<f4", copy=False).tobytes()
        return {"format": WEIGHTS_FORMAT, "record": b64encode_as_string(_sum_with_routes(self.routes, bits) + bits)}

    @classmethod
    def from_json(cls, routes: Routes, encoded: Mapping[str, Any]) -> RoutingWeights:
        """The weights of :meth:`to_json`, beside the very ``routes`` that they were made with.

        :class:`RowError` for anything else: another format, other routes, one changed bit.
        """
        if not isinstance(encoded, Mapping) or set(encoded) != {"format", "record"}:
            got = sorted(map(str, encoded)) if isinstance(encoded, Mapping) else type(encoded).__name__
            raise RowError("routing weights", f"an object of {WEIGHTS_FORMAT}, with format and record", got)
        if encoded["format"] != WEIGHTS_FORMAT:
            raise RowError("routing_weights.format", WEIGHTS_FORMAT, repr(encoded["format"]))
        record = from_base64("routing_weights.record", encoded["record"])
        nbytes = WEIGHTS_SUM_NBYTES + 4 * routes.ids.size
        if len(record) != nbytes:
            raise RowError("routing_weights.record", f"{nbytes} bytes, as its routes have ids", len(record))
        bits = record[WEIGHTS_SUM_NBYTES:]
        expected = _sum_with_routes(routes, bits)
        if record[:WEIGHTS_SUM_NBYTES] != expected:
            raise RowError("routing_weights.record checksum", expected.hex(), record[:WEIGHTS_SUM_NBYTES].hex())
        weights = np.frombuffer(bits, "<f4").reshape(routes.ids.shape).astype(np.float32)
        return cls(routes, weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __eq__(self, other: object) -> bool:
        """Equal routes, and equal bits of the weights."""
        if not isinstance(other, RoutingWeights):
            return NotImplemented
        return self.routes == other.routes and self.weights.tobytes() == other.weights.tobytes()

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    def __repr__(self) -> str:
        return f"RoutingWeights({self.routes!r})"


def _sum_with_routes(routes: Routes, bits: bytes) -> bytes:
    running = xxhash.xxh3_128()
    running.update(f"{WEIGHTS_FORMAT} {routes.start} {routes.layer_ids} {routes.ids.shape}".encode())
    running.update(routes.ids.astype(routes.ids.dtype.newbyteorder("<"), copy=False).tobytes())
    running.update(bits)
    return running.digest()


__all__ = ["RoutingWeights"]
