"""miles and slime, which have one shape: their own arguments, router, engine and rollouts, in this process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from live import HOST_PAGES, LAYERS, STOCK, share_by_file

PAGE, RESPONSE, POOL = 16, 128, 1024
HOSTED = [f"--sglang-{name.replace('_', '-')}={value}" for name, value in HOST_PAGES.items() if value != "true"]


class Rollouts:
    """The router and one engine of the trainer whose package has this name, and its rollouts."""

    def __init__(self, package: str, home: Path, *lines: str) -> None:
        self.package = package
        self.args = self._settings(home, lines)
        manager = self.part("ray.rollout")
        self.args.sglang_router_ip, self.args.sglang_router_port = manager._start_router(self.args)
        self.part("utils.http_utils").init_http_client(self.args)
        self.engine = self.part("backends.sglang_utils.sglang_engine").SGLangEngine(self.args, 0)
        ports = [self.part("utils.http_utils").find_available_port(start) for start in (16000, 18000, 20000)]
        self.engine.init(f"127.0.0.1:{ports[0]}", ports[1], ports[2], host="127.0.0.1")

    def part(self, name: str) -> Any:
        return import_module(f"{self.package}.{name}")

    def _settings(self, home: Path, lines: Sequence[str]) -> argparse.Namespace:
        """The trainer's own arguments; those that it adds to Megatron's, which has the ones on the model."""
        provider = getattr(self.part("utils.arguments"), f"get_{self.package}_extra_args_provider")
        args, rest = provider()(argparse.ArgumentParser()).parse_known_args([
            *("--use-rollout-routing-replay", "--hf-checkpoint", str(home)),
            *("--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1"),
            *("--num-gpus-per-node", "1", "--rollout-max-response-len", str(RESPONSE), "--rm-type", "random"),
            *("--rollout-batch-size", "1", "--n-samples-per-prompt", "1"),
            *("--sglang-device", "cpu", "--sglang-dtype", "float32", "--sglang-attention-backend", "torch_native"),
            *("--sglang-disable-cuda-graph", "--sglang-page-size", str(PAGE), "--sglang-max-total-tokens", str(POOL)),
            *("--sglang-enable-hierarchical-cache", *HOSTED),
            *("--sglang-grammar-backend", "none", "--sglang-max-running-requests", "8"),
            *(("--sglang-disable-overlap-schedule",) if STOCK else ()),
            *lines,
        ])  # fmt: skip
        if rest:  # slime has a parser of its own for SGLang's
            add = self.part("backends.sglang_utils.arguments").add_sglang_arguments
            add(argparse.ArgumentParser()).parse_args(rest, args)
        vars(args).update(seed=1, num_layers=LAYERS, moe_router_topk=4, fp16=False, use_critic=False)  # Megatron's
        vars(args).update(rollout_external=False, offload_rollout=False, debug_rollout_only=True)
        for name in ("dp", "pp", "ep"):  # as their ``validate_args`` does, of other names than these releases have
            setattr(args, f"sglang_{name}_size", 1)
        args.rollout_global_dataset = True
        args.over_sampling_batch_size = args.rollout_batch_size
        return args

    def source(self, prompts: Sequence[str], folder: Path, **settings: Any) -> Any:
        """The trainer's own source of samples over a file of these prompts; the arguments change for them."""
        file = folder / f"{len(list(folder.iterdir()))}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts))
        changed = {"prompt_data": str(file), "input_key": "text", "rollout_shuffle": False, **settings}
        changed["rollout_batch_size"] = changed["over_sampling_batch_size"] = len(prompts)
        for name, value in changed.items():
            setattr(self.args, name, value)
        type(self.part("rollout.sglang_rollout").GenerateState)._instances.clear()  # it has read the arguments once
        return self.part("rollout.data_source").RolloutDataSourceWithBuffer(self.args)

    def __call__(self, source: Any) -> list[Any]:
        """The samples of one rollout, by the trainer's own ``generate_rollout``."""
        output = self.part("rollout.sglang_rollout").generate_rollout(self.args, 0, source)
        return [sample for group in output.samples for sample in group]

    def put(self, name: str, weight: torch.Tensor, version: str) -> None:
        """A weight for the engine that is paused, as the trainer sends those of its own. Off a GPU a tensor goes in a
        file of shared memory."""
        from sglang.srt.utils import MultiprocessingSerializer

        share_by_file()
        sent = MultiprocessingSerializer.serialize([(name, weight)], output_str=True)
        self.engine.update_weights_from_tensor([sent], flush_cache=False, weight_version=version)

    def end(self) -> None:
        """Of the engine alone: miles' own end asks its router for a route that this has not."""
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(self.engine.process.pid)


def samples(answered: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Of the trainer's samples: each one's rows and its tokens."""
    return [(sample.rollout_routed_experts, list(sample.tokens)) for sample in answered]
