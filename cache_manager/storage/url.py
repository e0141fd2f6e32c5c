"""A store's URL, taken apart: ``scheme:path?name=value&...``.

A URL may hold others, ``scheme:url,url`` or ``scheme:?name=value&...,url,url``. A comma divides if a scheme follows it;
a comma of a URL's own before a scheme is written ``%2C``.

The adapter named by the scheme reads its own parameters from here; an unknown one is a :class:`ConfigError`, so that a
misspelt ``quota`` never turns into a default. Pure: text in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote, urlsplit

from cache_manager.errors import ConfigError

_SIZES: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZE_MAX: Final = (1 << 63) - 1  # of a file
_SECONDS_MAX: Final = 36_525 * 86_400  # a century
_COMPOSITE = re.compile(r"([a-z][a-z0-9+.-]*):(\?[^,]*,)?(?=[a-z][a-z0-9+.-]*:)")
_DIVIDER = re.compile(r",(?=[a-z][a-z0-9+.-]*:)")
_MEASURE = re.compile(r"([0-9]{1,18})([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of a store's URL; ``path`` is percent-decoded, ``parameters`` are as written.

    ``tiers`` are the texts of the URLs that it holds, if any; its path is then all of them.

    >>> url = StoreUrl.parse("file:///var/lib/kvroute?quota=1GiB")
    >>> url.scheme, url.path, url.nbytes("quota", default=0)
    ('file', '/var/lib/kvroute', 1073741824)
    >>> StoreUrl.parse("tiered:?queue=1GiB,file:///a,b?quota=1GiB,mooncake://h:1").tiers
    ('file:///a,b?quota=1GiB', 'mooncake://h:1')
    """

    text: str
    scheme: str
    host: str
    path: str
    parameters: Mapping[str, str]
    tiers: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """:class:`ConfigError` for text that is not a URL, or that names a parameter twice or without a value."""
        if not isinstance(text, str):
            raise ConfigError("store", "a URL such as file:///var/lib/kvroute", repr(text))
        own = text
        held = ""
        tiers = tuple[str, ...]()
        if (composite := _COMPOSITE.match(text)) is not None:
            own = text[: composite.end()].rstrip(",")
            held = text[composite.end() :]
            tiers = tuple(_DIVIDER.split(held))
        try:
            parts = urlsplit(own)
        except ValueError as error:
            raise ConfigError("store", "a URL such as file:///var/lib/kvroute", repr(text)) from error
        if not parts.scheme:
            raise ConfigError("store", "a URL such as file:///var/lib/kvroute", repr(text))
        if parts.fragment:
            raise ConfigError("store", "a URL without '#' (write it as %23)", repr(text))
        parameters: dict[str, str] = {}
        for part in parts.query.split("&") if parts.query else ():
            name, equals, value = part.partition("=")
            if not (name and equals and value):
                raise ConfigError("store parameter", "name=value", repr(part))
            if name in parameters:
                raise ConfigError(f"store parameter {name}", "one value", repr(text))
            parameters[name] = unquote(value)
        return cls(text, parts.scheme, parts.netloc, held or unquote(parts.path), MappingProxyType(parameters), tiers)

    def allow(self, *names: str) -> None:
        """:class:`ConfigError` when the URL has a parameter that is not one of ``names``."""
        for name in self.parameters:
            if name not in names:
                raise ConfigError(f"{self.scheme}: store parameter", "one of " + ", ".join(names), repr(name))

    def nbytes(self, name: str, default: int) -> int:
        """The size called ``name``, such as ``4096`` or ``64MiB``, in bytes: above zero, and below 2**63."""
        return default if name not in self.parameters else int(self._measure(name, _SIZES, _SIZE_MAX, "bytes"))

    def seconds(self, name: str, default: float | None) -> float | None:
        """The duration called ``name``, such as ``500ms``, ``15m`` or ``7d``, in seconds: above zero, and a century at
        most."""
        return default if name not in self.parameters else self._measure(name, _SECONDS, _SECONDS_MAX, "seconds")

    def _measure(self, name: str, units: Mapping[str, float], most: int, unit: str) -> float:
        text = self.parameters[name]
        match = _MEASURE.fullmatch(text)
        if match is None or match[2] not in units or int(match[1]) == 0:
            wanted = "a positive whole number with one of the units " + ", ".join(filter(None, units))
            raise ConfigError(f"{self.scheme}: store parameter {name}", wanted, repr(text))
        measure = int(match[1]) * units[match[2]]
        if measure > most:
            raise ConfigError(f"{self.scheme}: store parameter {name}", f"{most} {unit} at most", repr(text))
        return measure

    def milliseconds(self, name: str, default: int) -> int:
        """The whole number of milliseconds called ``name``."""
        text = self.parameters.get(name, str(default))
        if not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"{self.scheme}: store parameter {name}", "whole milliseconds", repr(text))
        return int(text)

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """The parameter called ``name``, which has to be one of ``choices``."""
        value = self.parameters.get(name, default)
        if value not in choices:
            raise ConfigError(f"{self.scheme}: store parameter {name}", "one of " + ", ".join(choices), repr(value))
        return value
