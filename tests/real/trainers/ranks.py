"""Every sharding of the reference: each rank's own part, through the real routers, as the trainer's own code cuts it.

One process is each rank in turn. Where each row of a rank comes from is told by the trainer's own code, which lays out
a tensor of token numbers as it lays out input ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mcore
import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_batch_on_this_cp_rank
from routes_of import expert_rows, made_routes
from skyrl.backends.skyrl_train.distributed.megatron import token_metadata
from skyrl.backends.skyrl_train.utils import replay_utils as skyrl_replay
from skyrl.train.dataset import preprocess as skyrl_preprocess
from verl.models.mcore.util import preprocess_thd_engine
from verl.utils.megatron import router_replay_patch as verl_patch
from verl.utils.megatron import router_replay_utils as verl_replay

from kvroute.replay import megatron, skyrl, verl
from kvroute.routes.split import Cut, Split

TOKENS = (7, 5, 13)
NUM_LAYERS = 8
LAYERS = (1, 2, 4, 7)  # irregular, one at least in each of four stages
ROUTES = [made_routes(i, n - 1, layer_ids=LAYERS, num_layers=NUM_LAYERS) for i, n in enumerate(TOKENS)]


@dataclass(frozen=True)
class Case:
    tp: int = 1
    cp: int = 1
    pp: int = 1
    layout: Cut = "zigzag"

    def split(self) -> Split:
        return Split(
            tp=self.tp,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            cp=self.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            sp=self.tp > 1,
            layout=self.layout,
        )

    def stage(self) -> mcore.Stage:
        """The routers of this rank's pipeline stage, as Megatron counts layers."""
        made = mcore.config(
            num_layers=NUM_LAYERS,
            moe_layer_freq=[int(n in LAYERS) for n in range(NUM_LAYERS)],
            tensor_model_parallel_size=self.tp,
            sequence_parallel=self.tp > 1,
            context_parallel_size=self.cp,
            pipeline_model_parallel_size=self.pp,
        )
        first = get_transformer_layer_offset(made)
        return mcore.Stage([n for n in range(first, first + get_num_layers_to_build(made)) if n in LAYERS], made)


SIZES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 2, 2), (1, 1, 4)]
CASES = [Case(*sizes) for sizes in SIZES]
CONTIGUOUS = [Case(*sizes, layout="contiguous") for sizes in SIZES if sizes[1] > 1]
PADDED = [case for case in CASES if case.cp <= 2]


def numbered() -> torch.Tensor:
    """Each token's number, from 1, in a jagged batch: 100 * sample + position + 1."""
    return torch.nested.as_nested_tensor(
        [torch.arange(n) + 100 * i + 1 for i, n in enumerate(TOKENS)], layout=torch.jagged
    )


def scattered(rows: torch.Tensor, case: Case) -> torch.Tensor:
    return scatter_to_sequence_parallel_region(rows.contiguous()) if case.tp > 1 else rows


def check(stage: mcore.Stage, hidden: torch.Tensor, numbers: torch.Tensor) -> int:
    """Run the routers and compare what they used with the rollout's; answers the rows compared.

    ``numbers`` say which token each of the router's rows is, 0 for padding.
    """
    used = mcore.Used(stage)
    stage(hidden)
    compared = 0
    for layer, (experts,) in used.experts.items():
        assert len(experts) == len(numbers), f"{len(experts)} rows for {len(numbers)} tokens"
        for row, number in zip(experts.tolist(), numbers.tolist(), strict=True):
            sample, position = divmod(number - 1, 100)
            if number and position < TOKENS[sample] - 1:
                wanted = sorted(expert_rows(sample, np.array([position]), (layer,), 16, 4)[0, 0].tolist())
                assert row == wanted, f"sample {sample} position {position} layer {layer}: {row}, not {wanted}"
                compared += 1
    return compared


def packed_numbers(case: Case) -> torch.Tensor:
    if case.layout == "contiguous":
        # verl has this layout for DeepSeek-V4 and refuses it with this Megatron-core. By the definition:
        align = case.tp * case.cp
        whole = [torch.nn.functional.pad(n, (0, -len(n) % align)) for n in numbered().unbind()]
        return scattered(torch.cat(whole).chunk(case.cp)[parallel_state.get_context_parallel_rank()], case)
    rows, _, _ = preprocess_thd_engine(numbered(), pre_process=True)
    return scattered(rows[0], case)


def hidden_for(numbers: torch.Tensor) -> torch.Tensor:
    return torch.randn(*numbers.shape, *([1] if numbers.dim() == 1 else []), mcore.HIDDEN)


def megatron_packed(case: Case) -> int:
    stage, numbers = case.stage(), packed_numbers(case)
    with megatron.schedule(stage):
        megatron.install(stage, megatron.packed(stage, ROUTES, TOKENS, case.split()))
        return check(stage, hidden_for(numbers), numbers)


def megatron_padded(case: Case) -> int:
    """A batch [sequence, batch], padded to 16 on the left; Megatron's own cut for context parallelism."""
    width = 16
    batch = torch.stack([torch.cat([torch.zeros(width - len(n), dtype=torch.int64), n]) for n in numbered().unbind()])
    mine = get_batch_on_this_cp_rank({"tokens": batch})["tokens"] if case.cp > 1 else batch
    numbers = scattered(mine.T, case)
    stage = case.stage()
    with megatron.schedule(stage):
        megatron.install(stage, megatron.padded(stage, ROUTES, TOKENS, width, case.split(), side="left"))
        return check(stage, hidden_for(numbers), numbers.reshape(-1))


