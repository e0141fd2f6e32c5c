"""What needs an engine of its own: small pools, stores and connectors, restarts, other weights, other families."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import connectors
import pytest
import torch
import vllm
from engines import BLOCK, LATENT, MODULE, Engine, prompts
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

import kvroute
from kvroute.integrations.vllm import routes, routing_weights
from kvroute.integrations.vllm.config import engine_of

Start = Any  # conftest's Engines
Model = Callable[..., Path]


def test_chunks_preemption_and_churn(engine: Start, model: Model) -> None:
    """Goal: blocks change hands all the time. Method: 15 blocks for requests that want 32 at once, in chunks of 96."""
    small = engine(
        model("qwen3_moe"), num_gpu_blocks_override=16, max_model_len=256, max_num_batched_tokens=96, max_num_seqs=8
    )
    small.assert_right(small.ask(prompts(11, 150, 170, 200), max_tokens=8))
    small.assert_right(small.ask(prompts(12, *[40] * 12), max_tokens=80))
    assert small.metric("num_preemptions") > 0
    for seed in range(4):
        small.assert_right(small.ask(prompts(13 + seed % 2, 5, 40, 9, shared=100), max_tokens=30))
    assert small.kept.blocks.counters.late_writes_dropped == 0
    small.kept.blocks.assert_consistent()


WEIGHTS = {"routing_weights": True}


class Shared:
    """A directory where an inner connector keeps KV, and a store of rows."""

    def __init__(self, home: Path) -> None:
        self.home, self.kv = home, home / "kv"
        self.store = f"file://{home / 'rows'}"

    def arguments(self, **settings: Any) -> dict[str, Any]:
        return {
            "connector": "KvrouteExampleConnector",
            "settings": {"store": self.store, "witness": "flagged", **settings},
            "extra": {"shared_storage_path": str(self.kv)},
        }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(tmp_path_factory.mktemp("shared"))


ASKED = prompts(20, 150, 98, 66)
FULL = [128, 96, 64]


def alone(engine: Engine, asked: list[list[int]] = ASKED) -> list[Any]:
    """The answers to prompts that were asked one after the other."""
    return [engine.ask([prompt])[0] for prompt in asked]


def test_hits_from_outside_bring_rows_after_a_restart(engine: Start, model: Model, shared: Shared) -> None:
    """Goal: KV that comes back has its rows with their weights, and only KV without rows is computed again.

    Method: an engine stores both; after a weight update it finds nothing; another engine over the same files finds all;
    one record of rows is deleted, and the hit ends before that block.
    """
    first = engine(model("qwen3_moe"), **shared.arguments(**WEIGHTS))
    with first.storing() as keys:
        first.assert_right(alone(first))
        first.kept.blocks.jobs.wait(10)
    lost = keys[2]
    assert first.llm.llm_engine.engine_core.reset_prefix_cache(False, True)
    updated = alone(first)
    first.assert_right(updated)
    assert [output.num_cached_tokens for output in updated] == [0, 0, 0]

    second = engine(model("qwen3_moe"), **shared.arguments(**WEIGHTS))
    hits = alone(second)
    assert [output.num_cached_tokens for output in hits] == FULL
    second.assert_right(hits)
    assert second.kept.blocks.counters.restored_blocks == sum(FULL) // BLOCK

    engine.stop()
    with closing(kvroute.open_store(shared.store)) as store:
        store.delete([lost])
    third = engine(model("qwen3_moe"), **shared.arguments(**WEIGHTS))
    cut = alone(third)
    assert [output.num_cached_tokens for output in cut] == [64, 96, 64]
    third.assert_right(cut)


def test_engines_with_other_weights_never_meet(engine: Start, model: Model, shared: Shared) -> None:
    """Goal: one store for two models of one shape. Method: a KV connector that knows tokens only offers its hits."""
    other = engine(model("qwen3_moe", 1), **shared.arguments())
    outputs = alone(other)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    other.assert_right(outputs)


def test_windows_beside_full_attention(engine: Start, model: Model) -> None:
    """Goal: gpt-oss' routers, and windows that drop nothing. Method: one KV cache group, as vLLM makes it with this
    argument; plain, prefix hits and a second turn. Groups of their own are in `test_hybrid.py`."""
    made = engine(model("gpt_oss"), settings=WEIGHTS, disable_hybrid_kv_cache_manager=True)
    assert len(made.scheduler.kv_cache_config.kv_cache_groups) == 1
    asked = prompts(30, 10, 33, 1, shared=100)
    for _ in range(2):
        outputs = made.ask(asked)
        made.assert_right(outputs)
    assert min(output.num_cached_tokens for output in outputs) >= 96
    made.assert_right(made.ask([[*p, *o.outputs[0].token_ids, 7] for p, o in zip(asked, outputs, strict=True)]))


def test_a_model_whose_windows_drop_kv_is_refused(engine: Start, model: Model) -> None:
    """Goal: no row is handed out of KV that was given up. Method: windows in all layers, of which vLLM keeps no more;
    one that holds all that a request may have is as good as none."""
    with pytest.raises(kvroute.ConfigError, match="not SlidingWindowSpec"):
        engine(model("mixtral_with_windows"))
    within = engine(model("mixtral_with_windows"), settings=WEIGHTS, max_model_len=64)
    within.assert_right(within.ask(prompts(31, 10, 33), max_tokens=20))


def test_deepseek_with_latent_attention(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: MLA, a dense first layer, grouped routing, weights that vLLM scales behind the experts. Method: one engine
    stores, another hits: vLLM has no prefix cache for MLA on a CPU. What was loaded is what was stored, byte for byte,
    and every row is transformers'.
    """
    shared, arguments = Shared(tmp_path), {"block_size": 16, "num_gpu_blocks_override": 128, **LATENT}
    first = engine(model("deepseek_v3"), **shared.arguments(**WEIGHTS), **arguments)
    before = alone(first)
    first.assert_right(before)
    second = engine(model("deepseek_v3"), **shared.arguments(**WEIGHTS), **arguments)
    after = alone(second)
    second.assert_right(after)
    for one, two in zip(before, after, strict=True):
        assert two.num_cached_tokens > 0
        hit = slice(0, two.num_cached_tokens)
        assert (routes(one).ids[hit] == routes(two).ids[hit]).all()
        assert routes(two).layer_ids == (1, 2)


