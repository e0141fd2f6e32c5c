"""Hybrid models: windows, or states of linear attention, in KV cache groups of their own beside full attention.

Each test is of two models. A tiny gpt-oss has windows in a group of their own. A tiny Qwen3-Next has states that are
aligned with blocks, and finds prompts by hashes of a quarter of a block: vLLM copies a block that is hit in part.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import updates
from engines import Engine, judge_tokens, keyed, prompts
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config import CacheConfig
from waiting import until

from cache_manager.regions.directory import region_path
from cache_manager.regions.header import extent_of
from cache_manager.regions.region import PAGE_NBYTES
from kvroute.connector.key import rollout_id
from kvroute.integrations.vllm import routes
from kvroute.rollout import open_rollouts

Model = Callable[..., Path]
KINDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_gpu_blocks_override": 64, "max_model_len": 320},
    "qwen3_next": {
        "dtype": "bfloat16",
        "block_size": None,  # as many tokens as a state has room for
        "enable_prefix_caching": True,  # which older releases do not choose by themselves
        **({"prefix_match_unit": 32} if hasattr(CacheConfig, "prefix_match_unit") else {}),
        "num_gpu_blocks_override": 20,
        "max_model_len": 640,
    },
}


class Hybrid:
    """An engine with rows in every place where a client may want them, two versions of its weights, and what its
    scheduler did."""

    def __init__(self, kind: str, homes: dict[int, Path], left: Path) -> None:
        self.homes = homes
        settings = {"field": True, "rollouts": f"file://{left}", "weights_version": 0}
        steps = {"max_num_batched_tokens": 256, "worker_extension_cls": "updates.Embedding"}
        self.engine = Engine(homes[0], settings=settings, **steps, **KINDS[kind])
        self.rollouts = open_rollouts(settings["rollouts"])
        self.core = self.engine.llm.llm_engine.engine_core.engine_core
        self.copied = self.evicted = 0
        self._count()

    def _count(self) -> None:
        feed, pool = self.engine.sent.feed, self.engine.scheduler.kv_cache_manager.block_pool
        copy, evict = feed.copy, pool._maybe_evict_cached_block

        def copying(pairs: Any, rows: Any) -> None:
            self.copied += len(pairs)
            copy(pairs, rows)

        def evicting(block: Any) -> bool:
            evicted = evict(block)
            self.evicted += evicted
            return bool(evicted)

        feed.copy = copying  # type: ignore[method-assign]
        pool._maybe_evict_cached_block = evicting

    def assert_right(self, outputs: Sequence[Any], **where: Any) -> None:
        """Every row of these answers is there, and is transformers' with the weights that its version names; vLLM's own
        field has the same rows."""
        for output in outputs:
            for index, completion in enumerate(output.outputs):
                tokens = [*output.prompt_token_ids, *completion.token_ids]
                rows = routes(output, index, rollouts=self.rollouts, **where)
                assert updates.right(rows, tokens, self.homes)
                field = completion.routed_experts
                assert field is not None, output.kv_transfer_params
                assert field.shape == (len(tokens) - 1, *rows.ids.shape[1:])
                assert (field == rows.ids).all()
        self.engine.kept.blocks.assert_consistent()
        assert not self.engine.kept.missing

    def close(self) -> None:
        self.rollouts.close()
        self.engine.close()


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    first, place = model(request.param), tmp_path_factory.mktemp(request.param)
    made = Hybrid(request.param, {0: first, 1: with_other_words(first, place / "1")}, place / "left")
    yield made
    made.close()


def with_other_words(home: Path, at: Path) -> Path:
    """The checkpoint of ``home``, where each token has the embedding of the one before."""
    shutil.copytree(home, at)
    weights = load_file(home / "model.safetensors")
    weights[updates.EMBEDDING] = weights[updates.EMBEDDING].roll(1, 0).contiguous()
    save_file(weights, at / "model.safetensors", metadata={"format": "pt"})
    return at


def test_rows_go_with_the_group_of_full_attention(hybrid: Hybrid) -> None:
    """Goal: neither the first group nor all of them. Method: vLLM's own groups, and their blocks while a long request
    runs: other groups give theirs up."""
    scheduler, group = hybrid.engine.scheduler, hybrid.engine.sent.engine.group
    groups = scheduler.kv_cache_config.kv_cache_groups
    kinds = [type(each.kv_cache_spec).__name__ for each in groups]
    assert [kind == "FullAttentionSpec" for kind in kinds] == [number == group for number in range(len(groups))]
    assert group > 0
    assert groups[group].kv_cache_spec.block_size == hybrid.engine.sent.engine.tokens
    core, (asked,) = hybrid.engine.llm.llm_engine, prompts(60, 300)
    core.add_request("long", {"prompt_token_ids": asked}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    given_up = set[int]()
    while core.has_unfinished_requests():
        outputs = core.step()
        for request in scheduler.requests:
            for number, blocks in enumerate(scheduler.kv_cache_manager.get_blocks(request).blocks):
                given_up |= {number} if any(block.is_null for block in blocks) else set()
    assert given_up == set(range(len(groups))) - {group}
    hybrid.assert_right(outputs)


def test_memory_is_bounded_by_the_group(hybrid: Hybrid) -> None:
    """Goal: rows take memory for blocks that the group of full attention has or had last, and for no other. Method:
    vLLM's own tables, after each step of requests that give blocks from group to group; the kernel's count of the
    region's pages beside the pages of those blocks, and of kvroute's own blocks behind the pool."""
    scheduler, engine = hybrid.engine.scheduler, hybrid.engine.sent.engine
    manager, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
    region = hybrid.engine.kept.blocks.region("device")
    last = dict[int, int]()
    give = pool.get_new_blocks

    def giving(count: int) -> Any:
        blocks = give(count)
        for block in blocks:
            last.pop(block.block_id, None)
        return blocks

    pool.get_new_blocks = giving
    core = hybrid.engine.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    outputs = []
    for number, prompt in enumerate(prompts(69, 5, 100, 60, 180, 90, 140, shared=100)):
        core.add_request(f"m{number}", {"prompt_token_ids": prompt}, sampling)
    while core.has_unfinished_requests():
        outputs += [output for output in core.step() if output.finished]
        for request in scheduler.requests:
            for group, blocks in enumerate(manager.get_blocks(request).blocks):
                last |= {block.block_id: group for block in blocks if not block.is_null}
    pool.get_new_blocks = give
    assert set(last.values()) == set(range(len(scheduler.kv_cache_config.kv_cache_groups)))
    hybrid.assert_right(outputs)
    elsewhere = {block for block, group in last.items() if group != engine.group}
    extent = extent_of(engine.layout, engine.places.stop)
    pages = set[int]()
    for block in set(range(engine.places.stop)) - elsewhere:
        start = extent.rows_offset + block * engine.layout.nbytes
        pages |= set(range(start // PAGE_NBYTES, -(-(start + engine.layout.nbytes) // PAGE_NBYTES)))
    used = os.stat(region_path(region.name)).st_blocks * 512
    whole = extent.nbytes - extent.rows_offset
    print(f"{len(elsewhere)} of {engine.blocks} blocks elsewhere; {used - extent.rows_offset} of {whole} bytes of rows")
    assert used <= extent.rows_offset + PAGE_NBYTES * len(pages)
    assert used < extent.nbytes


def test_prefix_hits_and_turns(hybrid: Hybrid) -> None:
    """Goal: rows of hits are those of the blocks that were hit, also of a part of one. Method: prompts with one
    beginning, at once; again; and as the first turn of a conversation, twice."""
    asked = prompts(61, 20, 70, 5, shared=140)
    hybrid.assert_right(hybrid.engine.ask(asked))
    copied = hybrid.copied
    for _ in range(3):
        outputs = hybrid.engine.ask(asked, max_tokens=10)
        assert min(output.num_cached_tokens for output in outputs) >= 128
        hybrid.assert_right(outputs)
        asked = [[*p, *o.outputs[0].token_ids, 7, 8] for p, o in zip(asked, outputs, strict=True)]
    parts = hybrid.engine.sent.engine.hashes > 1
    assert (hybrid.copied > copied) == parts


def test_a_small_pool(hybrid: Hybrid) -> None:
    """Goal: blocks change hands, between groups too. Method: requests that want more blocks than there are, in chunks,
    some of them with a beginning that was evicted or was not."""
    preempted = hybrid.engine.metric("num_preemptions")
    hybrid.assert_right(hybrid.engine.ask(prompts(62, *[60] * 10), max_tokens=90))
    assert hybrid.engine.metric("num_preemptions") > preempted
    evicted = hybrid.evicted
    for seed in (63, 64, 63):
        hybrid.assert_right(hybrid.engine.ask(prompts(seed, 5, 40, 90, shared=150), max_tokens=12))
    assert hybrid.evicted > evicted
    assert hybrid.engine.kept.blocks.counters.late_writes_dropped == 0


def test_several_completions_and_a_stop_string(hybrid: Hybrid) -> None:
    """Goal: n > 1, and a request that the front end ends. Method: sampled completions of one prompt; many words that
    end an answer, for in bfloat16 the same prompt may be answered otherwise."""
    outputs = hybrid.engine.ask(prompts(65, 150), n=3, temperature=1.0)
    hybrid.assert_right(outputs)
    words = [f"t{i}" for i in range(0, 512, 4)]
    stopped = hybrid.engine.ask(prompts(66, 45, 160), stop=words, max_tokens=60, **keyed("stopped"))
    assert {output.outputs[0].stop_reason for output in stopped} <= set(words)
    hybrid.assert_right(stopped, key="stopped")


def test_an_abort(hybrid: Hybrid) -> None:
    """Goal: a request that is aborted leaves its rows, and requests that hit its blocks have theirs. Method: aborts in
    prefill and in decode."""
    core, asked = hybrid.engine.llm.llm_engine, prompts(67, 290, 60)
    for name, prompt, steps in (("gone-1", asked[0], 1), ("gone-2", asked[1], 9)):
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **keyed(name))
        core.add_request(name, {"prompt_token_ids": prompt}, sampling)
        (request,) = core.engine_core.engine_core.scheduler.requests.values()
        while request.num_computed_tokens < (256 if steps == 1 else len(prompt) + steps - 1):
            core.step()
        tokens = list(request.all_token_ids)[: request.num_computed_tokens + 1]
        core.abort_request([name])
        place = rollout_id(name, prompt)
        until(lambda place=place: hybrid.rollouts.find(place))
        rows = hybrid.rollouts.get(hybrid.rollouts.find(place))[0]
        assert judge_tokens(hybrid.homes[0], tokens, rows).right == len(tokens) - 1 >= 60
    hybrid.assert_right(hybrid.engine.ask(asked))


def test_an_update_that_keeps_kv(hybrid: Hybrid) -> None:
    """Goal: rows of kept KV have the first version, later ones the second. Method: an update in a pause; then hits."""
    asked = prompts(68, 20, 33, shared=140)
    before = hybrid.engine.ask(asked)
    hybrid.core.pause_scheduler("keep", clear_cache=False)
    hybrid.engine.llm.collective_rpc("put", args=(str(hybrid.homes[1]),))
    hybrid.core.set_weight_version("1")
    hybrid.core.resume_scheduler()
    after = hybrid.engine.ask(asked)
    assert min(output.num_cached_tokens for output in after) >= 128
    hybrid.assert_right([*before, *after])
    spans = [routes(output, rollouts=hybrid.rollouts).weights_versions for output in after]
    assert [[version for *_, version in each] for each in spans] == [[0, 1]] * len(asked)
