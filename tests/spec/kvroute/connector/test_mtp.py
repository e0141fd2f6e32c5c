"""Rows of an MTP layer, whose router reads two tokens: each is handed out beside the token that it was read with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cache_manager.errors import RowError
from cache_manager.keys import Namespace
from kvroute.connector import Engine, Key, SchedulerRows, Settings, Tokens, mtp_missing, mtp_routes
from kvroute.connector.fields import MTP_FIELD
from kvroute.connector.mtp import NOT_DRAFTED, READ_OTHERWISE, MtpIds, mtp_spec
from kvroute.connector.worker import WorkerRows
from kvroute.routes import Routes
from kvroute.routing import ROUTING, routing_spec

BLOCKS, TOKENS, EXPERTS, TOP_K = 6, 4, 16, 2
SPEC = routing_spec(EXPERTS, TOP_K, (1, 2), num_layers=3, block_tokens=TOKENS)


def chosen(token: int, behind: int) -> list[int]:
    """What the MTP layer's router chooses for a token with the one behind it; the model's routers choose 14 and 15."""
    return [token % 7, 7 + behind % 7]


class Both:
    """Both ends, and a draft's first pass in each step that has one."""

    def __init__(self) -> None:
        settings = Settings.of({"strict": True, "weights": "m", "weights_version": 3, "mtp": True})
        engine = Engine(settings, SPEC, Namespace("m", 3), BLOCKS, 64, mtp=mtp_spec(SPEC))
        self.worker = WorkerRows(engine, {"layers.0": torch.zeros(BLOCKS, 1, TOKENS, 8)}, late=False)
        self.scheduler = SchedulerRows(engine)
        self.scheduler.attach(self.worker.handshake())

    def step(self, slots: Sequence[int], read: Sequence[tuple[int, int, int]] = ()) -> None:
        """The model computes these slots; a draft's pass ``read`` slots, each a token with the one behind it."""
        self.worker.begin(self.scheduler.step({"r": len(slots)}))
        self.worker.slots = torch.tensor(slots)
        for layer in (1, 2):
            self.worker.ids.hook(layer)(torch.tensor([[14, 15]] * len(slots)))
        if read:
            ids = torch.tensor([chosen(token, behind) for _, token, behind in read], dtype=torch.int32)
            assert isinstance(self.worker.mtp, MtpIds)
            self.worker.mtp.keep(ids, torch.tensor([slot for slot, *_ in read]), torch.tensor([n for *_, n in read]))
        self.worker.end()

    def answer(self, blocks: Sequence[int], tokens: Sequence[int], start: int = 0) -> dict[str, Any]:
        """The answer of a request with these tokens, whose prompt are the first two."""
        rows = self.scheduler.mtp_rows(Key("r"), blocks, len(tokens) - 1, Tokens(list(tokens), 2), start)
        choice = {"index": 0, "prompt_token_ids": list(tokens[:2]), "token_ids": list(tokens[2:])}
        return {"kv_transfer_params": {MTP_FIELD: rows}, "choices": [choice]}

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    made.scheduler.given(range(BLOCKS))
    yield made
    made.close()


def right(rows: Routes, tokens: Sequence[int]) -> list[bool]:
    """Which positions have the row of their token and the one behind it."""
    ids = [chosen(*tokens[place : place + 2]) for place in range(rows.start, rows.stop)]
    assert (rows.ids[rows.valid, 0] == np.array(ids).reshape(-1, TOP_K)[rows.valid]).all()
    return rows.valid.tolist()


def test_rows_of_tokens_that_stand(both: Both) -> None:
    """Goal: each position has the row of its own token and the next one, whatever drafts were rejected before. Method:
    a prompt; a step with two drafts, of which one stands, whose first pass reads all three; the next step."""
    tokens = [11, 12, 13, 14, 15, 16, 17]
    both.step([4, 5, 6], [(4, 11, 12), (5, 12, 13), (6, 13, 14)])
    both.step([7, 8, 9], [(7, 14, 15), (8, 15, 90), (9, 90, 91)])  # 90 and 91 are drafts
    assert mtp_missing(both.answer([1, 2], tokens[:6])) == ((4, 5, READ_OTHERWISE),)
    both.step([8, 9], [(8, 15, 16), (9, 16, 17)])
    answer = both.answer([1, 2], tokens)
    rows = mtp_routes(answer)
    rows.validate(tokens, rows=6)
    assert all(right(rows, tokens))
    assert mtp_missing(answer) == ()
    assert (rows.layer_ids, rows.num_layers, rows.num_experts) == ((0,), 1, EXPERTS)
    assert rows.weights_versions == ((0, 6, 3),)
    for start in range(1, 6):
        later = mtp_routes(both.answer([1, 2], tokens, start=start))
        assert (later.start, later.stop) == (start, 6)
        assert all(right(later, tokens))
    assert both.scheduler.mtp_rows(Key("r"), [1, 2], 6, Tokens(tokens, 2), 6) is None
    assert (both.worker.blocks.read(ROUTING, [1]).values == [14, 15]).all()


