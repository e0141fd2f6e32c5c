"""What can go wrong between two processes, as types; see :mod:`cache_manager.errors` for the three kinds of "no"."""

from __future__ import annotations

from cache_manager.errors import KVRouteError


class TransferError(KVRouteError):
    """Every failure of a transfer that is raised on purpose."""


class LocalProtocolError(TransferError):
    """This side asked its own session for something that its state does not allow; nothing was changed or sent."""


class RemoteProtocolError(TransferError):
    """The other side sent bytes that are not a message, or a message that may not come now; nothing was changed.

    Decoders raise it; sessions and links count it and go on.
    """


class IncompatiblePeerError(TransferError):
    """The two sides' rows have different meanings: no transfer between them can be right."""

    def __init__(self, field: str, wanted: object, got: object) -> None:
        super().__init__(f"peer's {field}: wanted {wanted}, got {got}")
        self.field = field
        self.wanted = wanted
        self.got = got


class SinkError(TransferError):
    """The engine's own code has raised an error instead of taking a record, which is missing."""


class NodeClosedError(TransferError):
    """The node was closed, its thread has ended, or this is a forked process."""


class NodeFullError(TransferError):
    """A limit of a node, or of a lender over it, is reached; nothing was changed, try again later."""

    def __init__(self, field: str, wanted: int, got: object) -> None:
        super().__init__(f"{field}: wanted at most {wanted}, got {got}")
