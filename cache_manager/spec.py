"""Row layouts: what one token's auxiliary values look like, and how a block's rows are packed.

Pure: no I/O, no clock, no framework. The byte layout is described in ``docs/format.md``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from cache_manager.errors import RowError, SpecError
from cache_manager.slots import REFUSALS, Ints, Values, unreadable, words_of

ALIGNMENT = 64
"""Each spec's rows start on a cache line of the record."""

SPECS_MAX = 16
BLOCK_TOKENS_MAX = 65_536
RECORD_NBYTES_MAX = 1 << 30
VALID_NBYTES_MAX = 65_280  # so that a record's header fits its 16-bit length

INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64")

_LITTLE_ENDIAN = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

_JSON_SCALARS = (str, int, float, bool, type(None))


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def _frozen_json(value: Any, where: str) -> Any:
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(where, "a finite number", value)
    if isinstance(value, _JSON_SCALARS):
        return value
    if isinstance(value, Mapping):
        frozen: dict[str, Any] = {}
        for key, member in value.items():
            if not isinstance(key, str):
                raise SpecError(where, "string keys", repr(key))
            frozen[key] = _frozen_json(member, f"{where}.{key}")
        return MappingProxyType(frozen)
    if isinstance(value, (list, tuple, range)):
        return tuple(_frozen_json(v, f"{where}[{i}]") for i, v in enumerate(value))
    raise SpecError(where, "JSON (string, number, bool, null, list, mapping)", type(value).__name__)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, tuple):
        return [_plain(member) for member in value]
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _fits(values: Values, info: np.iinfo[Any]) -> bool:
    """Whether every integer lies in the range of ``info``."""
    if info.min == 0 and values.dtype.kind == "i" and values.dtype.isnative:
        # Read as unsigned, a negative number is larger than any that fits a narrower type: one pass instead of two.
        unsigned = values.view(f"u{values.dtype.itemsize}")
        most = min(info.max, np.iinfo(values.dtype).max)
        return int(unsigned.max()) <= most
    least = int(values.min())
    return least >= info.min and int(values.max()) <= info.max


def canonical_json(value: Any) -> bytes:
    """The one byte string that stands for a JSON value: sorted keys, no spaces, ASCII."""
    text = json.dumps(
        _plain(value),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )
    return text.encode()


