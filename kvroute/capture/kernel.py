"""Capture in one launch: every layer's values of every token, narrowed, checked and stored at their slots.

Needs Triton. The specification is ``naive.capture_rows``, of the same signature.
"""
# Triton's language is not the Python that mypy knows.
# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM108  (constants of the compiled program are written and asked as such)

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from kvroute.capture.plan import LAYERS_MAX, Check, Plan, alignment

_LAYERS_MAX = tl.constexpr(LAYERS_MAX)
_SLOT = tl.constexpr(int(Check.SLOT))
_FIRST = tl.constexpr(int(Check.FIRST))
_TOKENS = tl.constexpr(int(Check.TOKENS))
SOURCES = {
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float32: tl.float32,
}
_TARGETS = {"uint8": tl.uint8, "uint16": tl.uint16, "int32": tl.int32, "uint32": tl.uint32, "float32": tl.float32}


@triton.jit
def _logical(values, maps, layer, there, PHYSICAL: tl.constexpr):
    """The logical ids of physical ones; those outside the map stay what they are."""
    known = there & (values >= 0) & (values < PHYSICAL)
    return tl.where(known, tl.load(maps + layer * PHYSICAL + values, mask=known, other=0), values)


@triton.jit
def _capture(
    table,  # [layers, 3] int64: address, elements from token to token, from value to value
    slots,  # [tokens] int64
    rows,  # uint8: the spec's first row
    checks,  # [7] int32
    bad,  # [tokens] int32
    maps,  # [layers, PHYSICAL] int32, or anything
    slots_end,  # int64
    token,
    NUMBER: tl.constexpr,
    SPECS: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,  # L * K rounded up to a power of two
    BLOCK_TOKENS: tl.constexpr,
    RECORD: tl.constexpr,  # bytes
    STAGED: tl.constexpr,
    ROW: tl.constexpr,  # bytes
    ALIGN: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    EXPERTS: tl.constexpr,
    PHYSICAL: tl.constexpr,
):
    """One spec's row of one token."""
    slot = tl.load(slots + token)
    if (slot >= slots_end) & (NUMBER == 0):
        tl.atomic_add(checks + _SLOT, 1)
        tl.atomic_min(checks + _FIRST, (token * SPECS * _LAYERS_MAX).to(tl.int32))
        tl.store(bad + token, 1)
    lane = tl.arange(0, W)
    layer, k = lane // K, lane % K
    used = (lane < L * K) & (slot >= 0) & (slot < slots_end)
    address = tl.load(table + layer * 3, mask=used, other=0)
    by_token = tl.load(table + layer * 3 + 1, mask=used, other=0)
    by_k = tl.load(table + layer * 3 + 2, mask=used, other=0)
    source = address.to(tl.pointer_type(SOURCE)) + token * by_token + k * by_k
    there = used & (address != 0)
    values = tl.load(source, mask=there, other=0)
    stored = values
    if PHYSICAL > 0:
        stored = _logical(values, maps, layer, there, PHYSICAL)
    # Four counts of at most W = 2048 each in one sum, so that the program's threads meet once.
    found = (used & (there == 0) & (k == 0)).to(tl.int64) << 32
    if EXPERTS > 0:
        LIMIT: tl.constexpr = PHYSICAL if PHYSICAL > 0 else EXPERTS
        found += (there & ((values < 0) | (values >= LIMIT))).to(tl.int64)
        again = there & (lane < 0)
        others = stored
        for step in tl.static_range(1, K):
            near_there = there & (k + step < K)
            near = tl.load(source + step * by_k, mask=near_there, other=0)
            if PHYSICAL > 0:
                near = _logical(near, maps, layer, near_there, PHYSICAL)
            again = again | (near_there & (near == stored))
            others = others | near
        found += again.to(tl.int64) << 16
        if K > 1:
            found += (there & (k == 0) & (others == 0)).to(tl.int64) << 48
    # The hint makes stores of several values a thread: a bus wants them side by side.
    if STAGED:
        at = token * RECORD
    else:
        at = (slot // BLOCK_TOKENS) * RECORD + (slot % BLOCK_TOKENS) * ROW
    row = rows + tl.multiple_of(at, ALIGN)
    tl.store(row.to(tl.pointer_type(TARGET), bitcast=True) + lane, stored.to(TARGET), mask=there)
    counts = tl.sum(found)
    if counts != 0:
        tl.atomic_add(checks, (counts & 0xFFFF).to(tl.int32))
        tl.atomic_add(checks + 1, ((counts >> 16) & 0xFFFF).to(tl.int32))
        tl.atomic_add(checks + 2, ((counts >> 32) & 0xFFFF).to(tl.int32))
        tl.atomic_add(checks + 3, ((counts >> 48) & 0xFFFF).to(tl.int32))
        first = tl.min(tl.where(found != 0, layer, L))
        tl.atomic_min(checks + _FIRST, ((token * SPECS + NUMBER) * _LAYERS_MAX + first).to(tl.int32))
        tl.store(bad + token, 1)


@triton.jit(do_not_specialize=["slots_end"], do_not_specialize_on_alignment=["table", "slots", "maps"])
def _capture_all(table, slots, rows, checks, bad, maps, slots_end, SPECS: tl.constexpr, COMMON: tl.constexpr):
    """A program for each token and spec."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        if token == 0:
            tl.store(checks + _TOKENS, tl.num_programs(0))
        if COMMON[2]:
            slot = tl.load(slots + token)
            head = (rows + token * COMMON[1]).to(tl.pointer_type(tl.int64), bitcast=True)
            tl.store(head, tl.where(slot < slots_end, tl.maximum(slot, -1), -1))
    for number in tl.static_range(len(SPECS)):
        if tl.program_id(1) == number:
            _capture(
                table + SPECS[number][0] * 3,
                slots,
                rows + SPECS[number][1],
                checks,
                bad,
                maps + SPECS[number][2],
                slots_end,
                token,
                number,
                len(SPECS),
                SPECS[number][3],
                SPECS[number][4],
                SPECS[number][5],
                COMMON[0],
                COMMON[1],
                COMMON[2],
                SPECS[number][6],
                SPECS[number][7],
                SPECS[number][8],
                SPECS[number][9],
                SPECS[number][10],
                SPECS[number][11],
            )


def launch(
    table: torch.Tensor,  # [sources, 3] int64, on the device
    slots: torch.Tensor,  # [tokens] int64, contiguous, on the device
    rows: torch.Tensor,  # [blocks, record_nbytes] uint8 that the device reaches; staged: [>= tokens, record_nbytes]
    slots_end: int,
    checks: torch.Tensor,  # [7] int32 that the device reaches
    bad: torch.Tensor,  # [>= tokens] int32 that the device reaches
    maps: torch.Tensor,  # int32, the specs' maps one behind the other
    constants: tuple,  # of ``constants_of``
) -> None:
    """The launch alone: nothing is looked up, allocated or waited for, so that a CUDA graph can hold it."""
    specs, common, warps = constants
    if len(slots):
        grid = (len(slots), len(specs))
        _capture_all[grid](table, slots, rows, checks, bad, maps, slots_end, specs, common, num_warps=warps)


def constants_of(plan: Plan, sources: Sequence[torch.dtype], address: int) -> tuple:
    """What the kernel is compiled for: ``sources`` are the dtypes that each spec's values come in."""
    specs, first, at = [], 0, 0
    for spec, source in zip(plan.specs, sources, strict=True):
        count = spec.layers * spec.top_k
        align = alignment(spec, plan.record_nbytes, address)
        width = triton.next_power_of_2(count)
        numbers = (first, spec.offset, at, spec.layers, spec.top_k, width, spec.row_nbytes, align)
        specs.append((*numbers, SOURCES[source], _TARGETS[spec.dtype], spec.experts, spec.physical))
        first += spec.layers
        at += spec.layers * spec.physical
    warps = 4 if max(spec[5] for spec in specs) >= 128 else 1
    return tuple(specs), (plan.block_tokens, plan.record_nbytes, plan.staged), warps


def source_words(source: torch.Tensor | None) -> tuple[int, int, int]:
    """A source's line of the pointer table; one of zeros for a layer that was not recorded."""
    return (0, 0, 0) if source is None else (source.data_ptr(), source.stride(0), source.stride(1))


def capture_rows(
    sources: Sequence[Sequence[torch.Tensor | None]],
    slots: torch.Tensor,
    rows: torch.Tensor,
    plan: Plan,
    slots_end: int,
    checks: torch.Tensor,
    bad: torch.Tensor,
    maps: Mapping[str, torch.Tensor],
) -> None:
    """As ``naive.capture_rows``: the table is made and sent each time. ``LayerCapture`` keeps what does not change."""
    device = slots.device
    words = [source_words(source) for layers in sources for source in layers]
    dtypes = [next((s.dtype for s in layers if s is not None), torch.int32) for layers in sources]
    table = torch.tensor(words, dtype=torch.int64).to(device)
    constants = constants_of(plan, dtypes, rows.data_ptr())
    launch(table, slots, rows, slots_end, checks, bad, joined(maps, plan).to(device), constants)


def joined(maps: Mapping[str, torch.Tensor], plan: Plan) -> torch.Tensor:
    """The specs' maps ``int32``, one behind the other; one word where there is none."""
    parts = [maps[spec.name].reshape(-1).to(torch.int32) for spec in plan.specs if spec.physical]
    return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.int32)


__all__ = ["SOURCES", "capture_rows", "constants_of", "joined", "launch", "source_words"]
