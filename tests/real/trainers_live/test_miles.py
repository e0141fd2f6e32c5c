"""miles' own arguments, router, engine, rollouts and samples, with kvroute's plugin in SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang
from sglang_plan import an_update_amid_answers, answers_and_prefix_hits, kv_from_outside, turns_with_a_tool
from sglang_rollouts import Rollouts

NAME, ENGINE = "miles 0.0.2", f"SGLang {sglang.__version__}"


@pytest.fixture(scope="module")
def rollouts(home: Path) -> Iterator[Rollouts]:
    rollouts = Rollouts("miles", home, "--use-miles-router")
    yield rollouts
    rollouts.end()


def test_answers_prefix_hits_and_stop_strings(rollouts: Rollouts, home: Path, tmp_path: Path) -> None:
    """Goal: rows in ``Sample.rollout_routed_experts``. Method: miles' ``generate_rollout`` of a file of prompts."""
    answers_and_prefix_hits(rollouts, home, tmp_path, NAME, ENGINE)


def test_turns(rollouts: Rollouts, home: Path, tmp_path: Path) -> None:
    """Goal: rows of a conversation. Method: miles' own loop of several turns with a tool."""
    turns_with_a_tool(rollouts, home, tmp_path, NAME, ENGINE)


def test_kv_from_outside(rollouts: Rollouts, home: Path, tmp_path: Path) -> None:
    """Goal: rows of KV that has left the device. Method: miles's rollouts over SGLang's pages on the host."""
    kv_from_outside(rollouts, home, tmp_path, NAME, ENGINE)


def test_an_update_amid_answers(rollouts: Rollouts, homes: dict[str, Path], tmp_path: Path) -> None:
    """Goal: each row is of the weights that its token was sampled with. Method: miles' engine is told what miles'
    update tells it."""
    an_update_amid_answers(rollouts, homes, tmp_path, NAME, ENGINE)
