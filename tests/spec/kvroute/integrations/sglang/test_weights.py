"""Routing weights of SGLang: where they are taken. An id and its weight are of one pass, or missing together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from waiting import until

from cache_manager.errors import ConfigError, KVRouteError
from cache_manager.keys import Namespace
from kvroute import RoutingWeights, routing_spec
from kvroute.capture.step_ids import REASONS
from kvroute.connector.fields import FIELD
from kvroute.connector.left import Tokens
from kvroute.connector.settings import Common, Lending
from kvroute.integrations.sglang import routing_weights
from kvroute.integrations.sglang.aside import Aside
from kvroute.integrations.sglang.capturer import Capturer
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.integrations.sglang.weights import (
    GIVEN_OTHER_TOKENS,
    IDS_ALONE,
    NOT_GIVEN,
    OTHER_FORM,
    OTHER_IDS,
    Given,
    GivenOnDevice,
    GivenWeights,
    bind_weights,
)

PAGE = 4
SLOTS = np.arange(PAGE, PAGE + 6)
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)
PROMPT, SAID = [1, 2, 3], [7, 8, 9, 10]


class Unquantized(torch.nn.Module):
    """SGLang's kernel, a module, which makes what it likes of the memory of its arguments."""

    moe_runner_config: Any = None

    def apply(self, choice: Any) -> torch.Tensor:
        output = choice.topk_weights.sum(1)
        choice.topk_weights.fill_(0)
        choice.topk_ids.fill_(0)
        return output


Unquantized.__name__ = "UnquantizedFusedMoEMethod"


class FusedMoE(torch.nn.Module):
    """The experts of a layer, as SGLang's are."""

    def __init__(self, layer_id: int, **config: Any) -> None:
        super().__init__()
        self.layer_id, self.quant_method = layer_id, Unquantized()
        judged = {"apply_router_weight_on_input": False, "num_fused_shared_experts": 0, "routed_scaling_factor": None}
        self.moe_runner_config = SimpleNamespace(**judged | config)

    def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        assert len(hidden_states) == len(topk_output.topk_ids)
        return self.quant_method.apply(topk_output)


class OtherExperts(FusedMoE):
    """Experts of another class."""


class MuseSpark1xMoE(torch.nn.Module):
    """A router whose capture was judged, and whose weights were not."""


def model_of(*experts: Any, **attributes: Any) -> torch.nn.Module:
    """A model with experts of layers 1, as they should be, and of these ones."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([FusedMoE(1), *experts])
    for name, value in attributes.items():
        setattr(model.layers[0], name, value)
    return model


def choice(salt: int, layer: int, tokens: int = 6) -> Any:
    """What experts are given: as :func:`ids_of`, and for each id a weight of the same salt."""
    ids = ids_of(salt)[:tokens, layer]
    return SimpleNamespace(topk_ids=ids.clone(), topk_weights=ids / 512)


def ids_of(salt: int) -> torch.Tensor:
    """``[6, 3, 2]``."""
    return torch.arange(36, dtype=torch.int32).reshape(6, 3, 2) + salt


def bits_of(salt: int) -> torch.Tensor:
    """``[6, 2, 2]``, of the layers with routers."""
    return ids_of(salt)[:, 1:] / 512


def stacked(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What experts were given of these ids ``[n, 3, 2]`` with these weights ``[n, 2, 2]``."""
    return torch.cat([ids[:, 1:], weights.view(torch.int32)], 1)


def run(rows: RoutedRows, salt: int, slots: Any = SLOTS) -> None:
    """A pass over these slots."""
    ids, weights = ids_of(salt)[: len(slots)], bits_of(salt)[: len(slots)]
    rows.launch(torch.from_numpy(slots), ids, given=stacked(ids, weights)).finalize()


@pytest.fixture
def rows() -> Iterator[RoutedRows]:
    rows = RoutedRows(SPEC, 8, Namespace("m", 1), Common(strict=True), weights=True)
    yield rows
    rows.close()


