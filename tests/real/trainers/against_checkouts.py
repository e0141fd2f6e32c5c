"""Routes against trainers that no package index has, from checkouts: slime, prime-rl, NeMo-RL and xtuner.

Their code runs as it stands, on a CPU, in the environment of ``make test-trainers``. Nothing of it is kept here, so no
test can run it by itself; docs/concepts/replay.md says which revisions were run, and what was seen.

    PYTHONPATH=. tests/real/trainers/.venv/bin/python -W ignore \\
        tests/real/trainers/against_checkouts.py --slime PATH ...

Each check prints a line that counts what it compared; the first difference ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import typing
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "worlds"))

import mcore
from a_store import a_store
from routes_of import expert_rows, made_routes
from sources import code_of

from kvroute import fetch_shard
from kvroute.encodings import encode
from kvroute.replay import nemo_rl, prime_rl, slime, watch
from kvroute.routes import Split, shard_packed

LAYERS, NUM_LAYERS = (1, 2, 3), 4
TOKENS = [9, 6]
ROUTES = [made_routes(i, n - 1) for i, n in enumerate(TOKENS)]


def seen(routes: int, rows: Any, tokens: int) -> int:
    """How many cells of ``rows`` ``[>= tokens - 1, layers, top_k]`` are the rollout's; all of them, or it raises."""
    expected = expert_rows(routes, np.arange(tokens - 1), LAYERS, mcore.EXPERTS, mcore.TOP_K)
    assert np.array_equal(np.asarray(rows)[: tokens - 1], expected)
    return expected.shape[0] * expected.shape[1]


# slime ----------------------------------------------------------------------------------------------------------------


def slime_samples(_root: Path) -> str:
    """Its own check of a batch, and the routes that it reads from an answer of SGLang, whole and from a later row
    on."""
    data = import_module("slime.observability.rollout_data_utils")
    sample_of = import_module("slime.utils.types").Sample
    args = Namespace(num_layers=NUM_LAYERS, moe_router_topk=mcore.TOP_K, moe_layer_freq=[0, 1, 1, 1])
    batch = {"rollout_routed_experts": [slime.sample(r, n) for r, n in zip(ROUTES, TOKENS, strict=True)]}
    data.tensorize_rollout_data_for_training(batch)
    data.validate_rollout_routed_experts_for_replay(batch["rollout_routed_experts"], args)
    cells = sum(seen(i, rows[:, 1:], n) for i, (rows, n) in enumerate(zip(*batch.values(), TOKENS, strict=True)))
    for i, (routes, n) in enumerate(zip(ROUTES, TOKENS, strict=True)):
        made = sample_of(tokens=list(range(n)))
        for start in (0, 3):
            answer = {"routed_experts": encode(routes.slice(start, n - 1), "sglang"), "routed_experts_start_len": start}
            made._apply_meta_info(args, answer, update_terminal_info=False)
            cells += seen(i, made.rollout_routed_experts[:, 1:], n)
    return f"{cells} cells"


