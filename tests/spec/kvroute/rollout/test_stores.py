"""Every rollout store keeps the contract; a real Mooncake pool too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
from budget import examples
from mooncake_pool import Master, running_master, running_owner

from cache_manager.record import RecordHeader
from kvroute.rollout import RolloutHandle, RolloutStore, open_rollouts
from kvroute.rollout.local import LocalRollouts
from kvroute.rollout.mooncake import MooncakeRollouts, keys_of
from kvroute.rollout.shard import fetch_shard
from kvroute.routes import Split, shard_packed
from kvroute.testing.rollouts import RolloutContract, routes_of


class TestLocalRollouts(RolloutContract):
    """Parts so small that rollouts have many."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvroute.rollout.parts.PART_NBYTES", 64)

    def make_store(self, directory: Path) -> RolloutStore:
        return LocalRollouts(directory / "rollouts")

    def damage(self, directory: Path, store: RolloutStore, handle: RolloutHandle) -> RolloutHandle:
        file = directory / "rollouts" / f"{handle.rollout_id}.routes"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return handle


class TestFusedLocalRollouts(TestLocalRollouts):
    """All layers in one part, each put synced."""

    reads_parts = False

    def make_store(self, directory: Path) -> RolloutStore:
        return LocalRollouts(directory / "rollouts", 6, sync=True)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    # With a short lease a read on a busy core would become a miss.
    with (
        running_master(5_000) as running,
        running_owner(running, tmp_path_factory.mktemp("pool") / "segment", 256 << 20),
    ):
        yield running


class TestMooncakeRollouts(RolloutContract):
    """Each store has a prefix of its own in one real pool."""

    settings = examples(5, stateful_step_count=8)
    numbers = count()

    @pytest.fixture(autouse=True)
    def _pool(self, master: Master) -> None:
        type(self).master = master

    master: Master

    def make_store(self, directory: Path) -> RolloutStore:
        prefix = f"test-{next(self.numbers)}"
        return open_rollouts(self.master.url(prefix, layers=1, arena="4MiB"))

    def damage(self, directory: Path, store: RolloutStore, handle: RolloutHandle) -> RolloutHandle:
        """A part whose own checksum is right, but which belongs to another put."""
        assert isinstance(store, MooncakeRollouts)
        other = store.put("another", routes_of(7))
        (part,), (foreign,) = keys_of(handle, [0]), keys_of(other, [0])
        content = bytearray(other.nbytes_of((0, 1)))
        (header,) = store.backend.get_into([foreign], [memoryview(content)])
        assert isinstance(header, RecordHeader)
        store.backend.delete([part])
        moved = msgspec.structs.replace(header, key=part)
        assert store.backend.put([moved], [content]) == [moved]
        return handle


def test_ranks_read_little_beside_their_rows(tmp_path: Path) -> None:
    """Goal: all ranks together read what they need, wherever their spans end. Method: two rollouts whose lengths are
    multiples of nothing, every rank of pp x cp in turn, with the defaults; headers count."""
    whole, tokens = (
        [routes_of(i, rows, top_k=8, experts=64) for i, rows in enumerate((20_011, 13_337))],
        [20_012, 13_338],
    )
    with closing(LocalRollouts(tmp_path)) as store:
        handles = [store.put(f"task:{i}:0:0", routes) for i, routes in enumerate(whole)]
        for split in (Split(pp=2, pp_rank=p, cp=2, cp_rank=c) for p in range(2) for c in range(2)):
            mine = fetch_shard(store, handles, tokens, split, "uint8")
            assert np.array_equal(mine, shard_packed(whole, tokens, split, dtype="uint8"))
        assert store.counters.get_nbytes < 1.1 * sum(routes.ids.nbytes for routes in whole)
