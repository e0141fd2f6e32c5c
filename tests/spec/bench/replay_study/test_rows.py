"""The rows that the study replays: which tokens are wrong, whose rows they hold, what a model computes from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.replay_study.models import build_trained
from bench.replay_study.rows import WRONG_SHARE, Labels, Replayed, Rows, labelled, replayed, wrong_pages
from bench.replay_study.scales import FAMILIES, SCALES
from kvroute.replay.rows import ReplayError
from kvroute.routing import routing_spec_from_hf

BATCH, TOKENS, CACHED, PROMPT, PAGE = 5, 47, 32, 8, 4
ROLLED = torch.arange(BATCH * TOKENS)[:, None, None].repeat(1, 2, 3).unflatten(0, (BATCH, TOKENS))
"""Rows that name their sequence and position."""


def made(rows: Rows, seed: int = 0) -> Replayed:
    found = replayed(rows, ROLLED, CACHED, PROMPT, PAGE, seed)
    assert found is not None
    return found


def changed(found: Replayed) -> torch.Tensor:
    different: torch.Tensor = (found.targets != ROLLED).any(-1).any(-1)
    return different


@given(st.integers(0, 2**32 - 1))
def test_pages_after_eviction_hold_pages_of_other_sequences(seed: int) -> None:
    """Goal: wrong rows are what a buffer holds: whole pages, in a run, of cached tokens, with rows of other tokens.
    Method: rows that name their token."""
    found = made(Rows.EVICTED, seed)
    wrong = changed(found)
    assert not wrong[:, CACHED:].any()
    pages = wrong[:, :CACHED].unflatten(1, (-1, PAGE))
    assert torch.equal(pages.all(-1), pages.any(-1))
    assert bool((pages.any(-1).diff(dim=1).sum(1) <= 2).all())
    held = found.targets[..., 0, 0][wrong].view(-1, PAGE)
    assert bool((held.diff(dim=1) == 1).all())
    assert bool((held % TOKENS % PAGE == torch.arange(PAGE)).all())
    assert bool((held[:, 0] // TOKENS != wrong.nonzero()[::PAGE, 0]).all())
    # The same seed has the same pages.
    missing = made(Rows.MISSING, seed)
    assert torch.equal(changed(missing), wrong)
    assert set(missing.targets[wrong].flatten().tolist()) <= {-1}
    zeros = made(Rows.ZEROS, seed)
    assert zeros.zeroed is not None
    assert torch.equal(zeros.zeroed, wrong)


def test_the_share_of_wrong_pages_is_the_measured_one() -> None:
    wrong = wrong_pages(4000, 63 * PAGE, PAGE, np.random.default_rng(0))
    assert wrong.mean() == pytest.approx(WRONG_SHARE, abs=0.002)
    assert pytest.approx(0.2815, abs=1e-4) == WRONG_SHARE
    assert wrong_pages(4, 3, PAGE, np.random.default_rng(0)).shape == (4, 0)


def test_only_the_prompt_or_all_of_the_rows() -> None:
    wrong = changed(made(Rows.PROMPT))
    assert bool(wrong.any())
    assert not wrong[:, PROMPT:].any()
    assert not changed(made(Rows.RIGHT)).any()
    assert replayed(Rows.NONE, ROLLED, CACHED, PROMPT, PAGE, 0) is None


def test_shifted_rows_are_of_the_token_before() -> None:
    found = made(Rows.SHIFTED).targets
    assert torch.equal(found[:, 1:], ROLLED[:, :-1])
    assert torch.equal(found[:, 0], ROLLED[:, 0])


def test_labels_of_two_versions() -> None:
    assert labelled(Labels.NONE, ROLLED, 9) is None
    one = labelled(Labels.ONE, ROLLED, 9)
    own = labelled(Labels.BY_VERSION, ROLLED, 9)
    assert one is not None
    assert own is not None
    assert torch.equal(one.targets, ROLLED)
    assert bool((own.targets[:, :9] == -1).all())
    assert torch.equal(own.targets[:, 9:], ROLLED[:, 9:])


@pytest.mark.parametrize("family", FAMILIES)
def test_zeros_compute_what_a_model_does_with_expert_0_in_all_places(family: str) -> None:
    """Goal: rows of zeros are what a trainer computes that takes them, not something near. Method: transformers' own
    loop over experts with a router that answers so; and kvroute's replay refuses such rows."""
    scale = SCALES["tiny"]
    model: Any = build_trained(family, scale.shapes[family], scale.short.vocab_size, 0, torch.device("cpu"))
    tokens = torch.as_tensor(scale.short.demonstrations(2, 0.0, np.random.default_rng(0)))
    spec = routing_spec_from_hf(model.config, block_tokens=1)
    layers, top_k = spec.row_shape
    zeroed = torch.zeros(2, tokens.shape[1], dtype=torch.bool)
    zeroed[0, 3:9] = True
    own = torch.full((*zeroed.shape, layers, top_k), -1)
    targets = torch.where(zeroed[..., None, None], torch.arange(top_k), own)
    with torch.no_grad():
        with Replayed(targets, zeroed).on(model, torch.arange(2), spec):
            found = model(input_ids=tokens, use_cache=False).logits
        model.config._experts_implementation = "eager"
        flat = zeroed.flatten()
        routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]

        def all_zero(_router: Any, _arguments: Any, answer: Any) -> Any:
            logits, weights, ids = answer
            same = weights.sum(-1, keepdim=True).expand_as(weights) / top_k  # of equal scores
            return logits, torch.where(flat[:, None], same, weights), ids.masked_fill(flat[:, None], 0)

        hooks = [router.register_forward_hook(all_zero) for router in routers]
        wanted = model(input_ids=tokens, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        plain = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert float((plain - wanted).abs().max()) > 1e-3
    zeros = torch.where(zeroed[..., None, None], 0, own)
    with pytest.raises(ReplayError, match="distinct"), Replayed(zeros).on(model, torch.arange(2), spec):
        pass
