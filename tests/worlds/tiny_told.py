"""That a manager of a page fails by its one fault."""

from __future__ import annotations

from typing import Any

from finding import check_found
from tiny_managers import Plain

from cache_manager.testing.life import Operation, replay


def check_sound_without(fault: Any) -> list[Operation]:
    """The story of a manager of ``tiny_managers`` with a fault, which its manager without the fault passes."""
    program = check_found(fault, (fault.breaks, *fault.also))
    sound = next(manager for manager in fault.__mro__ if manager.__module__ == Plain.__module__)
    replay(sound, program)
    return program
