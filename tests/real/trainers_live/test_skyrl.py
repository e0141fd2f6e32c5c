"""SkyRL's own server, client, generator and weight transfer, with kvroute as vLLM's connector."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import skyrl_gym
import torch
import vllm
from live import STOCK, STOPS, judged, judged_over_update, prompt, stock_beside_a_connector, verdict
from safetensors.torch import load_file
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.backends.skyrl_train.weight_sync.weight_senders import build_trainer_engine
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.generators.utils import prepare_generator_input
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import AutoTokenizer

NAME, ENGINE = "SkyRL 0.4.0", f"vLLM {vllm.__version__}"
TURNS = 3
SAID = "generation_tokens"


class Asks(BaseTextEnv):
    """Says something after each turn but the last."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.last = extras["turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns == self.last
        said = [] if done else [{"role": "user", "content": prompt(self.turns, 20)}]
        return BaseTextEnvStepOutput(observations=said, reward=1.0, done=done, metadata={})


def configured(home: Path, files: Path) -> SkyRLTrainConfig:
    """SkyRL's configuration, with the lines of docs/trainers/skyrl.md, and around a connector that stores KV and
    rows."""
    kvroute = f"kvroute: {{on_missing: fail, witness: flagged, store: 'file://{files}/rows'}}"
    name = "kv_connector: KvrouteExampleConnector, kv_connector_module_path: kvroute.integrations.vllm"
    transfer = (
        f"{{{name}, kv_role: kv_both, kv_connector_extra_config: {{shared_storage_path: '{files}/kv', {kvroute}}}}}"
    )
    engine = "generator.inference_engine"
    connector = () if STOCK else (f"{engine}.engine_init_kwargs.kv_transfer_config={transfer}",)
    return SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.policy.model.path={home}",
            "trainer.placement.colocate_all=false",
            "trainer.strategy=megatron",
            "trainer.policy.megatron_config.moe_enable_routing_replay=true",
            f"{engine}.enable_return_routed_experts=true",
            f"{engine}.distributed_executor_backend=mp",
            *connector,
            # What a CPU and a small model need.
            f"{engine}.engine_init_kwargs.worker_cls=vllm.v1.worker.cpu_worker.CPUWorker",
            f"{engine}.engine_init_kwargs.block_size=32",
            f"{engine}.engine_init_kwargs.num_gpu_blocks_override=64",
            f"{engine}.engine_init_kwargs.max_model_len=512",
            f"{engine}.model_dtype=float32",
            f"{engine}.enforce_eager=true",
            f"{engine}.max_num_batched_tokens=2048",
            f"{engine}.max_num_seqs=16",
            f"{engine}.enable_ray_prometheus_stats=false",
            f"{engine}.weight_sync_backend=delta",
            f"{engine}.delta_weight_sync.sync_dir={files / 'deltas'}",
            f"{engine}.delta_weight_sync.local_checkpoint_dir={files / 'checkpoints'}",
            f"{engine}.delta_weight_sync.publish_staging_dir={files / 'staging'}",
            f"generator.max_turns={TURNS}",
            "generator.max_input_length=400",
            "generator.sampling_params.max_generate_length=40",
            "generator.sampling_params.additional_kwargs={ignore_eos: true}",
            "environment.skyrl_gym.max_env_workers=0",
        ]
    )


class Rollout:
    """A server of SkyRL in its Ray actor, and SkyRL's generator that asks it with SkyRL's client."""

    def __init__(self, ray: Any, config: SkyRLTrainConfig) -> None:
        self.ray, self.config = ray, config
        engine = config.generator.inference_engine
        self.server = ray.remote(VLLMServerActor).options(max_concurrency=64).remote(
            build_vllm_cli_args(config),
            distributed_executor_backend=engine.distributed_executor_backend,
            enable_ray_prometheus_stats=engine.enable_ray_prometheus_stats,
        )  # fmt: skip
        self.url = ray.get(self.server.start.remote()).url
        self.tokenizer = AutoTokenizer.from_pretrained(config.trainer.policy.model.path)
        self.client = RemoteInferenceClient(
            proxy_url=self.url,
            server_urls=[self.url],
            data_parallel_size=1,
            model_name=config.trainer.policy.model.path,
            enable_return_routed_experts=engine.enable_return_routed_experts,
            tokenizer=self.tokenizer,
        )
        self.sender = build_trainer_engine(
            ie_cfg=engine,
            colocate_all=False,
            rank=0,
            inference_world_size=1,
            source_factory=lambda dtype, _: FsdpWeightSource(torch.nn.Module(), dtype),
            draft_source_factory=lambda dtype: FsdpWeightSource(torch.nn.Module(), dtype),
            server_urls=[self.url],
            data_parallel_size=1,
            base_model_path=config.trainer.policy.model.path,
        )

    async def generate(self, prompts: list[str], turns: int, **sampling: Any) -> Any:
        """A generator's output, of a conversation of so many turns for each prompt."""
        config = self.config.generator
        generator = SkyRLGymGenerator(config, self.config.environment.skyrl_gym, self.client, self.tokenizer)
        params = {**get_sampling_params_for_backend("vllm", config.sampling_params), **sampling}
        asked = [
            {
                "prompt": [{"role": "user", "content": text}],
                "env_class": "asks",
                "env_extras": {"turns": turns},
                "uid": text,
            }
            for text in prompts
        ]
        batch, _ = prepare_generator_input(asked, 1, params, "asks", "train", 0)
        return await generator.generate(batch, disable_tqdm=True)

    def run(self, work: Any) -> Any:
        """The result of ``work``, after which the client's connections are closed."""

        async def run() -> Any:
            try:
                return await work
            finally:
                await self.client.aclose()

        return asyncio.run(run())

    def __call__(self, prompts: list[str], turns: int, **sampling: Any) -> Any:
        return self.run(self.generate(prompts, turns, **sampling))

    def counter(self, name: str) -> float:
        """Of vLLM's, by the server's page of metrics."""
        lines = requests.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total"))

    def end(self) -> None:
        self.sender.shutdown()
        self.sender.client.close()
        self.ray.kill(self.server)