def verl_replays(
    stage: mcore.Stage, rows: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Jagged rows of jagged samples in the routers: all of it verl's own, and the mask too, where none is given."""
    aligned = verl_replay.align_r3_router_replay_data(rows, tokens)
    if mask is None:
        mask = verl_replay.build_r3_replay_mask(tokens, torch.ones(len(tokens.unbind()), 1))
    verl_replay.set_router_replay_data(aligned, None, stage.config, replay_mask=mask, model=stage)
    verl_replay.set_model_router_replay_action(stage, verl_patch.RouterReplayAction.REPLAY_FORWARD)


def verl_engine(case: Case) -> int:
    """From the jagged tensor on, all is verl's: alignment, mask, packing, scatter, and its own replay class."""
    stage, numbers = case.stage(), packed_numbers(case)
    verl_replays(stage, verl.jagged(ROUTES, TOKENS), numbered())
    return check(stage, hidden_for(numbers), numbers)


def verl_class(case: Case) -> int:
    """kvroute's own installation into verl's class."""
    stage, numbers = case.stage(), packed_numbers(case)
    rows = megatron.packed(stage, ROUTES, TOKENS, case.split())
    with megatron.schedule(stage):
        megatron.install(stage, rows)
        return check(stage, hidden_for(numbers), numbers)


def skyrl_packed(case: Case) -> int:
    return _skyrl(case, packed=True)


def skyrl_unpacked(case: Case) -> int:
    """One sample at a time: SkyRL flattens batches the other way round than Megatron does."""
    return _skyrl(case, packed=False)


def _skyrl(case: Case, *, packed: bool) -> int:
    compared = 0
    for samples in [list(range(len(TOKENS)))] if packed else [[i] for i in range(len(TOKENS))]:
        RouterReplay.clear_global_router_replay_instances()  # SkyRL goes by Megatron's list
        stage = case.stage()
        # SkyRL cuts the mask by a class that this Megatron-core lacks, but routes by the size of TP alone.
        stage.config.sequence_parallel = False
        output = {
            "prompt_token_ids": [[1] * (TOKENS[i] - 3) for i in samples],
            "response_ids": [[2, 3, 4]] * len(samples),
            "rollout_expert_indices": skyrl.rollout_expert_indices(
                [ROUTES[i] for i in samples], [TOKENS[i] for i in samples]
            ),
        }
        local = scattered(skyrl_replays(stage, output, samples, packed=packed), case)
        compared += check(stage, hidden_for(local), local.reshape(-1))
        skyrl_replay.clear_router_replay()
    return compared


def skyrl_replays(
    stage: mcore.Stage, output: dict[str, Any], samples: Sequence[int] | None = None, *, packed: bool
) -> torch.Tensor:
    """The output of a generator in the routers, by SkyRL's preparation of a micro-batch; its tokens' numbers.

    These are 100 * sample + position + 1, in the routers' order, and 0 for padding.
    """
    for router in stage.decoder:
        router.router_replay.layer_number = router.layer_number  # as SkyRL's patch of Megatron does
    responses, indices = output["response_ids"], output["rollout_expert_indices"]
    masks = output.get("loss_masks") or [[1] * len(response) for response in responses]
    rewards = [[0.0] * len(response) for response in responses]
    made = skyrl_preprocess.convert_prompts_responses_to_batch_tensors(
        0, output["prompt_token_ids"], responses, rewards, masks, rollout_expert_indices=indices
    )
    attention, rows = made[1], made[6]
    mask = skyrl_preprocess.make_router_padding_mask(attention, [len(part) for part in indices])
    layout = token_metadata.build_token_metadata_layout(
        attention, torch.device("cpu"), packed=packed, fp8_enabled=False
    )
    skyrl_replay.setup_per_microbatch_replay_forward(
        rows, mask, attention, stage, stage.config, layout, remove_microbatch_padding=packed
    )
    numbers = torch.zeros(attention.shape, dtype=torch.int64)
    for place, sample in enumerate(samples or range(len(responses))):
        row = attention[place].bool()
        numbers[place, row] = torch.arange(int(row.sum())) + 100 * sample + 1
    return token_metadata.align_token_metadata(numbers, layout, 0).T


@contextlib.contextmanager
def verl_patched() -> Iterator[None]:
    """verl's own class in Megatron's place, and Megatron's back afterwards."""
    kept = TopKRouter.__init__, TopKRouter.routing, TransformerConfig.__init__, MoEAlltoAllTokenDispatcher.preprocess
    kept_device, verl_replay.device_name = verl_replay.device_name, "cpu"
    try:
        verl_patch.apply_router_replay_patch()
        yield
    finally:
        TopKRouter.__init__, TopKRouter.routing = kept[:2]
        TransformerConfig.__init__, MoEAlltoAllTokenDispatcher.preprocess = kept[2:]
        verl_replay.device_name = kept_device
        del TopKRouter._router_replay_patched, TransformerConfig._verl_router_patched
        del MoEAlltoAllTokenDispatcher._preprocess_patched


Trainer = Callable[[Case], int]
MEGATRON: list[tuple[Trainer, Case]] = [
    *((megatron_packed, case) for case in CASES + CONTIGUOUS),
    *((megatron_padded, case) for case in PADDED),
    *((skyrl_packed, case) for case in CASES),
    *((skyrl_unpacked, case) for case in CASES if case.cp == 1),
]
VERL: list[tuple[Trainer, Case]] = [
    *((verl_engine, case) for case in CASES),
    *((verl_class, case) for case in CASES),
]
