"""vLLM's own offloading of KV to host memory, with rows: far beyond the pool, after preemption, while it runs ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, Engine, prompts
from host_offload import DAMAGED_RANK

from kvroute.integrations.vllm import routes, unseen

Start = Any  # conftest's Engines
Model = Callable[..., Path]
POOL = 16
"""Blocks of the engine, of which one is vLLM's own and stays empty."""
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def start(engine: Start, home: Path, settings: dict[str, Any], decoded: bool = False, **arguments: Any) -> Engine:
    """An engine of few blocks whose KV goes to 4 MB of host memory, which is 170 blocks of this model."""
    extra: dict[str, Any] = {"spec_name": "HostSpec", "spec_module_path": "host_offload", "cpu_bytes_to_use": 4 << 20}
    extra["offload_prompt_only"] = not decoded
    defaults = {"num_gpu_blocks_override": POOL, "max_model_len": 256}
    made: Engine = engine(home, "KvrouteOffloadingConnector", settings, extra, **{**defaults, **arguments})
    return made


def test_preempted_requests_come_back_from_the_host(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: rows of a request whose blocks were taken and whose KV was loaded again. Method: twelve requests at once of
    four blocks each for fifteen, whose decoded blocks are offloaded too; a second round hits all of them.
    """
    made = start(
        engine,
        model("qwen3_moe"),
        {"store": f"file://{tmp_path}", "witness": "flagged"},
        decoded=True,
        max_num_batched_tokens=96,
    )
    asked = prompts(71, *[40] * 12)
    for _ in range(2):
        made.assert_right(made.ask(asked, max_tokens=80))
    assert made.metric("num_preemptions") > 0
    assert made.metric("external_prefix_cache_hits") > 0
    made.kept.blocks.assert_consistent()


def test_rows_far_beyond_the_pool(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: hits on offloaded KV have their rows, however many blocks went through the pool. Method: twelve prompts of
    four whole blocks each, three pools full; then each again, the first one first: its KV has to come from the host.
    """
    made = start(engine, model("qwen3_moe"), {"store": f"file://{tmp_path}", "witness": "flagged"})
    asked = prompts(70, *[150] * 12)
    assert len(asked) * 4 > 2 * POOL
    for prompt in asked:
        made.assert_right(made.ask([prompt], max_tokens=4))
    outputs = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
    made.assert_right(outputs)
    assert [output.num_cached_tokens for output in outputs] == [4 * BLOCK] * 12
    assert made.metric("external_prefix_cache_hits") >= 12 * 4 * BLOCK - POOL * BLOCK
    assert made.kept.missing.total() == 0
    made.kept.blocks.assert_consistent()


def test_ranks_that_divide_the_heads(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: tensor parallelism with KV that leaves the pool and comes back. Method: two ranks in processes of their
    own, each with one of two heads and a host memory of its own; what comes back goes by both ranks' heads. Then
    a hit in the pool and new prompts at once.
    """
    settings = {"store": f"file://{tmp_path}", "witness": "flagged"}
    made, asked = start(engine, model("olmoe"), settings, **RANKS), prompts(72, *[150] * 6)
    for prompt in asked:
        made.assert_right(made.ask([prompt], max_tokens=4))
    outputs = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
    made.assert_right(outputs)
    assert [output.num_cached_tokens for output in outputs] == [4 * BLOCK] * 6
    assert [unseen(output) for output in outputs[:2]] == [((0, 4 * BLOCK),)] * 2, "from the host"
    made.assert_right(made.ask([[*asked[-1], 7], *prompts(73, 40, 100)]))


def test_kv_that_is_wrong_in_one_rank_alone(
    engine: Start, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the witness is of all ranks' heads. Method: as before; the second rank brings one bit of a layer wrong."""
    monkeypatch.setenv(DAMAGED_RANK, "1")
    settings = {"store": f"file://{tmp_path}", "witness": "flagged"}
    made, asked = start(engine, model("olmoe"), settings, **RANKS), prompts(74, *[150] * 5)
    made.assert_right([made.ask([prompt], max_tokens=4)[0] for prompt in asked])
    for output in [made.ask([prompt], max_tokens=4)[0] for prompt in asked[:2]]:
        assert output.num_cached_tokens == 4 * BLOCK
        valid = routes(output).valid
        assert not valid[: 4 * BLOCK].any()
        assert valid[4 * BLOCK :].all()
