"""A hybrid model in a release of vLLM that has not all tests: a tiny gpt-oss, or a tiny Qwen3-Next.
`tests/real/vllm/test_hybrid.py` has all that is asked of both."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from engines import Engine, judge_tokens, prompts
from safetensors.torch import load_file, save_file

from kvroute.integrations.vllm import routes
from kvroute.rollout import open_rollouts

RELEASE = [int(part) for part in vllm.__version__.split(".")[:2]]
LINEAR = RELEASE in ([0, 26], [0, 30])  # that of 0.30 takes gpt-oss in bfloat16 alone
GPT_OSS: dict[str, Any] = {"num_gpu_blocks_override": 32, "max_model_len": 320}
QWEN3_NEXT: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": None,  # as many tokens as a state has room for
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 16,
    "max_model_len": 512,
}


def with_names_of_0_24(home: Path, at: Path) -> Path:
    """The checkpoint of ``home`` with other names of experts: of those that a gpt-oss without its own quantization has,
    0.24 finds none."""
    shutil.copytree(home, at)
    weights = load_file(home / "model.safetensors")
    renamed = {name.replace(".mlp.experts.", ".mlp.experts.routed_experts."): weights[name] for name in weights}
    save_file(renamed, at / "model.safetensors", metadata={"format": "pt"})
    return at


@pytest.fixture(scope="module")
def hybrid(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if RELEASE < [0, 30]:
        import cpu_choices  # noqa: F401
        import cpu_states  # noqa: F401
    place = tmp_path_factory.mktemp("hybrid")
    home = model("qwen3_next" if LINEAR else "gpt_oss")
    started = with_names_of_0_24(home, place / "named") if RELEASE == [0, 24] else home
    settings = {"field": True, "rollouts": f"file://{place / 'rollouts'}"}
    made = Engine(started, settings=settings, max_num_batched_tokens=256, **(QWEN3_NEXT if LINEAR else GPT_OSS))
    made.home = home
    made.rollouts = open_rollouts(settings["rollouts"])
    yield made
    made.rollouts.close()
    made.close()


def assert_right(engine: Engine, outputs: list[Any]) -> None:
    """Every row is there, and is transformers'; vLLM's own field has the same rows."""
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        rows = routes(output, rollouts=engine.rollouts)
        assert judge_tokens(engine.home, tokens, rows).right == len(tokens) - 1
        array = output.outputs[0].routed_experts
        assert array is not None, output.kv_transfer_params
        assert (array[:, rows.layer_ids] == rows.ids).all()


def test_rows_of_a_hybrid_model(hybrid: Engine) -> None:
    """Goal: rows go with the blocks of full attention, and hits have them. Method: prompts with one beginning, then as
    the first turn of a conversation; more requests than the pool has blocks for; and the first ones again."""
    groups = hybrid.scheduler.kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    assert len(groups) > 1
    assert kinds[hybrid.sent.engine.group] == "FullAttentionSpec"
    asked = prompts(61, 20, 70, 5, shared=140)
    first = hybrid.ask(asked)
    turns = hybrid.ask([[*p, *o.outputs[0].token_ids, 7, 8] for p, o in zip(asked, first, strict=True)])
    assert min(output.num_cached_tokens for output in turns) >= 128
    assert_right(hybrid, [*first, *turns])
    preempted = hybrid.metric("num_preemptions")
    many = hybrid.ask(prompts(62, *[60] * 8), max_tokens=90)
    assert hybrid.metric("num_preemptions") > preempted
    assert_right(hybrid, [*many, *hybrid.ask(asked)])
    hybrid.kept.blocks.assert_consistent()
    assert not hybrid.kept.missing
