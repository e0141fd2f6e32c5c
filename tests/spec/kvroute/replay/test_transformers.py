"""Replaying routes on real transformers models: the experts are the recorded ones, and nothing else changes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import pytest
import torch
from router_weights import WEIGHTS, softmax
from torch import nn

from cache_manager.errors import KVRouteError
from kvroute.capture.capture import RoutingCapture, find_routers
from kvroute.replay.passes import Pass, one_pass
from kvroute.replay.rows import ReplayError
from kvroute.replay.transformers import packed, padded, recorded, replay
from kvroute.routes import Routes
from kvroute.routing import routing_spec_from_hf

TOKENS = torch.tensor([[5, 9, 13, 21, 33, 47, 8], [60, 3, 3, 3, 17, 22, 41]])
Gradients = dict[str, torch.Tensor]
RIGHT = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])  # the attention mask of two samples, padded on the right


def spec_of(tiny: Any) -> Any:
    return routing_spec_from_hf(tiny.config, block_tokens=16)


def routed(tiny: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """The model's own routes for ``tokens``, ``[tokens, layers, top_k]``."""
    with RoutingCapture(tiny.model, spec_of(tiny)) as capture:
        tiny.forward(tokens)
        return recorded(capture)


def random_targets(tiny: Any, tokens: int, seed: int = 3) -> torch.Tensor:
    """Distinct experts drawn without regard to any score, ``[tokens, layers, top_k]``."""
    (layers, top_k), experts = spec_of(tiny).row_shape, spec_of(tiny).attrs["num_experts"]
    drawn = torch.rand(tokens, layers, experts, generator=torch.Generator().manual_seed(seed))
    return drawn.argsort(dim=-1)[..., :top_k].contiguous()


def loss_and_gradients(tiny: Any, tokens: torch.Tensor = TOKENS) -> tuple[torch.Tensor, Gradients]:
    tiny.model.zero_grad()
    logits = tiny.model(tokens, use_cache=False).logits
    logits.float().log_softmax(dim=-1)[..., 0].sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in tiny.model.named_parameters() if p.grad is not None}


def router_gradients(tiny: Any, gradients: Gradients) -> Gradients:
    owned = {id(p) for router in find_routers(tiny.model).values() for p in router.parameters()}
    return {n: gradients[n] for n, p in tiny.model.named_parameters() if id(p) in owned and n in gradients}


class RouterCalls:
    """What each router answered: ``(logits, weights, ids)`` by layer, watched from outside."""

    def __init__(self, model: nn.Module) -> None:
        self.answers: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        self.hooks = [router.register_forward_hook(self._keep(layer)) for layer, router in find_routers(model).items()]

    def _keep(self, layer: int) -> Callable[..., None]:
        return lambda _m, _i, out: self.answers.setdefault(layer, []).append(out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def test_replay_of_recorded_routes_is_bit_exact(tiny_moe: Any) -> None:
    """Goal: R2 without drift changes nothing. Method: logits and every gradient, with and without, all families."""
    targets = routed(tiny_moe)
    plain, expected = loss_and_gradients(tiny_moe)
    with replay(tiny_moe.model, targets):
        logits, gradients = loss_and_gradients(tiny_moe)
    assert torch.equal(logits, plain)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[n], expected[n]) for n in expected)
    assert router_gradients(tiny_moe, gradients)


