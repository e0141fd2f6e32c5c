"""Routes of answers: what SGLang's own form has, and what no engine sends."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_manager.errors import RowError
from kvroute.connector import Key, Tokens
from kvroute.connector.answers import routes
from kvroute.connector.left import LeftRoutes
from kvroute.rollout import open_rollouts
from kvroute.routes import Routes

PROMPT, ANSWER = [5, 6, 7], [8, 9, 10]
TOKENS = [*PROMPT, *ANSWER]


def test_an_answer_of_sglang_names_the_key_of_its_routes(tmp_path: Path) -> None:
    """Goal: a client of SGLang finds routes that came without a handle: the request's id is their key. Method: routes
    that lie in a store; answers with their id, with another one, and without."""
    made = Routes(np.tile(np.array([1, 2]), (5, 1, 1)), np.ones(5, np.bool_), (0,), 4, 1)
    answer: dict[str, Any] = {"prompt_token_ids": PROMPT, "output_ids": ANSWER}
    with closing(open_rollouts(f"file://{tmp_path}")) as store:
        LeftRoutes(store).leave(Key("r", True), made, Tokens(TOKENS, len(PROMPT)), ())
        found = routes(answer | {"meta_info": {"id": "r"}}, rollouts=store, wait_s=0)
        assert found == made.bind(TOKENS, [3, 5])
        with pytest.raises(RowError, match="neither a handle in the answer nor one in the store"):
            routes(answer | {"meta_info": {"id": "other"}}, rollouts=store, wait_s=0)
        with pytest.raises(RowError, match="key=, the one that its request carried"):
            routes(answer | {"meta_info": {"finish_reason": "stop"}}, rollouts=store, wait_s=0)


@pytest.mark.parametrize("handle", ["{}", "x", [], 5, {"format": "kvroute.rollout/3"}])
def test_an_unsound_handle_is_a_row_error(tmp_path: Path, handle: Any) -> None:
    """Goal: one kind of error for an answer without rows. Method: what no engine sends in a handle's place."""
    choice = {"index": 0, "prompt_token_ids": PROMPT, "token_ids": ANSWER}
    answer = {"id": "r", "choices": [choice], "kv_transfer_params": {"kvroute": {"rollouts": {"0": handle}}}}
    with closing(open_rollouts(f"file://{tmp_path}")) as store, pytest.raises(RowError, match="rollout handle"):
        routes(answer, rollouts=store)
