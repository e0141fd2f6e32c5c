"""Which weights made the rows: the version of a step's rows, and the namespace that they are stored in.

The law: a version is known if it was given, and nothing has happened since that may have changed the weights. Rows are
stored under the name of the weights that made all of their KV, and otherwise not at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cache_manager.keys import Namespace

AS_LOADED: Final = (1 << 32) - 1
"""In a namespace: the weights that an engine began with, without a given version. Versions are below this number."""


def version_of(name: str) -> int | None:
    """The version that an engine calls ``name``; ``None`` if that is not a whole number from 0 to 4294967294."""
    number = int(name) if name.isascii() and name.isdecimal() else AS_LOADED
    return number if number < AS_LOADED else None


class Versions:
    """What is known about one engine's weights, which begins with ``namespace`` and the ``given`` version.

    ``named``: the operator has named the weights, so that name and version say which they are, here and in other
    engines. Otherwise the namespace's model is a digest of the loaded weights, which says nothing about later ones.
    ``renamed`` is called with each new namespace, when there are no rows or all are forgotten.
    """

    def __init__(
        self,
        namespace: Namespace,
        version: int | None,
        renamed: Callable[[Namespace], object],
        *,
        named: bool,
    ) -> None:
        self.version = version
        """The version of the present weights; ``None``: unknown."""
        self.mixed = False
        """Whether present computations may use KV of other weights: then nothing is stored, and nothing comes from a
        store. Otherwise the present weights made all rows."""
        self.changes = 0
        """How often the weights may have changed."""
        self.adapters: set[int] = set()
        """Numbers of added adapters, so that a caller can see whether one replaces another."""
        self._namespace = namespace
        self._renamed = renamed
        self._named = named
        self._sure = True  # neither computed nor paused since the version was given
        self._empty = True  # not computed since all KV was forgotten

    def changed(self, version: int | None = None) -> None:
        """The weights are of this version from the next step on; ``None``: of an unknown version.

        Existing rows keep their version. If KV is kept, too, nothing is stored before it is :meth:`forgotten`.
        """
        self.version = version
        self._sure = version is not None
        self.changes += 1
        self.mixed = not self._empty
        if self._empty:
            self._rename()

    def computes(self) -> None:
        """A step computes or loads tokens."""
        self._sure = self._empty = False

    def paused(self) -> None:
        """Nothing is computed until :meth:`resumed`: weights may change without notice."""
        self._sure = False

    def resumed(self) -> None:
        """Later rows have a version only if one was given since the pause."""
        if not self._sure:
            self.changed()

    def forgotten(self) -> None:
        """All KV was forgotten, as for other weights. The version stays valid if it was given since the last step."""
        if not self._sure:
            self._empty = False  # and renamed below
            self.changed()
        self.mixed = False
        self._empty = True
        self._rename()

    def _rename(self) -> None:
        if self.changes:  # else the weights are as they were loaded
            known = self.version if self._named else None
            alone = AS_LOADED + 1 + secrets.randbits(62)  # no other engine has this number, and it is not a version
            self._namespace = replace(self._namespace, weights_version=alone if known is None else known)
        self._renamed(self._namespace)


__all__ = ["AS_LOADED", "Versions", "version_of"]
