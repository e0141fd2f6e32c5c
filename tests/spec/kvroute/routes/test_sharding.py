"""The part of each rank: all tokens once over all ranks, in the order in which trainers cut their own token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sample_routes import SHAPES, Shape

from cache_manager.errors import InvalidInputError, RowError
from kvroute.routes import Split, shard_packed, shard_padded
from kvroute.routes.split import TAIL, Shard

SHAPE = SHAPES[0]


# The cuts, by the words of the trainers -------------------------------------------------------------------------------


def packed_by_hand(tokens: list[int], split: Split) -> list[tuple[int, int]]:
    """(sequence, position) of every local token, token by token: padding has a position behind the sequence's end."""
    align = split.align or split.tp * split.cp * (2 if split.cp > 1 and split.layout == "zigzag" else 1)
    sequences = []
    for i, n in enumerate(tokens):
        padded = n
        while padded % align:
            padded += 1
        sequences.append([(i, p) for p in range(padded)])
    if split.cp == 1:
        local = [t for s in sequences for t in s]
    elif split.layout == "zigzag":
        local = []
        for s in sequences:
            chunks = np.array_split(np.arange(len(s)), 2 * split.cp)
            local += [s[j] for j in chunks[split.cp_rank]] + [s[j] for j in chunks[2 * split.cp - 1 - split.cp_rank]]
    else:
        flat = [t for s in sequences for t in s]
        while len(flat) % (split.cp * split.tail_align):
            flat.append((TAIL, len(flat)))
        local = flat[split.cp_rank * len(flat) // split.cp : (split.cp_rank + 1) * len(flat) // split.cp]
    while len(local) % split.tail_align:
        local.append((TAIL, len(local)))
    if split.sp and split.tp > 1:
        part = len(local) // split.tp
        local = local[split.tp_rank * part : (split.tp_rank + 1) * part]
    return local


@st.composite
def splits(draw: st.DrawFn) -> Split:
    tp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    return Split(
        tp=tp,
        tp_rank=draw(st.integers(0, tp - 1)),
        cp=cp,
        cp_rank=draw(st.integers(0, cp - 1)),
        sp=draw(st.booleans()),
        layout=draw(st.sampled_from(["zigzag", "contiguous"])),
        tail_align=draw(st.sampled_from([1, tp, 8 * tp])),
        align=draw(st.sampled_from([None, 2 * cp, 8 * cp])),
    )


def flat(shards: list[Shard]) -> list[tuple[int, int]]:
    return [(s.sequence, p) for s in shards for p in range(s.start, s.stop)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), splits())
def test_a_packed_batch_is_cut_as_trainers_cut_it(tokens: list[int], split: Split) -> None:
    assume(not split.sp or len(packed_by_hand(tokens, replace(split, sp=False))) % split.tp == 0)
    found, expected = flat(split.packed(tokens)), packed_by_hand(tokens, split)
    assert [(s, p if s != TAIL else 0) for s, p in found] == [(s, p if s != TAIL else 0) for s, p in expected]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), splits(), st.data())
def test_a_shard_is_the_rows_of_its_tokens(tokens: list[int], split: Split, data: st.DataObject) -> None:
    """Goal: the experts used are the rollout's on every rank. Method: token by token, with holes, against the cut."""
    parts, known = [], []
    for n in tokens:
        valid = data.draw(st.lists(st.booleans(), min_size=n - 1, max_size=n + 3))  # a trainer may cut tokens off
        parts.append(SHAPE.routes(0, valid))
        known.append({p for p, there in enumerate(valid) if there and p < n})
    try:
        cut = flat(split.packed(tokens))
    except InvalidInputError:
        with pytest.raises(InvalidInputError):
            shard_packed(parts, tokens, split, missing="minus1")
        return
    made = shard_packed(parts, tokens, split, missing="minus1", pad="arange")
    assert made.shape == (len(cut), len(SHAPE.layer_ids), SHAPE.top_k)
    assert made.dtype == np.int64
    for row, (sequence, position) in zip(made, cut, strict=True):
        if sequence != TAIL and position in known[sequence]:
            expected = SHAPE.ids([position])[0]
        elif sequence != TAIL and position < tokens[sequence] - 1:
            expected = np.full_like(row, -1)
        else:
            expected = np.tile(np.arange(SHAPE.top_k), (len(SHAPE.layer_ids), 1))
        assert np.array_equal(row, expected)


