"""Rows in pages of paged KV: a row that is read is the row that was written, or it is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_engine import Toy, admitted

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.connector.limits import LIMITS, Limits
from kvroute.connector.pages import NO_ROW, OTHER_KV, OTHER_WEIGHTS, Pages, StepTokens, page_name, token_nbytes
from kvroute.routing import routing_spec

BLOCKS, TOKENS, VALUES = 6, 4, 6
SPECS = [
    routing_spec(num_experts=8, top_k=3, layer_ids=[1, 2], num_layers=3, block_tokens=TOKENS),
    routing_spec(num_experts=300, top_k=2, layer_ids=[0], num_layers=1, block_tokens=TOKENS),
]
seeds = st.integers(0, 2**32 - 1)


ALL = np.arange(BLOCKS * TOKENS)
MINE, OTHERS = Namespace("m", 1).fingerprint, Namespace("m", 2).fingerprint


class Held:
    """Pages beside KV, both with whatever was there before. ``turned``: KV as a CPU has it, each head's transposed."""

    def __init__(self, spec: Any, turned: bool = False, limits: Limits = LIMITS) -> None:
        rng = np.random.default_rng(1)
        before = rng.integers(0, 256, (BLOCKS, 1, TOKENS, token_nbytes(spec)), np.uint8)
        self.spec, self.seen = spec, StepTokens(BLOCKS * TOKENS + 3)
        self.kv = torch.from_numpy(rng.normal(size=(BLOCKS, 2, TOKENS, VALUES)).astype(np.float32))
        places = torch.arange(TOKENS * VALUES).view(VALUES, TOKENS).T if turned else None
        self.pages = Pages(torch.from_numpy(before), spec, self.kv, self.seen, places, limits)
        self.tokens, self.at = rng.integers(0, 500, BLOCKS * TOKENS), rng.permutation(BLOCKS * TOKENS)

    def put(self, slots: NDArray[Any], ids: NDArray[Any] | None, keep: NDArray[Any] | None = None) -> None:
        """A step that computes the tokens that these slots have."""
        self.seen.begin()
        self.seen.saw(torch.from_numpy(self.tokens[slots]), torch.from_numpy(self.at[slots]))
        kept = None if keep is None else torch.from_numpy(keep)
        self.pages.put(torch.from_numpy(slots), None if ids is None else torch.from_numpy(ids), MINE, kept)

    def get(
        self, slots: NDArray[Any] = ALL, *, namespace: bytes = MINE, **other: Any
    ) -> tuple[NDArray[Any], NDArray[np.bool_], dict[str, int]]:
        """The rows found for the tokens of these slots, or for other tokens."""
        said = {"token_ids": self.tokens[slots], "positions": self.at[slots], **other}
        return self.pages.rows(self.pages.get(slots, **said), namespace)


def choices(rng: np.random.Generator, spec: Any, n: int) -> NDArray[np.int32]:
    ids = rng.permuted(np.tile(np.arange(spec.attrs["num_experts"]), (n, spec.row_shape[0], 1)), axis=2)
    return ids[..., : spec.row_shape[1]].astype(np.int32)


def full(seed: int, spec: Any, turned: bool = False) -> tuple[Held, NDArray[np.int32]]:
    held, ids = Held(spec, turned), choices(np.random.default_rng(seed), spec, ALL.size)
    held.put(ALL, ids)
    return held, ids


