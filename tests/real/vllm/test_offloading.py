"""vLLM's own offloading of KV to host memory, with rows by its pairs or a store: far beyond the pool, and of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, RANKS, Engine, prompts

import kvroute
from bench.peers.vllm_host import DAMAGED_RANK
from bench.vllm_peers import HOST_OF_CPU
from bench.vllm_peers import plugin as installed
from kvroute.connector.carriers import ByKey, ByPairs
from kvroute.integrations.vllm import routes, unseen

Start = Any  # conftest's Engines
Model = Callable[..., Path]
POOL = 16
"""Blocks of the engine, of which one is vLLM's own and stays empty."""


CARRIERS: dict[str, Any] = {"pairs": ByPairs, "connector": ByKey}


def start(
    engine: Start, home: Path, carrier: str, directory: Path, *, multi: bool = False, chunk: int = 1, **arguments: Any
) -> Engine:
    """An engine of few blocks whose KV goes to 4 MB of host memory, which is 170 blocks of this model, in chunks of so
    many blocks."""
    stored = {"store": f"file://{directory}/rows", "witness": "flagged"}
    settings: dict[str, Any] = {"connector": stored, "pairs": {"routing_weights": True}}[carrier]
    extra: dict[str, Any] = {**HOST_OF_CPU, "cpu_bytes_to_use": 4 << 20}
    if chunk > 1:
        extra["block_size"] = chunk * BLOCK
    name = "KvrouteOffloadingConnector"
    if multi:
        inside = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        name, extra = "KvrouteMultiConnector", {"connectors": [inside]}
    few = {"num_gpu_blocks_override": POOL, "max_model_len": 256}
    made: Engine = engine(home, name, settings, extra, **{**few, **arguments})
    assert type(made.sent.engine.carrier) is CARRIERS[carrier]
    return made


def again(made: Engine, asked: list[list[int]], carrier: str) -> None:
    """Each prompt of four whole blocks, and then each again, the first one first: its KV has to come from the host."""
    for prompt in asked:
        made.assert_right(made.ask([prompt], max_tokens=4))
    outputs = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
    made.assert_right(outputs)
    assert [output.num_cached_tokens for output in outputs] == [4 * BLOCK] * len(asked)
    by_kv = ((0, 4 * BLOCK),) if carrier == "connector" else ()
    assert [unseen(output) for output in outputs[:2]] == [by_kv] * 2


@pytest.mark.parametrize("carrier", CARRIERS)
def test_rows_far_beyond_the_pool(engine: Start, model: Model, tmp_path: Path, carrier: str) -> None:
    """Goal: hits on offloaded KV have their rows, however many blocks went through the pool. Method: twelve prompts,
    three pools full; then each again.
    """
    made = start(engine, model("qwen3_moe"), carrier, tmp_path)
    again(made, prompts(70, *[150] * 12), carrier)
    assert made.metric("external_prefix_cache_hits") >= 12 * 4 * BLOCK - POOL * BLOCK
    assert made.kept.missing.total() == 0
    made.kept.blocks.assert_consistent()


def test_chunks_of_several_blocks(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: each block of a chunk has its own rows, also where a hit begins or ends inside one. Method: chunks of two
    blocks; prompts that share their first three blocks, so that these are hits in the pool and what follows comes from
    the host.
    """
    made = start(engine, model("qwen3_moe"), "pairs", tmp_path, chunk=2)
    asked = prompts(77, *[150] * 8, shared=3 * BLOCK)
    for prompt in (*asked, *asked):
        made.assert_right(made.ask([prompt], max_tokens=4))
    assert made.metric("external_prefix_cache_hits") > 0
    assert made.kept.missing.total() == 0
    made.kept.blocks.assert_consistent()


HYBRID: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_gpu_blocks_override": 40},
    "qwen3_next": {"dtype": "bfloat16", "block_size": None, "max_model_len": 640, "num_gpu_blocks_override": 14},
}
"""Models with several KV cache groups, and pools of a few of their requests."""


def test_connectors_inside_that_bear_one_group_alone_are_refused(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: an error with what to do, and not vLLM's assertion. Method: a MultiConnector around files and ours."""
    inside = [
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        }
    ]
    with pytest.raises(kvroute.ConfigError, match=r"SupportsHMA.*--disable-hybrid-kv-cache-manager, got others inside"):
        engine(model("gpt_oss"), "KvrouteMultiConnector", {}, {"connectors": inside})


