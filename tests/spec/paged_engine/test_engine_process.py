"""The engine whose KV the cache-transfer process copies is the engine without it, also when that process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import pytest
from engine_runs import NAMESPACE, PLAIN, TIGHT, assert_same, requests_of, run
from torch import nn
from waiting import until

from cache_manager.errors import InvalidInputError
from cache_manager.regions import list_regions
from paged_engine.engine import Engine
from paged_engine.scheduler import Work
from paged_engine.shared_kv import SharedKV

BESIDE = replace(TIGHT, transfer_process=True)


def test_what_the_process_copies_changes_no_token_and_no_row(qwen: nn.Module) -> None:
    """Goal: every way of moving KV goes through the process, and nothing is left of it. Method: as for the engine's own
    copies; regions and process are gone at the end."""
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = run(engine, requests_of())
    others = {region.name for region in list_regions()}
    with Engine(qwen, BESIDE, NAMESPACE) as engine:
        made = {region.name for region in list_regions()} - others
        tight = run(engine, requests_of())
        rows, moved = engine.aux.counters, engine.kv.moved_blocks
        assert isinstance(engine.kv, SharedKV)
        pid = engine.kv.process.pid
    assert_same(plain, tight)
    assert min(rows.swapped_out_rows, rows.swapped_in_rows, rows.copied_rows) > 0
    assert moved * TIGHT.block_tokens >= rows.swapped_out_rows + rows.swapped_in_rows + rows.copied_rows
    assert len(made) == 4
    assert made.isdisjoint(region.name for region in list_regions())
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_is_killed_costs_time_and_no_row(qwen: nn.Module) -> None:
    """Goal: KV that was not copied is computed again, with its rows. Method: it is killed in each pass in which it
    is there, until three moves have failed; then it comes back and moves the rest."""
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = run(engine, requests_of())
    killed: list[int] = []

    @contextmanager
    def kills(_: list[Work]) -> Iterator[None]:
        yield
        assert isinstance(engine.kv, SharedKV)
        process = engine.kv.process
        if engine.manager.counters.moves_failed >= 3:
            until(lambda: process.pid is not None)
        elif (pid := process.pid) is not None:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with Engine(qwen, BESIDE, NAMESPACE, observer=kills) as engine:
        tight = run(engine, requests_of())
        failed, moved = engine.manager.counters.moves_failed, engine.kv.moved_blocks
    assert_same(plain, tight)
    assert failed >= 3
    assert killed
    assert moved > 0


def test_a_process_copies_on_a_cpu_alone(qwen: nn.Module) -> None:
    with pytest.raises(InvalidInputError, match="transfer_process: wanted a model on a CPU, got meta"):
        Engine(deepcopy(qwen).to("meta"), BESIDE, NAMESPACE)