def slime_ranks(root: Path) -> str:
    """Every rank: its cut of whole samples beside the shard that a rank reads from a store through a lazy handle, and
    its top-k over random scores in both passes; padding, which both spell by themselves, is left out."""
    replays = import_module("slime.utils.routing_replay")
    cut = import_module("slime.backends.megatron_utils.cp_utils")
    fill = code_of(
        root / "slime/backends/megatron_utils/actor.py",
        "fill_routing_replay",
        prepare_routed_experts_for_routing_replay=cut.prepare_routed_experts_for_routing_replay,
    )["fill_routing_replay"]
    store = a_store()
    handles = [store.put(f"r{i}", routes) for i, routes in enumerate(ROUTES)]
    topk = replays.get_routing_replay_compute_topk(lambda scores, k, **_: torch.topk(scores, k, dim=1))
    replays.accelerator.current_device = lambda: torch.device("cpu")
    plain = torch.empty_like
    torch.empty_like = lambda like, pin_memory=False, **more: plain(like, **more)  # noqa: ARG005 - no memory to pin
    multiple, cells, ranks = 4, 0, 0
    for tp, cp, sequence_parallel, allgather in product((1, 2), (1, 2), (False, True), (False, True)):
        for t, c in product(range(tp), range(cp)):
            split = slime.split(
                tp, t, cp, c, sequence_parallel=sequence_parallel, allgather_cp=allgather,
                data_pad_size_multiplier=multiple,
            )  # fmt: skip
            lists = replays.RoutingReplay.all_routing_replays
            lists[:] = []
            eager = [replays.RoutingReplay() for _ in LAYERS]
            with mcore.rank_of(rank=c * tp + t, world=tp * cp, tp=tp, cp=cp):
                actor = Namespace(
                    args=Namespace(
                        num_experts=mcore.EXPERTS, data_pad_size_multiplier=multiple,
                        sequence_parallel=sequence_parallel, allgather_cp=allgather,
                    ),
                    model=[SimpleNamespace(module=SimpleNamespace(config=mcore.config()))],
                )  # fmt: skip
                batch = {
                    "rollout_routed_experts": [slime.sample(r, n) for r, n in zip(ROUTES, TOKENS, strict=True)],
                    "tokens": [torch.zeros(n) for n in TOKENS],
                }
                fill(actor, [SimpleNamespace(reset=int, get_next=lambda _, given=batch: dict(given))], [1], dict(batch))
            lists[:] = []
            lazy = [replays.RoutingReplay() for _ in LAYERS]
            micro_batch = slime.LazyMicroBatch(
                lambda layers, split=split: fetch_shard(store, handles, TOKENS, split, layers=layers), LAYERS
            )
            replays.RoutingReplay.register_lazy_resource(micro_batch)
            spread = torch.from_numpy(shard_packed(ROUTES, TOKENS, split, LAYERS, pad="zero"))
            for index, (layer, replay) in enumerate(zip(LAYERS, lazy, strict=True)):
                replay.record(micro_batch.layer(layer))
                (whole,) = eager[index].top_indices_list
                assert whole.shape == spread[:, index].shape
                real = (spread[:, index] != 0).any(dim=1)
                assert torch.equal(whole[real].long(), spread[real, index])
            for stage in ("replay_forward", "replay_backward"):
                os.environ |= {"ENABLE_ROUTING_REPLAY": "1", "ROUTING_REPLAY_STAGE": stage}
                replays.RoutingReplay.begin_lazy_pass(stage)
                for index, replay in enumerate(lazy):
                    replays.set_routing_replay(replay)
                    used = topk(torch.rand(len(spread), mcore.EXPERTS), mcore.TOP_K)[1]
                    real = (spread[:, index] != 0).any(dim=1)
                    assert torch.equal(used[real], spread[real, index])
                    cells += int(real.sum())
            replays.RoutingReplay.assert_all_consumed()
            replays.RoutingReplay.clear_all()
            ranks += 1
    torch.empty_like = plain
    return f"{cells} cells on {ranks} ranks"


def slime_receipt(_root: Path) -> str:
    """What Megatron's routers used, by a receipt: with its replay in both passes, and with the flag left off. Its patch
    of Megatron, two lines, is put in by hand: its top-k around Megatron's, and its registration of a router."""
    replays = import_module("slime.utils.routing_replay")
    replays.accelerator.current_device = lambda: torch.device("cpu")
    replays.RoutingReplay.clear_all()
    replays.RoutingReplay.all_routing_replays[:] = []
    split = slime.split(data_pad_size_multiplier=4)
    gaps = 0
    with mcore.rank_of():
        os.environ |= {"ENABLE_ROUTING_REPLAY": "1", "ROUTING_REPLAY_STAGE": "replay_forward"}
        stage = mcore.Stage(LAYERS, mcore.config())
        rows = torch.from_numpy(shard_packed(ROUTES, TOKENS, split, LAYERS))
        for index, router in enumerate(stage.decoder):
            replays.register_routing_replay(router)
            router.router_replay.get_replay_topk = lambda scores, topk, groups, group_topk, plain: (
                replays.get_routing_replay_compute_topk(plain)(scores, topk, groups, group_topk)
            )
            router.routing_replay.record(SimpleNamespace(materialize_for_routing_replay=lambda _, i=index: rows[:, i]))
        hidden = torch.randn(len(rows), 1, mcore.HIDDEN, requires_grad=True)

        def again() -> torch.Tensor:
            answer = torch.utils.checkpoint.checkpoint(lambda x: stage(x)[0][0] * 1, hidden, use_reentrant=True)
            return answer.square().sum()

        with watch(stage) as replayed:
            replayed.packed(ROUTES, TOKENS, split)
            loss = again()
            os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"
            loss.backward()
            replayed.receipt().check()
            due = replayed.receipt().due
            assert [use.recomputations for use in replayed.receipt().uses] == [1] * len(LAYERS)
            replays.RoutingReplay.assert_all_consumed()
            os.environ["ENABLE_ROUTING_REPLAY"] = "0"
            replayed.packed(ROUTES, TOKENS, split)
            stage(hidden)
            gaps = len(replayed.receipt().gaps)
            assert {gap.micro_batch for gap in replayed.receipt().gaps} == {1}
    assert gaps == len(LAYERS) * len(TOKENS)
    replays.RoutingReplay.clear_all()
    return f"{due} cells twice, {gaps} gaps with the flag off"