@pytest.mark.parametrize("around", ["", "Multi"])
@pytest.mark.parametrize("family", HYBRID)
def test_groups_whose_kv_comes_back(engine: Start, model: Model, tmp_path: Path, family: str, around: str) -> None:
    """Goal: KV of all groups comes back, and rows beside that of full attention. Method: prompts that fill the pool
    several times; again; and again after the rows of one block are lost: a hit without all of its rows is none, because
    states of other groups are kept for its end alone. Of the connector itself, and of one inside a MultiConnector.
    """
    made = start(engine, model(family), "connector", tmp_path, multi=bool(around), **HYBRID[family])
    asked = prompts(75, *[200] * 8)
    assert made.sent.engine.group == 1
    block = made.sent.engine.tokens
    hit = 200 // block * block
    with made.storing() as keys:
        for prompt in asked:
            made.assert_right(made.ask([prompt], max_tokens=4))
    made.kept.blocks.jobs.wait(10)
    outputs = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
    made.assert_right(outputs)
    assert [unseen(output) for output in outputs] == [((0, hit),)] * len(asked)
    made.kept.store.delete(keys[hit // block - 1 : hit // block])  # the last block of the first prompt
    outputs = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
    made.assert_right(outputs)
    assert [output.num_cached_tokens for output in outputs] == [0, *[hit] * (len(asked) - 1)]
    assert made.kept.missing.total() == 0
    made.kept.blocks.assert_consistent()


@pytest.mark.parametrize("family", HYBRID)
def test_groups_whose_rows_go_by_pairs(engine: Start, model: Model, tmp_path: Path, family: str) -> None:
    """Goal: rows go with the group of full attention, whatever the others do. Method: prompts that fill the pool
    several times, and again; then half of each, whose last block may be a part of one that was kept."""
    made = start(engine, model(family), "pairs", tmp_path, **HYBRID[family])
    asked = prompts(78, *[200] * 8)
    for prompt in (*asked, *asked, *(prompt[:100] for prompt in asked)):
        made.assert_right(made.ask([prompt], max_tokens=4))
    assert made.metric("external_prefix_cache_hits") > 0
    assert made.kept.missing.total() == 0
    made.kept.blocks.assert_consistent()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_ranks_that_divide_the_heads(
    engine: Start, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: str
) -> None:
    """Goal: tensor parallelism with KV that leaves the pool and comes back. Method: two ranks in processes of their
    own, each with one of two heads and a host memory of its own; what comes back goes by both ranks' heads, or by
    pairs. Then a hit in the pool and new prompts at once.
    """
    monkeypatch.syspath_prepend(installed(tmp_path / "plugin"))  # the ranks find plugins there
    made, asked = start(engine, model("olmoe"), carrier, tmp_path, **RANKS), prompts(72, *[150] * 6)
    again(made, asked, carrier)
    made.assert_right(made.ask([[*asked[-1], 7], *prompts(73, 40, 100)]))


def test_kv_that_is_wrong_in_one_rank_alone(
    engine: Start, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the witness is of all ranks' heads. Method: as before; the second rank brings one bit of a layer wrong."""
    monkeypatch.setenv(DAMAGED_RANK, "1")
    made, asked = start(engine, model("olmoe"), "connector", tmp_path, **RANKS), prompts(74, *[150] * 5)
    made.assert_right([made.ask([prompt], max_tokens=4)[0] for prompt in asked])
    for output in [made.ask([prompt], max_tokens=4)[0] for prompt in asked[:2]]:
        assert output.num_cached_tokens == 4 * BLOCK
        valid = routes(output).valid
        assert not valid[: 4 * BLOCK].any()
        assert valid[4 * BLOCK :].all()
