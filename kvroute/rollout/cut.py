"""How a store cuts rollouts, as its URL says. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self

from cache_manager.errors import ConfigError
from cache_manager.storage.url import StoreUrl
from kvroute.routes import Routes
from kvroute.routes.parts import Grid

PART_NBYTES: Final = 64 << 10
"""Of a part at most, where nothing else is said."""
LAYERS_MAX: Final = 1024
"""Of a part: all layers of any model."""
PART_NBYTES_MIN: Final = 64
PART_NBYTES_MAX: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class CutSettings:
    """A part has ``layers`` of the layers, or as many as there are, and ``part_nbytes`` at most.

    With one layer, or as many as a stage has, a rank of pipeline parallelism reads its layers and nothing else.
    """

    PARAMETERS: ClassVar[tuple[str, ...]] = ("layers", "part")

    layers: int = 1
    part_nbytes: int = PART_NBYTES

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= LAYERS_MAX:
            raise ConfigError("rollout store parameter layers", f"1 to {LAYERS_MAX}, or all", self.layers)
        if not PART_NBYTES_MIN <= self.part_nbytes <= PART_NBYTES_MAX:
            wanted = f"{PART_NBYTES_MIN} to {PART_NBYTES_MAX} bytes"
            raise ConfigError("rollout store parameter part", wanted, self.part_nbytes)

    @classmethod
    def from_url(cls, url: StoreUrl, layers: int = 1) -> Self:
        """The parameters ``layers`` (a number, or all) and ``part`` (a size)."""
        text = url.parameters.get("layers", str(layers))
        if text != "all" and not (text.isascii() and text.isdecimal()):
            raise ConfigError("rollout store parameter layers", f"1 to {LAYERS_MAX}, or all", repr(text))
        return cls(LAYERS_MAX if text == "all" else int(text), url.nbytes("part", PART_NBYTES))

    def grid(self, routes: Routes) -> Grid:
        """How ``routes`` are cut."""
        rows, layers, top_k = routes.ids.shape
        cell_nbytes = top_k * routes.ids.itemsize
        return Grid.fit(rows, layers, cell_nbytes, part_layers=self.layers, part_nbytes=self.part_nbytes)


__all__ = ["LAYERS_MAX", "PART_NBYTES", "PART_NBYTES_MAX", "PART_NBYTES_MIN", "CutSettings"]
