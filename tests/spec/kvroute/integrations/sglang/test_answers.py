"""The routes of SGLang's answers: of the request's own weights, and bound to tokens that say what the prompt was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faulty_disk import FaultyDisk
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from cache_manager.errors import KVRouteError, RowError
from cache_manager.keys import Namespace
from kvroute import Routes, routing_spec
from kvroute.connector.answers import routes
from kvroute.connector.fields import FIELD
from kvroute.connector.left import LeftRoutes, Tokens
from kvroute.connector.settings import Common
from kvroute.integrations.sglang import versions
from kvroute.integrations.sglang.answers import Answer, Answers
from kvroute.integrations.sglang.capturer import ANSWER, Capturer
from kvroute.integrations.sglang.drafts import accepted
from kvroute.integrations.sglang.hooks import HOOKS
from kvroute.integrations.sglang.passes import UNVERIFIED
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.rollout.local import LocalRollouts

PAGE = 4
SLOTS = np.arange(PAGE, PAGE + 6)


@pytest.fixture
def rows() -> Iterator[RoutedRows]:
    spec = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)
    rows = RoutedRows(spec, 4, Namespace("m", 1), Common(strict=True))
    yield rows
    rows.close()


def run(rows: RoutedRows, salt: int) -> None:
    """A pass over all slots, whose ids are of this salt."""
    ids = torch.arange(36, dtype=torch.int32).reshape(6, 3, 2) + salt
    rows.launch(torch.from_numpy(SLOTS), ids).finalize()


def made(answer: Answer) -> Answer:
    until(lambda: answer.ready, what="the answer is not ready")
    return answer


@pytest.mark.parametrize("fails", ["disk", "rows"])
def test_an_answer_whose_routes_cannot_be_left_has_no_earlier_ones(
    rows: RoutedRows, tmp_path: Path, fails: str
) -> None:
    """Goal: a row is of the weights that answered. Method: two requests of one ``rid`` with the same tokens; the
    disk is full when the second one's routes are left, or its rows cannot be read; the answer is one of a server that
    sends no handle."""
    disk, tokens = FaultyDisk(), list(range(7))
    store = LocalRollouts(tmp_path, disk=disk)
    rows.answers = Answers(rows.spec, LeftRoutes(store), rows.meter)
    answer = {"id": "s", "prompt_token_ids": tokens[:5], "choices": [{"index": 0, "token_ids": tokens[5:]}]}
    run(rows, 0)
    made(rows.answer("s", SLOTS, 0, Tokens(tokens, 5)))
    assert routes(answer, rollouts=store, key="s").complete
    run(rows, 100)
    if fails == "disk":
        disk.write_budget_nbytes = 0
    else:
        rows.aux.close()
    made(rows.answer("s", SLOTS, 0, Tokens(tokens, 5)))
    why = {"disk": "neither a handle in the answer nor one in the store", "rows": "a key that no other request has had"}
    with pytest.raises(RowError, match=why[fails]):
        routes(answer, rollouts=store, key="s", wait_s=0)


@pytest.mark.parametrize("embedded", ["input_embeds", "positional_embed_overrides"])
def test_routes_of_embeddings_are_bound_to_no_tokens(rows: RoutedRows, embedded: str) -> None:
    """Goal: merged parts are of one sequence. Method: two prompts of embeddings, to which SGLang gives the same ids;
    the rows of the first one's prompt, and those of the second one's answer."""
    capturer = Capturer(
        SimpleNamespace(
            device_cache=SimpleNamespace(buffer=torch.zeros(8, 3, 2, dtype=torch.int32)), destroy=lambda: None
        ),
        rows,
    )
    pool, found = SimpleNamespace(req_to_token=torch.from_numpy(SLOTS)[None]), list[Routes]()
    for start in (0, 3):
        run(rows, start)
        prompt: dict[str, Any] = {"input_embeds": None, "positional_embed_overrides": None, "origin_input_ids": [1] * 3}
        prompt[embedded] = [[0.5 + start]] * 3
        capturer.req = SimpleNamespace(rid="id", output_ids_through_stop=[7, 8, 9, 10], **prompt)
        capturer.get_topk(0, 7, pool, start)
        data = made(getattr(capturer.req, ANSWER)).data
        found.append(routes({"meta_info": {"id": "id", FIELD: [data]}, "output_ids": [7, 8, 9, 10]}))
    first, second = found
    assert (first.complete, second.complete, first.token_hashes) == (True, True, ())
    with pytest.raises(RowError, match="parts of one sequence"):
        first.slice(0, 3).merge(second)


class Theirs:
    """SGLang's capturer, without its buffer on the host."""

    def __init__(self) -> None:
        self.device_cache = SimpleNamespace(buffer=torch.zeros(8, 3, 2, dtype=torch.int32))
        self.destroy = lambda: None

    def capture(self, *, layer_id: int, topk_indices: torch.Tensor) -> None:
        self.device_cache.buffer[: len(topk_indices), layer_id] = topk_indices

    def _get_local_slice(self, batch: Any, *_: Any) -> Any:
        """Of the buffer itself, as SGLang up to 0.5.16 hands it on."""
        return self.device_cache.buffer[: len(batch.out_cache_loc)]


