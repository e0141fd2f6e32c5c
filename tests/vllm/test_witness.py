"""Rows and KV of different computations, made inside vLLM on kernels that are disturbed on purpose.

One engine computes the same prompts twice under different noise, and KV of the first pass comes to lie beside rows of
the second: as when two engines fill one pool of KV and another of rows. The rows of the first pass are the truth.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import BLOCK, Engine, noise, prompts
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from kvroute.integrations.vllm import routes, unseen

Start = Any  # conftest's Engines
Model = Callable[..., Path]
LAYERS = 3
ASKED = prompts(31, 150, 98, 200)
FULL = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in ASKED]


@dataclass
class Crossed:
    """An engine whose KV is of one pass and whose stored rows are of another, asked again."""

    first: list[NDArray[Any]]  # rows of the pass that made the KV, of whole blocks, sorted
    second: list[NDArray[Any]]  # rows of the pass that made the stored rows
    again: list[Any]  # answers with the KV of the first and what rows they were given


def crossed(engine: Engine, kv: Path, layer: int, size: float) -> Crossed:
    keys: list[BlockKey] = []
    persist = engine.sent.feed.persist

    def recording(blocks: dict[BlockKey, int]) -> None:
        keys.extend(blocks)
        persist(blocks)

    engine.sent.feed.persist = recording  # type: ignore[method-assign]
    with noise(engine, layer, size, seed=1):
        first = [rows_of(output) for output in engine.ask(ASKED, max_tokens=1)]
    engine.kept.blocks.wait(30)
    engine.kept.blocks.poll()
    engine.kept.store.delete(keys)
    aside = kv.with_name("aside")
    shutil.move(kv, aside)
    kv.mkdir()
    engine.forget_locally()
    with noise(engine, layer, size, seed=2):
        second = [rows_of(output) for output in engine.ask(ASKED, max_tokens=1)]
    while engine.kept.blocks.jobs:
        assert engine.kept.blocks.wait(30)
        engine.kept.blocks.poll()
    shutil.rmtree(kv)
    shutil.move(aside, kv)
    engine.forget_locally()
    again = engine.ask(ASKED, max_tokens=1)
    assert [output.num_cached_tokens for output in again] == FULL, "all of it came from outside"
    return Crossed(first, second, again)


def rows_of(output: Any) -> NDArray[Any]:
    found = routes(output)
    assert found.complete
    return np.sort(found.ids, axis=-1)[: (len(output.prompt_token_ids) - 1) // BLOCK * BLOCK]


def differing(one: list[NDArray[Any]], other: list[NDArray[Any]]) -> list[NDArray[np.bool_]]:
    """By prompt: at which tokens and layers the choices differ, ``[tokens, layers]``."""
    return [(a != b).any(2) for a, b in zip(one, other, strict=True)]


@pytest.fixture
def start(engine: Start, model: Model, tmp_path: Path) -> Callable[..., tuple[Engine, Path]]:
    def made(witness: str, **arguments: Any) -> tuple[Engine, Path]:
        kv = tmp_path / witness / "kv"
        kv.mkdir(parents=True)
        settings = {"store": f"file://{tmp_path / witness / 'rows'}", "witness": witness}
        extra = {"shared_storage_path": str(kv)}
        return engine(model("qwen3_moe"), "KvrouteExampleConnector", settings, extra, **arguments), kv

    return made


def test_rows_of_other_choices_are_missing(start: Any) -> None:
    """Goal: rows that are not of the KV's pass are never handed out. Method: noise in the first layer that changes
    choices; with the comparison no wrong row comes, without it many do (which shows that the test can fail).
    """
    engine, kv = start("flagged")
    found = crossed(engine, kv, layer=0, size=0.2)
    differ = differing(found.first, found.second)
    assert sum(int(d.any(1).sum()) for d in differ) > 20, "the noise changes choices"
    for output, first, full in zip(found.again, found.first, FULL, strict=True):
        given = routes(output)
        same = (np.sort(given.ids, axis=-1)[:full] == first).all((1, 2))
        assert (same | ~given.valid[:full]).all()
        assert given.valid[full:].all(), "what was computed here has its rows"
    assert engine.kept.missing["rows of other KV than was loaded"] > 0
    engine.kept.blocks.assert_consistent()

    engine, kv = start("off")
    found = crossed(engine, kv, layer=0, size=0.2)
    wrong = 0
    for output, first, full in zip(found.again, found.first, FULL, strict=True):
        given = routes(output)
        same = (np.sort(given.ids, axis=-1)[:full] == first).all((1, 2))
        wrong += int((~same & given.valid[:full]).sum())
    assert wrong > 20, "nothing was compared, and rows of another pass came"


def test_rows_of_equal_choices_beside_other_kv_are_missing_too(start: Any) -> None:
    """Goal: the price is known: KV that differs in its last bits refuses rows that were right. Method: noise too small
    to change a choice; every block is refused and none is wrong.
    """
    engine, kv = start("flagged")
    found = crossed(engine, kv, layer=0, size=1e-6)
    assert not any(d.any() for d in differing(found.first, found.second))
    assert not any(routes(output).valid[:full].any() for output, full in zip(found.again, FULL, strict=True))
    assert engine.kept.missing["rows of other KV than was loaded"] == sum(FULL)


@pytest.mark.parametrize("witness", ["missing", "flagged"])
def test_the_last_router_is_not_seen_and_said_so(start: Any, witness: str) -> None:
    """Goal: what no KV shows is not claimed. Method: noise in the last layer alone: all KV is equal and the last
    choices differ; they are missing where KV came from outside, or every such token is named.
    """
    engine, kv = start(witness)
    found = crossed(engine, kv, layer=LAYERS - 1, size=0.2)
    assert sum(int(d[:, -1].sum()) for d in differing(found.first, found.second)) > 20
    assert not any(d[:, :-1].any() for d in differing(found.first, found.second))
    for output, first, full in zip(found.again, found.first, FULL, strict=True):
        given = routes(output)
        assert given.layer_ids == tuple(range(LAYERS))
        assert given.known[:, :-1].all()
        assert given.known[full:].all(), "what was computed here"
        if witness == "missing":
            assert not given.known[:full, -1].any()
            assert given.missing == ((0, full),)
            assert unseen(output) == ()
        else:
            assert given.complete
            assert unseen(output) == ((0, full),)
        assert (np.sort(given.ids, axis=-1)[:full, : LAYERS - 1] == first[:, : LAYERS - 1]).all()
    assert engine.kept.missing["rows of other KV than was loaded"] == 0


def test_without_noise_every_row_comes(start: Any) -> None:
    """Goal: kernels that repeat themselves lose nothing. Method: no noise at all; all rows are there and right."""
    engine, kv = start("flagged")
    found = crossed(engine, kv, layer=0, size=0.0)
    for output, first, full in zip(found.again, found.first, FULL, strict=True):
        given = routes(output)
        assert given.complete
        assert (np.sort(given.ids, axis=-1)[:full] == first).all()
    assert engine.kept.missing["rows of other KV than was loaded"] == 0


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM has KV of eight bits on CPUs with AVX-512 or AMX",
)
@pytest.mark.parametrize("size", [0.0, 0.2])
def test_kv_of_eight_bits(start: Any, size: float) -> None:
    """Goal: KV that keeps little of what was computed still names its rows, by all of its layers. Method: as above with
    float8 KV: with noise no row of the other pass comes, without noise all come.
    """
    engine, kv = start("flagged", kv_cache_dtype="fp8_e4m3")
    found = crossed(engine, kv, layer=0, size=size)
    for output, first, full in zip(found.again, found.first, FULL, strict=True):
        given = routes(output)
        same = (np.sort(given.ids, axis=-1)[:full] == first).all((1, 2))
        assert (same | ~given.valid[:full]).all()
        assert given.complete or size
    refused = engine.kept.missing["rows of other KV than was loaded"]
    assert refused > 20 if size else refused == 0
    assert bool(sum(int(d.any(1).sum()) for d in differing(found.first, found.second))) == bool(size)