def test_experts_tell_what_their_kernel_gets() -> None:
    """Goal: what a kernel was given, whatever it makes of that memory, and of the layers with rows alone. Method: a
    kernel that writes over its arguments; a draft's experts beside the model's."""
    draft = FusedMoE(7)
    model = model_of(FusedMoE(2), draft)
    given = GivenWeights(SPEC)
    bind_weights(model, SimpleNamespace(routed_scaling_factor=1.0), (1, 2), given.hook)
    given.hook(1)(choice(50, 1))  # to warm up
    given.begin()
    hidden = torch.zeros(6, 8)
    outputs = [experts(hidden, topk_output=choice(0, experts.layer_id)) for experts in model.layers[:2]]
    draft(hidden, choice(9, 1))
    assert [output.tolist() for output in outputs] == [bits_of(0)[:, i].sum(1).tolist() for i in (0, 1)]
    taken = given.take(6)
    assert isinstance(taken, torch.Tensor)
    assert torch.equal(taken, stacked(ids_of(0), bits_of(0)))
    assert given.take(6) == NOT_GIVEN["a call in each pass"]  # of the next pass


@pytest.mark.parametrize(
    ("experts", "attributes", "refused"),
    [
        ([], {}, r"the model: wanted one FusedMoE in each .*, got none in \[2\]"),
        ([FusedMoE(2), FusedMoE(2)], {}, r"layers\.2: wanted one FusedMoE in each .*, got another one in layer 2"),
        ([OtherExperts(2)], {}, r"layers\.1: wanted experts of FusedMoE, got OtherExperts"),
        ([MuseSpark1xMoE(), FusedMoE(2)], {}, r"layers\.1: wanted routers of TopK, got MuseSpark1xMoE"),
        ([FusedMoE(2, apply_router_weight_on_input=True)], {}, r"layers\.1: .*, got some that count its input"),
        ([FusedMoE(2, num_fused_shared_experts=1)], {}, r"layers\.1: wanted no shared experts .*, got 1 of them"),
        ([FusedMoE(2, routed_scaling_factor=2.5)], {}, r"routed_scaling_factor of layers\.1: wanted 1 .*got 2\.5"),
        (
            [FusedMoE(2)],
            {"topk_config": SimpleNamespace(routed_scaling_factor=2)},
            r"routed_scaling_factor of layers\.0",
        ),
        ([FusedMoE(2)], {"route_scale": 1.5}, r"route_scale of layers\.0: wanted 1 or none: .*, got 1\.5"),
        ([FusedMoE(2)], {"quant_method": torch.nn.Module()}, r"layers\.0: wanted a kernel of Unquanti.*got Module"),
    ],
)
def test_weights_that_were_not_judged_are_refused_by_name(experts: Any, attributes: Any, refused: str) -> None:
    """Goal: a weight of a row is that by which the model counts an expert's output; nothing is hooked in another model.
    Method: experts, routers, kernels and factors that were not judged, beside a layer that was."""
    model = model_of(*experts, **attributes)
    with pytest.raises(ConfigError, match=f"^SGLang with kvroute: routing_weights, {refused}"):
        bind_weights(model, SimpleNamespace(), (1, 2), GivenWeights(SPEC).hook)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_runner_that_was_not_judged_on_a_device_is_refused_by_name() -> None:
    """Goal: a choice is referred to until its pass is over, so that its runner has to leave it as it is. Method: on a
    device, another runner, none that says its name, and the one that was judged; on a CPU no runner is asked for."""
    for name in ("deep_gemm", None, "triton"):
        model = model_of(FusedMoE(2))
        for layer in model.layers:
            backend = None if name is None else SimpleNamespace(value=name)
            layer.quant_method.runner = SimpleNamespace(runner_backend=backend)
        bind_weights(model_of(FusedMoE(2)), SimpleNamespace(), (1, 2), GivenWeights(SPEC).hook)
        given = GivenOnDevice(SPEC, 8, torch.device("cpu"))
        if name == "triton":
            bind_weights(model, SimpleNamespace(), (1, 2), given.hook, on_device=True)
            continue
        with pytest.raises(ConfigError, match=f"layers.0: wanted a kernel that 'triton' runs .*, got {name}"):
            bind_weights(model, SimpleNamespace(), (1, 2), given.hook, on_device=True)
        assert all("forward" not in vars(module) for module in model.modules())


