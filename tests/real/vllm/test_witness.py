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

from kvroute.connector.carriers.by_key import WRONG_KV
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
    again: list[Any]  # answers with the KV of the first pass, and the rows that they were given


def crossed(engine: Engine, kv: Path, layer: int, size: float) -> Crossed:
    engine.forget_locally()
    shutil.rmtree(kv)
    kv.mkdir()
    with engine.storing() as keys:
        with noise(engine, layer, size, seed=1):
            first = [rows_of(output) for output in engine.ask(ASKED, max_tokens=1)]
        engine.kept.blocks.jobs.wait(30)
        engine.kept.blocks.jobs.poll()
    engine.kept.store.delete(keys)
    aside = kv.with_name("aside")
    shutil.move(kv, aside)
    kv.mkdir()
    engine.forget_locally()
    with noise(engine, layer, size, seed=2):
        second = [rows_of(output) for output in engine.ask(ASKED, max_tokens=1)]
    while engine.kept.blocks.jobs:
        assert engine.kept.blocks.jobs.wait(30)
        engine.kept.blocks.jobs.poll()
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


def wrong_and_there(found: Crossed) -> tuple[int, int]:
    """Of rows of loaded KV: how many are not those of the pass that made it, and how many are there at all."""
    wrong = there = 0
    for output, first, full in zip(found.again, found.first, FULL, strict=True):
        given = routes(output)
        assert given.known[full:].all(), "what was computed here has its rows"
        known = given.known[:full]
        wrong += int(((np.sort(given.ids, axis=-1)[:full] != first).any(2) & known).any(1).sum())
        there += int(known.all(1).sum())
    return wrong, there


def test_rows_go_by_the_kv_that_they_are_beside(start: Any) -> None:
    """Goal: rows that are not of the KV's pass are never handed out, and without noise all are. Method: no noise; noise
    in the first layer that changes choices; noise too small to change one, whose price is known: every block is
    refused. Noise in the last layer alone, which no KV shows: every such token is named.
    """
    engine, kv = start("flagged")
    for layer, size, changed, there in ((0, 0.0, 0, sum(FULL)), (0, 0.2, 20, 0), (0, 1e-6, 0, 0)):
        before = engine.kept.missing[WRONG_KV]
        found = crossed(engine, kv, layer, size)
        differ = differing(found.first, found.second)
        assert sum(int(d.any(1).sum()) for d in differ) >= changed
        assert changed or not any(d.any() for d in differ)
        assert wrong_and_there(found) == (0, there)
        assert engine.kept.missing[WRONG_KV] - before == sum(FULL) - there
    found = crossed(engine, kv, LAYERS - 1, 0.2)
    differ = differing(found.first, found.second)
    assert sum(int(d[:, -1].sum()) for d in differ) > 20
    assert not any(d[:, :-1].any() for d in differ)
    assert [unseen(output) for output in found.again] == [((0, full),) for full in FULL]
    assert [routes(output).complete for output in found.again] == [True] * len(FULL)
    engine.kept.blocks.assert_consistent()


def test_the_last_router_is_missing_where_no_kv_shows_it(start: Any) -> None:
    """Goal: no choice is claimed that KV cannot prove. Method: noise in the last layer alone, with the defaults."""
    engine, kv = start("missing")
    found = crossed(engine, kv, LAYERS - 1, 0.2)
    assert wrong_and_there(found) == (0, 0)
    for output, full in zip(found.again, FULL, strict=True):
        assert routes(output).known[:, :-1].all()
        assert routes(output).missing == ((0, full),)
        assert unseen(output) == ()


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM has KV of eight bits on CPUs with AVX-512 or AMX",
)
def test_kv_of_eight_bits(start: Any) -> None:
    """Goal: KV that keeps little of what was computed still names its rows, by all of its layers. Method: float8 KV:
    with noise no row of the other pass comes, without noise all come.
    """
    engine, kv = start("flagged", kv_cache_dtype="fp8_e4m3")
    assert wrong_and_there(crossed(engine, kv, 0, 0.0)) == (0, sum(FULL))
    assert engine.kept.missing[WRONG_KV] == 0
    wrong, there = wrong_and_there(crossed(engine, kv, 0, 0.2))
    assert wrong == 0
    assert there < sum(FULL)
