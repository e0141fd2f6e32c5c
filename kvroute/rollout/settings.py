"""How a rollout store cuts what it is given, and how its URL says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from cache_manager.errors import ConfigError
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.grid import PART_NBYTES, PART_NBYTES_MAX, PART_NBYTES_MIN, Grid
from kvroute.routes import Routes


@dataclass(frozen=True, slots=True)
class CutSettings:
    """``fused`` puts all layers of a row into one part; else every layer has its own parts, of ``part_nbytes`` at most.

    Per layer, a rank of pipeline parallelism reads its layers and nothing else; fused, a rollout has fewer, larger
    files.
    """

    PARAMETERS: ClassVar[tuple[str, ...]] = ("fused", "part")

    fused: bool = False
    part_nbytes: int = PART_NBYTES

    def __post_init__(self) -> None:
        if not PART_NBYTES_MIN <= self.part_nbytes <= PART_NBYTES_MAX:
            raise ConfigError(
                "rollout store parameter part", f"{PART_NBYTES_MIN} to {PART_NBYTES_MAX} bytes", self.part_nbytes
            )

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """The parameters ``fused`` (true or false) and ``part`` (a size)."""
        fused = url.choice("fused", ("true", "false"), "false") == "true"
        return cls(fused, url.nbytes("part", PART_NBYTES))

    def grid(self, routes: Routes) -> Grid:
        """How ``routes`` are cut."""
        layers = len(routes.layer_ids)
        return Grid.fit(
            len(routes),
            layers,
            routes.top_k * routes.ids.itemsize,
            part_layers=layers if self.fused else 1,
            part_nbytes=self.part_nbytes,
        )


__all__ = ["CutSettings"]
