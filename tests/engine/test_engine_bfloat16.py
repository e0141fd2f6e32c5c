"""The engine in bfloat16, in which production engines compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from paged_engine.engine import Engine
from paged_engine.models import MODELS, build_model
from paged_engine.request import EngineConfig, Request


@pytest.mark.parametrize("family", list(MODELS))
def test_kv_and_rows_of_bfloat16_come_back_from_a_store(family: str, tmp_path: Path) -> None:
    """Goal: bits of bfloat16 keep through swap and store. Method: the same prompt twice, the second time in an engine
    that has only the store; it reuses blocks, every row is there, and the rows of the reused part are the first life's.
    """
    model = build_model(family, seed=0, vocab_size=64, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    namespace, config = (
        Namespace(f"bfloat16/{family}", weights_version=1),
        EngineConfig(block_tokens=8, device_blocks=16),
    )
    lives = []
    for name in ("first", "second"):
        store = open_store(tmp_path.as_uri())
        with Engine(model, config, namespace, store=store) as engine:
            engine.add(Request(name, tuple(range(40)), max_tokens=8, temperature=1.0, draw="the same"))
            (output,) = engine.run()
            engine.drain()
            lives.append((output, engine.manager.counters.restored_tokens))
        store.flush()
        store.close()
    (first, _), (second, restored) = lives
    assert first.routes.complete
    assert second.routes.complete
    assert restored >= 32
    assert (first.routes.ids[:restored] == second.routes.ids[:restored]).all()


def test_bfloat16_is_the_float64_model_rounded() -> None:
    whole, rounded = (build_model("qwen3_moe", seed=3, vocab_size=64, dtype=d) for d in (torch.float64, torch.bfloat16))
    for a, b in zip(whole.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
    assert {buffer.dtype for buffer in rounded.buffers()} == {torch.float32}