def test_a_factor_of_the_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="router_scaling_factor of the model's configuration: wanted 1 or none"):
        bind_weights(model_of(FusedMoE(2)), SimpleNamespace(router_scaling_factor=2), (1, 2), GivenWeights(SPEC).hook)


def test_weights_are_in_answers_alone() -> None:
    """Goal: what has no place for weights is refused by name. Method: settings with a rollout store, or none at all."""
    assert Lending.of({"routing_weights": True}).routing_weights
    for rollouts in ("", "file:///a", "apart:file:///a"):
        with pytest.raises(ConfigError, match=r"routing_weights: wanted false, or rollouts 'response:': weights"):
            Lending.of({"routing_weights": True, "rollouts": rollouts})


class Theirs:
    """SGLang's capturer."""

    def __init__(self) -> None:
        self.device_cache = SimpleNamespace(buffer=torch.zeros(8, 3, 2, dtype=torch.int32))

    def capture(self, *, layer_id: int, topk_indices: torch.Tensor) -> None:
        self.device_cache.buffer[: len(topk_indices), layer_id] = topk_indices


WITHOUT = {
    "": "",
    "no call": NOT_GIVEN["a call in each pass"],
    "two calls": NOT_GIVEN["one call a pass"],
    "other ids": OTHER_IDS,
    "other order": OTHER_IDS,
    "fewer tokens": GIVEN_OTHER_TOKENS,
    "doubles": OTHER_FORM,
    "shared columns": OTHER_FORM,
}


ON_DEVICE = {
    "two calls": REASONS["one call a pass"],
    "fewer tokens": NOT_GIVEN["a call in each pass"],
    "doubles": NOT_GIVEN["a call in each pass"],
    "shared columns": NOT_GIVEN["a call in each pass"],
}
"""Reasons beside a device, where they are others."""


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("odd", list(WITHOUT))
def test_a_pass_without_weights_of_its_ids_has_neither(rows: RoutedRows, odd: str, on_device: bool) -> None:
    """Goal: never one without the other, and the reason is counted. Method: a pass whose routers told ids, and whose
    experts were given something else; the page had rows before, and the pass before it is right. What stands beside a
    device does so in memory of the host, too."""
    given: Given = GivenOnDevice(SPEC, 8, torch.device("cpu")) if on_device else GivenWeights(SPEC)
    capturer = Capturer(Theirs(), rows, weights=given)
    batch = SimpleNamespace(out_cache_loc=torch.from_numpy(SLOTS), out_cache_loc_virtual=None)
    for salt, wrong in ((0, ""), (100, odd)):
        given.hook(1)(choice(7, 1))  # to warm up
        capturer.begin()
        for layer in (1, 2):
            capturer.capture(layer_id=layer, topk_indices=ids_of(salt)[:, layer])
            made = choice(salt, layer, 5 if wrong == "fewer tokens" else 6)
            if layer == 2 and wrong == "no call":
                continue
            if layer == 2 and wrong == "two calls":
                given.hook(layer)(made)
            if layer == 2 and wrong == "other ids":
                made.topk_ids[3, 1] += 1
            if layer == 2 and wrong == "other order":
                made.topk_ids = made.topk_ids.flip(1)
            if wrong == "doubles":
                made.topk_weights = made.topk_weights.double()
            if wrong == "shared columns":
                made.topk_weights = torch.cat([made.topk_weights, torch.ones(6, 1)], 1)
            given.hook(layer)(made)
        capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None)
        assert_read(rows, [salt] * 6 if not wrong else [None] * 6)
    reason = ON_DEVICE.get(odd, WITHOUT[odd]) if on_device else WITHOUT[odd]
    assert rows.meter.missing == ({reason.partition(":")[0]: 6} if odd else {})


def assert_read(rows: RoutedRows, salts: list[int | None], slots: Any = SLOTS) -> None:
    """The rows at these slots are of passes of these salts, ids and weights; ``None``: both are missing."""
    read = rows.read(slots, 0)
    found = read.routes()[0]
    weights = read.weights_of(found)
    assert weights is not None
    assert found.valid.tolist() == [salt is not None for salt in salts]
    for i, salt in enumerate(salts):
        if salt is None:
            assert np.isnan(weights.weights[i]).all()
        else:
            assert (found.ids[i] == ids_of(salt)[i, 1:].numpy()).all()
            assert weights.weights[i].tobytes() == bits_of(salt)[i].numpy().tobytes()