# prime-rl -------------------------------------------------------------------------------------------------------------


def prime_rl_batches(root: Path) -> str:
    """Samples through its packing, cutting and padding into tensors, and those through its router."""
    types = import_module("prime_rl.transports.rollouts.types")
    batches = import_module("prime_rl.trainer.batch")
    data = code_of(
        root / "src/prime_rl/trainer/rl/data.py", "_micro_batch_to_tensor", "_torch_dtype", TensorMicroBatch=dict, np=np
    )
    router_of = code_of(
        root / "src/prime_rl/trainer/models/layers/moe.py",
        "TokenChoiceTopKRouter", "_selected_probability_mass_sum", nn=torch.nn, F=torch.nn.functional,
    )["TokenChoiceTopKRouter"]  # fmt: skip
    counted = torch.histc
    torch.histc = lambda ids, **more: counted(ids.float(), **more)  # a CPU counts no integers
    cells = 0
    for seq_len, multiple in ((32, 1), (32, 8), (7, 4)):
        samples = [
            types.TrainingSample(
                token_ids=list(range(n)), mask=[True] * n, logprobs=[0.0] * n, temperatures=[1.0] * n, env_name="e",
                advantages=[float(i)] * n, routed_experts=types.RoutedExperts(**prime_rl.routed_experts(routes, n)),
            )
            for i, (routes, n) in enumerate(zip(ROUTES, TOKENS, strict=True))
        ]  # fmt: skip
        (made,) = batches.prepare_batch(samples, seq_len, 1, sum, multiple)
        for micro_batch in made:
            whose = [int(a) for a in micro_batch.advantages]
            rows = data["_micro_batch_to_tensor"](None, micro_batch)["routed_experts"]
            assert rows.shape == (1, len(micro_batch.input_ids), NUM_LAYERS, mcore.TOP_K)
            at = 0
            for length in micro_batch.sequence_lengths:
                kept = min(TOKENS[whose[at]], seq_len)
                # a sample that was cut keeps the row of its last token, which later tokens have read
                rows_of = kept + 1 if kept < TOKENS[whose[at]] else kept
                part = rows[0, at : at + length]
                cells += seen(whose[at], part[:, 1:], rows_of)
                last = part[kept - 1, 1:].sort(dim=-1).values
                assert bool((last[:, 1:] > last[:, :-1]).all()), "experts of the last token are distinct"
                at += length
            router = router_of(mcore.HIDDEN, mcore.EXPERTS, mcore.TOP_K, "softmax", True, 1.0)
            for layer in LAYERS:
                given = rows[:, :, layer].reshape(-1, mcore.TOP_K)
                used, counts = router(torch.randn(len(given), mcore.HIDDEN), routed_experts=given)[1:3]
                assert torch.equal(used, given)
                assert int(counts.sum()) == given.numel()
    torch.histc = counted
    return f"{cells} cells"


# NeMo-RL --------------------------------------------------------------------------------------------------------------


def nemo_rl_strings(_root: Path) -> str:
    """Its codec reads and writes our string, and its dtypes are ours; for every width."""
    codec = import_module("nemo_rl.utils.routed_experts_codec")
    interfaces = import_module("nemo_rl.models.generation.interfaces")
    for experts in (16, 128, 129, 300, 1 << 15, (1 << 15) + 1):
        routes = made_routes(1, 6, experts=experts)
        rows = nemo_rl.sequence(routes, 7)[:6]
        assert rows.dtype == interfaces.resolve_routed_experts_dtype(experts)
        assert torch.equal(codec.decode_routed_experts(encode(routes, "nemo"), rows.dtype), rows)
        assert codec.encode_routed_experts(rows) == encode(routes, "nemo")
    holed = made_routes(1, 6, holes=(2,))
    assert codec.encode_routed_experts(nemo_rl.sequence(holed, 7)[:6]) == encode(holed, "nemo")
    return "7 strings"


