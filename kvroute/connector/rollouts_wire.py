"""What an engine's process says to the process of its rollouts, and the answer: MessagePack, never pickle. Pure.

An ended request goes over as its name, its tokens, and where the rows of each computation lie. Rows that the engine's
process has read go over themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import msgspec
import numpy as np

from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage.apart_process import Failure
from kvroute.connector.computations import Computation
from kvroute.connector.end import End
from kvroute.connector.key import Key
from kvroute.connector.left import Tokens
from kvroute.connector.unread import Seen
from kvroute.routing import weights_version_spec


class Opening(msgspec.Struct, frozen=True):
    """What the process opens: the rollout store at ``url``, for rows of a spec with these fields."""

    url: str
    name: str
    row_shape: tuple[int, ...]
    dtype: str
    block_tokens: int
    attrs: dict[str, Any]
    flagged: bool
    cuts_max: int

    @classmethod
    def of(
        cls,
        url: str,
        spec: AuxBlockDataSpec,
        *,
        flagged: bool,
        cuts_max: int,
    ) -> Opening:
        attrs = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.attrs.items()}
        return cls(url, spec.name, spec.row_shape, spec.dtype, spec.block_tokens, attrs, flagged, cuts_max)

    @property
    def spec(self) -> AuxBlockDataSpec:
        return AuxBlockDataSpec(self.name, self.row_shape, self.dtype, self.block_tokens, self.attrs)


class RowsBytes(msgspec.Struct, frozen=True, array_like=True):
    """Rows that were read: their values one after the other, and a byte for each that says whether it is valid."""

    values: bytes
    valid: bytes

    @classmethod
    def of(cls, rows: Rows) -> RowsBytes:
        return cls(rows.values.tobytes(), rows.valid.tobytes())

    def rows(self, spec: AuxBlockDataSpec) -> Rows:
        """Rows of ``spec``, the caller's own."""
        values = np.frombuffer(bytearray(self.values), spec.numpy_dtype)
        valid = np.frombuffer(bytearray(self.valid), np.bool_)
        return Rows(values.reshape(len(valid), *spec.row_shape), valid)


class SentComputation(msgspec.Struct, frozen=True, array_like=True):
    """A computation, as its fields are called there; ``read`` and ``labels`` are of ``[start, read_stop)``.

    ``blocks`` and ``lives`` are int64, and empty if all rows are ``read``.
    """

    start: int
    stop: int
    weights: int
    version: int | None
    mixed: bool
    by_kv: bytes | None
    read_stop: int
    read: RowsBytes | None
    labels: RowsBytes | None
    blocks: bytes
    lives: bytes

    @classmethod
    def of(cls, computation: Computation, seen: Seen) -> SentComputation:
        """``seen`` is what has been read of the computation."""
        by_kv = computation.by_kv
        return cls(
            computation.start,
            computation.stop,
            computation.weights,
            computation.version,
            computation.mixed,
            None if by_kv is None else by_kv.tobytes(),
            seen.stop,
            None if seen.rows is None else RowsBytes.of(seen.rows),
            None if seen.labels is None else RowsBytes.of(seen.labels),
            b"" if seen.whole else computation.blocks.tobytes(),
            b"" if seen.whole else computation.lives.tobytes(),
        )

    def computation(self, spec: AuxBlockDataSpec) -> Computation:
        """The computation of rows of ``spec``, with what has been read of it."""
        computation = Computation(
            np.frombuffer(self.blocks, np.int64),
            np.frombuffer(self.lives, np.int64),
            self.start,
            self.stop,
            [],
            self.weights,
            self.version,
            self.mixed,
            None if self.by_kv is None else np.frombuffer(self.by_kv, np.bool_),
        )
        if self.read is not None:
            computation.read = self.read.rows(spec)
        if self.labels is not None:
            computation.read_labels = self.labels.rows(weights_version_spec(spec.block_tokens))
        computation.read_stop = self.read_stop
        if computation.read is not None and not self.blocks:
            computation.rows = computation.read
            computation.versions = computation.read_labels if self.mixed else self.version
        return computation


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """An ended request, as its fields are called in :class:`~kvroute.connector.end.End`."""

    key: str
    of_client: bool
    tokens: list[int] | None  # MessagePack writes a list in a fifth of the time that an array of it takes
    prompt: int
    cut: bool
    start: int
    why: Mapping[int, str]
    parts: list[SentComputation]  # the last one is that of its end

    @classmethod
    def of(
        cls,
        end: End,
        computations: Sequence[Computation],
        seen: Sequence[Seen],
    ) -> Ended:
        """``seen`` is what has been read of each of the end's ``computations``."""
        tokens = end.request_tokens
        ids = None if tokens is None else tokens.ids
        return cls(
            end.key.text,
            end.key.of_client,
            ids if ids is None or isinstance(ids, list) else list(ids),
            0 if tokens is None else tokens.prompt,
            tokens is not None and tokens.cut,
            end.start,
            end.why,
            list(map(SentComputation.of, computations, seen)),
        )

    def end(self, spec: AuxBlockDataSpec) -> End:
        """The end of a request with rows of ``spec``."""
        *kept, last = [part.computation(spec) for part in self.parts]
        tokens = None
        if self.tokens is not None:
            tokens = Tokens(self.tokens, self.prompt, self.cut)
        key = Key(self.key, self.of_client)
        return End(kept, why=self.why, key=key, last=last, request_tokens=tokens, start=self.start)

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes as a message."""
        nbytes = 5 * len(self.tokens or ())
        for part in self.parts:
            if part.read is not None:
                nbytes += len(part.read.values)
        return nbytes


class RolloutsQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Take these ``ends``. Their rows are in ``regions``, ``(name, layer_ids)`` each, of the ``namespace``.

    ``voids`` are names of rollouts that nobody may find any more. ``again``: the process that was asked before has not
    answered, and may have put some of them.
    """

    regions: list[tuple[str, list[int]]]
    namespace: bytes
    again: bool
    voids: list[str]
    ends: list[Ended]


class TakenRollout(msgspec.Struct, frozen=True, array_like=True):
    """What has become of an end: the ``values`` that it has left, or why it has left none.

    With neither, a row is missing in the region: nothing was put.
    """

    values: dict[str, Any] | None = None
    failure: Failure | None = None


encode_message = msgspec.msgpack.Encoder(enc_hook=index).encode  # numpy's whole numbers, too
QUESTIONS = msgspec.msgpack.Decoder(RolloutsQuestion)
ANSWERS = msgspec.msgpack.Decoder(list[TakenRollout])
OPENINGS = msgspec.json.Decoder(Opening)

__all__ = [
    "ANSWERS",
    "OPENINGS",
    "QUESTIONS",
    "Ended",
    "Opening",
    "RolloutsQuestion",
    "RowsBytes",
    "SentComputation",
    "TakenRollout",
    "encode_message",
]
