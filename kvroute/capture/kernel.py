"""Capture in one launch: every layer's values of every token, narrowed, checked and stored at their slots.

Needs Triton. The specification is ``naive.capture_rows``, of the same signature except for ``group``.
"""
# Triton's language is not the Python that mypy knows.
# mypy: ignore-errors
# ruff: noqa: N803, N806 (constants of the compiled program are upper case)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvroute.capture.plan import LAYERS_MAX, NO_BAD_ROW, Check, Plan, alignment

GROUP_TOKENS = 8
"""So many neighbouring rows fill whole lines of 128 bytes if a row's bytes are a multiple of 16."""
GROUPED_FROM = 2048
STORE_NBYTES = 16
"""The most bytes that a thread stores at once."""
CPU_PROGRAMS = 2

_LAYERS_MAX = tl.constexpr(LAYERS_MAX)
_NO_BAD_ROW = tl.constexpr(NO_BAD_ROW)
_RANGE, _DUPLICATE, _MISSING, _ZERO, _SLOT, _FIRST, _TOKENS = (tl.constexpr(int(check)) for check in Check)
SOURCES = {torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64, torch.float32: tl.float32}
_TARGETS = {"uint8": tl.uint8, "uint16": tl.uint16, "int32": tl.int32, "uint32": tl.uint32, "float32": tl.float32}


@triton.jit
def _places(slots, slots_end, first, tokens, index, EACH: tl.constexpr, GROUP: tl.constexpr):
    """Token and slot of each of ``index``, ``EACH`` of which belong to a token; whether there is one, and whether it is
    stored.

    A slot of -1 is padding.
    """
    token = first + index // EACH
    inside = (index < GROUP * EACH) & (token < tokens)
    slot = tl.load(slots + token, mask=inside, other=-1)
    return token, slot, inside, (slot >= 0) & (slot < slots_end)


@triton.jit
def _sources(table, token, layer, inside, SOURCE: tl.constexpr):
    """A pointer to a token's first value in a layer, the elements to the next one, and whether there are any.

    These loads do not wait for the slots: padding has values too.
    """
    address = tl.load(table + layer * 3, mask=inside, other=0)
    by_token = tl.load(table + layer * 3 + 1, mask=inside, other=0)
    by_k = tl.load(table + layer * 3 + 2, mask=inside, other=0)
    return address.to(tl.pointer_type(SOURCE)) + token * by_token, by_k, address != 0


