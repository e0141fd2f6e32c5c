"""Faults R14, R19, R21 and R22: what a reopened store finds, with another row layout or after damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache_manager.keys import Namespace
from cache_manager.ports import Absence
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.testing.records import get, payload_of, put
from tests.fault_matrix.blocks import (
    TOKENS,
    file_nbytes,
    key,
    killed_before_a_byte,
    persist,
    restore_into_a_used_block,
    stored,
)
from tests.storage.stores import SMALL_NBYTES, flip, opened, payload_in


@pytest.mark.parametrize("change", ["dtype", "shape", "attributes", "weights", "tenant", "rank"])
def test_r19_rows_are_never_reinterpreted(change: str, tmp_path: Path) -> None:
    """Fault: a restart with another dtype, other layers or top-k, weights, tenant or rank. kvroute: a miss."""
    spec = AuxBlockDataSpec("routing", (4, 8), "uint16", TOKENS, {"num_experts": 300})
    other: dict[str, Any] = {
        "dtype": {"spec": AuxBlockDataSpec("routing", (4, 8), "float16", TOKENS, {"num_experts": 300})},
        "shape": {"spec": AuxBlockDataSpec("routing", (8, 4), "uint16", TOKENS, {"num_experts": 300})},
        "attributes": {"spec": AuxBlockDataSpec("routing", (4, 8), "uint16", TOKENS, {"num_experts": 301})},
        "weights": {"namespace": Namespace("m", 2)},
        "tenant": {"namespace": Namespace("m", 1, salt="t")},
        "rank": {"namespace": Namespace("m", 1, rank=1, world=2)},
    }[change]
    with stored(tmp_path, spec=spec) as (aux, _):
        assert persist(aux, [1]) == [True]
    with stored(tmp_path, **{"spec": spec, **other}) as (aux, store):
        assert store.usage()["records"] == 1
        assert not restore_into_a_used_block(aux, 1)
        assert aux.store_counters is not None
        assert (aux.store_counters.misses, aux.store_counters.corrupt) == (1, 0)
        assert persist(aux, [1]) == [True]
    for options in ({"spec": spec}, {"spec": spec, **other}):
        with stored(tmp_path, **options) as (aux, _):
            assert restore_into_a_used_block(aux, 1)


@pytest.mark.parametrize("at", [0, 100, 1000, 2047])
def test_r21_a_byte_flipped_at_rest_is_a_miss(at: int, tmp_path: Path) -> None:
    """Fault: flip a byte of the oldest record between two runs. kvroute: no row of it reaches a block.

    A start reads heads only.
    """
    with stored(tmp_path) as (aux, _):
        assert all(persist(aux, range(1, 8)) + persist(aux, range(8, 15)))
        flip(*payload_in(tmp_path, key(aux, 1), at))
    with stored(tmp_path) as (aux, _):
        assert not restore_into_a_used_block(aux, 1)
        assert aux.store_counters is not None
        assert aux.store_counters.hits == 0


def test_r14_r22_what_a_killed_process_left_is_swept_and_counted(tmp_path: Path) -> None:
    """Fault: a child killed when a new file has no byte yet, then a start with a limit. kvroute: no leftover, and used
    bytes are the bytes of the files, within the limit."""
    killed_before_a_byte(tmp_path)
    quota = 2 * SMALL_NBYTES
    with opened(tmp_path, quota_nbytes=quota) as store:
        assert not list(tmp_path.glob("*.tmp"))
        assert get(store, range(12)) == [payload_of(n) for n in range(6)] + [Absence.MISS] * 6
        assert store.usage()["used_nbytes"] == file_nbytes(tmp_path) <= quota
        for first in range(0, 60, 6):
            assert all(put(store, range(first, first + 6)))
            assert store.usage()["used_nbytes"] == file_nbytes(tmp_path) <= quota
