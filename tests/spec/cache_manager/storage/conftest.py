"""A real file system that is soon full, and a Mooncake pool with stores of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from budget import examples
from mooncake_pool import LEASE_MS, Master, Owner, Pools
from mooncake_stores import CALM_MS, SEGMENT_NBYTES, opened

from cache_manager.storage.mooncake import MooncakeStore
from cache_manager.testing.contract import StorageContract

# What is shipped says how many for users; here they are drawn as all others are.
StorageContract.machine_settings = examples(25, stateful_step_count=25)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; skipped where mounting is not allowed."""
    where = tmp_path / "tiny"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)]
    try:
        allowed = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this user may not mount a file system")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools()) as running:
        yield running


@pytest.fixture
def master(request: pytest.FixtureRequest, pools: Pools) -> Iterator[Master]:
    """Its parameter is the lease that a read has, in ms."""
    yield pools.pool(getattr(request, "param", LEASE_MS))[0]
    pools.end_broken()


@pytest.fixture
def owner(master: Master, pools: Pools, tmp_path: Path) -> Owner:
    found = pools.pool(master.lease_ms)[1]
    found.segment(tmp_path / "segment", SEGMENT_NBYTES)
    return found


@pytest.fixture
def backend(master: Master, owner: Owner) -> Iterator[MooncakeStore]:  # noqa: ARG001 - the pool's memory
    with opened(master) as store:
        yield store


@pytest.fixture
def calm(master: Master, owner: Owner) -> Iterator[MooncakeStore]:  # noqa: ARG001 - the pool's memory
    with opened(master, timeout_ms=CALM_MS) as store:
        yield store