@pytest.mark.parametrize("odd", ["two batches", "a shard", "not called", ""])
def test_a_layer_whose_router_was_not_called_once_with_all_tokens_has_no_rows(rows: RoutedRows, odd: str) -> None:
    """Goal: what SGLang's buffer does not hold is missing. Method: in the second pass one router is called a half of
    the batch at a time (two-batch overlap), with a part of the tokens, or not at all; earlier calls, before a pass
    begins, do not count."""
    capturer = Capturer(Theirs(), rows)
    for salt in (0, 100):
        ids = torch.arange(36, dtype=torch.int32).reshape(6, 3, 2) + salt
        capturer.capture(layer_id=1, topk_indices=ids[:2, 1])  # to warm up
        capturer.begin()
        for layer in (1, 2):
            parts = {"two batches": [ids[:3], ids[3:]], "a shard": [ids[:3]], "not called": []}
            for part in parts[odd] if salt and odd and layer == 1 else [ids]:
                capturer.capture(layer_id=layer, topk_indices=part[:, layer])
        batch = SimpleNamespace(out_cache_loc=torch.from_numpy(SLOTS), out_cache_loc_virtual=None)
        capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None)
    found = rows.read(SLOTS, 0).routes()[0]
    assert found.valid.tolist() == [not odd] * 6
    assert odd or found.ids.tolist() == ids[:, 1:].tolist()


def test_an_answer_without_a_token_has_its_routes(rows: RoutedRows) -> None:
    """Goal: ``max_new_tokens=0``."""
    capturer = Capturer(Theirs(), rows)
    pool = SimpleNamespace(req_to_token=torch.from_numpy(SLOTS)[None])
    run(rows, 0)
    capturer.req = SimpleNamespace(
        rid="id",
        output_ids_through_stop=[],
        origin_input_ids=list(range(7)),
        input_embeds=None,
        positional_embed_overrides=None,
    )
    capturer.get_topk(0, 7, pool, 0)
    data = made(getattr(capturer.req, ANSWER)).data
    answer = {"meta_info": {"id": "id", FIELD: [data]}, "prompt_token_ids": list(range(7)), "output_ids": []}
    assert (len(routes(answer)), routes(answer).complete) == (6, True)


@pytest.mark.parametrize("lost", [False, True])
def test_tokens_of_kv_that_was_given_up_keep_the_rows_that_they_were_sampled_with(rows: RoutedRows, lost: bool) -> None:
    """Goal: a retraction at a weight update changes no row of a token that was sampled before. Method: a request gives
    up its KV behind two tokens, again behind none and behind one more, and each time other weights compute all tokens
    again; with ``lost``, the first computation had no rows, and the later ones fill none of them."""
    capturer = Capturer(Theirs(), rows)
    rows.weights.changed(1)
    pool = SimpleNamespace(req_to_token=torch.from_numpy(SLOTS)[None])
    req = SimpleNamespace(
        rid="id",
        return_routed_experts=True,
        origin_input_ids=list(range(3)),
        output_ids=[],
        kv=SimpleNamespace(req_pool_idx=0),
        input_embeds=None,
        positional_embed_overrides=None,
    )
    capturer.retracted(req, pool)  # in the midst of its prompt: no token was sampled yet
    if lost:
        rows.launch(torch.from_numpy(SLOTS), "lost").finalize()
    else:
        run(rows, 0)
    req.output_ids = [7, 8]
    capturer.retracted(req, pool)
    rows.weights.changed(2)
    run(rows, 100)
    capturer.retracted(req, pool)  # before a further token
    req.output_ids = [7, 8, 9]
    capturer.retracted(req, pool)
    rows.weights.changed(3)
    run(rows, 200)
    req.output_ids_through_stop = [7, 8, 9, 10]
    capturer.req = req
    capturer.get_topk(0, 7, pool, 1)
    data = made(getattr(req, ANSWER)).data
    answered = routes(
        {"meta_info": {"id": "id", FIELD: [data]}, "prompt_token_ids": [0, 1, 2], "output_ids": [7, 8, 9, 10]}
    )
    due = torch.arange(36).reshape(6, 3, 2)[1:, 1:] + torch.tensor([0, 0, 0, 100, 200])[:, None, None]
    assert answered.valid.tolist() == [not lost] * 3 + [True] * 2
    assert answered.ids[answered.valid].tolist() == due[3 if lost else 0 :].tolist()
    spans = [list(span) for span in answered.weights_versions]
    assert spans == ([] if lost else [[1, 4, 1]]) + [[4, 5, 2], [5, 6, 3]]


