"""Calls that an exception from a signal handler ends in the middle, at each place where that can happen."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from types import FrameType

from budget import FACTOR

import cache_manager
from cache_manager.blocks import AuxBlocks

HOME = os.path.dirname(cache_manager.__file__)
EVERY = 1 if FACTOR > 1 else 5  # place where a call can be interrupted


class StoppedError(Exception):
    """What a signal handler raises, such as a keyboard interrupt."""


def interrupt(blocks: AuxBlocks, block: int) -> None:
    """A call that forgets ``block`` is ended in the middle of its change, and the next call finds that."""
    at = 0
    while not blocks.counters.interrupted_calls:
        at += 1
        assert is_stopped(lambda: blocks.forget([block]), at), "it has no such place"
        blocks.generations([block])


def is_stopped(call: Callable[[], object], at: int) -> bool:
    """Make a call during which something is raised where the interpreter runs signal handlers for the ``at``-th time in
    our code: when a function has begun, or a call of a C function has ended. Returns whether there was such a place.
    No garbage is collected meanwhile: the interpreter drops what is raised in the finaliser of an earlier store."""
    places = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal places
        file = frame.f_code.co_filename
        if event in ("call", "c_return") and file.startswith(HOME):
            places += 1
            if places == at:
                sys.setprofile(None)
                raise StoppedError

    gc.disable()
    sys.setprofile(profile)
    try:
        call()
    except StoppedError:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return places >= at