def test_a_hole_names_its_sequence_and_position() -> None:
    parts = [SHAPE.whole(4), SHAPE.routes(0, [True, False, True])]
    with pytest.raises(RowError, match="sequence 1 row 1: wanted a row"):
        shard_packed(parts, [5, 4], Split())
    shard_packed(parts, [5, 2], Split())  # the hole is the last token's, which has no row
    with pytest.raises(RowError, match="sequence 0 row 4"):
        shard_packed(parts, [6, 2], Split())
    with pytest.raises(RowError, match="tokens: wanted one number for each of 2 routes"):
        shard_packed(parts, [5], Split())
    with pytest.raises(RowError, match="sample 1 routed_layers"):
        shard_packed([SHAPE.whole(1), Shape(layer_ids=(0, 4)).whole(1)], [1, 1], Split())


# Padded batches -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=3),
    splits(),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["sequence", "batch"]),
)
def test_a_padded_batch_is_cut_by_columns(tokens: list[int], split: Split, side: Any, order: Any) -> None:
    """Method: the whole batch by hand, ``[batch, width]`` of positions, cut as token ids are, then compared."""
    width = 32
    positions = np.full((len(tokens), width), -1)
    for i, n in enumerate(tokens):
        at = width - n if side == "left" else 0
        positions[i, at : at + n] = np.arange(n)
    if split.cp > 1 and split.layout == "zigzag":
        chunks = np.split(positions, 2 * split.cp, axis=1)
        positions = np.concatenate([chunks[split.cp_rank], chunks[2 * split.cp - 1 - split.cp_rank]], axis=1)
    elif split.cp > 1:
        positions = np.split(positions, split.cp, axis=1)[split.cp_rank]
    if split.sp:
        positions = np.split(positions, split.tp, axis=1)[split.tp_rank]
    parts = [SHAPE.whole(n) for n in tokens]
    made = shard_padded(parts, tokens, split, width=width, side=side, order=order, pad="zero")
    if order == "sequence":
        made = made.swapaxes(0, 1)
    assert made.shape[:2] == positions.shape
    for row, position in zip(made.reshape(-1, *made.shape[2:]), positions.ravel(), strict=True):
        assert np.array_equal(row, SHAPE.ids([position])[0] if position >= 0 else np.zeros_like(row))


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_padding_of_a_shard_is_distinct_and_loads_every_expert_rank_alike(ep: int) -> None:
    """Goal: padding neither takes one expert twice nor crowds a rank (miles 2697), and the ranks and layers that a
    caller gives apply to it. Method: a sequence of nothing but padding, beside the same rows materialised; other ranks
    and other layers first, whose plans are kept; count, layer by layer."""
    shape = Shape(layer_ids=(0, 1, 2), num_experts=32, num_layers=3, top_k=6)
    empty = shape.routes(0, [])
    for other in (8 // ep, ep):
        for layers in ("all", [2, 0]):
            wanted = empty.materialize(64, layers, "int64", missing="spread", ep=other)
            found = shard_packed([empty], [1], Split(align=64), layers, ep=other)
            assert np.array_equal(found, wanted)
    assert all(len(set(row)) == shape.top_k for row in found.reshape(-1, shape.top_k).tolist())
    for ids in found.swapaxes(0, 1):
        assert (np.bincount(ids.ravel() // (32 // ep), minlength=ep) == ids.size // ep).all()
        assert (np.bincount(ids.ravel(), minlength=32) == ids.size // 32).all()


# Layers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", ["all", "moe"])
def test_stages_together_are_the_whole(shape: Shape, layers: Any) -> None:
    """Goal: dense-first layers shift no layer's rows (verl 5037, slime 810). Method: stages side by side against no
    stages."""
    pp = next(n for n in (4, 3, 2) if shape.num_layers % n == 0)
    routes = shape.whole(6)
    whole = shard_packed([routes], [7], Split(), layers)
    stages: list[NDArray[Any]] = [shard_packed([routes], [7], Split(pp=pp, pp_rank=r), layers) for r in range(pp)]
    assert np.array_equal(np.concatenate(stages, axis=1), whole)
    assert np.array_equal(whole[:6], routes.materialize(6, layers, "int64"))


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda: Split(cp=2, align=1).packed([5]), "a multiple of 2 cp = 4"),
        (lambda: Split(tp=2, sp=True, align=1).packed([5]), "local tokens: wanted a multiple of tp=2"),
        (lambda: Split(cp=2).columns(6), "width: wanted a multiple of 4, for cp=2 with zigzag"),
        (lambda: Split(cp=4, layout="contiguous").columns(6), "width: wanted a multiple of 4, for cp=4 with contig"),
        (lambda: Split(pp=2).layers(7), "pp: wanted a divisor of 7 layers"),
        (lambda: shard_padded([SHAPE.whole(8)], [9], Split(), width=8), "tokens of sequence 0: wanted 8 at most"),
    ],
)
def test_lengths_that_cannot_be_cut_are_refused(cut: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        cut()
