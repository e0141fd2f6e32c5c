"""An engine with routing weights under a scheduler that acts at random: each id has its own pass's weight."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from toy_requests import weights_of

from kvroute.connector import routing_weights
from tests.machines.connector_house import House


class WeightsHouse(House):
    """A :class:`House` whose answers have weights; at times its routers tell none."""

    settings = MappingProxyType({"routing_weights": True})

    def __init__(self, seed: int, home: Path) -> None:
        super().__init__(seed, home)
        self.judged = 0

    def url(self, home: Path, *, near: bool) -> tuple[str, str]:
        return "response:", ""

    def odds(self) -> dict[str, int]:
        return super().odds() | {"routers_fall_silent": 1}

    def routers_fall_silent(self) -> None:
        """In the steps until now they told their weights, or did not; now it is the other way round."""
        self.toy.quiet = not self.toy.quiet

    def _step(self, *arguments: Any, **more: Any) -> None:
        before = dict(self.kv)
        super()._step(*arguments, **more)
        if self.toy.quiet:  # what was computed may be missing, as what was loaded
            new = [slot for slot, kv in self.kv.items() if before.get(slot) is not kv]
            self.kv.update({slot: self.kv[slot]._replace(loaded=True) for slot in new})

    def found(self, answer: dict[str, Any], **_: Any) -> Any:
        """The routes of an answer, whose weights are kept for :meth:`_judge`."""
        self.weighed = routing_weights(answer)
        return self.weighed.routes

    def _judge(self, said: Any, found: Any) -> None:
        super()._judge(said, found)
        for i, kv in enumerate(said.due[: found.stop]):
            known = found.known[i]
            due = weights_of(kv.prefix, kv.weights)[list(found.layer_ids)]
            assert self.weighed.weights[i][known].tobytes() == due[known].tobytes(), f"{said.key}: at {i}, due {kv}"
            assert np.isnan(self.weighed.weights[i][~known]).all()
            self.judged += int(known.sum())


__all__ = ["WeightsHouse"]
