"""The line in an engine's log that says what kvroute does there, once, at its start. Pure."""

from __future__ import annotations

from cache_manager.spec import AuxBlockDataSpec
from kvroute import __version__
from kvroute.connector.settings import RESPONSE, Common
from kvroute.connector.versions import AS_LOADED


def started(
    engine: str,
    spec: AuxBlockDataSpec,
    settings: Common,
    *,
    captured: int,
    blocks: int,
    carrier: str,
    version: int,
) -> str:
    """What an operator would ask first. ``engine`` is its name and version; ``captured`` of the spec's layers have a
    hook; ``version`` is that of a namespace.

    >>> from kvroute.connector.settings import Settings
    >>> attrs = {"num_experts": 8, "layer_ids": [0, 1], "num_layers": 3}
    >>> spec = AuxBlockDataSpec("routing", (2, 4), "uint8", 16, attrs)
    >>> print(started("vLLM 0.32.0", spec, Settings(), captured=2, blocks=512, carrier="none", version=17))
    ... # doctest: +ELLIPSIS
    kvroute ... in vLLM 0.32.0: 2 of 2 routed layers captured, top 4 of 8 experts; ...; weights version 17
    """
    layers, top_k = spec.row_shape
    rollouts = {"": "none", RESPONSE: "in the answer"}.get(settings.rollouts, settings.rollouts)
    return (
        f"kvroute {__version__} in {engine}: {captured} of {layers} routed layers captured, "
        f"top {top_k} of {spec.attrs['num_experts']} experts; {blocks} blocks of {spec.block_tokens} tokens; "
        f"carrier {carrier}; store {settings.store or 'none'}; rollouts {rollouts}; "
        f"weights version {version if version < AS_LOADED else 'unknown'}"
    )


__all__ = ["started"]
