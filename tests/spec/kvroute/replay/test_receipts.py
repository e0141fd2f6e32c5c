"""A receipt says what routers really used: on real transformers models, with kvroute's replay and with a trainer's."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from routes_of import made_routes
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cache_manager.errors import RowError
from kvroute.capture.capture import RoutingCapture, find_routers
from kvroute.replay import Gap, Receipt, ReplayError, Use, Watch, watch
from kvroute.replay.transformers import packed, padded, recorded, replay
from kvroute.replay.uses import DueRows
from kvroute.routes import Routes, Split
from kvroute.routing import routing_spec_from_hf

LAYERS = (1, 3)  # those of the fixture qwen with experts
LENGTHS = (5, 3)
TOKENS = torch.tensor([[5, 9, 13, 21, 33, 60, 3, 17]])  # two samples end to end
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
PADDED = torch.tensor([[5, 9, 13, 21, 33, 0], [60, 3, 17, 0, 0, 0]])


def routes_of(*samples: int, holes: tuple[int, ...] = ()) -> list[Routes]:
    """Routes of samples of :data:`LENGTHS`; of the first one, positions ``holes`` are missing."""
    return [
        made_routes(
            sample, LENGTHS[i] - 1, layer_ids=LAYERS, num_layers=4, experts=8, top_k=2, holes=holes if i == 0 else ()
        )
        for i, sample in enumerate(samples)
    ]


def wrong(receipt: Receipt) -> list[str]:
    return [f"{gap.where}: wanted {gap.wanted}, got {gap.got}" for gap in receipt.gaps]


def test_what_was_used_is_counted_by_layer_sample_and_micro_batch(qwen: Any) -> None:
    """Goal: a whole receipt, of rows that are there and of a hole. Method: two micro-batches, the second forward twice,
    with what is due by the routes; every number is known."""
    with watch(qwen.model) as replayed:
        assert replayed.layers == LAYERS
        for routes, passes in ((routes_of(1, 2), 1), (routes_of(3, 4, holes=(2,)), 2)):
            replayed.packed(routes, LENGTHS)
            with replay(qwen.model, packed(routes, LENGTHS)):
                for _ in range(passes):
                    qwen.forward(TOKENS)
        receipt = replayed.receipt()
    assert receipt == Receipt(
        LAYERS,
        (
            *(Use(0, layer, (0, 1), (4, 2), (4, 2), (0, 0), 1, 0) for layer in LAYERS),
            *(Use(1, layer, (0, 1), (3, 2), (3, 2), (0, 0), 2, 0) for layer in LAYERS),
        ),
        (),
    )
    assert (receipt.due, receipt.taken, receipt.recomputations) == (22, 22, 0)
    receipt.check()


def test_only_rows_that_the_tokens_read_are_due(qwen: Any) -> None:
    """Goal: a response that was cut: routes go on behind it, and its last token's row is the router's own. Method:
    longer routes, packed and padded, with that row replaced."""
    longer = [
        made_routes(sample, count + 2, layer_ids=LAYERS, num_layers=4, experts=8, top_k=2)
        for sample, count in zip((1, 2), LENGTHS, strict=True)
    ]
    with watch(qwen.model) as replayed:
        replayed.packed(longer, LENGTHS)
        with replay(qwen.model, packed(routes_of(1, 2), LENGTHS)):
            qwen.forward(TOKENS)
        replayed.padded(longer, LENGTHS, 6, side="right", order="batch")
        with replay(qwen.model, padded(routes_of(1, 2), MASK)):
            qwen.forward(PADDED)
    replayed.receipt().check()
    assert {use.due for use in replayed.receipt().uses} == {(4, 2)}


def test_every_familys_experts_are_seen(tiny_moe: Any) -> None:
    """Goal: what enters the experts is what was forced. Method: the model's own routes, and drawn ones, for a batch of
    two; one token whose experts are others' is the one that the receipt names."""
    spec = routing_spec_from_hf(tiny_moe.config, block_tokens=16)
    (layers, top_k), experts = spec.row_shape, spec.attrs["num_experts"]
    drawn = torch.rand(12, layers, experts, generator=torch.Generator().manual_seed(3)).argsort(dim=-1)[..., :top_k]
    with RoutingCapture(tiny_moe.model, spec) as capture:
        tiny_moe.forward(PADDED)
        own = recorded(capture)
    for targets in (own, drawn):
        with watch(tiny_moe.model) as replayed, replay(tiny_moe.model, targets.view(2, 6, layers, top_k)):
            tiny_moe.forward(PADDED)
        receipt = replayed.receipt()
        receipt.check()
        assert [use.samples for use in receipt.uses] == [(0, 1)] * layers
        assert receipt.due == 12 * layers
    other = drawn.clone()
    other[7, 0] = (drawn[7, 0] + 1) % experts
    with watch(tiny_moe.model) as replayed:
        replayed.due(drawn, [0] * 6 + [1] * 6)
        with replay(tiny_moe.model, other):
            tiny_moe.forward(PADDED)
    layer = spec.attrs["layer_ids"][0]
    with pytest.raises(ReplayError, match=rf"^micro-batch 0 layer {layer} sample 1: .*got 5, not local token 7$"):
        replayed.receipt().check()
    assert len(replayed.receipt().gaps) == 1


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_batch_is_known_by_its_samples(qwen: Any, side: str) -> None:
    """Goal: padding and last tokens are not due, on either side. Method: a batch as transformers takes it; then the
    same with the samples' rows exchanged."""
    mask = MASK if side == "right" else MASK.flip(1)
    one, other = routes_of(1, 2), [routes_of(2)[0], routes_of(1, 1)[1]]
    with watch(qwen.model) as replayed:
        for routes in (one, other):
            replayed.padded(one, LENGTHS, 6, side=side, order="batch")  # type: ignore[arg-type]
            with replay(qwen.model, padded(routes, mask)):
                qwen.model(PADDED, attention_mask=mask, use_cache=False)
    receipt = replayed.receipt()
    assert [(use.due, use.taken) for use in receipt.uses if use.micro_batch == 0] == [((4, 2), (4, 2))] * 2
    assert {(gap.micro_batch, gap.layer, gap.sample) for gap in receipt.gaps} == {
        (1, layer, sample) for layer in LAYERS for sample in (0, 1)
    }


