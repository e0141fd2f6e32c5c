"""Which of vLLM's layers, which it tells apart by their names, are the model's own, and which a draft model's.

vLLM makes the model before its draft, and no two layers have one name. So the names of the model's layers begin as the
first one does, up to its number (``model.layers.``). A draft's layers have other names (``mtp.layers.0.self_attn``,
``draft_model.model.layers.0.self_attn``), or numbers behind the model's last one (``model.layers.61.self_attn``).
"""

from __future__ import annotations

from collections.abc import Iterable


def own_layers(names: Iterable[str], count: int) -> list[str]:
    """The layers of the model itself, which has so many, among those with these ``names``; vLLM made the first one
    first."""
    ordered = list(names)
    if not ordered:
        return []
    root, _ = _parts(ordered[0])
    return [name for name in ordered if is_own(name, root, count)]


def root_of(name: str) -> str:
    """What stands before the number of a layer: ``model.layers.`` of ``model.layers.3.self_attn``."""
    return _parts(name)[0]


def is_own(name: str, root: str, count: int) -> bool:
    """Whether a layer is one of the first ``count`` under this ``root``."""
    before, number = _parts(name)
    return before == root and number is not None and number < count


def _parts(name: str) -> tuple[str, int | None]:
    """A name up to its first number, and the number; all of a name that has none."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return "".join(f"{before}." for before in parts[:place]), int(part)
    return name, None


__all__ = ["is_own", "own_layers", "root_of"]