def nemo_rl_routers(root: Path) -> str:
    """A batch through its padding, its cut for context parallelism and its assignment to Megatron's routers, with
    compressed layers and with all; a row of -1 is the router's own choice in both passes."""
    replay = import_module("nemo_rl.models.megatron.router_replay")
    data = code_of(root / "nemo_rl/models/megatron/data.py", "_fill_routed_experts_padding")
    holed = [made_routes(0, TOKENS[0] - 1, holes=(2,)), ROUTES[1]]
    os.environ["NRL_ROUTER_REPLAY_VALIDATE"] = "1"
    cells = 0
    for layers in ("moe", "all"):
        batch = nemo_rl.batch(holed, TOKENS, 10, layers=layers)  # type: ignore[arg-type]
        repaired = data["_fill_routed_experts_padding"](batch, torch.tensor(TOKENS))
        assert torch.equal(repaired, batch), "padding was a valid route before"
        with mcore.rank_of():
            stage = mcore.Stage(LAYERS, mcore.config())
            used = mcore.Used(stage)
            hidden = torch.randn(10, 2, mcore.HIDDEN)
            stage(hidden)
            own = {layer: found.pop() for layer, found in used.experts.items()}
            replay.set_router_replay_forward(stage, batch)
            stage(hidden)
            replay.set_router_replay_backward(stage)
            stage(hidden)
            replay.clear_router_replay(stage)
        for index, layer in enumerate(LAYERS):
            forward, backward = used.experts[layer]
            assert torch.equal(forward, backward)
            for i, n in enumerate(TOKENS):
                mine = forward.view(10, 2, -1)[: n - 1, i]
                hole = (batch[i, : n - 1, index - len(LAYERS)] == -1).all(dim=1)
                assert hole.nonzero().flatten().tolist() == ([2] if i == 0 else [])
                assert torch.equal(mine[hole], own[layer].view(10, 2, -1)[: n - 1, i][hole])
                rollout = expert_rows(i, np.arange(n - 1), LAYERS, mcore.EXPERTS, mcore.TOP_K)[:, index]
                assert np.array_equal(mine[~hole], np.sort(rollout, axis=1)[~hole])
                cells += n - 1
    return f"{cells} cells"


def nemo_rl_receipt(_root: Path) -> str:
    """What the routers used of a padded batch with a hole, by a receipt: in both passes; in the router of multi-token
    prediction, which its walk takes for the decoder's layer of the same number (#3903); and after its replay is
    cleared."""
    replay = import_module("nemo_rl.models.megatron.router_replay")
    replay._install_missing_route_fallback_patch()
    holed = [made_routes(0, TOKENS[0] - 1, holes=(2,)), ROUTES[1]]
    with mcore.rank_of():
        torch.manual_seed(1)
        model = mcore.gpt()
        model.mtp.layers[0].transformer_layer.mlp.router.set_layer_number(2)
        stage = mcore.Stage(LAYERS, mcore.config())
        hidden = torch.randn(10, 2, mcore.HIDDEN, requires_grad=True)
        with watch(stage) as replayed:
            replayed.padded(holed, TOKENS, 10, side="right", order="sequence")
            replay.set_router_replay_forward(stage, nemo_rl.batch(holed, TOKENS, 10))
            loss = torch.utils.checkpoint.checkpoint(lambda x: stage(x)[-1][0] * 1, hidden, use_reentrant=True)
            replay.set_router_replay_backward(stage)
            loss.sum().backward()
            replayed.receipt().check()
            due = replayed.receipt().due
            replay.clear_router_replay(stage)
            replayed.padded(holed, TOKENS, 10, side="right", order="sequence")
            stage(hidden)
        gaps = replayed.receipt().gaps
        assert {(gap.micro_batch, gap.layer, gap.sample) for gap in gaps} == set(product((1,), LAYERS, (0, 1)))
        with watch(model) as replayed, torch.no_grad():
            replayed.packed(ROUTES[:1], TOKENS[:1])
            replay.set_router_replay_forward(model, nemo_rl.batch(ROUTES[:1], TOKENS[:1], TOKENS[0]))
            mcore.run(model, torch.arange(TOKENS[0])[None])
        (gap,) = replayed.receipt().gaps
        assert (gap.layer, "multi-token prediction" in gap.wanted) == (1, True)
    return f"{due} cells twice, {len(gaps)} gaps without it, 1 in multi-token prediction"