def samples(output: Any) -> list[tuple[Any, list[int]]]:
    """Of a generator's output: each sample's rows, as its trainer packs them, and its tokens, without an end that the
    generator has appended behind a stop string."""
    made = convert_prompts_responses_to_batch_tensors(
        2,
        *(output[name] for name in ("prompt_token_ids", "response_ids")),
        output["rewards"],
        output["loss_masks"],
        rollout_expert_indices=output["rollout_expert_indices"],
    )
    pairs = []
    for i, said in enumerate(output["response_ids"]):
        tokens = [*output["prompt_token_ids"][i], *said]
        rows = made[6].segment(i).numpy()
        captured = output["rollout_expert_indices"][i]
        assert np.array_equal(rows[: len(captured)], captured)
        tokens = tokens[:-1] if said[-1] == 1 else tokens
        pairs.append((rows[: len(captured)], tokens))
    return pairs


@pytest.fixture(scope="module")
def rollout(cluster: Any, homes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    skyrl_gym.registry["asks"] = skyrl_gym.envs.registration.EnvSpec(id="asks", entry_point=Asks)
    rollout = Rollout(cluster, configured(homes["A"], tmp_path_factory.mktemp("files")))
    yield rollout
    rollout.end()


ASKED = [prompt(seed, 100 + seed) for seed in range(4)]


def test_turns_and_stop_strings(rollout: Rollout, homes: dict[str, Path]) -> None:
    """Goal: rows of conversations, of prefixes that are there, and of answers that a string ends. Method: SkyRL's
    generator, and the tensors that its trainer makes of its output."""
    turns = rollout(ASKED[:2], TURNS)
    verdict(NAME, ENGINE, "three turns", judged(homes["A"], samples(turns)))
    stopped = rollout(ASKED, 1, stop=STOPS)
    verdict(NAME, ENGINE, "a prefix hit and a stop string", judged(homes["A"], samples(stopped)))


def test_kv_from_outside(rollout: Rollout, homes: dict[str, Path]) -> None:
    """Goal: rows of KV that has left the engine. Method: answers that fill its pool between two answers to the same
    prompts, whose KV and rows then come from files."""
    scenario = "prefixes whose KV came from files"
    if STOCK:
        stock_beside_a_connector(NAME, ENGINE, scenario, homes["A"])
        return
    loaded = rollout.counter("external_prefix_cache_hits")
    for seeds in (range(20, 25), range(25, 30), range(30, 35)):
        rollout([prompt(seed, 110) for seed in seeds], 1)
    again = rollout(ASKED, 1)
    loaded = rollout.counter("external_prefix_cache_hits") - loaded
    assert loaded >= 96 * len(ASKED), loaded
    verdict(NAME, ENGINE, scenario, judged(homes["A"], samples(again)))


@pytest.mark.parametrize("forgets", [False, True], ids=["keeps KV", "asks to forget KV"])
def test_an_update_amid_answers(rollout: Rollout, homes: dict[str, Path], forgets: bool) -> None:
    """Goal: each row is of the weights that its token was sampled with, and of the KV that was there. Method: SkyRL's
    own sender of changed weights pauses the server; answers go on. As its fully-async trainer wants by default, it asks
    for nothing else; or to forget KV, which vLLM's route of that name does not read of SkyRL's message."""
    before, after = (homes["B"], homes["A"]) if forgets else (homes["A"], homes["B"])
    weights = load_file(after / "model.safetensors")
    rollout.sender.source = FsdpWeightSource(SimpleNamespace(state_dict=lambda: weights), torch.float32)
    rollout.sender.skyrl_set_reset_prefix_cache(forgets)

    async def run() -> Any:
        asked = asyncio.create_task(rollout.generate(ASKED, 1, max_tokens=120))
        said = rollout.counter(SAID)
        while rollout.counter(SAID) < said + 40 * len(ASKED):
            await asyncio.sleep(0.1)
        await asyncio.to_thread(rollout.sender.send_weights)
        rollout.client.increment_weight_version()
        assert not asked.done()
        return await asked

    pairs = samples(rollout.run(run()))
    how = "asked to forget KV" if forgets else "KV kept"
    tally, cuts = judged_over_update(before, after, pairs, again=False)
    assert STOCK or all(
        len(tokens) - 120 < cut < len(tokens) - 1 for cut, (_, tokens) in zip(cuts, pairs, strict=True)
    ), cuts
    verdict(NAME, ENGINE, f"weights updated amid answers, {how}", tally)
    verdict(NAME, ENGINE, f"after an update, {how}", judged(after, samples(rollout(ASKED, 1))))
