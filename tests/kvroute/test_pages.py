"""Rows in pages of paged KV: a row that comes out is the row that went in, or it is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_manager.errors import ConfigError
from kvroute.connector.pages import Pages, page_name, slots_of, token_nbytes
from kvroute.routing import routing_spec

BLOCKS, TOKENS = 6, 4
SPECS = [
    routing_spec(num_experts=8, top_k=3, layer_ids=[1, 2], num_layers=3, block_tokens=TOKENS),
    routing_spec(num_experts=300, top_k=2, layer_ids=[0], num_layers=1, block_tokens=TOKENS),
]
seeds = st.integers(0, 2**32 - 1)


def pages(spec: Any) -> Pages:
    """Memory as an engine finds it: with whatever was there before."""
    random = np.random.default_rng(1).integers(0, 256, (BLOCKS, 1, TOKENS, token_nbytes(spec)), np.uint8)
    return Pages(torch.from_numpy(random), spec)


def put(held: Pages, slots: NDArray[np.int64], ids: NDArray[np.int32] | None, keep: NDArray[np.bool_]) -> None:
    held.put(torch.from_numpy(slots), None if ids is None else torch.from_numpy(ids), torch.from_numpy(keep))


def choices(rng: np.random.Generator, spec: Any, n: int) -> NDArray[np.int32]:
    ids = rng.permuted(np.tile(np.arange(spec.attrs["num_experts"]), (n, spec.row_shape[0], 1)), axis=2)
    return ids[..., : spec.row_shape[1]].astype(np.int32)


@given(seeds, st.sampled_from(SPECS))
def test_a_row_that_comes_out_went_in_there(seed: int, spec: Any) -> None:
    """Goal: pages lose, move and invent nothing. Method: steps with padding and rows that are not to be kept, over
    memory with anything in it, against a dictionary.
    """
    rng, held, known = np.random.default_rng(seed), pages(spec), {}
    for _ in range(4):
        slots = rng.permutation(BLOCKS * TOKENS)[: rng.integers(1, 12)]
        slots[rng.random(slots.size) < 0.2] = -1
        ids, keep = choices(rng, spec, slots.size), rng.random(slots.size) < 0.8
        captured = rng.random() < 0.8
        put(held, slots, ids if captured else None, keep)
        for slot, row, kept in zip(slots.tolist(), ids, keep.tolist(), strict=True):
            if slot >= 0:
                known[slot] = row if captured and kept else None
    everything = np.arange(BLOCKS * TOKENS)
    found, good = held.rows(held.get(everything))
    assert good.tolist() == [known.get(slot) is not None for slot in everything.tolist()]
    for slot in np.flatnonzero(good).tolist():
        assert (found[slot] == known[slot]).all()


@given(seeds, st.sampled_from(SPECS), st.data())
def test_a_changed_byte_is_a_missing_row(seed: int, spec: Any, data: st.DataObject) -> None:
    """Goal: a damaged page is never believed. Method: change any byte of a token; that row is missing, no other."""
    rng, held = np.random.default_rng(seed), pages(spec)
    slots = np.arange(BLOCKS * TOKENS)
    held.put(torch.from_numpy(slots), torch.from_numpy(choices(rng, spec, slots.size)))
    slot = data.draw(st.integers(0, slots.size - 1))
    held.cache.view(-1, token_nbytes(spec))[slot, data.draw(st.integers(0, token_nbytes(spec) - 1))] ^= 255
    assert np.flatnonzero(~held.rows(held.get(slots))[1]).tolist() == [slot]


@given(seeds)
def test_a_block_that_is_given_out_has_no_row_of_its_earlier_life(seed: int) -> None:
    """Goal: a step whose rows are lost leaves nothing that looks like a row. Method: fill all, give two blocks out."""
    spec, held = SPECS[0], pages(SPECS[0])
    slots = np.arange(BLOCKS * TOKENS)
    held.put(torch.from_numpy(slots), torch.from_numpy(choices(np.random.default_rng(seed), spec, slots.size)))
    held.clear([4, 1])
    assert (~held.rows(held.get(slots))[1]).reshape(BLOCKS, TOKENS).sum(1).tolist() == [0, TOKENS, 0, 0, TOKENS, 0]


@given(seeds)
def test_pages_move_with_their_blocks(seed: int) -> None:
    """Goal: whoever copies a block's page copies its rows, into any block of any engine. Method: copy two pages."""
    spec, rng = SPECS[0], np.random.default_rng(seed)
    one, other = pages(spec), pages(spec)
    blocks, to = np.array([4, 1]), np.array([0, 5])
    ids = choices(rng, spec, 7)
    one.put(torch.from_numpy(slots_of(blocks, TOKENS, 7)), torch.from_numpy(ids))
    other.cache[to] = one.cache[blocks]
    found, good = other.rows(other.get(slots_of(to, TOKENS, 7)))
    assert good.all()
    assert (found == ids).all()


@given(seeds, st.sampled_from(SPECS))
def test_padding_and_ids_that_are_none_leave_no_row(seed: int, spec: Any) -> None:
    """Goal: a page says of each token whether its row is there, whatever a device finds. Method: a step of padding
    alone, over pages that are full; then one whose tokens have one id each that no expert has.
    """
    held, slots = pages(spec), np.arange(BLOCKS * TOKENS)
    rng = np.random.default_rng(seed)
    ids = choices(rng, spec, slots.size)
    held.put(torch.from_numpy(slots), torch.from_numpy(ids))
    held.put(torch.full((3,), -1), torch.from_numpy(ids[:3]))
    found, good = held.rows(held.get(slots))
    assert good.all()
    assert (found == ids).all()
    some = rng.permutation(slots.size)[:2]
    bad = ids[some].copy()
    bad[0, -1, -1], bad[1, 0, 0] = spec.attrs["num_experts"], -1
    held.put(torch.from_numpy(slots[some]), torch.from_numpy(bad))
    assert sorted(np.flatnonzero(~held.rows(held.get(slots))[1])) == sorted(some)


def test_a_layer_of_another_shape_is_refused() -> None:
    """Goal: engines that differ do not read each other's pages. Method: other tokens, widths and dtypes."""
    spec = SPECS[0]
    good = (BLOCKS, 1, TOKENS, token_nbytes(spec))
    assert page_name(spec) == "model.kvroute.3.rows"
    for shape in ((BLOCKS, 1, 2 * TOKENS, good[3]), (*good[:3], good[3] + 8), (BLOCKS, 2, TOKENS, good[3])):
        with pytest.raises(ConfigError, match="pages of rows"):
            Pages(torch.zeros(shape, dtype=torch.uint8), spec)
    with pytest.raises(ConfigError, match="pages of rows"):
        Pages(torch.zeros(good, dtype=torch.int8), spec)