def test_every_cause_is_on_the_page() -> None:
    page = (Path(__file__).parents[5] / "docs" / "missing-rows.md").read_text()
    causes = [*NOT_GIVEN.values(), OTHER_FORM, GIVEN_OTHER_TOKENS, OTHER_IDS, IDS_ALONE]
    assert [cause for cause in causes if f"`{cause}`" not in page] == []


def test_a_weight_that_is_no_number_costs_its_own_row(rows: RoutedRows) -> None:
    weights = bits_of(0)
    weights[2, 1, 0] = torch.inf
    rows.launch(torch.from_numpy(SLOTS), ids_of(0), given=stacked(ids_of(0), weights)).finalize()
    assert_read(rows, [0, 0, None, 0, 0, 0])


def test_ids_that_come_without_weights_have_no_rows(rows: RoutedRows) -> None:
    """Method: over rows that have both."""
    run(rows, 0)
    rows.launch(torch.from_numpy(SLOTS), ids_of(100)).finalize()
    assert_read(rows, [None] * 6)
    assert list(rows.meter.missing) == [IDS_ALONE.partition(":")[0]]


def test_what_was_put_aside_comes_back_with_its_weights(rows: RoutedRows) -> None:
    """Goal: rows of KV that is copied aside and comes into other pages. Method: a row without both stays so."""
    weights = bits_of(0)
    weights[2, 1, 0] = torch.nan
    rows.launch(torch.from_numpy(SLOTS), ids_of(0), given=stacked(ids_of(0), weights)).finalize()
    aside = Aside()
    aside.keep(rows, SLOTS)
    run(rows, 100)
    there = SLOTS + 4 * PAGE
    aside.bring_back(rows, there)
    assert_read(rows, [0, 0, None, 0, 0, 0], there)


def answered(rows: RoutedRows, kept: Any = None, start: int = 0) -> RoutingWeights:
    """What a client reads of the answer of a request at these slots."""
    answer = rows.answer("id", SLOTS, start, Tokens([*PROMPT, *SAID], len(PROMPT)), kept)
    until(lambda: answer.ready, what="the answer is not ready")
    meta = {"id": "id", FIELD: [answer.data]}
    return routing_weights({"meta_info": meta, "prompt_token_ids": PROMPT, "output_ids": SAID})


@pytest.mark.parametrize("lost", [False, True])
def test_tokens_of_kv_that_was_given_up_keep_the_weights_that_they_were_sampled_with(
    rows: RoutedRows, lost: bool
) -> None:
    """Goal: retraction at a weight update. Method: other weights compute the tokens of the first three rows again,
    which stay; with ``lost`` the third one is missing, because other weights fill none."""
    rows.weights.changed(1)
    run(rows, 0, SLOTS[:2])
    if lost:
        rows.launch(torch.from_numpy(SLOTS[2:3]), "lost").finalize()
    else:
        ids, weights = ids_of(0)[2:3], bits_of(0)[2:3]
        rows.launch(torch.from_numpy(SLOTS[2:3]), ids, given=stacked(ids, weights)).finalize()
    kept = rows.kept(SLOTS[:3])
    assert not isinstance(kept, KVRouteError)
    rows.weights.changed(2)
    run(rows, 100)
    found = answered(rows, kept, start=1)
    salts = [0, None if lost else 0, 100, 100, 100]
    assert found.routes.valid.tolist() == [salt is not None for salt in salts]
    for i, salt in enumerate(salts):
        if salt is not None:
            assert (found.routes.ids[i] == ids_of(salt)[1 + i, 1:].numpy()).all()
            assert found.weights[i].tobytes() == bits_of(salt)[1 + i].numpy().tobytes()
    assert [span[2] for span in found.routes.weights_versions] == [1, 2]


def test_an_answer_has_the_bits_of_each_id(rows: RoutedRows) -> None:
    run(rows, 0)
    found = answered(rows)
    assert found.routes.complete
    assert found.weights.tobytes() == bits_of(0).numpy().tobytes()
    assert rows.read(SLOTS, 0).nbytes == 6 * 2 * 2 * (1 + 4)  # which wait for the answer
