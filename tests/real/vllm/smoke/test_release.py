"""A release of vLLM that has not all tests, with one engine: `make smoke-vllm` runs this on each that a trainer pins,
and on the newest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import updates
import vllm
from engines import Engine, prompts
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import kvroute
from kvroute.integrations.vllm import connector, field, missing, routes, versions
from kvroute.rollout import open_rollouts

ASKED = prompts(5, 20, 41, 9, 100, shared=70)


@pytest.fixture(scope="module")
def homes(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two checkpoints, by their versions; the second one is the first with another embedding."""
    first, other = model("qwen3_moe"), model("qwen3_moe", 1)
    return {0: first, 1: updates.with_embedding_of(first, other, tmp_path_factory.mktemp("1") / "home")}


@pytest.fixture(scope="module")
def engine(homes: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """KV and rows go to files, routes of answers to a rollout store, and n-grams are drafted from."""
    home = tmp_path_factory.mktemp("release")
    rollouts = f"file://{home / 'rollouts'}"
    settings = {
        "store": f"file://{home / 'rows'}",
        "witness": "flagged",
        "rollouts": rollouts,
        "weights_version": 0,
        "field": True,
    }
    number = [int(part) for part in vllm.__version__.split(".")[:2]]
    if number < [0, 30]:
        import cpu_choices  # noqa: F401
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    made = Engine(
        homes[0],
        "KvrouteExampleConnector",
        settings,
        {"shared_storage_path": str(home / "kv")},
        worker_extension_cls="updates.Embedding",
        speculative_config=drafts if number > [0, 30] else None,  # vLLM's own sampler of drafts fails there on a CPU
    )
    made.rollouts = open_rollouts(rollouts)
    yield made
    made.rollouts.close()
    made.close()


def assert_right(engine: Engine, outputs: Sequence[Any], homes: dict[int, Path], key: str | None = None) -> None:
    """Every row of these answers is there, and is transformers' with the weights that its version names; vLLM's own
    field has the same rows."""
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        rows = routes(output, rollouts=engine.rollouts, key=key)
        assert updates.right(rows, tokens, homes)
        array = output.outputs[0].routed_experts
        assert array is not None, output.kv_transfer_params
        assert (array.dtype, len(array)) == (np.dtype("uint8"), len(tokens) - 1)
        assert (array[:, rows.layer_ids] == rows.ids).all()
        assert array.shape[1] == rows.num_layers


def core_of(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core


def test_this_release_is_in_the_table() -> None:
    assert vllm.__version__ in {judged.version for judged in versions.JUDGED}


def test_prefix_hits(engine: Engine, homes: dict[int, Path]) -> None:
    """Method: the same prompts twice, and then as the first turn of a conversation."""
    first = engine.ask(ASKED)
    again = engine.ask(ASKED)
    turns = engine.ask([[*p, *o.outputs[0].token_ids, 7, 8] for p, o in zip(ASKED, again, strict=True)])
    assert min(output.num_cached_tokens for output in (*again, *turns)) >= 64
    assert_right(engine, [*first, *again, *turns], homes)


def test_kv_and_rows_from_a_store(engine: Engine, homes: dict[int, Path]) -> None:
    """Method: the pool forgets its blocks, so that the connector inside brings the KV of the test before."""
    engine.kept.blocks.jobs.wait(10)
    restored = engine.kept.blocks.counters.restored_blocks
    engine.forget_locally()
    loaded = engine.ask(ASKED)
    assert min(output.num_cached_tokens for output in loaded) >= 64
    assert engine.kept.blocks.counters.restored_blocks > restored
    assert_right(engine, loaded, homes)


def test_a_stop_string(engine: Engine, homes: dict[int, Path]) -> None:
    (whole,) = engine.ask(ASKED[:1])
    word = f"t{whole.outputs[0].token_ids[7]}"
    carried = {"extra_args": {"kv_transfer_params": {"kvroute": {"key": "stops"}}}}
    (stopped,) = engine.ask(ASKED[:1], stop=[word], **carried)
    assert stopped.outputs[0].stop_reason == word
    assert_right(engine, [stopped], homes, key="stops")


def test_an_update(engine: Engine, homes: dict[int, Path]) -> None:
    """Goal: rows of kept KV have the first version, later ones the second. Method: an update in a pause."""
    core = core_of(engine)
    before = engine.ask(ASKED)
    core.pause_scheduler("keep", clear_cache=False)
    engine.llm.collective_rpc("put", args=(str(homes[1]),))
    core.set_weight_version("1")
    core.resume_scheduler()
    after = engine.ask(ASKED)
    assert_right(engine, [*before, *after], homes)
    found = [routes(output, rollouts=engine.rollouts).weights_versions for output in after]
    assert [[version for *_, version in spans] for spans in found] == [[0, 1]] * len(ASKED)


def test_sleep_and_wake_up(engine: Engine, homes: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an engine wakes up, and the version that it is told then is that of its rows. Method: the executor's part,
    which a CPU lacks, does nothing; 0.33 repeats the connector's handshake."""
    core = core_of(engine)
    for call in ("sleep", "wake_up"):
        monkeypatch.setattr(core.model_executor, call, lambda *_, **__: None)
    view = engine.sent.view
    core.sleep(1)
    core.wake_up()
    assert not core.is_scheduler_paused()
    assert engine.sent.view is view
    engine.llm.collective_rpc("put", args=(str(homes[1]),))
    core.set_weight_version("1")
    outputs = engine.ask(ASKED)
    assert_right(engine, outputs, homes)
    assert {version for o in outputs for *_, version in routes(o, rollouts=engine.rollouts).weights_versions} == {1}


def test_whose_requests_get_rows_and_what_a_short_answer_is_told() -> None:
    """Goal: this release's front end marks its requests, and never puts a shorter array together. Method: its own
    classes without an engine: a request that goes through it, one of a session, and one past it; a token without its
    row."""
    field.guard_front_end()
    refused: dict[str, str] = {}
    core = object.__new__(field.Field)
    core.stream = SimpleNamespace(refuse=refused.__setitem__)  # type: ignore[assignment]
    front, asked = OutputProcessor(None, log_stats=False), SamplingParams(max_tokens=4)
    for name in ("marked", "session", "past"):
        request = EngineCoreRequest(
            request_id=name, external_req_id=name, prompt_token_ids=[5, 6, 7], mm_features=None, sampling_params=asked,
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
            resumable=name == "session",
        )  # fmt: skip
        if name != "past":
            front.add_request(request, None)
        sent = MsgpackDecoder(EngineCoreRequest).decode([bytes(part) for part in MsgpackEncoder().encode(request)])
        core.begins(Request.from_engine_core_request(sent, None))
    assert refused == {"session": field.SESSION, "past": field.UNGUARDED}
    assert asked.extra_args is None
    first = EngineCoreOutput("marked", [8], routed_experts=np.zeros((3, 3, 4), np.uint8))
    front.process_outputs([first])
    (answer,) = front.process_outputs(
        [EngineCoreOutput("marked", [9], finish_reason=FinishReason.LENGTH)]
    ).request_outputs
    assert answer.outputs[0].routed_experts is None
    assert missing(answer) == ((3, 4, field.SHORT),)


def test_a_front_end_that_asks_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a trainer's own server that asks the model's configuration whether answers have the field hears so, with
    kvroute's field and not without. A bug that was found: prime-rl's answered 400. Method: this release's own class,
    whose start does nothing."""
    calls = [(OutputProcessor, "add_request"), (OutputProcessor, "process_outputs"), (AsyncLLM, "__init__")]
    for owner, name in [*calls, (RequestState, "make_request_output"), (RequestOutput, "add")]:
        monkeypatch.setattr(owner, name, lambda *_: None)
    field.guard_front_end()
    for asked in (True, False):
        extra = {"kvroute": {"field": asked}}
        transfer = KVTransferConfig(kv_connector="KvrouteConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        config = SimpleNamespace(kv_transfer_config=transfer, model_config=SimpleNamespace(**{field.FLAG: False}))
        AsyncLLM(config)
        assert getattr(config.model_config, field.FLAG) is asked


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
@pytest.mark.parametrize("seed", [None, "7"])
def test_whether_blocks_have_random_hashes(algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: kvroute knows if another process can find its rows. Method: vLLM's first hash, made twice."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    made = set()
    for _ in range(2):
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
        made.add(bytes(kv_cache_utils.NONE_HASH))
    assert versions.names_blocks_at_random(algorithm) == (len(made) > 1)


def test_a_release_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an absent name ends the start, before anything is hooked, whatever the settings say. Method: it is gone."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delattr(BlockPool, "get_new_blocks")
    monkeypatch.delattr(EngineCore, "pause_scheduler")
    versions.resolve.cache_clear()
    with pytest.raises(kvroute.ConfigError) as refused:
        connector.connector_class("Connector")
    assert str(refused.value).endswith("BlockPool.get_new_blocks, vllm.v1.engine.core:EngineCore.pause_scheduler")