def test_a_rank_has_its_part(qwen: Any) -> None:
    """Goal: a cut by context parallelism. Method: each of two ranks' zigzag chunks, replayed by the same cut."""
    due = 0
    for rank in (0, 1):
        split = Split(cp=2, cp_rank=rank)
        with watch(qwen.model) as replayed:
            replayed.packed(routes_of(1, 2), LENGTHS, split)
            targets = packed(routes_of(1, 2), LENGTHS, split)
            with replay(qwen.model, targets):
                qwen.forward(torch.arange(len(targets))[None])
        replayed.receipt().check()
        due += replayed.receipt().due
    assert due == 6 * len(LAYERS)


# Gaps -----------------------------------------------------------------------------------------------------------------


def test_a_router_that_runs_without_replay_is_a_gap(qwen: Any) -> None:
    """Goal: verl 7340, NeMo-RL 3903, AReno 524: a replay that does nothing, in silence. Method: rows are due, and the
    model runs by itself."""
    with watch(qwen.model) as replayed:
        replayed.packed(routes_of(1, 2), LENGTHS)
        qwen.forward(TOKENS)
    wanted = "micro-batch 0 layer 1 sample 0: wanted 4 tokens sent to the experts of their rows, got 0, not local token"
    with pytest.raises(ReplayError, match=wanted):
        replayed.receipt().check()


