"""What a ``RoutingReplayConfig`` means for an engine: which rows it captures, and what becomes of them."""

from __future__ import annotations

from concurrent.futures import Future

from cache_manager.errors import ConfigError
from cache_manager.ports import StorageBackend
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from kvroute.capture.canary import canary_spec, check_canary
from kvroute.config import RoutingReplayConfig
from kvroute.rollout import RolloutHandle
from kvroute.rollout.manager import RoutingReplayManager
from kvroute.routes import Routes
from paged_engine.request import Request


class EngineReplay:
    """The parts of an engine that its configuration chooses; without one, rows are captured and stored nowhere.

    ``store`` is the one that the engine is to use: the one given, or the one that ``block_store`` names, which
    :meth:`close` closes.
    """

    def __init__(
        self, config: RoutingReplayConfig | None, spec: AuxBlockDataSpec, store: StorageBackend | None
    ) -> None:
        on = config is not None and config.enable_routing_replay
        self.captures = config is None or on
        self.spec = canary_spec(spec) if on and config is not None and config.debug_mode else spec
        self.required = config.required if on and config is not None else None
        self.store = store
        self._opened: StorageBackend | None = None
        self.manager: RoutingReplayManager | None = None
        self.debug = self.spec is not spec
        if config is None or not on:
            return
        if config.block_store and store is not None:
            raise ConfigError("block_store", "'', as the engine was given a store", repr(config.block_store))
        self.manager = RoutingReplayManager(config.fitted(spec), self.spec)
        if config.block_store:
            try:
                self.store = self._opened = open_store(config.block_store)
            except BaseException:
                self.manager.close()
                raise

    def check(self, request: Request) -> None:
        """Raise ``InvalidInputError`` for a request whose rollouts could have no names."""
        if self.manager is not None:
            self.manager.check(request.id, request.n)

    def submit(self, request: Request, sample: int, routes: Routes) -> Future[RolloutHandle] | None:
        """Hand over what a sample that ended has; ``None`` when there is nothing, or nowhere to hand it to."""
        if self.debug:
            check_canary(self.spec, routes)
        if self.manager is None or not len(routes):
            return None
        return self.manager.submit(request.id, routes, sample=sample)

    def close(self) -> None:
        """Store what was submitted and close what was opened; raises what the manager has to report."""
        try:
            if self.manager is not None:
                self.manager.close()
        finally:
            if self._opened is not None:
                self._opened.flush()
                self._opened.close()


__all__ = ["EngineReplay"]
