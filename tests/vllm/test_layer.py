"""Rows in a layer of the KV: an inner connector that knows nothing of rows moves them, the last router's too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import prompts
from safetensors.torch import load_file, save_file

from bench.vllm_peers import plugin as installed
from cache_manager.errors import ConfigError
from kvroute.connector.pages import NO_ROW, OTHER_KV, OTHER_WEIGHTS
from kvroute.integrations.vllm import routes, unseen

Start = Any  # conftest's Engines
Model = Callable[..., Path]
ASKED = prompts(41, 150, 98, 66)
FULL = [128, 96, 64]


def start(engine: Start, home: Path, kv: Path, **arguments: Any) -> Any:
    """An engine that says nothing of how rows are carried: with this connector and no store, in the KV."""
    kv.mkdir(exist_ok=True)
    made = engine(home, "KvrouteExampleConnector", {}, {"shared_storage_path": str(kv)}, **arguments)
    assert made.kept.pages is not None
    return made


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_kv_that_comes_back_brings_its_rows(engine: Start, model: Model, tmp_path: Path, family: str) -> None:
    """Goal: without a store of rows, a second engine has every row of KV that the first one's connector left. Method:
    two engines over one directory; the second has 15 blocks, so that later prompts take those of the first.
    """
    first = start(engine, model(family), tmp_path / "kv")
    first.assert_right(first.ask(ASKED))
    second = start(engine, model(family), tmp_path / "kv", num_gpu_blocks_override=16, max_model_len=256)
    found = [second.ask([prompt])[0] for prompt in ASKED]
    assert [output.num_cached_tokens for output in found] == FULL
    second.assert_right(found)
    assert not any(unseen(output) for output in found)
    assert second.kept.missing.total() == 0
    for prompt in prompts(42, *[150] * 5):
        second.assert_right(second.ask([prompt]))
    again = second.ask([ASKED[0]])
    assert [output.num_cached_tokens for output in again] == FULL[:1], "after the pool was filled with others"
    second.assert_right(again)


def test_offloaded_kv_brings_its_rows(engine: Start, model: Model) -> None:
    """Goal: vLLM's own offloading moves the layer like any, long after the pool was full of others. Method: twelve
    prompts of four whole blocks through a pool of 15, the KV in host memory; then each again.
    """
    extra = {"spec_name": "HostSpec", "spec_module_path": "host_offload", "cpu_bytes_to_use": 4 << 20}
    small = {"num_gpu_blocks_override": 16, "max_model_len": 256}
    made = engine(model("qwen3_moe"), "KvrouteOffloadingConnector", {"carrier": "layer"}, extra, **small)
    asked = prompts(44, *[150] * 12)
    for prompt in asked:
        made.assert_right(made.ask([prompt], max_tokens=4))
    found = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
    assert [output.num_cached_tokens for output in found] == [128] * 12
    made.assert_right(found)
    assert not any(unseen(output) for output in found)
    assert made.kept.missing.total() == 0


def test_ranks_that_divide_the_heads(
    engine: Start, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the first rank's pages say what the first rank's KV is of. Method: two ranks in processes of their own,
    each with one of two heads; six prompts of four whole blocks through a pool of 15, then each again from the host.
    """
    monkeypatch.syspath_prepend(installed(tmp_path / "plugin"))  # the ranks find plugins there
    extra = {"spec_name": "HostSpec", "spec_module_path": "host_offload", "cpu_bytes_to_use": 4 << 20}
    small = {"num_gpu_blocks_override": 16, "max_model_len": 256}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    made = engine(model("olmoe"), "KvrouteOffloadingConnector", {}, extra, **small, **ranks)
    assert made.sent.engine.pages
    asked = prompts(46, *[150] * 6)
    for _ in range(2):
        found = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
        made.assert_right(found)
    assert [output.num_cached_tokens for output in found] == [128] * 6


