"""kvroute in an SGLang process: a door at the scheduler's start, and the hooks behind it.

SGLang's own registry of hooks logs what fails and goes on, and so does its plugin loader. So nothing is decided there:
the plugin places the door alone. A scheduler that is to return routed experts starts with every hook in place, or not
at all; any other scheduler is left as it is.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any

from cache_manager.errors import ConfigError
from kvroute.integrations.sglang import versions
from kvroute.integrations.sglang.settings import settings_of_arguments

logger = logging.getLogger(__name__)

Undo = Callable[[], None]


@cache
def register_door() -> None:
    """Once in a process, however many installed packages name the plugin.

    Ends the process if there is no such door, because SGLang would go on with rows that nobody follows.
    """
    try:
        wrap(versions.DOOR, _guarded)
    except (ImportError, AttributeError) as error:
        why = "kvroute cannot work in this SGLang, which lacks"
        raise SystemExit(f"{why} {versions.DOOR} ({error}): leave it out of SGLANG_PLUGINS") from error


def wrap(place: str, wrapper: Callable[..., Any]) -> Undo:
    """Replace the function at ``place`` with ``wrapper(function, *its arguments)``. Returns what undoes that."""
    owner, name = versions.resolved(place)
    held, own = inspect.getattr_static(owner, name), name in vars(owner)
    function = held.__func__ if isinstance(held, staticmethod) else held

    @wraps(function)
    def wrapped(*args: Any, **named: Any) -> Any:
        return wrapper(function, *args, **named)

    setattr(owner, name, staticmethod(wrapped) if isinstance(held, staticmethod) else wrapped)
    return partial(setattr, owner, name, held) if own else partial(delattr, owner, name)


def _guarded(start: Callable[..., Any], scheduler: Any, server_args: Any, *args: Any, **named: Any) -> None:
    """The door: ``Scheduler.__init__``."""
    if not getattr(server_args, "enable_return_routed_experts", False):
        logger.info("kvroute does nothing here: routed experts are not asked for (--enable-return-routed-experts)")
        start(scheduler, server_args, *args, **named)
        return
    begin(server_args)
    start(scheduler, server_args, *args, **named)
    from kvroute.integrations.sglang.hooks import handover
    from kvroute.integrations.sglang.metrics import export

    handover(scheduler)
    export(scheduler)


@cache
def _hooked(version: str) -> None:
    from kvroute.integrations.sglang.hooks import HOOKS

    hook_all({name: HOOKS[hook] for hook, name in versions.hooked(version).items()})


def begin(server_args: Any) -> None:
    """Put every hook in place. :class:`ConfigError` for a version in which kvroute cannot work: then there is none."""
    import sglang  # type: ignore[import-not-found]

    settings = settings_of_arguments(server_args)
    if (refusal := versions.unfit(sglang.__version__, settings.untested)) is not None:
        raise ConfigError("SGLang with kvroute", *refusal)
    _hooked(sglang.__version__)


def hook_all(wrappers: Mapping[str, Callable[..., Any]]) -> None:
    """All of them, by their places, or none: :class:`ConfigError` if one fails."""
    undo: list[Undo] = []
    for place, wrapper in wrappers.items():
        try:
            undo.append(wrap(place, wrapper))
        except Exception as error:  # whatever it is, the earlier hooks must not stay
            for undo_hook in reversed(undo):
                undo_hook()
            raise ConfigError("SGLang with kvroute", f"a function at {place}", repr(error)) from error


__all__ = ["begin", "hook_all", "register_door", "wrap"]
