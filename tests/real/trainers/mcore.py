"""Real Megatron-core models and routers on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

EXPERTS, TOP_K, HIDDEN = 16, 4, 32

# Parts that Megatron expects on a GPU, and a router on a CPU does not need.
torch.cuda.current_device = lambda: torch.device("cpu")
moe_utils.te_general_gemm = None  # the name is missing where TransformerEngine is
tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()


@contextlib.contextmanager
def rank_of(rank: int = 0, world: int = 1, tp: int = 1, pp: int = 1, cp: int = 1) -> Iterator[None]:
    """This process as one rank of a world, in Megatron's own groups, without the other ranks.

    The backend is torch's fake one: groups and ranks are real, nothing is sent, no thread is started. The tested code
    only reads its rank and cuts its own part.
    """
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config(**changes: Any) -> TransformerConfig:
    """Four layers of which the first is dense, 16 experts, top 4."""
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 32,
        "moe_ffn_hidden_size": 16,
        "moe_layer_freq": [0, 1, 1, 1],
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_enable_routing_replay": True,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**settings, **changes})


def gpt(**changes: Any) -> GPTModel:
    """A whole model, with a layer for multi-token prediction whose router replays too."""
    made = config(mtp_num_layers=1, **changes)
    layers = get_gpt_decoder_block_spec(made, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(made, layers, use_transformer_engine=False)
    return GPTModel(
        made,
        layers,
        vocab_size=64,
        max_sequence_length=64,
        mtp_block_spec=mtp,
        position_embedding_type="learned_absolute",
    )


def stage_of(made: TransformerConfig, *, first: bool, last: bool) -> GPTModel:
    """One stage of a pipeline."""
    return GPTModel(
        made,
        get_gpt_decoder_block_spec(made, use_transformer_engine=False),
        vocab_size=64,
        max_sequence_length=64,
        pre_process=first,
        post_process=last,
        position_embedding_type="learned_absolute",
    )


def run(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """The loss ``[batch, sequence]`` of ``tokens`` ``[batch, sequence]``."""
    length = tokens.shape[1]
    positions = torch.arange(length)[None].expand_as(tokens)
    later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return model(tokens, positions, later, labels=tokens)


class Stage(nn.Module):
    """The routers of one pipeline stage, under the names they have in a model."""

    def __init__(self, layer_ids: Sequence[int], made: TransformerConfig) -> None:
        super().__init__()
        self.config = made
        self.pre_process = False
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.decoder = nn.ModuleList(TopKRouter(made, pg_collection=groups) for _ in layer_ids)
        for layer, router in zip(layer_ids, self.decoder, strict=True):
            router.set_layer_number(layer + 1)

    def forward(self, hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each router's probabilities and map, ``[sequence * batch, experts]``, of ``[sequence, batch, hidden]``."""
        return [router(hidden) for router in self.decoder]


class Used:
    """The experts to which each router of a model sent each token, watched from outside: sorted ids ``[tokens, top_k]``
    by layer."""

    def __init__(self, model: nn.Module) -> None:
        self.experts: dict[int, list[torch.Tensor]] = {}
        self.mtp: list[torch.Tensor] = []
        for name, module in model.named_modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(self._keep("mtp" in name))

    def _keep(self, mtp: bool) -> Any:
        def keep(router: TopKRouter, _inputs: Any, answer: Any) -> None:
            seen = self.mtp if mtp else self.experts.setdefault(router.layer_number - 1, [])
            seen.append(chosen(answer[1]))

        return keep


def chosen(routing_map: torch.Tensor) -> torch.Tensor:
    """The expert ids ``[tokens, top_k]`` in increasing order; a token with fewer experts is an error."""
    counts = routing_map.sum(dim=1)
    assert bool((counts == TOP_K).all()), f"{counts.tolist()} experts a token"
    return routing_map.nonzero()[:, 1].view(len(routing_map), TOP_K)
