"""The key by which the routes of a request lie in a rollout store: a name that its client gives it, and never again.

A request carries it: ``kv_transfer_params: {"kvroute": {"key": "..."}}``. Of several completions of one prompt number
``i`` has the key ``<key>~<i>`` (:func:`choice_key`). A request without one has the engine's own name for it as a key,
which its client does not know: its routes are found by the handle in its answer, and not otherwise.

A rollout's id is ``<key>@<hash>``, with the hash of the prompt's tokens: a list of prompts has one key. It is all that
both sides know of a request whose answer was cut short (an abort, a stop string). If a second request leaves routes
under one id, :func:`void` ones take their place: what lies there belongs to nobody for certain. Pure: no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cache_manager.errors import RowError
from kvroute.routes import Layout, Routes
from kvroute.routes.routes import checked_routes
from kvroute.routes.token_hash import token_hash

KEY_MAX: Final = 128
"""Characters of a client's key."""
WANTED: Final = f"1 to {KEY_MAX} letters and digits of ASCII, and characters of -_.:"
CHOICE: Final = "~"
_KEY_TEXT = re.compile(rf"[A-Za-z0-9_.:-]{{1,{KEY_MAX}}}")
_OF_CHOICE = re.compile(rf"{_KEY_TEXT.pattern}({CHOICE}[0-9]{{1,9}})?")


@dataclass(frozen=True, slots=True)
class Key:
    """The key of one request of an engine.

    ``of_client``: a client has chosen it, and may look for routes under it. ``choice`` is the request's number among
    the completions of its prompt, ``group`` a name that those have in common, if it may be one of several.
    """

    text: str
    of_client: bool = False
    choice: int = 0
    group: str | None = None

    @classmethod
    def of(cls, request_id: str, key: str | None = None) -> Key:
        """The key of vLLM's request ``request_id``, for which its client has given this one.

        vLLM's ids of several completions are ``<i>_`` and a common id. A client's own id may begin like that, too: the
        group of such a request has one member, and its key the number.
        """
        number, _, parent = request_id.partition("_")
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            return cls(request_id if key is None else key, key is not None)
        choice = int(number)
        return cls(request_id if key is None else choice_key(key, choice), key is not None, choice, parent)


def checked_key(key: Any, field: str) -> str:
    """``key``, as a client gives it with its request; :class:`RowError` that names ``field`` for anything else."""
    if not isinstance(key, str) or _KEY_TEXT.fullmatch(key) is None:
        raise RowError(field, WANTED, repr(key)[:200])
    return key


def checked_choice(key: Any, field: str) -> str:
    """``key``, of a request or of one of its choices; :class:`RowError` that names ``field`` for anything else."""
    if not isinstance(key, str) or _OF_CHOICE.fullmatch(key) is None:
        wanted = f"{WANTED}, and of a choice {CHOICE} and its number"
        raise RowError(field, wanted, repr(key)[:200])
    return key


def choice_key(key: str, choice: int) -> str:
    """The key of completion ``choice`` of a prompt, where ``n > 1``.

    >>> choice_key("sample-17", 3)
    'sample-17~3'
    """
    return f"{key}{CHOICE}{choice}"


def rollout_id(key: str, prompt: Sequence[int]) -> str:
    """The id of the rollout of a request with this ``key`` and these tokens in its ``prompt``.

    >>> rollout_id("sample-17", [1, 2, 3])
    'sample-17@2433db8a68579e7a195c621964573b5b'
    """
    return f"{key}@{token_hash(prompt).hex()}"


def void(layout: Layout) -> Routes:
    """What lies in place of the routes of several requests: no row, bound to no tokens."""
    shape = (0, len(layout.layer_ids), layout.top_k)
    return checked_routes(layout, np.empty(shape, layout.dtype), np.empty(shape[:2], np.bool_))


def is_void(routes: Routes) -> bool:
    return not len(routes) and not routes.token_hashes


__all__ = ["Key", "checked_choice", "checked_key", "choice_key", "is_void", "rollout_id", "void"]