def test_every_pass_has_to_use_the_rows(qwen: Any) -> None:
    """Goal: a right pass does not hide a wrong one. Method: one of each in a micro-batch, in both orders."""
    for order in ((True, False), (False, True)):
        with watch(qwen.model) as replayed:
            replayed.packed(routes_of(1, 2), LENGTHS)
            with replay(qwen.model, packed(routes_of(1, 2), LENGTHS)):
                forced = vars(find_routers(qwen.model)[3])["forward"]
                for replays in order:
                    if not replays:
                        forced.remove()
                    qwen.forward(TOKENS)
                    if not replays:
                        forced.install()
        assert {(use.layer, use.passes) for use in replayed.receipt().uses} == {(1, 2), (3, 2)}
        assert {gap.layer for gap in replayed.receipt().gaps} == {3}


def test_a_flag_that_was_left_off_is_a_gap(qwen: Any) -> None:
    """Goal: nothing due is nothing proved. Method: a step of which the watch is told nothing, one whose rows are all
    missing, and one pass too many behind a block."""
    with watch(qwen.model) as replayed:
        qwen.forward(TOKENS)
    assert wrong(replayed.receipt()) == [
        "receipt: wanted a row that is due, got none in 0 micro-batches",
        *(f"layer {n}: wanted rows that are due before each forward pass, got 1 passes without" for n in LAYERS),
    ]
    with watch(qwen.model) as replayed, replay(qwen.model, torch.full((8, 2, 2), -1)):
        qwen.forward(TOKENS)
    assert wrong(replayed.receipt()) == ["receipt: wanted a row that is due, got none in 1 micro-batches"]
    targets = packed(routes_of(1, 2), LENGTHS)
    with watch(qwen.model) as replayed:
        with replay(qwen.model, targets):
            qwen.forward(TOKENS)
        replayed.receipt().check()
        qwen.forward(TOKENS)
    with pytest.raises(ReplayError, match="layer 1: wanted rows that are due before each forward pass, got 1 passes"):
        replayed.receipt().check()