@pytest.mark.parametrize("changes", ["", "before it is computed again", "while it is computed, in place"])
def test_a_row_that_was_missing_is_filled_by_the_same_weights_alone(rows: RoutedRows, changes: str) -> None:
    """Goal: as the journal has it. Method: a pass without ids, whose tokens are sampled; its request gives up its KV,
    and a second pass computes it again, with the same weights or others."""
    rows.weights.changed(1)
    ids = torch.arange(36, dtype=torch.int32).reshape(6, 3, 2)
    rows.launch(torch.from_numpy(SLOTS[:2]), ids[:2]).finalize()
    rows.launch(torch.from_numpy(SLOTS[2:4]), "lost").finalize()
    if changes.startswith("while"):
        rows.weights.changed(2)
    kept = rows.kept(SLOTS[:4])
    if changes.startswith("before"):
        rows.weights.changed(2)
    rows.launch(torch.from_numpy(SLOTS), ids + 100).finalize()
    answered = rows.kept(SLOTS, 1, kept)
    assert not isinstance(answered, KVRouteError)
    routes = answered.routes()[0]
    assert routes.valid.tolist() == [True, not changes, not changes, True, True]
    due = torch.cat([ids[1:2], ids[2:] + 100])[routes.valid.tolist(), 1:]
    assert routes.ids[routes.valid].tolist() == due.tolist()


def verified(capturer: Capturer, slots: list[int], accepted: list[list[int]], first: int, *, overlap: bool) -> Any:
    """A pass that verifies drafts, of which these are accepted for each request: token ``i`` has the ids of
    ``first + i``. Behind it the draft model computes, with other choices."""
    ids = (torch.arange(len(slots), dtype=torch.int32) + first)[:, None, None] + torch.tensor([0, 100])
    capturer.begin()
    for layer in (1, 2):
        capturer.capture(layer_id=layer, topk_indices=ids[:, 0])
    mode = SimpleNamespace(is_target_verify=lambda: True)
    batch = SimpleNamespace(out_cache_loc=torch.tensor(slots), out_cache_loc_virtual=None, forward_mode=mode)
    capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None, no_copy_to_cpu=overlap)
    width = max(map(len, accepted))
    index = torch.tensor([[*each, *[-1] * (width - len(each))] for each in accepted], dtype=torch.int32)
    HOOKS["accepted"](lambda *_: (None, torch.tensor([len(each) for each in accepted]), index), None)
    capturer.begin(drafting=True)
    capturer.capture(layer_id=1, topk_indices=ids[:, 0] + 50)
    result = SimpleNamespace(routed_experts_output=None)
    HOOKS["carried"](lambda *_: result, None)
    return result.routed_experts_output


@given(data=st.data(), overlap=st.booleans())
def test_rows_are_those_of_accepted_drafts_in_the_order_of_their_positions(data: st.DataObject, overlap: bool) -> None:
    """Goal: speculative decoding. Method: two requests whose drafts are trees. SGLang moves the KV of each accepted
    path to the front of the slots; what the model keeps of each slot is the token whose KV lies there then."""
    spec = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)
    rows = RoutedRows(spec, 13, Namespace("m", 1), Common(strict=True))
    capturer = Capturer(Theirs(), rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "experts_capturer", lambda: capturer)
        memory, lengths, first, width = np.full((2, 24), -1), [0, 0], 0, 4
        slots = PAGE + np.arange(48).reshape(2, 24)
        flight: list[Any] = []
        for _ in range(data.draw(st.integers(1, 5))):
            window = [slots[i, lengths[i] : lengths[i] + width].tolist() for i in (0, 1)]
            behind = st.sets(st.integers(1, width - 1), max_size=width - 1).map(sorted)
            paths = [[i * width, *(i * width + at for at in data.draw(behind))] for i in (0, 1)]
            flight.append(verified(capturer, [*window[0], *window[1]], paths, first, overlap=overlap))
            for i, path in enumerate(paths):
                memory[i, lengths[i] : lengths[i] + len(path)] = [first + at for at in path]
                lengths[i] += len(path)
            first += 2 * width
            if len(flight) > int(overlap):
                flight.pop(0).finalize()
        for launched in flight:
            launched.finalize()
        for i in (0, 1):
            found = rows.read(slots[i, : lengths[i]], 0).routes()[0]
            assert found.complete
            assert found.ids[:, 0, 0].tolist() == memory[i, : lengths[i]].tolist()
            beyond = rows.read(slots[i, : lengths[i] + 1], 0).routes()[0]
            assert not beyond.valid[-1], "a rejected draft has a row"
    rows.close()


