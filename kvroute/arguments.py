"""Commands of a command line and their arguments: how a flag is written down, and how its text is read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from errno import EISDIR
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from cache_manager.errors import ConfigError
from kvroute.findings import STDOUT

MOST: Final = 2**63 - 1


class Integer(NamedTuple):
    """Reads a flag's value in ``[least, most]``."""

    least: int
    most: int

    def __call__(self, text: str) -> int:
        with suppress(ValueError):
            value = int(text)
            if self.least <= value <= self.most:
                return value
        wanted = f"an integer of {self.least} " + ("or more" if self.most == MOST else f"to {self.most}")
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")


Flag = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """Its help text, the function (``module:name``) that gets its flags by name, and the flags."""

    what: str
    run: str | Callable[..., int]
    flags: tuple[Flag, ...] = ()


def flag(*names: str, **options: Any) -> Flag:
    return names, options


def number(
    name: str,
    default: int | None,
    what: str,
    least: int = 1,
    most: int = MOST,
) -> Flag:
    return flag(name, type=Integer(least, most), default=default, metavar="N", help=what)


def file(text: str) -> Path:
    """A file that can be written: told before the work whose findings go there. Its directory is made.

    ``-`` is standard output.
    """
    if text == str(STDOUT):
        return STDOUT
    path = Path(text)
    try:
        if text.endswith(os.sep):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR), text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        wanted = f"wanted a file that can be written, got {text!r} ({error.strerror})"
        raise argparse.ArgumentTypeError(wanted) from error
    return path


def judged_flag(judge: str, *among: str, **how: Any) -> Callable[[str], str]:
    """Reads a flag's text, which ``judge``, a function ``module:name``, takes; so are the words ``among``."""

    def read(text: str) -> str:
        module, _, function = judge.partition(":")
        try:
            if text not in among:
                getattr(import_module(module), function)(text, **how)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"wanted {error.wanted}, got {error.got}") from error
        return text

    return read


STORE_URL = judged_flag("cache_manager.storage:check_store_url", "mooncake")
ROLLOUTS_URL = judged_flag("kvroute.rollout:check_rollouts_url", "")
SERVER_URL = judged_flag("kvroute.verify.asking:check_url")
ADDRESS = judged_flag("transfer.zmq_settings:check_address", field="address", curve=False)
JSON = flag("--json", type=file, metavar="FILE", help="write the findings to this file, too; - is standard output")

__all__ = [
    "ADDRESS",
    "JSON",
    "ROLLOUTS_URL",
    "SERVER_URL",
    "STORE_URL",
    "Command",
    "Flag",
    "Integer",
    "file",
    "flag",
    "judged_flag",
    "number",
]
