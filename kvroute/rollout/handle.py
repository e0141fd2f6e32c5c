"""A handle: what a trainer gets instead of the rows, and fetches them with.

It says which put of which rollout it stands for, and how the rows are cut into parts, so that a rank of a trainer knows
by itself which parts it needs. A few hundred bytes of JSON. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta
from pybase64 import b64encode_as_string

from cache_manager.errors import InvalidInputError
from kvroute import cells
from kvroute.rollout.grid import PART_NBYTES_MAX, Grid
from kvroute.rollout.ids import checked_id
from kvroute.routes import Routes
from kvroute.routing import id_dtype, routing_spec

FORMAT: Final = "kvroute.rollout/3"
PUT_ID_NBYTES: Final = 16
ROWS_MAX: Final = 1 << 24
IDS_MAX: Final = 1 << 36
HEAD_NBYTES_MAX: Final = 64 << 20

_Layers = tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...]
_Count = Annotated[int, Meta(ge=1, lt=1 << 62)]


class RolloutHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One put of one rollout. ``put_id`` is 32 lower-case hex digits, new for every put.

    ``store`` is the scheme of the store that it was put to. ``inline`` are head and parts themselves, where that store
    keeps none. Rows are of the positions ``[start, start + rows)`` in the layers ``layer_ids``; ``missing_layers`` have
    a router, too, and no rows. A part has ``part_layers`` of the layers (the last one of a rollout may have fewer) and
    ``part_tokens`` rows.
    """

    format: Literal["kvroute.rollout/3"]
    store: str
    rollout_id: str
    put_id: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * PUT_ID_NBYTES}}}\Z")]
    start: Annotated[int, Meta(ge=0, lt=1 << 62)]
    rows: Annotated[int, Meta(ge=0, le=ROWS_MAX)]
    layer_ids: _Layers
    num_layers: _Count
    num_experts: _Count
    top_k: _Count
    part_layers: _Count
    part_tokens: _Count
    missing_layers: _Layers = ()
    head_nbytes: Annotated[int, Meta(ge=0, le=HEAD_NBYTES_MAX)] = 0
    inline: bytes = b""

    @classmethod
    def of(cls, store: str, rollout_id: str, put_id: bytes, routes: Routes, grid: Grid) -> Self:
        """The handle of ``routes`` cut by ``grid``; :class:`InvalidInputError` for more rows than one can have."""
        handle = cls(
            format=FORMAT,
            store=store,
            rollout_id=rollout_id,
            put_id=put_id.hex(),
            start=routes.start,
            rows=len(routes),
            layer_ids=routes.layer_ids,
            missing_layers=routes.missing_layers,
            num_layers=routes.num_layers,
            num_experts=routes.num_experts,
            top_k=routes.top_k,
            part_layers=grid.part_layers,
            part_tokens=grid.part_tokens,
        )
        handle.check()
        return handle

    @classmethod
    def from_json(cls, given: str | bytes | Mapping[str, Any]) -> Self:
        """The handle that :meth:`to_json` was called on, from its text or its content.

        Raises :class:`InvalidInputError` naming the field for anything that cannot be one; nothing is allocated for
        what it claims.
        """
        try:
            if isinstance(given, (str, bytes)):
                handle = msgspec.json.decode(given, type=cls)
            else:
                handle = msgspec.convert(given, cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise InvalidInputError("rollout handle", f"an object of {FORMAT}", error) from error
        handle.check()
        return handle

    def to_json(self) -> str:
        """One line of JSON."""
        head = msgspec.json.encode(msgspec.structs.replace(self, inline=b"")).decode()
        # msgspec's own base64 takes twenty times as long, in the process that schedules
        return f'{head[:-1]},"inline":"{b64encode_as_string(self.inline)}"}}' if self.inline else head

    def check(self) -> None:
        """Raise :class:`InvalidInputError` unless the fields, each possible by itself, are possible together."""

        def wrong(field: str, wanted: object) -> InvalidInputError:
            return InvalidInputError(f"rollout handle {field}", wanted, repr(getattr(self, field)))

        checked_id(self.rollout_id, "rollout handle rollout_id")
        routing_spec(self.num_experts, self.top_k, self.layer_ids, self.num_layers, block_tokens=1)
        if cells.missing_layers(self.missing_layers, self.layer_ids, self.num_layers) != self.missing_layers:
            raise wrong("missing_layers", "increasing layers")
        if self.part_layers > len(self.layer_ids):
            raise wrong("part_layers", f"1 to {len(self.layer_ids)}")
        if self.part_tokens > 1 and self.grid.part_nbytes > PART_NBYTES_MAX:
            raise wrong("part_tokens", f"parts of at most {PART_NBYTES_MAX} bytes")
        if self.rows > ROWS_MAX or self.rows * len(self.layer_ids) * self.top_k > IDS_MAX:
            raise wrong("rows", f"at most {ROWS_MAX}, with at most {IDS_MAX} ids")

    @property
    def stored(self) -> Self:
        """The handle as a rollout's own head has it: without what is known only when the head is packed."""
        return msgspec.structs.replace(self, head_nbytes=0, inline=b"")

    @property
    def grid(self) -> Grid:
        """How the rows are cut."""
        cell_nbytes = self.top_k * self.dtype.itemsize
        return Grid(self.rows, len(self.layer_ids), cell_nbytes, self.part_layers, self.part_tokens)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an id, little endian."""
        return np.dtype(id_dtype(self.num_experts)).newbyteorder("<")

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + self.rows


__all__ = ["FORMAT", "HEAD_NBYTES_MAX", "PUT_ID_NBYTES", "RolloutHandle"]
