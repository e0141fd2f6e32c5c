"""The same embedding where one launch at the end of a pass stores its rows, as on a GPU; here it is interpreted."""

from __future__ import annotations

from functools import partial

import pytest
from salted_moe import SaltedMoe
from served_transformers import all_right, example, prompts, served
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kvroute

launched = partial(example.EmbeddedRoutes, memory="shared", launched=True)


def test_chunks_prefixes_forks_and_swaps(moe: SaltedMoe) -> None:
    """Goal: every row is that of the pass that made the KV beside it. Method: answers in twos to prompts with a common
    prefix, longer than a pass, with so few blocks that requests are swapped out."""
    with served(moe, embed=launched, returns=2, num_blocks=20, max_batch_tokens=48, cpu_offload_space=0.01) as engine:
        engine.ask(prompts([9, 14, 4, 30], shared=40))
        assert engine.seen["hit"] >= 40
        assert engine.seen["copied"] >= 1
        assert engine.seen["swapped"] >= 1
        assert engine.embedded.passes_without_rows == 0
        all_right(engine.verdict(), due=2 * (4 * 40 + 57 + 4 * 19))


def test_one_launch_stores_ids_and_weights(moe: SaltedMoe) -> None:
    """Goal: both are one record of one launch. Method: as above, beside the judge's weights."""
    with served(moe, embed=partial(launched, weights=True), num_blocks=32, max_batch_tokens=48, new=6) as engine:
        engine.ask(prompts([9, 14], shared=24))
        assert engine.embedded.passes_without_rows == 0
        assert engine.weights_error() < 1e-4
        all_right(engine.verdict(), due=2 * 24 + 23 + 2 * 5)


@pytest.mark.parametrize("lost", [1, -1], ids=["a router's hook", "the model's hook"])
def test_a_pass_without_its_launch_has_no_rows(lost: int) -> None:
    """Goal: where a launch was not made, as in an older graph, the old bytes at the slots are not taken for rows, and
    the engine goes on. Method: a hook is lost after the first request."""
    with served(SaltedMoe(salted=True), embed=launched, new=4, num_blocks=16, max_batch_tokens=64) as engine:
        engine.ask(prompts([9]))
        all_right(engine.verdict(), due=9 + 3)
        engine.embedded.capture.handles[lost].remove()
        engine.ask(prompts([9], seed=1))
        assert engine.embedded.passes_without_rows == 4
        verdict = engine.verdict()
        assert (verdict.wrong, verdict.missing) == (0, 9 + 3)


def test_graphs_without_a_launch_are_refused() -> None:
    """Goal: hooks on the host see nothing of a graph's replay, so that graphs are refused there. Method: a manager's
    configuration as it is where there are graphs."""
    manager = SaltedMoe(salted=False).model.init_continuous_batching(
        GenerationConfig(max_new_tokens=1), ContinuousBatchingConfig(page_size=8, num_blocks=16, max_batch_tokens=64)
    )
    manager.continuous_batching_config.use_cuda_graph = True
    with pytest.raises(kvroute.ConfigError, match="CUDA graphs only where rows are launched"):
        example.EmbeddedRoutes(manager, kvroute.Namespace("small", weights_version=1))