def test_a_drafting_model_is_not_captured(rows: RoutedRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: SGLang's own hook on a pass, of the model and of the one that drafts for it."""
    theirs = Theirs()
    capturer = Capturer(theirs, rows)
    monkeypatch.setattr(versions, "experts_capturer", lambda: capturer)
    for drafting in (True, False):
        HOOKS["begins"](lambda *_: None, SimpleNamespace(is_draft_worker=drafting))
        capturer.capture(layer_id=1, topk_indices=torch.ones(2, 2, dtype=torch.int32))
        assert bool((theirs.device_cache.buffer[:, 1] == 1).any()) is not drafting


def test_drafts_whose_verification_is_not_reported_have_no_rows(rows: RoutedRows) -> None:
    ids = torch.arange(36, dtype=torch.int32).reshape(6, 3, 2)
    rows.launch(torch.from_numpy(SLOTS), ids, drafts=True).finalize()
    assert not rows.read(SLOTS, 0).rows.valid.any()
    assert rows.meter.missing == {UNVERIFIED: 6}
    rows.launch(torch.from_numpy(SLOTS), ids).finalize()
    assert rows.read(SLOTS, 0).rows.valid.all()


def test_more_accepted_tokens_than_a_pass_has_are_an_error() -> None:
    with pytest.raises(AssertionError, match="3 accepted tokens of 2"):
        accepted(torch.arange(4), torch.zeros(2, 3, dtype=torch.int32), torch.tensor([1, 1]))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("odd", ["", "its own tokens alone", "a graph", "more tokens than the ranks have"])
def test_a_rank_takes_its_own_tokens_of_those_of_all_ranks(
    rows: RoutedRows, monkeypatch: pytest.MonkeyPatch, rank: int, odd: str
) -> None:
    """Goal: with attention data parallelism a row is of this rank's request. Method: two ranks with 3 and 5 tokens,
    of which a router has all, padded to 4 and 6; then passes whose order of tokens is not known, and one in which this
    rank has no token."""
    monkeypatch.setattr(versions, "function_at", lambda _: lambda _counts: rank)
    theirs, tokens = Theirs(), [3, 5][rank]
    theirs.device_cache.buffer = torch.zeros(16, 3, 2, dtype=torch.int32)
    capturer = Capturer(theirs, rows)
    gathered = torch.arange(72, dtype=torch.int32).reshape(12, 3, 2)
    routed = {"its own tokens alone": [4, 6][rank], "more tokens than the ranks have": 12, "a graph": 10, "": 10}[odd]
    batch = SimpleNamespace(
        out_cache_loc=torch.from_numpy(np.concatenate([SLOTS[:tokens], [0]])),
        out_cache_loc_virtual=None,
        global_num_tokens_cpu=[4, 6],
        original_global_num_tokens_cpu=[3, 5],
    )
    capturer.begin()
    if odd == "a graph":  # it writes the buffer, and calls nothing
        theirs.device_cache.buffer[:10] = gathered[:10]
    for layer in () if odd == "a graph" else (1, 2):
        capturer.capture(layer_id=layer, topk_indices=gathered[:routed, layer])
    capturer.on_forward_end(batch, can_run_graph=odd == "a graph", cuda_graph_batch=4 if odd == "a graph" else None)
    known = rows.read(SLOTS[:tokens], 0).routes()[0]
    start = [0, 4][rank]
    assert known.valid.tolist() == [not odd] * tokens
    assert odd or known.ids.tolist() == gathered[start : start + tokens, 1:].tolist()
    launched = rows.passes.launched
    batch.original_global_num_tokens_cpu = [5, 5]
    batch.original_global_num_tokens_cpu[rank] = 0
    assert capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None) is None
    assert rows.passes.launched == rows.passes.ended == launched
