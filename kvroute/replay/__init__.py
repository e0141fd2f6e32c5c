"""Routes in the form that each trainer takes. One module per trainer; import only the one in use: most need torch.

What the routers used of them is seen by :func:`watch`, whose names are here, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvroute.replay.receipts import Gap as Gap
    from kvroute.replay.receipts import Receipt as Receipt
    from kvroute.replay.receipts import Use as Use
    from kvroute.replay.rows import ReplayError as ReplayError
    from kvroute.replay.watching import Watch as Watch
    from kvroute.replay.watching import watch as watch

_HOME = {"Gap": "receipts", "Receipt": "receipts", "Use": "receipts", "ReplayError": "rows"}
_HOME |= {"Watch": "watching", "watch": "watching"}  # with torch, which is loaded when one of these is first asked for
__all__ = ["Gap", "Receipt", "ReplayError", "Use", "Watch", "watch"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"kvroute.replay.{_HOME[name]}"), name)
