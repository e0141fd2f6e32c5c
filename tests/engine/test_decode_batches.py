"""Decode passes over static tables give what any pass gives, and touch no more of the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_runs import NAMESPACE, TIGHT, Hook, assert_same, judged, requests_of, run
from torch import nn

from paged_engine.demo.checker import Checker, RouterWatch
from paged_engine.engine import text
from paged_engine.engine.decode_batches import LENGTH_MIN, DecodePasses
from paged_engine.engine.engine import Engine
from paged_engine.engine.kv import PagedKV
from paged_engine.engine.models import BATCH_MULTIPLE
from paged_engine.engine.paged_attention import PagedBatch
from paged_engine.engine.probe import kv_shape

BLOCK, BLOCKS = 8, 96
LENGTHS = [1, 9, LENGTH_MIN - 1, LENGTH_MIN, LENGTH_MIN + 1, 2 * LENGTH_MIN]
"""Tokens that are in the cache; the decode's own comes behind them."""


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS * 3, [2]], ids=["some", "more than a multiple", "one"])
def test_a_decode_pass_is_the_pass_that_any_batch_makes(any_model: nn.Module, lengths: list[int]) -> None:
    """Goal: padding and masked context change nothing. Method: NaN wherever nothing was written; twice in one batch."""
    kvs = [PagedKV(kv_shape(any_model), block_tokens=BLOCK, device_blocks=3 * BLOCKS, host_blocks=0) for _ in "ab"]
    for kv in kvs:
        kv.device.fill_(float("nan"))
    stops = [length + 1 for length in lengths]
    all_slots = torch.randperm(3 * BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))
    slots = torch.split(all_slots[: sum(stops) + len(stops)], [stop + 1 for stop in stops])
    tokens = [torch.tensor(text.encode(text.paragraphs()[i % 4])[:1] * (stop + 1)) for i, stop in enumerate(stops)]
    passes = DecodePasses(any_model, kvs[0], tokens_max=64)
    with torch.inference_mode():
        for kv in kvs:
            for mine, given, length in zip(slots, tokens, lengths, strict=True):
                _paged(any_model, kv, [(0, mine[:length])], given[:length])
        watch = RouterWatch(any_model)
        for more in (0, 1):
            at = [length + more for length in lengths]
            given = torch.stack([each[i] for each, i in zip(tokens, at, strict=True)])
            contexts = [mine[: i + 1] for mine, i in zip(slots, at, strict=True)]
            found = passes.run(given.tolist(), [context.numpy() for context in contexts])
            routes = watch.take()[: len(at)]
            spans = [(i, context) for i, context in zip(at, contexts, strict=True)]
            wanted = _paged(any_model, kvs[1], spans, given)
            torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)
            assert (routes == watch.take()[: len(at)]).all()
    written = [~kv.device.isnan().reshape(3 * BLOCKS * BLOCK, -1).all(dim=1) for kv in kvs]
    assert torch.equal(*written)
    assert passes.size(len(lengths)) in (BATCH_MULTIPLE, 2 * BATCH_MULTIPLE)
    watch.close()


def _paged(model: nn.Module, kv: PagedKV, spans: list[tuple[int, torch.Tensor]], tokens: torch.Tensor) -> torch.Tensor:
    batch = PagedBatch.of(kv, spans, multiple_of=BATCH_MULTIPLE)
    padded = nn.functional.pad(tokens, (0, batch.padding))
    out = model(input_ids=padded[None], position_ids=batch.positions, use_cache=False, paged=batch)
    logits: torch.Tensor = out.logits[0, : len(tokens)]
    return logits


def test_an_engine_with_graphs_answers_as_one_without(qwen: nn.Module) -> None:
    """Goal: tokens, routes and verdict are the same. Method: reuse, forks, swaps and drops under the checker's eyes."""
    found = {}
    for graphs in (False, True):
        checker = Checker()
        checker.attach(qwen)
        with Engine(
            qwen, replace(TIGHT, graphs=graphs), NAMESPACE, observer=Hook(checker.begin, checker.end)
        ) as engine:
            found[graphs] = run(engine, requests_of())
        checker.detach()
        verdict = judged(checker, "qwen3_moe", found[graphs])
        assert verdict.expected > 0
        assert (verdict.wrong, verdict.missing) == (0, 0)
    assert_same(found[True], found[False])