def test_a_layer_that_replays_nothing_or_is_skipped_is_a_gap(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the layer is named. Method: one router's replay is taken out inside the block; then its layer is skipped,
    in the only pass and in one of two."""
    targets = packed(routes_of(1, 2), LENGTHS)
    with watch(qwen.model) as replayed, replay(qwen.model, targets):
        vars(find_routers(qwen.model)[3])["forward"].remove()
        qwen.forward(TOKENS)
    assert {(gap.micro_batch, gap.layer) for gap in replayed.receipt().gaps} == {(0, 3)}
    with watch(qwen.model) as replayed:
        for passes in (1, 2):
            replayed.packed(routes_of(1, 2), LENGTHS)
            with replay(qwen.model, targets):
                if passes == 2:
                    qwen.forward(TOKENS)
                with monkeypatch.context() as skipping:
                    skipping.setattr(qwen.model.model.layers[3], "forward", lambda hidden, **_: hidden)
                    qwen.forward(TOKENS)
    assert wrong(replayed.receipt()) == [
        "micro-batch 0 layer 3: wanted a forward pass, got none",
        "micro-batch 1 layer 3: wanted 2 forward passes, as other routers had, got 1",
    ]


def test_rows_in_another_order_are_a_gap(qwen: Any) -> None:
    """Goal: what is installed is not what is due because it was installed. Method: the samples of a micro-batch in
    another order, micro-batches in another order, and rows that are one token late."""
    one, two = routes_of(1, 2), routes_of(3, 4)
    late = packed(one, LENGTHS).roll(1, dims=0)
    with watch(qwen.model) as replayed:
        for routes, targets in ((one, packed(two, LENGTHS)), (two, packed(one, LENGTHS)), (one, late)):
            replayed.packed(routes, LENGTHS)
            with replay(qwen.model, targets):
                qwen.forward(TOKENS)
    places = {(gap.micro_batch, gap.layer, gap.sample) for gap in replayed.receipt().gaps}
    assert places == {(batch, layer, sample) for batch in range(3) for layer in LAYERS for sample in (0, 1)}


def test_other_tokens_than_there_are_rows_are_a_gap(qwen: Any) -> None:
    """Goal: a length that is one short. Method: rows of seven tokens are due, eight come."""
    with watch(qwen.model) as replayed:
        replayed.packed(routes_of(1, 2), (5, 2))
        qwen.forward(TOKENS)
    wanted = "micro-batch 0 layer 1: wanted passes of 7 local tokens, as rows are due, got 8"
    with pytest.raises(ReplayError, match=wanted):
        replayed.receipt().check()


# Recomputations -------------------------------------------------------------------------------------------------------


def checkpointed(build_moe: Any, *, reentrant: bool) -> Any:
    tiny = build_moe("qwen3_moe")
    tiny.model.train()
    tiny.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        tiny.model.enable_input_require_grads()
    return tiny


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputations_are_counted(build_moe: Any, reentrant: bool) -> None:
    """Goal: how many there were, and that they used the same. Method: gradient checkpointing inside the block."""
    tiny = checkpointed(build_moe, reentrant=reentrant)
    with watch(tiny.model) as replayed:
        for sample in (1, 2):
            replayed.packed(routes_of(sample, 3), LENGTHS)
            with replay(tiny.model, packed(routes_of(sample, 3), LENGTHS)):
                tiny.model(TOKENS, use_cache=False).logits.sum().backward()
    receipt = replayed.receipt()
    receipt.check()
    assert receipt.uses == tuple(
        Use(number, layer, (0, 1), (4, 2), (4, 2), (4, 2), 1, 1) for number in (0, 1) for layer in LAYERS
    )


class FirstInFirstOut:
    """The replay of a trainer's own: each router takes, in a recomputation, the oldest list of rows, as Megatron's."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[torch.Tensor] = []
        self.left: dict[int, list[torch.Tensor]] = {}
        for index, (layer, router) in enumerate(find_routers(model).items()):
            self.left[layer] = []
            router.register_forward_hook(partial(self._take, index, layer))

    def forward(self, rows: torch.Tensor) -> None:
        self.rows = [rows]
        for left in self.left.values():
            left.append(rows)

    def _take(self, index: int, layer: int, _router: nn.Module, _inputs: Any, answer: Any) -> Any:
        computing_again = torch._C._current_autograd_node() is not None
        rows = self.left[layer].pop(0) if computing_again else self.rows[0]
        return *answer[:2], rows[:, index]


def test_a_recomputation_of_other_rows_is_a_gap(build_moe: Any) -> None:
    """Goal: AReaL 1166, SkyRL 1908: lists of rows that are first in, first out, while backward passes run the other way
    round. Method: such a replay, three micro-batches forward, and backward in two orders. (Where a checkpoint is not
    reentrant, torch itself sees that experts have other numbers of tokens.)"""
    for order, micro_batches in (((0, 1, 2), set()), ((2, 1, 0), {0, 2})):
        tiny = checkpointed(build_moe, reentrant=True)
        own = FirstInFirstOut(tiny.model)
        with watch(tiny.model) as replayed:
            losses = []
            for sample in range(3):
                replayed.packed(routes_of(sample, 7), LENGTHS)
                own.forward(packed(routes_of(sample, 7), LENGTHS).clamp(min=0))
                losses.append(tiny.model(TOKENS, use_cache=False).logits.sum())
            for number in order:
                losses[number].backward()
        receipt = replayed.receipt()
        assert all(use.taken == use.due and use.recomputations == 1 for use in receipt.uses)
        assert {gap.micro_batch for gap in receipt.gaps} == micro_batches
        assert {gap.sample for gap in receipt.gaps} <= {0}, "both have sample 7"
    wanted = (
        "micro-batch 0 layer 1 sample 0: wanted 4 tokens sent to the experts of their rows when computed again, got 0"
    )
    with pytest.raises(ReplayError, match=wanted):
        receipt.check()


def test_a_recomputation_that_belongs_to_no_micro_batch_is_a_gap(build_moe: Any) -> None:
    """Goal: it is neither counted as another's nor raised in the trainer's backward pass. Method: a pass before any
    rows are due, computed again while some are; and a forward pass in another thread."""
    tiny = checkpointed(build_moe, reentrant=False)
    with watch(tiny.model) as replayed:
        replayed.packed(routes_of(5, 6), LENGTHS)
        with replay(tiny.model, packed(routes_of(5, 6), LENGTHS)):
            tiny.forward(TOKENS)
        plain = tiny.model(TOKENS, use_cache=False).logits.sum()
        replayed.packed(routes_of(1, 2), LENGTHS)
        plain.backward()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(tiny.forward, TOKENS).result()
    text = wrong(replayed.receipt())
    assert "micro-batch 1 layer 1: wanted a forward pass, got none" in text
    assert "layer 1: wanted rows that are due before each forward pass, got 1 passes without" in text
    assert any(line.startswith("layer 3: wanted a recomputation of a forward pass that had rows") for line in text)
    assert any(line.startswith("layer 3: wanted forward passes in the thread that gave the rows") for line in text)


def test_selective_checkpoints_are_not_disturbed(build_moe: Any) -> None:
    """Goal: a trainer's checkpoint that keeps some operations ends where it sees others in its recomputation. Method:
    one that keeps matrix products, around a model whose watch takes a different path the second time."""
    tiny = build_moe("qwen3_moe")
    keep = partial(
        create_selective_checkpoint_contexts,
        lambda _, op, *__, **___: CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE,
    )

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return tiny.model(inputs_embeds=hidden, use_cache=False).logits.sum()

    hidden = tiny.model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    with watch(tiny.model) as replayed:
        replayed.packed(routes_of(1, 2), LENGTHS)
        with replay(tiny.model, packed(routes_of(1, 2), LENGTHS)):
            loss = torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=False, context_fn=keep)
            loss.backward()
    replayed.receipt().check()
    assert replayed.receipt().recomputations == len(LAYERS)