def test_a_drifted_replay_keeps_the_current_weights_and_their_gradient(tiny_moe: Any) -> None:
    """Goal: the selection is the recorded one, the weights are current. Method: experts drawn at random; the weights
    are the family's formula over all current scores, and so is their gradient with respect to those scores."""
    targets = random_targets(tiny_moe, TOKENS.numel())
    with replay(tiny_moe.model, targets), RouterCalls(tiny_moe.model) as calls:
        _, gradients = loss_and_gradients(tiny_moe)
    if spec_of(tiny_moe).row_shape[1] > 1:  # one expert's share is 1, whatever its score: no gradient but of rounding
        assert all(bool(g.abs().sum() > 0) for g in router_gradients(tiny_moe, gradients).values())
    for index, (layer, router) in enumerate(find_routers(tiny_moe.model).items()):
        ((logits, weights, ids),) = (answer[:3] for answer in calls.answers[layer])
        assert torch.equal(ids, targets[:, index])
        formula = WEIGHTS[tiny_moe.family](logits.detach().float(), ids, router, tiny_moe.config)
        # LFM2 adds 1e-6 to the sum that it divides by.
        torch.testing.assert_close(weights.detach().float(), formula, rtol=2e-4, atol=1e-5)


def test_an_expert_of_a_group_that_is_no_longer_chosen_keeps_its_weight(build_moe: Any) -> None:
    """Goal: weights come from the full scores. Method: DeepSeek-V2's group-limited router blanks the scores of groups
    that it does not choose before its top-k; recorded experts of those groups must not get the blank as weight."""
    tiny = build_moe("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=1)
    targets = random_targets(tiny, TOKENS.numel())
    with replay(tiny.model, targets), RouterCalls(tiny.model) as calls:
        tiny.forward(TOKENS)
    for (answer,) in calls.answers.values():
        logits, weights, ids = answer
        torch.testing.assert_close(weights, softmax(logits, ids, None, tiny.config))
        assert bool((weights > 0).all())
    own = routed(tiny)
    with replay(tiny.model, own):
        assert torch.equal(tiny.forward(TOKENS), tiny.forward(TOKENS))
    half = torch.where(torch.arange(len(own))[:, None, None] % 2 == 0, own, -1)
    plain = tiny.forward(TOKENS)
    with replay(tiny.model, half):
        assert torch.equal(tiny.forward(TOKENS), plain)


def test_a_missing_row_takes_the_routers_own_choice(tiny_moe: Any) -> None:
    """Goal: native where a row is missing. Method: nothing but missing rows is the plain model, bit for bit; every
    other row missing leaves the first layer's own choices where they were."""
    plain, own, forced = tiny_moe.forward(TOKENS), routed(tiny_moe), random_targets(tiny_moe, TOKENS.numel())
    with replay(tiny_moe.model, torch.full_like(own, -1)):
        assert torch.equal(tiny_moe.forward(TOKENS), plain)
    odd = (torch.arange(len(own)) % 2 == 1)[:, None, None]
    with replay(tiny_moe.model, torch.where(odd, forced, -1)):
        mixed = routed(tiny_moe)
    assert torch.equal(mixed[1::2], forced[1::2])
    # Within the first routed layer; hidden states of later layers have met forced experts through attention.
    assert torch.equal(mixed[::2, 0], own[::2, 0])


def test_routes_reach_their_tokens_padded_on_either_side_and_packed(qwen: Any) -> None:
    """Goal: the flattened order is the model's. Method: two samples of unlike length, each token's experts drawn at
    random, seen again at that token whatever the layout; the last token's row and all padding are the router's own."""
    spec, lengths = spec_of(qwen), [7, 4]
    drawn = [random_targets(qwen, n - 1, seed=n).numpy() for n in lengths]
    routes = [
        Routes(
            rows,
            np.ones(len(rows), bool),
            spec.attrs["layer_ids"],
            spec.attrs["num_experts"],
            qwen.config.num_hidden_layers,
        )
        for rows in drawn
    ]
    ids = [TOKENS[0, :7], TOKENS[1, :4]]
    pad = torch.zeros(3, dtype=torch.int64)
    batches = {
        "right": (torch.stack([ids[0], torch.cat([ids[1], pad])]), [slice(0, 6), slice(7, 10)]),
        "left": (torch.stack([ids[0], torch.cat([pad, ids[1]])]), [slice(0, 6), slice(10, 13)]),
        "packed": (torch.cat(ids)[None], [slice(0, 6), slice(7, 10)]),
    }
    for layout, (batch, places) in batches.items():
        mask = {"right": RIGHT, "left": RIGHT.flip(1)}.get(layout)
        targets = packed(routes, lengths) if mask is None else padded(routes, mask)
        assert targets.shape[-2:] == spec.row_shape
        assert targets[..., 0, 0].numel() == batch.numel()
        with replay(qwen.model, targets):
            used = routed(qwen, batch).numpy()
        for rows, place in zip(drawn, places, strict=True):
            assert np.array_equal(used[place], rows)
        flat = targets.reshape(-1, *spec.row_shape)
        assert int((flat[:, 0, 0] >= 0).sum()) == sum(lengths) - 2


def checkpointed(build_moe: Any, *, reentrant: bool) -> Any:
    tiny = build_moe("qwen3_moe")
    tiny.model.train()
    tiny.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # such a checkpoint needs an input with a gradient
        tiny.model.enable_input_require_grads()
    return tiny


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_sees_the_same_routes(build_moe: Any, reentrant: bool) -> None:
    """Goal: gradient checkpointing inside the block. Method: gradients with and without it, random routes."""
    tiny = build_moe("qwen3_moe")
    targets = random_targets(tiny, TOKENS.numel())
    with replay(tiny.model, targets):
        _, expected = loss_and_gradients(tiny)
    again = checkpointed(build_moe, reentrant=reentrant)
    with replay(again.model, targets), RouterCalls(again.model) as calls:
        _, gradients = loss_and_gradients(again)
    assert {len(answers) for answers in calls.answers.values()} == {2}
    assert all(torch.equal(gradients[n], expected[n]) for n in expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_without_or_with_other_routes_is_an_error(build_moe: Any, reentrant: bool) -> None:
    """Goal: never a silent mix of routes. Method: two micro-batches; the backward pass of the first behind its block,
    in the second's block, and of a pass without replay in a block; after the errors the blocks are as good as new."""
    tiny = checkpointed(build_moe, reentrant=reentrant)
    targets = [random_targets(tiny, TOKENS.numel(), seed) for seed in (3, 4)]

    def loss() -> torch.Tensor:
        return tiny.model(TOKENS, use_cache=False).logits.sum()

    with replay(tiny.model, targets[0]):
        behind, inside = loss(), loss()
    plain = loss()
    over = r"router of layer 3: wanted a backward pass inside the replay of its forward pass, got one after it"
    with pytest.raises(ReplayError, match=over):
        behind.backward()
    with replay(tiny.model, targets[1]):
        own = loss()
        with pytest.raises(ReplayError, match=over):
            (inside + own).backward()
        with pytest.raises(ReplayError, match="layer 3: wanted a recomputation of a forward pass that had rows"):
            plain.backward()
        loss().backward()
    loss().backward()


def kept_passes() -> int:
    gc.collect()
    return sum(type(kept) is Pass for kept in gc.get_objects())


def test_a_router_is_watched_in_few_numbers(build_moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a run of many micro-batches keeps no memory of each, and still refuses the oldest. Method: a limit of two,
    five blocks with a graph and five without; then the backward pass of the first."""
    monkeypatch.setattr("kvroute.replay.passes.PASSES_MAX", 2)
    router = find_routers(build_moe("qwen3_moe").model)[3]
    hidden = torch.rand(14, 32, requires_grad=True)
    weights = []
    earlier = kept_passes()
    for _ in range(5):
        with one_pass({3: router}):
            weights.append(torch.utils.checkpoint.checkpoint(router, hidden, use_reentrant=False)[1])
        with one_pass({3: router}), torch.no_grad():
            router(hidden)
    assert kept_passes() - earlier == 2
    assert len(router._forward_pre_hooks) == 1
    with pytest.raises(ReplayError, match="got one after it"):
        weights[0].sum().backward()


def test_a_forward_pass_in_another_thread_is_an_error(qwen: Any) -> None:
    """Goal: nodes are numbered by thread, so that a pass elsewhere could not be told from another's."""
    with (
        replay(qwen.model, random_targets(qwen, TOKENS.numel())),
        ThreadPoolExecutor(1) as threads,
        pytest.raises(ReplayError, match="layer 1: wanted forward passes in the thread that gave the rows"),
    ):
        threads.submit(qwen.forward, TOKENS).result()


def test_the_model_is_left_as_it_was(build_moe: Any) -> None:
    """Goal: clean removal, whatever ends the block. Method: look at the modules, also with a user's own forward on one
    of them, and after an error inside the model."""
    tiny = build_moe("qwen3_moe")
    routers = find_routers(tiny.model)
    own = routers[1].forward
    routers[1].forward = own
    targets = random_targets(tiny, TOKENS.numel())
    plain = tiny.forward(TOKENS)
    with replay(tiny.model, targets), pytest.raises(KVRouteError, match="14 tokens, as the targets have, got 3"):
        tiny.forward(TOKENS[:1, :3])
    assert routers[1].forward is own
    assert "forward" not in vars(routers[3])
    assert torch.equal(tiny.forward(TOKENS), plain)
    with (
        replay(tiny.model, targets),
        pytest.raises(ReplayError, match=r"no replay in progress, got one on layers \[1, 3\]"),
        replay(tiny.model, targets),
    ):
        pass
    assert torch.equal(tiny.forward(TOKENS), plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.float(), "targets: wanted integers, got torch.float32"),
        (lambda t: t[:, :1], r"got torch.int64 of shape \(14, 1, 2\)"),
        (lambda t: t[..., :1], r"got torch.int64 of shape \(14, 2, 1\)"),
        (lambda t: t[0, 0], "integers"),
        (lambda t: t.clone().index_fill_(0, torch.tensor([3]), 0), r"token 3 layer 1: wanted distinct.*got \[0, 0\]"),
        (lambda t: t + 8 * (torch.arange(14) == 5)[:, None, None], r"token 5 layer 1: wanted distinct ids in \[0, 8\)"),
        (lambda t: t.clone().index_fill_(0, torch.tensor([9]), -2), r"token 9 layer 1: .*or -1 throughout"),
        (lambda t: torch.cat([t[..., :1], torch.full_like(t[..., 1:], -1)], -1), r"token 0 layer 1: .*throughout"),
    ],
)
def test_targets_that_no_router_can_have_chosen_are_refused(qwen: Any, change: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message), replay(qwen.model, change(random_targets(qwen, 14))):
        pytest.fail("the block was entered")


def test_a_router_that_answers_no_ids_is_an_error(build_moe: Any) -> None:
    """Goal: a model that cannot be checked is refused. Method: Llama 4's router answers scores and logits."""
    tiny = build_moe("llama4_text", num_local_experts=4, interleave_moe_layer_step=2)
    targets = random_targets(tiny, TOKENS.numel())
    with (
        replay(tiny.model, targets),
        pytest.raises(ReplayError, match=r"an answer \(logits, weights, ids\), got tuple"),
    ):
        tiny.forward(TOKENS)


def test_a_router_without_a_top_k_is_an_error(build_moe: Any) -> None:
    """Goal: never a replay that silently does nothing. Method: phimoe's sparse mixer selects by arg-max and masks."""
    tiny = build_moe("phimoe", num_local_experts=8, num_experts_per_tok=2)
    targets = random_targets(tiny, TOKENS.numel())
    with (
        replay(tiny.model, targets),
        pytest.raises(ReplayError, match="exactly one top-2 of 8 experts, got 0 in Phimoe"),
    ):
        tiny.forward(TOKENS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16], ids=str)
def test_targets_come_in_any_integer_dtype(qwen: Any, dtype: torch.dtype) -> None:
    """Goal: torch.uint16 knows no max, sort or gather; it must not matter. Method: each carriage dtype."""
    targets = random_targets(qwen, TOKENS.numel())
    with replay(qwen.model, targets.to(dtype)):
        assert torch.equal(routed(qwen), targets)
