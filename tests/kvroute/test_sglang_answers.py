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

from cache_manager.errors import RowError
from cache_manager.keys import Namespace
from kvroute import Routes, routing_spec
from kvroute.connector.answers import routes
from kvroute.connector.left import LeftRoutes, Tokens
from kvroute.connector.settings import Common
from kvroute.integrations.sglang.rows import Capturer, RoutedRows
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


def test_an_answer_whose_routes_cannot_be_left_has_no_earlier_ones(rows: RoutedRows, tmp_path: Path) -> None:
    """Goal: a row is of the weights that answered. Method: two requests of one ``rid`` with the same tokens; the
    disk is full when the second one's routes are left, and the answer is one of a server that sends no handle."""
    disk, tokens = FaultyDisk(), list(range(7))
    rows._left = LeftRoutes(store := LocalRollouts(tmp_path, disk=disk))
    answer = {"id": "s", "prompt_token_ids": tokens[:5], "choices": [{"index": 0, "token_ids": tokens[5:]}]}
    run(rows, 0)
    rows.answer("s", SLOTS, 0, Tokens(tokens, 5))
    assert routes(answer, rollouts=store).complete
    run(rows, 100)
    disk.write_budget_nbytes = 0
    rows.answer("s", SLOTS, 0, Tokens(tokens, 5))
    with pytest.raises(RowError, match="wanted a rollout of this answer's tokens"):
        routes(answer, rollouts=store, wait_s=0)


@pytest.mark.parametrize("embedded", ["input_embeds", "positional_embed_overrides"])
def test_routes_of_embeddings_are_bound_to_no_tokens(rows: RoutedRows, embedded: str) -> None:
    """Goal: merged parts are of one sequence. Method: two prompts of embeddings, to which SGLang gives the same ids;
    the rows of the first one's prompt, and those of the second one's answer."""
    capturer = Capturer(SimpleNamespace(capture=None, destroy=lambda: None), rows)
    pool, found = SimpleNamespace(req_to_token=torch.from_numpy(SLOTS)[None]), list[Routes]()
    for start in (0, 3):
        run(rows, start)
        prompt: dict[str, Any] = {"input_embeds": None, "positional_embed_overrides": None, "origin_input_ids": [1] * 3}
        prompt[embedded] = [[0.5 + start]] * 3
        capturer.req = SimpleNamespace(rid="id", output_ids_through_stop=[7, 8, 9, 10], customized_info=None, **prompt)
        capturer.get_topk(0, 7, pool, start)
        found.append(routes({"meta_info": {"id": "id", **capturer.req.customized_info}, "output_ids": [7, 8, 9, 10]}))
    first, second = found
    assert (first.complete, second.complete, first.token_hashes) == (True, True, ())
    with pytest.raises(RowError, match="parts of one sequence"):
        first.slice(0, 3).merge(second)