# The watch itself -----------------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_watch_changes_nothing_and_leaves_nothing(build_moe: Any) -> None:
    """Goal: the same logits, no hook and no rows behind the block, also after an error. Method: beside a plain pass."""
    tiny = build_moe("qwen3_moe")
    targets = packed(routes_of(1, 2), LENGTHS)
    earlier = [due for due in gc.get_objects() if type(due) is DueRows]
    with replay(tiny.model, targets):
        plain = tiny.forward(TOKENS)
    before = hooks(tiny.model)
    with watch(tiny.model) as replayed, replay(tiny.model, targets):
        assert torch.equal(tiny.forward(TOKENS), plain)
    assert hooks(tiny.model) == before
    dues = [due for due in gc.get_objects() if type(due) is DueRows and due not in earlier]
    assert len(dues) == len(LAYERS)
    assert not any(due.ids.numel() for due in dues)
    replayed.receipt().check()
    with pytest.raises(KeyError), watch(tiny.model):
        raise KeyError
    assert hooks(tiny.model) == before


def test_one_watch_of_a_router_at_a_time(qwen: Any) -> None:
    """Goal: rows are due in one receipt. Method: a watch in a watch is refused, and the first one goes on."""
    with watch(qwen.model) as replayed, replay(qwen.model, packed(routes_of(1, 2), LENGTHS)):
        with pytest.raises(ReplayError, match="watch: wanted one watch of a router at a time"), watch(qwen.model):
            pytest.fail("the block was entered")
        qwen.forward(TOKENS)
    replayed.receipt().check()


