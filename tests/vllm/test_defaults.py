"""What a trainer gets of an engine that used KV of another one, with the defaults and with a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import models, prompts

from cache_manager.errors import RowError
from kvroute.integrations.vllm import routes
from kvroute.replay import verl

Start = Any  # conftest's Engines
Model = Callable[..., Path]
ASKED = prompts(48, 150, 98, 66)
FULL = [128, 96, 64]


@pytest.mark.parametrize("store", [False, True])
def test_a_row_is_right_in_every_layer_or_missing_by_name(
    engine: Start, model: Model, tmp_path: Path, store: bool
) -> None:
    """Goal: a trainer never trains on zeros. Method: a restart over KV in files, whose rows are in the KV by default,
    or in a store; each layer of each row against transformers, and again behind an adapter that refuses missing rows.
    With a store only what the last router chose at loaded positions is missing.
    """
    home, settings = model("qwen3_moe"), {"store": f"file://{tmp_path / 'rows'}"} if store else {}
    (tmp_path / "kv").mkdir()
    for hits in ([0, 0, 0], FULL):
        made = engine(home, "KvrouteExampleConnector", settings, {"shared_storage_path": str(tmp_path / "kv")})
        for prompt, hit in zip(ASKED, hits, strict=True):
            (output,) = made.ask([prompt])
            assert output.num_cached_tokens == hit
            found, answer = routes(output), list(output.outputs[0].token_ids)
            expected = models.routing(home, [*prompt, *answer])[:-1]
            known = np.ones(expected.shape[:2], np.bool_)
            known[:hit, -1] = not store
            assert (found.known == known).all()
            assert (np.sort(found.ids.astype(np.int64))[known] == expected[known]).all()
            if known.all():
                rows = verl.agent_loop(found, len(prompt), len(answer), missing="error")
                assert (np.sort(rows[: len(expected)].astype(np.int64)) == expected).all()
            else:
                with pytest.raises(RowError, match=f"row 0 layer {expected.shape[1] - 1}"):
                    verl.agent_loop(found, len(prompt), len(answer), missing="error")
