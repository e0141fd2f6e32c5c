"""Routes in a FastDeploy-like engine: the configuration that its users already have, and what stores their rollouts."""

from kvroute.integrations.fastdeploy.config import RoutingReplayConfig
from kvroute.integrations.fastdeploy.manager import ReplayCounters, RoutingReplayManager

__all__ = ["ReplayCounters", "RoutingReplayConfig", "RoutingReplayManager"]
