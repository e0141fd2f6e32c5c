"""What can go wrong while routes are captured."""

from __future__ import annotations

from cache_manager.errors import InvalidInputError


class CaptureError(InvalidInputError):
    """A model whose routers do not fit the spec, or a forward pass that did not route every layer exactly once.

    Rows of that pass are not handed out: a layer that a fused kernel bypassed would otherwise read as expert 0.
    """
