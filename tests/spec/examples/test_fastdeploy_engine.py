"""The recorded FastDeploy-like engine: a trainer reads what was recorded, from each store that its keys name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import GIVE_UP_S

EXAMPLE = Path(__file__).parents[3] / "examples" / "fastdeploy_engine.py"
ON = {"enable_routing_replay": True}


def run(directory: Path, config: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), "--routing-replay-config", json.dumps(config)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=GIVE_UP_S, env=os.environ)


@pytest.mark.parametrize(
    "keys", [{}, {"local_store_dir": "fused", "use_fused_put": True}, {"rollout_store": "file:elsewhere"}]
)
def test_a_trainer_reads_what_was_recorded(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Goal: FastDeploy's configuration drives a whole engine. Method: requests are computed in chunks and swapped."""
    done = run(tmp_path, ON | keys)
    assert (done.returncode, done.stderr) == (0, "")
    served, read = done.stdout.splitlines()
    assert served.startswith("12 requests in ")
    assert int(served.split(", ")[1].split()[0]) > 2, served
    assert read.endswith(": 0 wrong")
    assert int(read.split()[0]) > 10_000
    stores = {path.name for path in tmp_path.iterdir()}
    assert stores == {keys.get("local_store_dir", keys.get("rollout_store", "routing_replay_output")).split(":")[-1]}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "enable_routing_replay: wanted true, for there to be a manager, got False"),
        (ON | {"moe_top_k": 3}, "moe_top_k: wanted 4, as the model has, got 3"),
        (ON | {"rdma_store_server": 7}, "routing replay config: wanted a JSON object with the keys"),
    ],
)
def test_what_cannot_be_followed_is_one_line(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    done = run(tmp_path, config)
    assert done.returncode == 1
    assert done.stderr.startswith(told)
    assert len(done.stderr.splitlines()) == 1
