"""slime's own arguments, router, engine, rollouts and samples, with kvroute's plugin in SGLang.

The package index has no slime: a checkout's folder is in ``KVROUTE_TRAINERS``, by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang
import sglang_between
from live import free_port
from sglang_plan import an_update_that_aborts, answers_and_prefix_hits, kv_from_outside
from sglang_rollouts import Rollouts
from slime.utils import accelerator

NAME, ENGINE = "slime 624b824", f"SGLang {sglang.__version__}"


ON_CPU = SimpleNamespace(name="cpu", is_available=lambda: True, resolve_visible_device_id=lambda _: 0)
"""slime has no accelerator for CPUs; its engine asks one for the number of its device."""


@pytest.fixture(scope="module")
def rollouts(home: Path) -> Iterator[Rollouts]:
    accelerator.register_accelerator("cpu", lambda: ON_CPU, lambda: True)
    port = free_port()
    sglang_between.started(port)
    rollouts = Rollouts("slime", home, "--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(port))
    yield rollouts
    rollouts.end()


def test_answers_prefix_hits_and_stop_strings(rollouts: Rollouts, home: Path, tmp_path: Path) -> None:
    """Goal: rows in ``Sample.rollout_routed_experts``. Method: slime's ``generate_rollout`` of a file of prompts."""
    answers_and_prefix_hits(rollouts, home, tmp_path, NAME, ENGINE)


def test_kv_from_outside(rollouts: Rollouts, home: Path, tmp_path: Path) -> None:
    """Goal: rows of KV that has left the device. Method: slime's rollouts over SGLang's pages on the host."""
    kv_from_outside(rollouts, home, tmp_path, NAME, ENGINE)


def test_an_update_amid_answers(rollouts: Rollouts, homes: dict[str, Path], tmp_path: Path) -> None:
    """Goal: each row is of the weights that have computed it. Method: slime's engine is told what slime's update tells
    it."""
    an_update_that_aborts(rollouts, homes, tmp_path, NAME, ENGINE)