@given(seeds, st.sampled_from(SPECS), st.booleans())
def test_a_row_that_comes_out_went_in_there(seed: int, spec: Any, turned: bool) -> None:
    """Goal: pages lose, move and invent nothing. Method: steps with padding and rows that are not to be kept, over
    memory with anything in it, against a dictionary; each step writes the KV of its
    tokens. In the end KV and pages are copied, to other places of another engine, and KV is folded in parts.
    """
    rng, held, known = np.random.default_rng(seed), Held(spec, turned), {}
    for _ in range(4):
        slots = rng.permutation(BLOCKS * TOKENS)[: rng.integers(1, 12)]
        slots[rng.random(slots.size) < 0.2] = -1
        write(held, slots, rng, turned)
        ids, keep = choices(rng, spec, slots.size), rng.random(slots.size) < 0.8
        captured = rng.random() < 0.8
        held.put(slots, ids if captured else None, keep)
        for slot, row, kept in zip(slots.tolist(), ids, keep.tolist(), strict=True):
            if slot >= 0:
                known[slot] = row if captured and kept else None
    put_once = np.array(sorted(known))
    found, good, lost = held.get(put_once)
    assert good.tolist() == [known[slot] is not None for slot in put_once.tolist()]
    assert lost == ({NO_ROW: n} if (n := int(np.count_nonzero(~good))) else {})
    for i in np.flatnonzero(good).tolist():
        assert (found[i] == known[int(put_once[i])]).all()
    never = np.setdiff1d(ALL, put_once)
    assert not held.get(never)[1].any(), "what lay there before is no row"
    limits = Limits(gather_nbytes_max=5 * 2 * VALUES * 4)
    other, to = Held(spec, turned, limits), rng.permutation(BLOCKS)
    other.pages.cache[to], other.kv[to] = held.pages.cache, held.kv
    moved = to[put_once // TOKENS] * TOKENS + put_once % TOKENS
    said = {"token_ids": held.tokens[put_once], "positions": held.at[put_once]}
    assert other.get(moved, **said)[1].tolist() == good.tolist()


def write(held: Held, slots: NDArray[Any], rng: np.random.Generator, turned: bool) -> None:
    """New K and V of the tokens at these slots, and of no other."""
    for slot in slots[slots >= 0].tolist():
        new = torch.from_numpy(rng.normal(size=(2, VALUES)).astype(np.float32))
        if turned:
            held.kv[slot // TOKENS].view(2, VALUES, TOKENS)[:, :, slot % TOKENS] = new
        else:
            held.kv[slot // TOKENS, :, slot % TOKENS] = new


@given(seeds, st.sampled_from(SPECS), st.booleans(), st.data())
def test_a_changed_byte_is_a_missing_row(seed: int, spec: Any, turned: bool, data: st.DataObject) -> None:
    """Goal: a damaged page is never believed, nor one beside damaged KV. Method: change any byte of a token, in its
    page or in its K and V; that row is missing, no other.
    """
    held, ids = full(seed, spec, turned)
    slot = data.draw(st.integers(0, ALL.size - 1))
    if data.draw(st.booleans()):
        held.pages.cache.view(-1, token_nbytes(spec))[slot, data.draw(st.integers(0, token_nbytes(spec) - 1))] ^= 255
    else:
        raw = held.kv.view(torch.uint8).view(BLOCKS, 2, TOKENS * VALUES, 4)
        place, value = slot % TOKENS, data.draw(st.integers(0, VALUES - 1))
        number = value * TOKENS + place if turned else place * VALUES + value
        raw[slot // TOKENS, data.draw(st.integers(0, 1)), number, data.draw(st.integers(0, 3))] ^= 255
    found, good, lost = held.get()
    assert np.flatnonzero(~good).tolist() == [slot]
    assert sum(lost.values()) == 1
    assert (found[good] == ids[good]).all()


@given(seeds, st.sampled_from(SPECS), st.data())
def test_a_row_of_another_token_position_or_weights_is_missing(seed: int, spec: Any, data: st.DataObject) -> None:
    """Goal: a page proves which tokens, positions and weights its rows belong to. Method: ask for other tokens,
    positions or weights than it was written for, at some slots; those rows are missing, by their reason, and no
    other."""
    held, ids = full(seed, spec)
    assert held.get()[1].all()
    some = np.array(sorted(data.draw(st.sets(st.sampled_from(ALL.tolist()), min_size=1))))
    for of, by, reason in (("token_ids", 1, OTHER_KV), ("positions", TOKENS, OTHER_KV)):
        asked = (held.tokens if of == "token_ids" else held.at).copy()
        asked[some] += by
        found, good, lost = held.get(**{of: asked})
        assert np.flatnonzero(~good).tolist() == some.tolist()
        assert lost == {reason: some.size}
        assert (found[good] == ids[good]).all()
    assert held.get(namespace=OTHERS)[2] == {OTHER_WEIGHTS: ALL.size}
    assert not held.get(namespace=OTHERS)[1].any()
    held.pages.put(torch.from_numpy(some), torch.from_numpy(ids[some]), b"")  # of weights without a name
    assert np.flatnonzero(~held.get()[1]).tolist() == some.tolist()
    assert held.get(namespace=b"")[2] == {NO_ROW: some.size} | (
        {OTHER_WEIGHTS: ALL.size - some.size} if some.size < ALL.size else {}
    )


@given(seeds, st.booleans())
def test_pages_beside_the_kv_of_others_have_no_rows(seed: int, pages: bool) -> None:
    """Goal: a page and KV that do not belong together are found out even where tokens and positions are the same.
    Method: the pages of two blocks change places, or their KV does; no row of the two is handed out.
    """
    held, _ = full(seed, SPECS[0])
    held.tokens[:] = held.tokens[0]
    held.at = ALL % TOKENS
    held.put(ALL, choices(np.random.default_rng(seed), SPECS[0], ALL.size))
    moved = held.pages.cache if pages else held.kv
    moved[[1, 4]] = moved[[4, 1]]
    _, good, lost = held.get()
    assert good.reshape(BLOCKS, TOKENS).all(1).tolist() == [True, False, True, True, False, True]
    assert lost == {OTHER_KV: 2 * TOKENS}


@given(seeds)
def test_a_token_that_the_model_never_got_has_no_row(seed: int) -> None:
    """Goal: a row whose token is not known is no row. Method: a pass over embeddings, one of fewer tokens than slots,
    one of tokens with several positions each, and one of more tokens than were said.
    """
    for sure in (0, 5, -1, -2):
        held, ids = full(seed, SPECS[0])
        held.seen.begin()
        tokens, at = torch.from_numpy(held.tokens), torch.from_numpy(held.at)
        if sure == -1:
            held.seen.saw(tokens, torch.stack([at] * 3))
        elif sure == -2:
            held.seen.saw(tokens.repeat(2), at.repeat(2))
        else:
            held.seen.saw(tokens[:sure] if sure else None, at[:sure] if sure else at)
        held.pages.put(torch.from_numpy(ALL), torch.from_numpy(ids), MINE)
        assert np.flatnonzero(held.get()[1]).tolist() == list(range(max(0, sure)))
    held, _ = full(seed, SPECS[0])
    more = torch.arange(BLOCKS * TOKENS + 4) % ALL.size
    ids = torch.from_numpy(choices(np.random.default_rng(seed), SPECS[0], len(more)))
    held.pages.put(more, ids, MINE)
    assert not held.get()[1].any(), "a step of more tokens than were said"


@given(seeds, st.sampled_from(SPECS))
def test_padding_and_invalid_ids_leave_no_row(seed: int, spec: Any) -> None:
    """Goal: a page marks each token's row as present or missing, whatever slots and ids a step has. Method: a step of
    padding alone, over pages that are full; then one whose tokens have one id each that no expert has."""
    held, ids = full(seed, spec)
    held.put(np.full(3, -1), ids[:3])
    found, good, _ = held.get()
    assert good.all()
    assert (found == ids).all()
    some = np.random.default_rng(seed).permutation(ALL.size)[:2]
    bad = ids[some].copy()
    bad[0, -1, -1], bad[1, 0, 0] = spec.attrs["num_experts"], -1
    held.put(some, bad)
    assert sorted(np.flatnonzero(~held.get()[1])) == sorted(some)


def test_a_step_without_slots_leaves_no_row() -> None:
    """Goal: a page that may have been overwritten is not trusted. Method: a step whose slots are unknown."""
    toy, (held, _) = Toy(pages=True), full(1, SPECS[0])
    toy.worker.carrier.pages = held.pages
    admitted(toy, [3, 1, 4], [5])
    toy.worker.begin(toy.scheduler.step({"r": 3}))
    assert held.get()[1].all()
    toy.worker.end()
    assert held.get()[2] == {NO_ROW: ALL.size}
    toy.close()


def test_a_layer_of_another_shape_is_refused() -> None:
    """Goal: engines that differ do not read each other's pages. Method: other tokens, widths and dtypes, of pages and
    of the KV beside them.
    """
    spec, seen = SPECS[0], StepTokens(8)
    good, kv = (BLOCKS, 1, TOKENS, token_nbytes(spec)), torch.zeros(BLOCKS, 2, TOKENS, VALUES)
    assert page_name(spec) == "model.kvroute.3.rows"
    for shape in ((BLOCKS, 1, 2 * TOKENS, good[3]), (*good[:3], good[3] + 8), (BLOCKS, 2, TOKENS, good[3])):
        with pytest.raises(ConfigError, match="pages of rows"):
            Pages(torch.zeros(shape, dtype=torch.uint8), spec, kv, seen)
    with pytest.raises(ConfigError, match="pages of rows"):
        Pages(torch.zeros(good, dtype=torch.int8), spec, kv, seen)
    for other in (kv[1:], kv[:, :, 1:], kv[0], torch.zeros(BLOCKS, 1, TOKENS, 3)):
        with pytest.raises(ConfigError, match="KV beside rows"):
            Pages(torch.zeros(good, dtype=torch.uint8), spec, other, seen)
