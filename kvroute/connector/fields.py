"""The names under which answers and requests speak of routes, and what a request may ask for under them.

Beside an answer goes ``{"kvroute": {"routes": {i: routes}, "rollouts": {i: handle}, "unseen": {i: spans}, "missing":
{i: gaps}, "error": {i: text}, "routing_weights": {i: weights}}}``. ``i`` is a completion's number among those of its
prompt, ``"0"`` where there is one.
It has routes, as :meth:`Routes.to_json` says, or where a rollout store is used handles of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cache_manager.errors import RowError
from kvroute.connector.key import checked_key
from kvroute.connector.tickets import TRANSFER

FIELD: Final = "kvroute"
ROUTES: Final = "routes"
LEFT: Final = "rollouts"
UNSEEN: Final = "unseen"
WEIGHTS: Final = "routing_weights"
GAPS: Final = "missing"
ERROR: Final = "error"
START: Final = "start"
"""A request's option under :data:`FIELD`: the position of the first row in its answer."""
MTP_FIELD: Final = "kvroute_mtp"
"""Beside an answer, of the rows of an MTP layer: ``{i: {"routes": routes, "missing": gaps}}``."""
KEY: Final = "key"
"""A request's option under :data:`FIELD`: where its routes lie in a rollout store."""
OPTIONS: Final = f"a mapping with {START} or {KEY}"
ASKED: Final = (START, KEY, TRANSFER, ROUTES, WEIGHTS, LEFT, UNSEEN, GAPS, ERROR)
"""Keys of a request's mapping under :data:`FIELD`. All but the first two are of an answer of prefill, which goes on as
it is; of those kvroute reads the first."""


class Options(NamedTuple):
    """A request's own options."""

    start: Any = 0  # judged where the prompt is known
    key: str | None = None


def options_of(options: Any) -> Options:
    """The options that a request has in its mapping ``options`` under :data:`FIELD`.

    Raises :class:`RowError` for anything but a mapping, for an unknown name in it, and for a key that is not one.
    """
    if options is None:
        return Options()
    if not isinstance(options, Mapping):
        raise RowError(FIELD, OPTIONS, repr(options))
    for name in options:
        if name not in ASKED:
            raise RowError(FIELD, OPTIONS, f"the key {name!r}")
    key = None
    if KEY in options:
        key = checked_key(options[KEY], f"{FIELD}.{KEY}")
    return Options(options.get(START, 0), key)


__all__ = [
    "ERROR",
    "FIELD",
    "GAPS",
    "KEY",
    "LEFT",
    "MTP_FIELD",
    "ROUTES",
    "START",
    "UNSEEN",
    "WEIGHTS",
    "Options",
    "options_of",
]