@dataclass(frozen=True, slots=True)
class AuxBlockDataSpec:
    """The layout of the auxiliary rows that ride along with one KV block.

    ``row_shape`` and ``dtype`` describe one token's row, ``block_tokens`` how many tokens a KV block holds. ``attrs``
    is JSON that readers need to make sense of the rows.
    Two processes may exchange rows only when their fingerprints are equal; ``attrs`` is part of the fingerprint.

    Raises :class:`SpecError` for invalid values.

    >>> spec = AuxBlockDataSpec("topk_ids", row_shape=(48, 8), dtype="uint8", block_tokens=64)
    >>> spec.row_nbytes, spec.block_nbytes
    (384, 24576)
    >>> spec.fingerprint.hex()
    '19d29a2fc4586f88ef311c626f66cd3d'
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: str
    block_tokens: int
    attrs: Mapping[str, Any] = field(default_factory=dict, compare=False)  # compared by fingerprint
    fingerprint: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise SpecError("spec.name", f"a name matching {_NAME.pattern}", repr(self.name))
        shape = tuple(self.row_shape) if isinstance(self.row_shape, Sequence) else None
        if shape is None or not all(_is_int(n) and n > 0 for n in shape):
            raise SpecError(f"{self.name}.row_shape", "a tuple of positive integers", repr(self.row_shape))
        dtype = str(np.dtype(self.dtype)) if self.dtype in DTYPES else repr(self.dtype)
        if dtype not in DTYPES:
            raise SpecError(f"{self.name}.dtype", "one of " + ", ".join(DTYPES), dtype)
        if not _is_int(self.block_tokens) or not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise SpecError(f"{self.name}.block_tokens", f"an integer in [1, {BLOCK_TOKENS_MAX}]", self.block_tokens)
        object.__setattr__(self, "row_shape", tuple(int(n) for n in shape))
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "block_tokens", int(self.block_tokens))
        if not isinstance(self.attrs, Mapping):
            raise SpecError(f"{self.name}.attrs", "a mapping", repr(self.attrs))
        object.__setattr__(self, "attrs", _frozen_json(self.attrs, f"{self.name}.attrs"))
        if self.block_nbytes > RECORD_NBYTES_MAX:
            raise SpecError(f"{self.name}.block_nbytes", f"at most {RECORD_NBYTES_MAX}", self.block_nbytes)
        described = canonical_json(self.to_json())
        digest = hashlib.blake2b(described, digest_size=16, person=b"kvroute.spec/1")
        object.__setattr__(self, "fingerprint", digest.digest())

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian, as it lies in memory, on disk and on the wire."""
        return _LITTLE_ENDIAN[self.dtype]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token's row."""
        return math.prod(self.row_shape) * self.numpy_dtype.itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block's rows."""
        return self.row_nbytes * self.block_tokens

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object: what the fingerprint is made of."""
        return {
            "name": self.name,
            "row_shape": list(self.row_shape),
            "dtype": self.dtype,
            "block_tokens": self.block_tokens,
            "attrs": _plain(self.attrs),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AuxBlockDataSpec:
        """The inverse of :meth:`to_json`."""
        fields = ("name", "row_shape", "dtype", "block_tokens", "attrs")
        if set(value) != set(fields):
            wanted = "the keys " + ", ".join(fields)
            raise SpecError("spec", wanted, ", ".join(map(str, value)))
        shape = value["row_shape"]
        if isinstance(shape, list):
            shape = tuple(shape)
        return cls(**{**value, "row_shape": shape})

    def rows(self, values: Values, *, tokens: int, kept: Ints | None = None, copy: bool = True) -> Values:
        """``values`` as rows ``[tokens, *row_shape]`` of this dtype, or a :class:`RowError`; only those at the places
        ``kept [n]`` if given, and then what the others hold does not matter.

        Integers may be wider than the spec's dtype as long as every value fits it. The rows are new ones; without
        ``copy`` they may be the caller's own array.
        """
        try:
            values = np.asarray(values)
        except REFUSALS as refusal:
            wanted = f"shape {(tokens, *self.row_shape)}"
            raise RowError(f"{self.name} rows", wanted, unreadable(values, refusal)) from refusal
        if values.shape != (tokens, *self.row_shape):
            raise RowError(f"{self.name} rows", f"shape {(tokens, *self.row_shape)}", f"shape {values.shape}")
        if kept is not None:
            values = values[kept]
        dtype = self.numpy_dtype
        if values.dtype == dtype:
            return values.copy(order="C") if copy else values
        if values.dtype.kind not in "iu" or dtype.kind not in "iu":
            raise RowError(f"{self.name} rows", f"dtype {self.dtype}", f"dtype {values.dtype}")
        info = np.iinfo(dtype)
        if values.size and not _fits(values, info):
            outlier = values.min()
            if int(outlier) >= info.min:
                outlier = values.max()
            raise RowError(f"{self.name} rows", f"{self.dtype} values in [{info.min}, {info.max}]", int(outlier))
        return values.astype(dtype, order="C")


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Several specs' rows of one block, packed: each spec starts on a 64-byte boundary.

    All specs share ``block_tokens``. Their order is part of the layout, and so of its fingerprint.

    >>> a = AuxBlockDataSpec("topk_ids", row_shape=(3, 2), dtype="uint8", block_tokens=16)
    >>> b = AuxBlockDataSpec("weights_version", row_shape=(), dtype="uint32", block_tokens=16)
    >>> layout = RecordLayout((a, b))
    >>> layout.offsets, layout.nbytes, layout.valid_words
    ((0, 128), 192, 1)
    >>> layout.fingerprint.hex()
    'f42b81ac4e3c687874caebf5b3767d5d'
    """

    specs: tuple[AuxBlockDataSpec, ...]
    offsets: tuple[int, ...] = field(init=False)
    nbytes: int = field(init=False)
    fingerprint: bytes = field(init=False)

    def __post_init__(self) -> None:
        specs = tuple(self.specs) if isinstance(self.specs, (tuple, list)) else None
        if specs is None or not all(isinstance(s, AuxBlockDataSpec) for s in specs):
            raise SpecError("specs", "a sequence of AuxBlockDataSpec", repr(self.specs))
        object.__setattr__(self, "specs", specs)
        if not 1 <= len(specs) <= SPECS_MAX:
            raise SpecError("specs", f"1 to {SPECS_MAX} specs", len(specs))
        names = [s.name for s in specs]
        if len(set(names)) != len(names):
            raise SpecError("specs", "distinct names", ", ".join(names))
        if len({s.block_tokens for s in specs}) != 1:
            got = ", ".join(f"{s.name}={s.block_tokens}" for s in specs)
            raise SpecError("specs", "one block_tokens for all", got)
        offsets = []
        at = 0
        for s in specs:
            offsets.append(at)
            at = align(at + s.block_nbytes)
        if self.valid_nbytes > VALID_NBYTES_MAX:
            raise SpecError("specs", f"validity bits of at most {VALID_NBYTES_MAX} bytes a block", self.valid_nbytes)
        if at > RECORD_NBYTES_MAX:
            raise SpecError("specs", f"a record of at most {RECORD_NBYTES_MAX} bytes", at)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "nbytes", at)
        digest = hashlib.blake2b(digest_size=16, person=b"kvroute.layout/1")
        for s in specs:
            digest.update(s.fingerprint)
        object.__setattr__(self, "fingerprint", digest.digest())

    @property
    def block_tokens(self) -> int:
        """Tokens in a block, the same for every spec."""
        return self.specs[0].block_tokens

    @property
    def valid_words(self) -> int:
        """64-bit words of validity bits that one spec needs for one block."""
        return words_of(self.block_tokens)

    @property
    def valid_nbytes(self) -> int:
        """Bytes of validity bits that all specs need for one block."""
        return 8 * self.valid_words * len(self.specs)

    def index(self, name: str) -> int:
        """The place of the spec called ``name``; :class:`SpecError` when there is none."""
        for i, s in enumerate(self.specs):
            if s.name == name:
                return i
        names = ", ".join(s.name for s in self.specs)
        raise SpecError("spec name", f"one of {names}", repr(name))
