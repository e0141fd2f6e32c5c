"""vLLM engines in this process, and the judge of every row that they hand out."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked  # noqa: F401
import models
import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from weights_judge import assert_weights_right

import kvroute
from cache_manager.keys import BlockKey
from kvroute.connector.scheduler import SchedulerRows
from kvroute.connector.worker import WorkerRows
from kvroute.integrations.vllm import routes

# Objects that imports left are excluded from collection: an engine's start and end collect ten times, a second each.
gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None

MODULE = "kvroute.integrations.vllm"
BLOCK = 32  # what vLLM's attention kernels for CPUs want
GIVE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""``kv_transfer_params`` of a request whose KV another engine fetches over NIXL."""
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
LATENT: dict[str, Any] = {"attention_config": {"backend": "CPU_MLA"}}
"""Latent attention on any CPU: where there is AMX, vLLM would take kernels that want blocks of 32 and bfloat16."""


@dataclass(frozen=True)
class Verdict:
    """Of one answer: how many rows were due, right in all layers, missing in some at least, and wrong in some."""

    due: int
    right: int
    missing: int
    wrong: int


def keyed(key: str) -> dict[str, Any]:
    """Sampling parameters of a request that carries this key."""
    return {"extra_args": {"kv_transfer_params": {"kvroute": {"key": key}}}}


class Engine:
    """An engine with a connector, for prompts of token ids; strict, so that no mistake of bookkeeping is quiet."""

    def __init__(
        self,
        home: Path,
        connector: str = "KvrouteConnector",
        settings: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        module: str = MODULE,
        **arguments: Any,
    ) -> None:
        self.home = home
        self.tells_weights = bool(settings and settings.get("routing_weights"))
        self.dtype = str(arguments.get("dtype", "float32"))
        more = {"kvroute": {"strict": True, **(settings or {})}, **(extra or {})}
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 64,
            "disable_log_stats": False,
        }
        try:
            self.llm = LLM(
                str(home),
                kv_transfer_config=KVTransferConfig(
                    kv_connector=connector,
                    kv_connector_module_path=module,
                    kv_role="kv_both",
                    kv_connector_extra_config=more,
                    **arguments.pop("transfer", {}),
                ),
                **{**defaults, **arguments},
            )
        except BaseException:
            ensure_kv_transfer_shutdown()  # vLLM would give the worker's connector to the next engine
            cleanup_dist_env_and_memory()
            raise

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def sent(self) -> SchedulerRows:
        rows = self.scheduler.connector.scheduler_rows
        assert isinstance(rows, SchedulerRows)
        return rows

    @property
    def kept(self) -> WorkerRows:
        rows = get_kv_transfer_group().worker_rows
        assert isinstance(rows, WorkerRows)
        return rows

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 20, **sampling: Any) -> list[Any]:
        sampling = {"temperature": 0, "ignore_eos": True, **sampling}
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(given, SamplingParams(max_tokens=max_tokens, **sampling), use_tqdm=False)

    def judge(self, output: Any, index: int = 0, **where: Any) -> Verdict:
        """Each row of the answer against transformers' forward pass of the same weights over the same tokens."""
        return judge(self.home, output, routes(output, index, **where), index)

    def assert_right(self, outputs: Sequence[Any], **where: Any) -> None:
        """Every row that is due is there and right, and so is each routing weight where the engine tells them."""
        for output in outputs:
            for index in range(len(output.outputs)):
                found = self.judge(output, index, **where)
                assert found == Verdict(found.due, found.due, 0, 0), (output.request_id, found)
                if self.tells_weights:
                    assert_weights_right(self.home, output, index, self.dtype)

    @contextmanager
    def storing(self) -> Iterator[list[BlockKey]]:
        """The keys that the engine stores meanwhile, in order."""
        found, persist = list[BlockKey](), self.sent.feed.persist

        def recording(blocks: dict[BlockKey, int]) -> None:
            found.extend(blocks)
            persist(blocks)

        self.sent.feed.persist = recording  # type: ignore[method-assign]
        try:
            yield found
        finally:
            self.sent.feed.persist = persist  # type: ignore[method-assign]

    def forget_locally(self) -> None:
        """The pool has no hits any more; connectors and weights are as they were."""
        manager = self.scheduler.kv_cache_manager
        manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))

    def metric(self, name: str) -> int:
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == f"vllm:{name}")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()


def judge(home: Path, output: Any, found: kvroute.Routes, index: int = 0) -> Verdict:
    return judge_tokens(home, [*output.prompt_token_ids, *output.outputs[index].token_ids], found)


def judge_tokens(home: Path, tokens: list[int], found: kvroute.Routes) -> Verdict:
    due = len(tokens) - 1
    moe = [i for i, layer in enumerate(models.moe_layers(home)) if layer in found.layer_ids]
    expected = models.routing(home, tokens)[: len(found), moe]
    same = (np.sort(found.ids.astype(np.int64), axis=-1) == expected).all(axis=2)
    whole = np.full(len(found), not found.missing_layers)
    right, wrong = int((same & found.known).all(1)[whole].sum()), int((~same & found.known).any(1).sum())
    assert found.start == 0
    return Verdict(due, right, due - right - wrong, wrong)


@contextmanager
def noise(engine: Engine, layer: int, size: float, seed: int) -> Iterator[None]:
    """What the experts' layer ``layer`` is given is moved by normal noise of ``size`` times its own size."""
    random = torch.Generator().manual_seed(seed)

    def disturb(_module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = given[0]
        moved = torch.randn(hidden.shape, generator=random, dtype=hidden.dtype) * hidden.std() * size
        return (hidden + moved, *given[1:])

    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    hook = executor.driver_worker.get_model().model.layers[layer].mlp.register_forward_pre_hook(disturb)
    try:
        yield
    finally:
        hook.remove()


def prompts(seed: int, *lengths: int, shared: int = 0) -> list[list[int]]:
    """Random prompts of these lengths behind ``shared`` tokens that they have in common."""
    random = np.random.default_rng(seed)
    head = random.integers(5, 500, shared).tolist()
    return [head + random.integers(5, 500, length).tolist() for length in lengths]