def test_a_model_whose_routers_are_not_known_is_refused() -> None:
    """Goal: never a receipt of nothing. Method: a model without routers, and chunks that are not Megatron's."""
    with pytest.raises(ReplayError, match="blocks with a child experts"), watch(nn.Linear(2, 2)):
        pytest.fail("the block was entered")
    with pytest.raises(ReplayError, match="chunks with routers of Megatron-core"), watch([nn.Linear(2, 2)] * 2):
        pytest.fail("the block was entered")


@pytest.mark.parametrize(
    ("rows", "samples", "message"),
    [
        (
            torch.zeros(8, 3, 2, dtype=torch.int64),
            None,
            r"rows: wanted integers \[tokens, 2 layers, top_k\], got torch.i",
        ),
        (torch.zeros(8, 2, 2), None, "rows: wanted integers .* got torch.float32"),
        (torch.zeros(8, 2, 2, dtype=torch.bool), None, "rows: wanted integers .* got torch.bool"),
        (torch.tensor([[[1, 2], [1, -1]]]), None, r"rows token 0 layer 3: wanted ids of 0 or more, or -1 throughout"),
        (torch.tensor([[[1, 2], [-2, -2]]]), None, r"rows token 0 layer 3: .* got \[-2, -2\]"),
        (torch.zeros(8, 2, 2, dtype=torch.int64), [0] * 7, "samples: wanted one number for each of 8 tokens"),
        (torch.zeros(8, 2, 2, dtype=torch.int64), [0.5] * 8, "samples: wanted one number for each of 8 tokens"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    qwen: Any, rows: torch.Tensor, samples: Sequence[Any] | None, message: str
) -> None:
    """Goal: nothing becomes due by a refused call. Method: every misfit, then a look at the receipt."""
    with watch(qwen.model) as replayed:
        with pytest.raises(ReplayError, match=message):
            replayed.due(rows, samples)
        assert replayed.receipt().uses == ()


def test_routes_that_do_not_fit_are_refused(qwen: Any) -> None:
    """Goal: as for a replay. Method: a dense layer, unlike samples, a split that cuts layers."""

    def check(replayed: Watch) -> None:
        dense = made_routes(1, 4, layer_ids=(0, 1), num_layers=4, experts=8, top_k=2)
        with pytest.raises(ReplayError, match="layer 3: wanted a router in the routes of sample 0"):
            replayed.packed([dense], [5])
        other = made_routes(1, 4, layer_ids=LAYERS, num_layers=4, experts=16, top_k=2)
        with pytest.raises(RowError, match="experts"):
            replayed.packed([*routes_of(1), other], LENGTHS)
        with pytest.raises(ReplayError, match=r"layers: wanted some of \[1, 3\], got 2"):
            replayed.packed(routes_of(1, 2), LENGTHS, layers=[1, 2])
        with pytest.raises(ReplayError, match="split: wanted pp=1"):
            replayed.packed(routes_of(1, 2), LENGTHS, Split(pp=2))

    with watch(qwen.model) as replayed:
        check(replayed)
        assert replayed.receipt().uses == ()


def test_arrays_of_every_dtype_are_due(qwen: Any) -> None:
    """Goal: rows as trainers carry them. Method: each dtype, as an array, with the same experts replayed."""
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(8), (8, 2, 1)), axis=-1)[..., :2]
    for dtype in ("uint8", "int8", "int16", "uint16", "int32", "int64"):
        with watch(qwen.model) as replayed:
            replayed.due(ids.astype(dtype))
            with replay(qwen.model, torch.from_numpy(ids)):
                qwen.forward(TOKENS)
        receipt = replayed.receipt()
        receipt.check()
        assert [(use.samples, use.due, use.taken) for use in receipt.uses] == [((None,), (8,), (8,))] * 2


def test_a_gap_says_where_it_is() -> None:
    assert Gap(3, 1, 0, "", "").where == "micro-batch 1 layer 3 sample 0"
    assert Gap(None, None, None, "", "").where == "receipt"
