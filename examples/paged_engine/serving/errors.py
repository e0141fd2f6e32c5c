"""What a server answers when it cannot do what it was asked."""

from __future__ import annotations

from cache_manager.errors import KVRouteError


class ServingError(KVRouteError):
    """A request ends without an answer; ``status`` is the HTTP status that says so."""

    status = 500


class BusyError(ServingError):
    """As many requests are in flight as may be; try again later."""

    status = 503


class DrainingError(ServingError):
    """The server is about to end and takes nothing on."""

    status = 503


class EngineFailedError(ServingError):
    """The engine has failed; it will not come back in this process."""

    status = 500


class UpstreamError(ServingError):
    """No server that could do the work has done it; the message has each one's reason."""

    status = 502


class NoServerError(UpstreamError):
    """No server could be reached, or all are busy."""

    status = 503


class UpstreamTimeoutError(UpstreamError):
    """The time for the request was over before a server answered."""

    status = 504


__all__ = [
    "BusyError",
    "DrainingError",
    "EngineFailedError",
    "NoServerError",
    "ServingError",
    "UpstreamError",
    "UpstreamTimeoutError",
]