def test_kv_that_fails_to_load_is_computed_again(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: rows that a step computed from KV that had not come are never read, stored or hit. Method: a connector that
    loads rubbish into one block and says so; other requests run beside; vLLM computes again.
    """
    shared = Shared(tmp_path)
    first = engine(model("qwen3_moe"), **shared.arguments())
    first.assert_right(alone(first))
    arguments = shared.arguments() | {
        "connector": "Kvrouteconnectors:FailingConnector",
        "transfer": {"kv_load_failure_policy": "recompute"},
    }
    second = engine(model("qwen3_moe"), **arguments)
    outputs = second.ask([*ASKED, *prompts(41, 40, 150)])
    second.assert_right(outputs)
    assert connectors.FailingConnector.failures == 1
    second.assert_right(second.ask(ASKED))


def test_kv_that_comes_later(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: loads beside other requests' steps, as NIXL's. Method: a connector that reports its load a step later."""
    shared = Shared(tmp_path)
    first = engine(model("qwen3_moe"), **shared.arguments())
    first.assert_right(alone(first))
    second = engine(model("qwen3_moe"), **shared.arguments() | {"connector": "Kvrouteconnectors:LateConnector"})
    outputs = second.ask([*ASKED, *prompts(42, 40, 150)])
    assert [output.num_cached_tokens for output in outputs] == [*FULL, 0, 0]
    second.assert_right(outputs)


def test_a_compiled_model_has_no_rows_and_says_why(engine: Start, model: Model) -> None:
    """Goal: no silent zeros. Method: on a CPU vLLM compiles the model before a connector can bind its hooks."""
    compiled = engine(model("qwen3_moe"), settings=WEIGHTS, enforce_eager=False)
    (output,) = compiled.ask(prompts(43, 40))
    found = routes(output)
    assert len(found) == 59
    assert not found.valid.any()
    assert list(compiled.kept.missing) == ["a router's hook was not called"]
    assert not routing_weights(output).routes.mask.any()


REFUSED: dict[str, Any] = {
    "0.32": {"vllm": "0.99.1"},
    "one KV cache group.* or a connector that was judged .*KvrouteConnector": {
        "groups": 2,
        "inner": "connectors:LateConnector",
    },
    "one pool of blocks": {"groups": 2, "group": {"host_resident": True}},
    "a hash for each block of 32 tokens, not one for 96": {
        "groups": 2,
        "second": lambda: MambaSpec(96, shapes=((8,),), dtypes=(torch.float32,)),
        "settings": {"store": "file:///x"},
    },
    "KV of all tokens.*not SlidingWindowSpec": {"kv": SlidingWindowSpec, "window": {"sliding_window": 64}},
    "KV of all tokens.*not ChunkedLocalAttentionSpec": {
        "kv": ChunkedLocalAttentionSpec,
        "window": {"attention_chunk_size": 64},
    },
    "KV of all tokens.*not RSWASpec": {"kv": RSWASpec, "window": {"rswa_window": 64}},
    "KV of all tokens.*not MLAAttentionSpec of 4 tokens a state": {
        "kv": MLAAttentionSpec,
        "window": {"tokens_per_state": 4},
    },
    "no bounded replay of windows": {
        "groups": 2,
        "second": lambda: SlidingWindowMLASpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=32,
            dtype=torch.float32,
            sliding_window=64,
            bounded_replay=True,
        ),
    },
    # attends to a window and keeps all KV: the next condition is the one refused
    "no context": {"window": {"sliding_window": 64}, "parallel": {"decode_context_parallel_size": 2}},
    "no data parallelism": {"parallel": {"pipeline_parallel_size": 2, "data_parallel_size": 2}},
    "no context parallelism": {"parallel": {"decode_context_parallel_size": 2}},
    "no dual-batch overlap": {"parallel": {"enable_dbo": True}},
    "prompts of tokens": {"model": {"enable_prompt_embeds": True}},
    "routed experts of vLLM's own": {"model": {"enable_return_routed_experts": True}},
    "routing_weights: wanted no pipeline, data or expert": {
        "parallel": {"enable_expert_parallel": True},
        "settings": {"routing_weights": True},
    },
    "other processes": {"settings": {"store": "memory:"}},
    "wanted some of store, .*got 'stor'": {"settings": {"stor": "file:///x"}},
}


