"""What one capture launch writes: which values, at what width, how far apart, and what makes a row bad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from kvroute.capture.errors import CaptureError

LAYERS_MAX: Final = 128
TOP_K_MAX: Final = 16
SPECS_MAX: Final = 8
DTYPES: Final = ("uint8", "uint16", "int32", "uint32", "float32")
"""Dtypes of rows. Routers give ids as int16, int32 or int64, floating-point values as float32."""


class Check(IntEnum):
    """The places of the check words ``int32 [7]``. Counts only ever grow; FIRST counts down from its start."""

    RANGE = 0  # ids outside [0, num_experts)
    DUPLICATE = 1  # ids that occur again later in their row
    MISSING = 2  # rows of a layer that was not recorded
    ZERO = 3  # rows of several ids that are all zero
    SLOT = 4  # tokens whose slot is not in the buffer
    FIRST = 5  # the smallest number of a bad row, (token * specs + spec) * LAYERS_MAX + layer
    TOKENS = 6  # of the last launch


NO_BAD_ROW: Final = np.iinfo(np.int32).max
"""The value of FIRST while no row is bad."""


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """One spec's rows ``[layers, top_k]`` within a record of every spec."""

    name: str
    layer_ids: tuple[int, ...]
    top_k: int
    dtype: str
    offset: int  # bytes from the record's beginning to the spec's first row
    row_nbytes: int
    experts: int  # ids are in [0, experts), each once in a row; 0: not ids, so not checked

    @property
    def layers(self) -> int:
        return len(self.layer_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every spec of one record, and the record in the buffer ``uint8 [blocks, record_nbytes]``."""

    specs: tuple[SpecPlan, ...]
    block_tokens: int
    record_nbytes: int

    @classmethod
    def of(cls, layout: RecordLayout, names: Sequence[str] | None = None) -> Plan:
        """The plan for the specs ``names`` of ``layout`` (all of them). Raises :class:`CaptureError`."""
        chosen = [spec.name for spec in layout.specs] if names is None else list(names)
        if not 1 <= len(chosen) <= SPECS_MAX or len(set(chosen)) != len(chosen):
            wanted = f"1 to {SPECS_MAX} different ones"
            raise CaptureError("specs of a capture", wanted, chosen)
        indices = [layout.index(name) for name in chosen]
        specs = tuple(_spec_plan(layout.specs[i], layout.offsets[i]) for i in indices)
        return cls(specs, layout.block_tokens, layout.nbytes)

    def place(self, first: int) -> tuple[int, SpecPlan, int]:
        """Token, spec and layer id of a bad row's number."""
        pair, layer = divmod(first, LAYERS_MAX)
        token, spec = divmod(pair, len(self.specs))
        return token, self.specs[spec], self.specs[spec].layer_ids[layer]


def _spec_plan(spec: AuxBlockDataSpec, offset: int) -> SpecPlan:
    if spec.dtype not in DTYPES:
        wanted = "one of " + ", ".join(DTYPES)
        raise CaptureError(f"{spec.name} rows", wanted, spec.dtype)
    shape = spec.row_shape
    layers_and_top_k = {0: (1, 1), 1: (1, *shape), 2: shape}
    layers, top_k = layers_and_top_k.get(len(shape), (0, 0))
    if not (1 <= layers <= LAYERS_MAX and 1 <= top_k <= TOP_K_MAX):
        wanted = f"at most {LAYERS_MAX} layers of {TOP_K_MAX} values"
        raise CaptureError(f"{spec.name} rows", wanted, f"shape {spec.row_shape}")
    layer_ids = tuple(spec.attrs.get("layer_ids", range(layers)))
    experts = int(spec.attrs.get("num_experts", 0))
    if experts > np.iinfo(np.int32).max:
        raise CaptureError(f"{spec.name} num_experts", "at most 2**31 - 1", experts)
    return SpecPlan(spec.name, layer_ids, top_k, spec.dtype, offset, spec.row_nbytes, experts)


def check_words() -> NDArray[np.int32]:
    """Check words before anything was captured."""
    words = np.zeros(len(Check), np.int32)
    words[Check.FIRST] = NO_BAD_ROW
    return words


def alignment(plan: SpecPlan, record_nbytes: int, base: int) -> int:
    """The largest power of two, at most 16, that divides every row's address."""
    return math.gcd(16, plan.row_nbytes, plan.offset, record_nbytes, base)


__all__ = [
    "LAYERS_MAX",
    "NO_BAD_ROW",
    "SPECS_MAX",
    "TOP_K_MAX",
    "Check",
    "Plan",
    "SpecPlan",
    "alignment",
    "check_words",
]
