"""A rollout store in files that takes nothing before its gate is open: a file named ``open`` in its directory."""

from __future__ import annotations

import time
from pathlib import Path

from waiting import GIVE_UP_S

from cache_manager.storage.url import StoreUrl
from kvroute import Routes
from kvroute.rollout import RolloutHandle
from kvroute.rollout.local import LocalRollouts


class GatedRollouts(LocalRollouts):
    def put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        give_up_s = time.monotonic() + GIVE_UP_S
        while not (self.directory / "open").exists():
            assert time.monotonic() < give_up_s, "nobody opened the gate"
            time.sleep(0.01)
        return super().put(rollout_id, routes)


def opened(url: StoreUrl) -> GatedRollouts:
    """``gated:///dir``"""
    return GatedRollouts(Path(url.path))
