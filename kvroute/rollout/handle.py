"""A handle: what a trainer gets instead of the rows, and fetches them with.

It says which put of which rollout it stands for, and how the rows are cut into parts, so that a rank of a trainer knows
by itself which parts it needs. A few hundred bytes of JSON. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from pybase64 import b64encode_as_string

from cache_manager.errors import InvalidInputError
from cache_manager.record import Buffer
from kvroute.rollout.grid import PART_NBYTES_MAX, Grid, Selection
from kvroute.rollout.ids import checked_id
from kvroute.routes import Layout, Routes
from kvroute.routes.cells import UnknownSpan, mask_of
from kvroute.routing import id_dtype

FORMAT: Final = "kvroute.rollout/2"
PUT_ID_NBYTES: Final = 16
ROWS_MAX: Final = 1 << 24
IDS_MAX: Final = 1 << 36
MANIFEST_NBYTES_MAX: Final = 64 << 20


class RolloutHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One put of one rollout. ``put_id`` is 32 hex digits, new for every put.

    ``store`` is the scheme of the store that it was put to. ``inline`` are the rows themselves, where that store keeps
    none. Rows are of the positions ``[start, start + rows)`` in the layers ``layer_ids``; ``missing_layers`` have a
    router, too, and no rows. A part has ``part_layers`` of the layers (the last one of a rollout may have fewer) and
    ``part_tokens`` rows.
    """

    format: str
    store: str
    rollout_id: str
    put_id: str
    start: int
    rows: int
    layer_ids: tuple[int, ...]
    num_layers: int
    num_experts: int
    top_k: int
    part_layers: int
    part_tokens: int
    missing_layers: tuple[int, ...] = ()
    manifest_nbytes: int = 0
    inline: bytes = b""

    @classmethod
    def of(cls, store: str, rollout_id: str, put_id: bytes, routes: Routes, grid: Grid, **more: Any) -> Self:
        """The handle of ``routes`` cut by ``grid``."""
        return cls(
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
            **more,
        )

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
        head = msgspec.json.encode(self if not self.inline else msgspec.structs.replace(self, inline=b"")).decode()
        # msgspec's own base64 takes twenty times as long, in the process that schedules
        return f'{head[:-1]},"inline":"{b64encode_as_string(self.inline)}"}}' if self.inline else head

    def check(self) -> None:
        """Raise :class:`InvalidInputError` unless every field can be what it says."""

        def wrong(field: str, wanted: object) -> InvalidInputError:
            return InvalidInputError(f"rollout handle {field}", wanted, repr(getattr(self, field)))

        if self.format != FORMAT:
            raise wrong("format", FORMAT)
        checked_id(self.rollout_id, "rollout handle rollout_id")
        try:
            whole = bytes.fromhex(self.put_id)
        except ValueError:
            whole = b""
        if len(whole) != PUT_ID_NBYTES or whole.hex() != self.put_id:
            raise wrong("put_id", f"{2 * PUT_ID_NBYTES} lower-case hex digits")
        if not 0 <= self.rows <= ROWS_MAX:
            raise wrong("rows", f"0 to {ROWS_MAX}")
        if not 0 <= self.start < 1 << 62:
            raise wrong("start", "a position, 0 or more")
        if self.layout.missing_layers != self.missing_layers:
            raise wrong("missing_layers", "increasing layers")
        if not 1 <= self.part_layers <= len(self.layer_ids):
            raise wrong("part_layers", f"1 to {len(self.layer_ids)}")
        if self.part_tokens < 1 or (self.part_tokens > 1 and self.grid.part_nbytes > PART_NBYTES_MAX):
            raise wrong("part_tokens", f"parts of at most {PART_NBYTES_MAX} bytes")
        if self.rows * len(self.layer_ids) * self.top_k > IDS_MAX:
            raise wrong("rows", f"at most {IDS_MAX} ids")
        if not 0 <= self.manifest_nbytes <= MANIFEST_NBYTES_MAX:
            raise wrong("manifest_nbytes", f"0 to {MANIFEST_NBYTES_MAX}")

    @property
    def layout(self) -> Layout:
        """Of the rows."""
        return Layout(self.layer_ids, self.num_experts, self.num_layers, self.top_k, self.missing_layers)

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

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that bind every part to this very handle."""
        text = msgspec.json.encode(msgspec.structs.replace(self, manifest_nbytes=0, inline=b""))
        return hashlib.blake2b(text, digest_size=16, person=b"kvroute.rollout").digest()

    def routes(
        self,
        ids: Sequence[NDArray[Any]],  # of [n, layers, top_k], one for each range of rows
        manifest: Manifest,
        wanted: Selection,
    ) -> list[Routes]:
        """Routes of what was wanted; the ids were checked before they were put.

        :class:`InvalidInputError` for a manifest that says of them what cannot be.
        """
        mask = manifest.mask(self)
        if mask.ndim == 2:
            mask = mask[:, list(wanted.layers)]
        return [
            self._part(rows, mask[first:last], manifest, wanted.layer_ids, self.start + first)
            for rows, (first, last) in zip(ids, wanted.rows, strict=True)
        ]

    def _part(
        self,
        ids: NDArray[Any],
        mask: NDArray[np.bool_],  # [n] or [n, layers]
        manifest: Manifest,
        layer_ids: tuple[int, ...],
        start: int,
    ) -> Routes:
        stop = start + len(ids)
        versions = ((max(a, start), min(b, stop), v) for a, b, v in manifest.weights_versions)
        return Routes.checked(
            self.layout.only(layer_ids),
            ids,
            mask,
            start,
            tuple(span for span in versions if span[0] < span[1]),
            tuple((n, h) for n, h in manifest.token_hashes if n <= stop + 1),
        )


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What belongs to a whole rollout beside its parts: small, and fetched by every rank.

    ``valid`` has one bit a row, lowest bit first: whether anything of it is known; it is empty where that is so of all.
    ``unknown`` are ``(layer id, start, stop)``: where it is known of other layers but not of this one.
    """

    valid: bytes
    unknown: tuple[UnknownSpan, ...]
    weights_versions: tuple[tuple[int, int, int], ...]
    token_hashes: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, routes: Routes) -> Manifest:
        some = routes.some
        valid = b"" if some.all() else np.packbits(some, bitorder="little").tobytes()
        return cls(valid, routes.unknown, routes.weights_versions, routes.token_hashes)

    def mask(self, handle: RolloutHandle) -> NDArray[np.bool_]:
        """Which rows, ``[rows]``, or cells, ``[rows, layers]``, of the rollout are known.

        :class:`InvalidInputError` for unknown cells that cannot be the rollout's.
        """
        there = np.ones(handle.rows, np.bool_)
        if self.valid:
            bits = np.frombuffer(self.valid, np.uint8)
            there = np.unpackbits(bits, count=handle.rows, bitorder="little").astype(np.bool_)
        return mask_of(there, self.unknown, handle.layer_ids, handle.start)

    def check(self, rows: int) -> None:
        """Raise :class:`InvalidInputError` unless this can belong to ``rows`` rows."""
        if self.valid and len(self.valid) != -(-rows // 8):
            raise InvalidInputError("manifest valid", f"{-(-rows // 8)} bytes, or none", len(self.valid))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, given: Buffer, rows: int) -> Manifest:
        try:
            manifest = msgspec.msgpack.decode(given, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidInputError("manifest", "a manifest", error) from error
        manifest.check(rows)
        return manifest


__all__ = ["FORMAT", "PUT_ID_NBYTES", "Manifest", "RolloutHandle"]
