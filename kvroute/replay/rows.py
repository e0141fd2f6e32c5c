"""Which rows of a sequence a trainer is given."""

from __future__ import annotations

from kvroute.replay.errors import ReplayError
from kvroute.routes import Routes


def read_rows(tokens: int) -> int:
    """How many of ``tokens`` tokens were read by a forward pass and have a row: all but the last."""
    if tokens < 1:
        raise ReplayError("tokens", "at least one", tokens)
    return tokens - 1


def cut(routes: Routes, tokens: int) -> Routes:
    """``routes`` without the rows behind ``tokens`` tokens, as a trainer that truncates a response has them."""
    return routes.slice(routes.start, max(routes.start, min(routes.stop, tokens)))
