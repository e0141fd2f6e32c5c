"""What can go wrong while routes are handed to a trainer."""

from __future__ import annotations

from cache_manager.errors import InvalidInputError


class ReplayError(InvalidInputError):
    """Routes that a trainer must not be given, or a model that cannot be given routes; nothing was replayed."""