def test_latent_attention(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: the layer stands beside MLA's. Method: as above for DeepSeek-V3, whose bfloat16 flips some choices beside
    the reference: what was loaded has to be what the first engine computed, the last layer's choices too.
    """
    arguments = {"dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 128}
    first = start(engine, model("deepseek_v3"), tmp_path / "kv", **arguments)
    before = [routes(first.ask([prompt])[0]) for prompt in ASKED]
    second = start(engine, model("deepseek_v3"), tmp_path / "kv", **arguments)
    for rows, prompt in zip(before, ASKED, strict=True):
        (output,) = second.ask([prompt])
        again, hit = routes(output), output.num_cached_tokens
        assert hit > 0
        assert rows.complete
        assert again.complete
        assert again.layer_ids == rows.layer_ids == (1, 2)
        assert (rows.ids[:hit] == again.ids[:hit]).all()


def test_a_row_that_was_not_captured_is_missing_where_its_kv_arrives(
    engine: Start, model: Model, tmp_path: Path
) -> None:
    """Goal: a page says that a row is not there. Method: the first engine loses the rows of a prompt whose blocks had
    others' before; the KV is kept all the same, and the second engine has none of its rows and no wrong one.
    """
    first = start(engine, model("qwen3_moe"), tmp_path / "kv", num_gpu_blocks_override=16, max_model_len=256)
    for prompt in prompts(43, *[150] * 5):
        first.assert_right(first.ask([prompt]))
    first.kept._put = first.kept._write = lambda *_: None
    first.ask([ASKED[0]])
    second = start(engine, model("qwen3_moe"), tmp_path / "kv")
    (found,) = second.ask([ASKED[0]])
    assert found.num_cached_tokens == FULL[0]
    verdict = second.judge(found)
    assert (verdict.missing, verdict.wrong) == (FULL[0], 0)
    assert second.kept.missing == {NO_ROW: FULL[0]}
    assert routes(found).missing == ((0, FULL[0]),)


def test_pages_that_are_damaged_or_mixed_up_have_no_rows(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: a row in the KV is of the token, the position and the KV that it lies beside, or missing. Method: of five
    prompts' files of rows one has a bit turned, two change places, one goes round by a token and one stays; then the
    engine, which has forgotten its own blocks, is asked again.
    """
    kv = tmp_path / "kv"
    made, asked, files = start(engine, model("qwen3_moe"), kv), prompts(45, *[150] * 5), list[Path]()
    for prompt in asked:
        before = set(kv.iterdir())
        made.assert_right(made.ask([prompt], max_tokens=4))
        (new,) = set(kv.iterdir()) - before
        files += new.glob("*kvroute*")
    bit, one, other, rolled, _ = (load_file(file)["kv_cache"] for file in files)
    bit.flatten(0, -2)[10, 16] ^= 1
    for file, pages in zip(files, (bit, other, one, rolled.roll(1, 0)), strict=False):
        save_file({"kv_cache": pages.contiguous()}, file)
    made.forget_locally()
    found = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
    assert [output.num_cached_tokens for output in found] == [128] * 5
    assert [made.judge(output).wrong for output in found] == [0] * 5
    assert [made.judge(output).missing for output in found] == [1, 128, 128, 128, 0]
    assert made.kept.missing == {OTHER_KV: 3 * 128 + 1}


def test_kv_that_outlives_its_weights_has_no_rows(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: rows of earlier weights are never handed out as those of new ones. Method: an engine is told of an update
    by a reset, which its connector's files outlive; then an engine of other weights finds the same files.
    """
    made = start(engine, model("qwen3_moe"), tmp_path / "kv")
    made.assert_right(made.ask(ASKED))
    made.llm.reset_prefix_cache(reset_connector=True)
    hits = assert_missing_where_loaded(made)
    made = start(engine, model("qwen3_moe", seed=1), tmp_path / "kv")
    assert assert_missing_where_loaded(made) == hits == FULL


def assert_missing_where_loaded(made: Any) -> list[int]:
    """Of each answer the rows of loaded KV are missing and all others there; how many tokens were loaded."""
    hits = []
    for prompt in ASKED:
        (output,) = made.ask([prompt])
        hits.append(output.num_cached_tokens)
        assert routes(output).missing == ((0, hits[-1]),)
    assert made.kept.missing == {OTHER_WEIGHTS: sum(hits)}
    return hits


def test_a_model_without_the_layer_is_refused(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: the operator who asks for a layer is told when there is none. Method: a store beside the layer; the error
    names both conditions.
    """
    with pytest.raises(ConfigError, match="no store, and a model with a layer of rows"):
        engine(
            model("qwen3_moe"),
            "KvrouteExampleConnector",
            {"carrier": "layer", "store": f"file://{tmp_path / 'rows'}"},
            {"shared_storage_path": str(tmp_path)},
        )
