"""Paged and unpaged passes of the very same modelling code must agree, however the tokens are cut up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paged_engine import text
from paged_engine.attention import PagedBatch, PagedKV, kv_shape
from paged_engine.judge import RouterWatch
from paged_engine.models import BATCH_MULTIPLE, build_model, weights_digest
from paged_engine.request import EngineConfig

BLOCK = 8
TOKENS = 61


def _cache(model: nn.Module) -> PagedKV:
    kv = PagedKV(kv_shape(model), EngineConfig(BLOCK, device_blocks=24, host_blocks=4))
    kv.device.fill_(float("nan"))  # reading unwritten memory becomes visible
    return kv


def _scattered_slots(seed: int) -> torch.Tensor:
    """Slots of 64 tokens in blocks of no particular order, disjoint for even and odd seeds."""
    blocks = torch.randperm(12, generator=torch.Generator().manual_seed(seed)) * 2 + seed % 2
    return (blocks[:8, None] * BLOCK + torch.arange(BLOCK)).reshape(-1)


def _prompt(number: int) -> torch.Tensor:
    return torch.tensor(text.encode(text.paragraphs()[number])[:TOKENS])


def _unpaged(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and top-k of the whole sequence by transformers' own attention."""
    watch = RouterWatch(model)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        padded = nn.functional.pad(tokens, (0, -len(tokens) % BATCH_MULTIPLE))
        with torch.inference_mode():
            logits = model(input_ids=padded[None], use_cache=False).logits[0, : len(tokens)]
        return logits, torch.from_numpy(watch.take()[: len(tokens)])
    finally:
        model.set_attn_implementation(before)
        watch.close()


def _paged(model: nn.Module, batch: PagedBatch, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    watch = RouterWatch(model)
    padded = nn.functional.pad(tokens, (0, batch.padding), value=text.PAD)
    with torch.inference_mode():
        out = model(input_ids=padded[None], position_ids=batch.positions, use_cache=False, paged=batch)
    watch.close()
    return out.logits[0, : len(tokens)], torch.from_numpy(watch.take()[: len(tokens)])


@pytest.mark.parametrize("chunk", [1, BLOCK + 1, TOKENS])
def test_chunks_of_any_size_give_the_logits_and_routes_of_the_whole(any_model: nn.Module, chunk: int) -> None:
    """Goal: paging and chunking change nothing. Method: scattered blocks full of NaN, chunks around a block's size."""
    tokens, slots, kv = _prompt(0), _scattered_slots(0), _cache(any_model)
    logits, routes = [], []
    for start in range(0, TOKENS, chunk):
        stop = min(start + chunk, TOKENS)
        batch = PagedBatch.of(kv, [(start, slots[:stop])], multiple_of=BATCH_MULTIPLE)
        some_logits, some_routes = _paged(any_model, batch, tokens[start:stop])
        logits.append(some_logits)
        routes.append(some_routes)
    whole_logits, whole_routes = _unpaged(any_model, tokens)
    # transformers' eager attention takes its softmax through float32; the routes are equal all the same
    torch.testing.assert_close(torch.cat(logits), whole_logits, atol=1e-5, rtol=0)
    assert torch.equal(torch.cat(routes), whole_routes)


def test_sequences_in_one_batch_do_not_see_each_other(any_model: nn.Module) -> None:
    """Goal: continuous batching is invisible. Method: a decode token, a chunk and a prompt side by side, and alone."""
    kv, first, second, third = _cache(any_model), _prompt(0), _prompt(1), _prompt(2)[:20]
    even, odd = _scattered_slots(0), _scattered_slots(1)
    _paged(any_model, PagedBatch.of(kv, [(0, even[:40])], multiple_of=BATCH_MULTIPLE), first[:40])
    _paged(any_model, PagedBatch.of(kv, [(0, odd[:13])], multiple_of=BATCH_MULTIPLE), second[:13])
    elsewhere = torch.tensor([s for s in range(24 * BLOCK) if s not in set(even.tolist() + odd.tolist())])[:20]
    batch = PagedBatch.of(kv, [(40, even[:41]), (13, odd[:33]), (0, elsewhere)], multiple_of=BATCH_MULTIPLE)
    assert (batch.positions.shape[1] % BATCH_MULTIPLE, batch.padding) == (0, 7)
    logits, routes = _paged(any_model, batch, torch.cat([first[40:41], second[13:33], third]))
    for tokens, start, stop, at in ((first, 40, 41, 0), (second, 13, 33, 1), (third, 0, 20, 21)):
        alone_logits, alone_routes = _unpaged(any_model, tokens[:stop])
        here = slice(at, at + stop - start)
        torch.testing.assert_close(logits[here], alone_logits[start:], atol=1e-5, rtol=0)
        assert torch.equal(routes[here], alone_routes[start:])


def test_padding_touches_no_slot(qwen: nn.Module) -> None:
    kv = _cache(qwen)
    slots = _scattered_slots(0)[:3]
    _paged(qwen, PagedBatch.of(kv, [(0, slots)], multiple_of=BATCH_MULTIPLE), _prompt(0)[:3])
    written = ~kv.device.isnan().reshape(24 * BLOCK, -1).all(dim=1)
    assert written.nonzero().reshape(-1).tolist() == sorted(slots.tolist())


def test_the_same_seed_gives_the_same_model_and_another_does_not() -> None:
    before = torch.get_rng_state()
    same = [weights_digest(build_model("qwen3_moe", seed=seed, vocab_size=512)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)  # the global random state is left alone
    assert same[0] == same[1] != same[2]
    assert weights_digest(build_model("olmoe", seed=1, vocab_size=512)) not in same
