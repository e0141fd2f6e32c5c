"""verl's configuration and actors, for either of its engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from live import HERE
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

PROMPT, RESPONSE = 160, 128


def configured(home: Path, files: Path, engine: str, rollout: Sequence[str], kwargs: Sequence[str]) -> Any:
    """verl's configuration, with further lines of ``rollout``, and the engine's own arguments ``kwargs``."""
    import verl

    (files / "loops.yaml").write_text("- name: stopping\n  _target_: verl_parts.Stopping\n")
    of_all = (
        f"name={engine}",
        "enable_rollout_routing_replay=true",
        "tensor_model_parallel_size=1",
        "dtype=float32",
        "load_format=auto",
        "enforce_eager=true",
        "free_cache_engine=false",
        "max_model_len=512",
        "max_num_seqs=16",
        "ignore_eos=true",
        "disable_log_stats=false",
        "agent.num_workers=1",
        f"agent.agent_loop_config_path={files / 'loops.yaml'}",
        f"multi_turn.function_tool_path={HERE / 'verl_tool.py'}",
        "multi_turn.format=always",
        "multi_turn.max_assistant_turns=3",
    )
    overrides = [
        f"actor_rollout_ref.model.path={home}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        "+actor_rollout_ref.rollout.enable_sleep_mode=false",
        *(f"actor_rollout_ref.rollout.{line}" for line in (*of_all, *rollout)),
        *(f"+actor_rollout_ref.rollout.engine_kwargs.{engine}.{line}" for line in kwargs),
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides)


class Rollout:
    """A server of verl in its Ray actor, and verl's managers of agent loops that ask it, one with each client."""

    def __init__(self, ray: Any, config: Any, server: type, name: str, **more: Any) -> None:
        from verl.workers.rollout.replica import RolloutMode
        from verl.workers.rollout.router import get_router_handle

        self.ray, self.config = ray, config
        of = config.actor_rollout_ref
        self.server = ray.remote(server).options(max_concurrency=64, name=name).remote(
            config=of.rollout, model_config=of.model, rollout_mode=RolloutMode.STANDALONE, workers=[], replica_rank=0,
            node_rank=0, nnodes=1, cuda_visible_devices="", **more,
        )  # fmt: skip
        launched = self.server.launch_server.remote()  # the other actors start meanwhile
        balancer = get_router_handle({"one": self.server})
        clients = LLMServerClient, FullyAsyncLLMServerClient
        self.plain, self.partial = (AgentLoopManager.create(config, client(config, balancer)) for client in clients)
        ray.get(launched)
        self.address = "{}:{}".format(*ray.get(self.server.get_server_address.remote()))

    def batch(self, loop: str, prompts: list[str]) -> Any:
        raw = np.empty(len(prompts), dtype=object)
        raw[:] = [[{"role": "user", "content": text}] for text in prompts]
        names = np.array([loop] * len(prompts), dtype=object)
        return DataProto(non_tensor_batch={"raw_prompt": raw, "agent_name": names}, meta_info={"global_steps": 0})

    def __call__(self, loop: str, prompts: list[str]) -> Any:
        return self.plain.generate_sequences(self.batch(loop, prompts))

    def end(self) -> None:
        self.ray.kill(self.server)


def samples(batch: Any) -> list[tuple[Any, list[int]]]:
    """Of a DataProto: each sample's rows and its tokens."""
    pairs = []
    for i in range(len(batch)):
        mask = batch.batch["attention_mask"][i].bool()
        rows = batch.batch["routed_experts"][i][mask].numpy()
        pairs.append((rows, batch.batch["input_ids"][i][mask].tolist()))
    return pairs