@triton.jit
def _store(
    table,  # [layers, 3] int64: address, elements from token to token, from value to value
    slots,  # [tokens] int64
    rows,  # uint8: the spec's first row
    slots_end,  # int64
    first,  # the group's first token, int64
    tokens,
    L: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # tokens
    WIDTH: tl.constexpr,  # values that a thread stores at once, of one layer
    BLOCK_TOKENS: tl.constexpr,
    RECORD: tl.constexpr,  # bytes
    ROW: tl.constexpr,  # bytes
    ALIGN: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """One spec's rows of a group of tokens, side by side: so neighbouring rows are written in whole lines of memory."""
    EACH: tl.constexpr = L * K // WIDTH
    word = tl.arange(0, triton.next_power_of_2(GROUP * EACH))
    token, slot, inside, used = _places(slots, slots_end, first, tokens, word, EACH, GROUP)
    lane = word % EACH * WIDTH
    near = tl.arange(0, WIDTH)[None, :]
    source, by_k, there = _sources(table, token, lane // K, inside, SOURCE)
    k = (lane % K)[:, None] + near
    value = tl.load(source[:, None] + k * by_k[:, None], mask=there[:, None], other=0)
    at = (slot // BLOCK_TOKENS) * RECORD + (slot % BLOCK_TOKENS) * ROW
    # With the hint a thread stores several values at once, which the bus transfers faster.
    row = (rows + tl.multiple_of(at, ALIGN)).to(tl.pointer_type(TARGET), bitcast=True)
    tl.store((row + lane)[:, None] + near, value.to(TARGET), mask=(used & there)[:, None])


@triton.jit
def _check(
    table,
    slots,
    checks,  # [7] int32
    bad,  # [tokens] int32
    slots_end,
    first,
    tokens,
    NUMBER: tl.constexpr,
    SPECS: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SOURCE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Count the bad values in one spec's rows of a group of tokens, row by row; other arguments as for ``_store``."""
    row = tl.arange(0, triton.next_power_of_2(GROUP * L))
    token, slot, inside, used = _places(slots, slots_end, first, tokens, row, L, GROUP)
    layer = row % L
    source, by_k, there = _sources(table, token, layer, inside, SOURCE)
    missing = (used & (there == 0)).to(tl.int32)
    outside = ((slot >= slots_end) & (layer == 0) & (NUMBER == 0)).to(tl.int32)
    ranged, twice, zero = 0 * missing, 0 * missing, 0 * missing
    there = there & used
    if EXPERTS > 0:
        any_id = 0 * missing
        for k in tl.static_range(K):  # the compiled program loads each value once
            value = tl.load(source + k * by_k, mask=there, other=0)
            ranged += (there & ((value < 0) | (value >= EXPERTS))).to(tl.int32)
            any_id |= (value != 0).to(tl.int32)
            twin = layer < 0
            for later in tl.static_range(k + 1, K):
                twin |= tl.load(source + later * by_k, mask=there, other=0) == value
            twice += (there & twin).to(tl.int32)
        if K > 1:
            zero = there.to(tl.int32) & (1 - any_id)
    found = ranged | twice | missing | zero | outside
    if tl.max(found) != 0:
        tl.atomic_add(checks + _RANGE, tl.sum(ranged))
        tl.atomic_add(checks + _DUPLICATE, tl.sum(twice))
        tl.atomic_add(checks + _MISSING, tl.sum(missing))
        tl.atomic_add(checks + _ZERO, tl.sum(zero))
        tl.atomic_add(checks + _SLOT, tl.sum(outside))
        number = ((token * SPECS + NUMBER) * _LAYERS_MAX + layer).to(tl.int32)
        tl.atomic_min(checks + _FIRST, tl.min(tl.where(found != 0, number, _NO_BAD_ROW)))
        tl.store(bad + token, 1, mask=found != 0)


@triton.jit(do_not_specialize=["slots_end", "tokens"], do_not_specialize_on_alignment=["table", "slots"])
def capture_all(table, slots, rows, checks, bad, slots_end, tokens, SPECS: tl.constexpr, COMMON: tl.constexpr):
    """Programs of one spec each, which take groups of tokens in turn."""
    GROUP: tl.constexpr = COMMON[2]
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(checks + _TOKENS, tokens)
    first = tl.program_id(0).to(tl.int64) * GROUP
    while first < tokens:
        for number in tl.static_range(len(SPECS)):
            if tl.program_id(1) == number:
                _store(
                    table + SPECS[number][0] * 3,
                    slots,
                    rows + SPECS[number][1],
                    slots_end,
                    first,
                    tokens,
                    SPECS[number][2],
                    SPECS[number][3],
                    GROUP,
                    SPECS[number][4],
                    COMMON[0],
                    COMMON[1],
                    SPECS[number][5],
                    SPECS[number][6],
                    SPECS[number][7],
                    SPECS[number][8],
                )
                _check(
                    table + SPECS[number][0] * 3,
                    slots,
                    checks,
                    bad,
                    slots_end,
                    first,
                    tokens,
                    number,
                    len(SPECS),
                    SPECS[number][2],
                    SPECS[number][3],
                    GROUP,
                    SPECS[number][7],
                    SPECS[number][9],
                )
        first += tl.num_programs(0) * GROUP


class Launch:
    """The launch for passes with one look; a spec's values have its dtype in ``sources``.

    With ``group`` 1 a program stores one token; else as many programs as the device has processors store groups of
    tokens. It is compiled at the first call, for the one buffer ``rows`` at ``address``: always pass the same.
    """

    def __init__(self, plan: Plan, sources: Sequence[torch.dtype], address: int, device: torch.device, group: int):
        specs, first, words = [], 0, 1
        for spec, source in zip(plan.specs, sources, strict=True):
            count = spec.layers * spec.top_k
            width = math.gcd(spec.top_k, STORE_NBYTES * count // spec.row_nbytes)
            numbers = (first, spec.offset, spec.layers, spec.top_k, width, spec.row_nbytes)
            align = alignment(spec, plan.record_nbytes, address)
            specs.append((*numbers, align, SOURCES[source], _TARGETS[spec.dtype], spec.experts))
            first += spec.layers
            words = max(words, triton.next_power_of_2(group * count // width))
        self.constants = tuple(specs), (plan.block_tokens, plan.record_nbytes, group)
        self.warps = min(max(words // 32, 1), 8)
        self._group = group
        on_gpu = device.type == "cuda"
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else CPU_PROGRAMS
        self._compiled: Any = None

    def __call__(
        self,
        table: torch.Tensor,  # [sources, 3] int64, on the device
        slots: torch.Tensor,  # [tokens] int64, contiguous, that the device reaches
        rows: torch.Tensor,  # [blocks, record_nbytes] uint8 that the device reaches
        slots_end: int,
        checks: torch.Tensor,  # [7] int32 that the device reaches
        bad: torch.Tensor,  # [>= tokens] int32 that the device reaches
    ) -> None:
        """Only the launch, without look-ups, allocations or waits, so that a CUDA graph can hold it."""
        tokens = len(slots)
        if not tokens:
            return
        programs = tokens if self._group == 1 else min(triton.cdiv(tokens, self._group), self._programs)
        grid = (programs, len(self.constants[0]), 1)
        given = (table, slots, rows, checks, bad, slots_end, tokens, *self.constants)
        if self._compiled is None:
            self._compiled = capture_all[grid](*given, num_warps=self.warps)
        else:  # without Triton's check of each argument
            self._compiled[grid](*given)


def group_of(tokens: int) -> int:
    """How many tokens a program takes at once in passes of ``tokens``: whole memory lines if all programs are busy."""
    return GROUP_TOKENS if tokens >= GROUPED_FROM else 1


def source_words(source: torch.Tensor | None) -> tuple[int, int, int]:
    """A source's line of the pointer table; zeros for a layer that was not recorded."""
    return (0, 0, 0) if source is None else (source.data_ptr(), source.stride(0), source.stride(1))


def capture_rows(
    sources: Sequence[Sequence[torch.Tensor | None]],
    slots: torch.Tensor,
    rows: torch.Tensor,
    plan: Plan,
    slots_end: int,
    checks: torch.Tensor,
    bad: torch.Tensor,
    group: int = 1,
) -> None:
    """As ``naive.capture_rows``: makes and sends the table each time. ``LayerCapture`` reuses an unchanged one."""
    device = slots.device
    words = [source_words(source) for layers in sources for source in layers]
    dtypes = [next((s.dtype for s in layers if s is not None), torch.int32) for layers in sources]
    table = torch.tensor(words, dtype=torch.int64).to(device)
    launch = Launch(plan, dtypes, rows.data_ptr(), device, group)
    launch(table, slots, rows, slots_end, checks, bad)


__all__ = ["GROUP_TOKENS", "SOURCES", "Launch", "capture_rows", "group_of", "source_words"]