@pytest.mark.parametrize("wanted", REFUSED)
def test_what_is_not_followed_is_refused_by_name(model: Model, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    """Goal: an engine with an unsupported configuration does not start. Method: vLLM's own configuration, one thing
    changed."""
    changed = REFUSED[wanted]
    transfer = KVTransferConfig(
        kv_connector_module_path=MODULE,
        kv_connector="KvrouteConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"kvroute": changed.get("settings", {})},
    )
    config = EngineArgs(model=str(model("qwen3_moe")), max_model_len=512, kv_transfer_config=transfer)
    made = config.create_engine_config()
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    kinds = [changed.get("kv", FullAttentionSpec)(**shape, **changed.get("window", {}))] * changed.get("groups", 1)
    if "second" in changed:
        kinds[1] = changed["second"]()
    groups = [KVCacheGroupSpec(["layers.0"], kind, **changed.get("group", {})) for kind in kinds]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    for where, name in ((made.parallel_config, "parallel"), (made.model_config, "model")):
        for field, value in changed.get(name, {}).items():
            object.__setattr__(where, field, value)
    monkeypatch.setattr(vllm, "__version__", changed.get("vllm", vllm.__version__))
    with pytest.raises(kvroute.ConfigError, match=wanted):
        engine_of(made, cache, changed.get("inner", "Connector"))


@pytest.mark.parametrize(
    "inner",
    [
        "Connector",
        "ExampleConnector",
        "OffloadingConnector",
        "NixlConnector",
        "MooncakeConnector",
        "LMCacheConnectorV1",
        "MultiConnector",
        "connectors:LateConnector",
    ],
)
def test_any_connector_can_be_the_inner_one(inner: str) -> None:
    """Goal: wrapping is by configuration alone. Method: vLLM's factory finds the class, with all methods it wants."""
    config = KVTransferConfig(kv_connector=f"Kvroute{inner}", kv_connector_module_path=MODULE, kv_role="kv_both")
    found = KVConnectorFactory.get_connector_class(config)
    assert not found.__abstractmethods__
    if ":" not in inner and inner != "Connector":
        wrapped = KVConnectorFactory.get_connector_class_by_name(inner)
        assert issubclass(found, wrapped)
        assert supports_hma(found) == supports_hma(wrapped)
    if inner == "Connector":
        assert supports_hma(found)


def test_a_connector_that_vllm_does_not_know_is_named_as_ours() -> None:
    """Goal: the error for a misspelled name lists the existing ones. Method: vLLM's factory gets an unknown name."""
    config = KVTransferConfig(kv_connector="KvrouteNixl", kv_connector_module_path=MODULE, kv_role="kv_both")
    wanted = "kv_connector: wanted KvrouteConnector, .*KvrouteNixlConnector, .*<module>:<class>, got KvrouteNixl$"
    with pytest.raises(kvroute.ConfigError, match=wanted):
        KVConnectorFactory.get_connector_class(config)
