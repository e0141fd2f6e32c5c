"""A receipt of miles' own Megatron and its routers; a script, because that Megatron has the name of the other one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mcore
import megatron.core
import torch
from miles.backends.megatron_utils.replay_utils import get_register_replay_list_func
from miles.backends.training_utils import cp_utils, parallel
from miles.backends.training_utils.data import DataIterator
from miles.utils.replay_base import routing_replay_manager as manager
from routes_of import made_routes
from sources import code_of, installed

from kvroute.replay import slime, watch

LAYERS, TOKENS, MULTIPLE = (1, 2, 3), [9, 6], 4
ROUTES = [made_routes(i, count - 1) for i, count in enumerate(TOKENS)]


def record() -> None:
    """One micro-batch into the routers' lists, by miles' own actor."""
    actor = installed("miles") / "backends" / "megatron_utils" / "actor.py"
    names = {"slice_with_cp": cp_utils.slice_with_cp, "get_parallel_state": parallel.get_parallel_state}
    batch = {
        "tokens": [torch.arange(count) for count in TOKENS],
        "rollout_routed_experts": [
            torch.from_numpy(slime.miles_sample(*each)) for each in zip(ROUTES, TOKENS, strict=True)
        ],
    }
    args = SimpleNamespace(qkv_format="thd", data_pad_size_multiplier=MULTIPLE, sequence_parallel=False)
    model = [SimpleNamespace(module=SimpleNamespace(config=mcore.config()))]
    code_of(actor, "_fill_replay_data", **names)["_fill_replay_data"](
        SimpleNamespace(args=args, model=model),
        [DataIterator(batch, micro_batch_size=len(TOKENS))],
        [1],
        batch,
        manager.data_key,
        manager.replays,
        get_register_replay_list_func(manager),
    )


def main() -> None:
    assert Path(megatron.core.__file__).is_relative_to(installed("miles").parent), "miles' own Megatron"
    plain = torch.empty_like
    torch.empty_like = lambda like, pin_memory=False, **more: plain(like, **more)  # noqa: ARG005 - no memory to pin
    one = parallel.GroupInfo(0, 1, None)
    groups = ("tp", "cp", "intra_dp", "intra_dp_cp", "pp", "ep", "etp")
    parallel.set_parallel_state(parallel.ParallelState(**dict.fromkeys(groups, one)))
    manager.enabled = True
    split = slime.split(data_pad_size_multiplier=MULTIPLE)
    with mcore.rank_of():
        stage = mcore.Stage(LAYERS, mcore.config())
        with watch(stage) as replayed:
            for stage_of_replay in ("replay_forward", "fallthrough"):
                manager.clear_all()
                record()
                manager.stage = stage_of_replay
                replayed.packed(ROUTES, TOKENS, split)
                stage(torch.randn(16, 1, mcore.HIDDEN))
                receipt = replayed.receipt()
                if stage_of_replay == "replay_forward":
                    receipt.check()
                    print("receipt", receipt.due, receipt.taken)
    print("gaps", len(receipt.gaps), len({(gap.layer, gap.sample) for gap in receipt.gaps if gap.micro_batch == 1}))


if __name__ == "__main__":
    main()
