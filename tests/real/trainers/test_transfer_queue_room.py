"""A Ray cluster that is too small for a TransferQueue."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_manager.errors import StorageError
from kvroute.rollout import open_rollouts


@pytest.mark.usefixtures("cluster")
def test_a_cluster_without_cpus_for_a_queue_is_refused_at_once(tmp_path: Path) -> None:
    """Goal: an engine hears why; it once waited for 300 s in TransferQueue. Method: two CPUs, and no queue."""
    with pytest.raises(StorageError, match=r"a queue takes 3 CPUs; the cluster has 2, of which 2 are free"):
        open_rollouts(f"tq:?partition=room,file://{tmp_path}")