def nemo_rl_ranks(root: Path) -> str:
    """Its cut of a packed batch for context parallelism beside the shard that a rank reads by itself, padding too."""
    cut = code_of(root / "nemo_rl/distributed/model_utils.py", "_get_tokens_on_this_cp_rank")
    shard = code_of(root / "nemo_rl/models/megatron/data.py", "_shard_routed_experts_for_cp", **cut)
    cells, ranks = 0, 0
    for cp in (1, 2, 4):
        align = 2 * cp if cp > 1 else 1
        ends, padded = np.cumsum([0, *TOKENS]), np.cumsum([0, *(-(-n // align) * align for n in TOKENS)])
        for rank in range(cp):
            given = nemo_rl.batch(ROUTES, TOKENS, 10), None, *map(torch.tensor, (TOKENS, ends, padded)), rank, cp
            mine = shard["_shard_routed_experts_for_cp"](*given)[1][0]
            split = Split(cp=cp, cp_rank=rank, align=align)
            assert torch.equal(
                mine, torch.from_numpy(shard_packed(ROUTES, TOKENS, split, LAYERS, "int8", pad="arange"))
            )
            cells, ranks = cells + mine.shape[0] * mine.shape[1], ranks + 1
    return f"{cells} cells on {ranks} ranks"


def nemo_rl_references(_root: Path) -> str:
    """Its workers' reading of our references in a real cluster, beside those of its own writer: a whole sample without
    padding, and a padded batch of a whole one with a hole and of one in slices, as several turns leave it. Then the
    rows end with the weights version that its trainer retires."""
    import ray

    theirs = import_module("nemo_rl.utils.routed_experts_ref")
    from kvroute.replay.nemo_rl_references import References

    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))  # for the actors
    samples, cells = [made_routes(0, TOKENS[0] - 1, holes=(2,)), ROUTES[1]], 0
    names: dict[str, Any] = {"request_id": "chatcmpl/1:ä", "rollout_index": 2, "target_weight_version": 5}
    ours: dict[str, Any] = {"request_id": "chatcmpl/1:ä", "rollout": 2, "weights_version": 5}
    with TemporaryDirectory(prefix="ray") as directory:
        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=128 << 20, _temp_dir=directory)
        writer, references = theirs.RoutedExpertsStoreWriter("run"), References("run")
        found = []
        for whose in ("theirs", "ours"):
            refs = []
            for i, (routes, n) in enumerate(zip(samples, TOKENS, strict=True)):
                if whose == "ours":
                    ref = references.put(routes, n, task=i, **ours)
                else:
                    rows = torch.from_numpy(routes.materialize(n, "moe", "int16", "minus1"))
                    ref = writer.put(rows, task_index=i, **names)
                refs.append(json.loads(json.dumps(ref)))
            turns = [theirs.slice_routed_experts_ref(refs[1], offset=at, length=3) for at in (0, 3)]
            for batch, lengths, width in (([refs[1]], TOKENS[1:], TOKENS[1]), ([refs[0], turns], TOKENS, 10)):
                tokens = torch.zeros(len(batch), width, dtype=torch.long)
                given = {"input_ids": tokens, "input_lengths": torch.tensor(lengths)}
                found.append(theirs.materialize_routed_experts_refs(batch, **given).clone())
        for its, mine in zip(found[:2], found[2:], strict=True):
            assert torch.equal(its, mine)
        whole, padded = found[2:]
        for i, rows in ((1, whole[0]), (0, padded[0]), (1, padded[1])):
            lost = (rows == -1).all(dim=(1, 2)).nonzero().flatten().tolist()
            assert lost == [2] * (i == 0) + list(range(TOKENS[i] - 1, len(rows)))
            there = [at for at in range(TOKENS[i] - 1) if at not in lost]
            expected = expert_rows(i, np.array(there), LAYERS, mcore.EXPERTS, mcore.TOP_K)
            assert np.array_equal(rows[there], expected)
            cells += expected.shape[0] * expected.shape[1]
        policy = {"enabled": True, "transport": "ray", "_store_run_instance_id": "run"}
        retired = theirs.retire_routed_experts_through({"router_replay": policy}, 5)
        assert (retired["stores"], retired["retired_objects"], retired["remaining_objects"]) == (2, 4, 0)
        with pytest.raises(ray.exceptions.RayTaskError, match="one of rows that are here"):
            theirs.materialize_routed_experts_refs([refs[0]], input_ids=torch.zeros(1, 9), input_lengths=[9])
        ray.shutdown()
    return f"{cells} cells"


# xtuner ---------------------------------------------------------------------------------------------------------------


def xtuner_samples(root: Path) -> str:
    """Samples behind references, and one of padding, through its worker; then layer by layer through its router."""
    objects = {i: slime.sample(routes, n).numpy() for i, (routes, n) in enumerate(zip(ROUTES, TOKENS, strict=True))}
    freed: list[int] = []
    free = SimpleNamespace(free=lambda ref, **_: freed.append(ref))
    ray = SimpleNamespace(ObjectRef=int, get=objects.get, internal=free)
    worker = code_of(
        root / "xtuner/v1/rl/trainer/worker.py", "_add_rollout_routed_experts", ray=ray, np=np, BaseComposeConfig=str
    )
    router_of = code_of(
        root / "xtuner/v1/module/router/greedy.py",
        "GreedyRouter", nn=torch.nn, F=torch.nn.functional, os=os, RouterProtocol=object,
    )["GreedyRouter"]  # fmt: skip
    model = Namespace(n_routed_experts=mcore.EXPERTS, num_hidden_layers=NUM_LAYERS, num_experts_per_tok=mcore.TOP_K)
    actor = Namespace(config=Namespace(model_cfg=model, free_rollout_routed_experts_in_worker=True), sp_mesh=None)
    context = Namespace(input_ids=torch.zeros(1, sum(TOKENS) - len(TOKENS) + 3), rollout_routed_experts=None)
    worker["_add_rollout_routed_experts"](actor, context, [*objects, torch.zeros(3, 1, 1)])
    assert freed == list(objects)
    counted = torch.histc
    torch.histc = lambda ids, **more: counted(ids.float(), **more)  # a CPU counts no integers
    router = router_of(n_routed_experts=mcore.EXPERTS, num_experts_per_tok=mcore.TOP_K)
    rows = context.rollout_routed_experts
    used = torch.stack(
        [router(torch.randn(len(rows), mcore.EXPERTS), rows[:, layer])["topk_ids"] for layer in LAYERS], dim=1
    )
    torch.histc = counted
    ends = np.cumsum([0, *(n - 1 for n in TOKENS)])
    cells = sum(seen(i, used[ends[i] : ends[i + 1]], n) for i, n in enumerate(TOKENS))
    return f"{cells} cells"


CHECKS: dict[str, tuple[tuple[str, ...], tuple[Callable[[Path], str], ...]]] = {
    "slime": ((".",), (slime_samples, slime_ranks, slime_receipt)),
    "prime-rl": (("src",), (prime_rl_batches,)),
    "nemo-rl": ((".",), (nemo_rl_strings, nemo_rl_routers, nemo_rl_receipt, nemo_rl_ranks, nemo_rl_references)),
    "xtuner": ((".",), (xtuner_samples,)),
}


def ready(name: str, root: Path) -> None:
    """Stand-ins for modules that the trainers need and these checks do not."""
    sys.path[:0] = [str(root / each) for each in CHECKS[name][0]]
    if name == "prime-rl":
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
        for package in ("prime_rl", "prime_rl.transports", "prime_rl.transports.rollouts", "prime_rl.trainer"):
            module = sys.modules[package] = ModuleType(package)  # their own imports want configurations and CUDA
            module.__path__ = [str(root / "src" / package.replace(".", "/"))]
    if name == "nemo-rl":
        sys.modules.setdefault("pynvml", ModuleType("pynvml"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CHECKS:
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"a checkout of {name}")
    given = {name: root for name, root in zip(CHECKS, vars(parser.parse_args()).values(), strict=True) if root}
    if not given:
        parser.error("at least one checkout is wanted")
    for name, root in given.items():
        ready(name, root)
        for check in CHECKS[name][1]:
            print(f"{name}: {check.__name__}: {check(root.absolute())}", flush=True)


if __name__ == "__main__":
    main()
