"""Tensor-parallel ranks of a connector, each in a process of its own: the witness made of their folds."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed
from waiting import GIVE_UP_S

from cache_manager.keys import Namespace
from kvroute.connector import Engine, Settings
from kvroute.connector.carriers import ByKey
from kvroute.connector.carriers.by_key import ByKeyWorker, Filled
from kvroute.connector.messages import StepMeta
from kvroute.connector.witness import OtherRank
from kvroute.connector.worker import WorkerRows, rank_part
from kvroute.routing import routing_spec
from kvroute.witness import ROOT, Run, chained, fold_reference

RUN = Run(-1, [3, 0, 5])


def kv_of(heads: int) -> torch.Tensor:
    return torch.randn(8, heads, 4, 16, generator=torch.Generator().manual_seed(1))


def rank_of(rank: int, directory: Path, damaged: bool) -> None:
    """One rank's step, which fills ``RUN``; the first one leaves the witnesses of its blocks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'ranks'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    kv = kv_of(2)[:, rank : rank + 1].clone()
    if damaged and rank:
        kv.view(torch.int32)[0, 0, 2, 3] ^= 1
    spec = routing_spec(8, 2, range(2), num_layers=2, block_tokens=4)
    settings = Settings.of({"strict": True, "weights": "m", "store": "memory:"})
    engine = Engine(settings, spec, Namespace("m", 1), 8, max_tokens=64, carrier=ByKey("flagged"))
    group = distributed.group.WORLD
    assert group is not None
    part = rank_part(engine, {"layers.1": kv}, group, divided=True)
    assert isinstance(part, OtherRank if rank else WorkerRows)
    part.begin(StepMeta(None, b"", carrier=Filled([RUN], b"")))
    part.end()
    if isinstance(part, WorkerRows):
        assert isinstance(part.carrier, ByKeyWorker)
        found = part.blocks.exchange.origins(RUN.blocks)
        (directory / "witnesses").write_text(" ".join(map(str, found)))
        part.close()
    distributed.destroy_process_group()


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "damaged"])
def test_what_the_first_rank_sees_is_of_all_ranks(tmp_path: Path, damaged: bool) -> None:
    """Goal: a witness is that of the whole KV, and another one where a rank has other KV. Method: two processes over
    gloo, with one of two heads each; a bit of the second block in the second rank.
    """
    context = multiprocessing.get_context("forkserver")  # imports once what would take each rank seconds
    context.set_forkserver_preload(["torch.distributed", "kvroute.connector.worker", "kvroute.witness"])
    ranks = [context.Process(target=rank_of, args=(rank, tmp_path, damaged)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(GIVE_UP_S)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    found = [int(each) for each in (tmp_path / "witnesses").read_text().split()]
    whole, before = list[int](), ROOT
    for fold in fold_reference(kv_of(2).numpy()[list(RUN.blocks)]).tolist():
        whole.append(before := chained(before, fold))
    assert [a == b for a, b in zip(found, whole, strict=True)] == [True, not damaged, not damaged]