def test_another_token_behind_a_block(both: Both) -> None:
    """Goal: a block that is hit has no row of its last token for a request that goes on otherwise. Method: two requests
    with one block in common, of which the second reads its own tokens alone."""
    first, second = [21, 22, 23, 24, 25, 26], [21, 22, 23, 24, 35, 36]
    both.step([0, 1, 2, 3, 4], [(i, first[i], first[i + 1]) for i in range(5)])
    both.step([8], [(8, 35, 36)])
    assert all(right(mtp_routes(both.answer([0, 1], first)), first))
    answer = both.answer([0, 2], second)
    assert right(mtp_routes(answer), second) == [True, True, True, False, True]
    assert mtp_missing(answer) == ((3, 4, READ_OTHERWISE),)


def test_tokens_that_no_pass_has_read(both: Both) -> None:
    """Goal: what was not drafted is missing, also where an earlier pass has left a row that was right for its own
    tokens. Method: a step without a pass; over a slot with the row of a rejected draft, whose next token came back."""
    tokens = [31, 32, 33, 34]
    both.step([0, 1, 2], [(0, 31, 32), (1, 80, 33), (2, 33, 34)])
    both.step([1, 2])  # both were rejected, and the engine drafts no more
    answer = both.answer([0], tokens)
    assert right(mtp_routes(answer), tokens) == [True, False, False]
    assert mtp_missing(answer) == ((1, 3, NOT_DRAFTED),)
    assert both.worker.blocks.read(ROUTING, [0], stop=3).valid.all()


def test_ids_that_do_not_fit_leave_no_rows(both: Both) -> None:
    """Goal: the model's rows stay whole beside whatever a draft's router says. Method: ids that no expert has, of
    another width, and without a place."""
    assert isinstance(both.worker.mtp, MtpIds)
    for ids, slots in (([[3, 16], [4, 4]], [0, 1]), ([[1, 2, 3]] * 2, [0, 1]), ([[1, 2]] * 2, [-1, 5])):
        both.worker.begin(both.scheduler.step({"r": 2}))
        both.worker.slots = torch.tensor([0, 1])
        for layer in (1, 2):
            both.worker.ids.hook(layer)(torch.tensor([[14, 15]] * 2))
        both.worker.mtp.keep(torch.tensor(ids), torch.tensor(slots), torch.tensor([8, 9]))
        both.worker.end()
        assert mtp_missing(both.answer([0], [7, 8, 9])) == ((0, 2, NOT_DRAFTED),)
        assert both.worker.blocks.read(ROUTING, [0], stop=2).valid.all()


def test_answers_without(both: Both) -> None:
    """Goal: an engine that was not asked for them, and another completion's tokens, give an error that says so."""
    with pytest.raises(RowError, match="wanted an answer with rows of an MTP layer"):
        mtp_routes({"choices": [{"index": 0, "prompt_token_ids": [1], "token_ids": [2]}]})
    both.step([0, 1], [(0, 5, 6), (1, 6, 7)])
    answer = both.answer([0], [5, 6, 7])
    answer["choices"][0]["token_ids"] = [8]
    with pytest.raises(RowError, match="rows of other tokens"):
        mtp_routes(answer)
    answer["kv_transfer_params"][MTP_FIELD] = {"0": {"error": "no room"}}
    with pytest.raises(RowError, match="wanted an answer with rows, got no room"):
        mtp_routes(answer)
    assert both.scheduler.mtp_rows(Key("r"), [], 0, Tokens([5, 6], 2)) is None
