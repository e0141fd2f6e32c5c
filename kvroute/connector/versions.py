"""Which weights rows are of: the version that rows of a step have, and the namespace that they are stored in.

The law: a version is known if somebody has given it, and nothing has happened since by which weights may have changed.
Rows are stored under the name of the weights that made all of their KV, and otherwise not at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cache_manager.keys import Namespace

AS_LOADED: Final = (1 << 32) - 1
"""In a namespace: the weights that an engine began with, of which nobody has given a version. Versions are below it."""


def version_of(name: str) -> int | None:
    """The version that an engine calls ``name``; ``None`` for a name that is no whole number from 0 to 4294967294."""
    number = int(name) if name.isascii() and name.isdecimal() else AS_LOADED
    return number if number < AS_LOADED else None


class Versions:
    """What is known of the weights of one engine, which begins with ``namespace`` and the version that was ``given``.

    ``named``: the operator has named the weights, so that name and version say which they are, here and in other
    engines. Otherwise the namespace's model is a digest of what was loaded, which says nothing of later weights.
    ``renamed`` is told of another namespace, which comes only when there are no rows, or none that may stay.
    """

    def __init__(
        self, namespace: Namespace, given: int | None, renamed: Callable[[Namespace], object], *, named: bool
    ) -> None:
        self.version = given
        """Of what is computed now; ``None``: unknown."""
        self.mixed = False
        """What is computed now may stand on KV of other weights: nothing is stored, and nothing comes from a store.
        Otherwise all rows that there are were made by the weights of now."""
        self.changes = 0
        """How often the weights may have become others."""
        self.adapters: set[int] = set()
        """Numbers of adapters that were added, for who looks whether one takes the place of another."""
        self._namespace, self._renamed, self._named = namespace, renamed, named
        self._sure = True  # nothing was computed, and nothing was paused, since the version was given
        self._empty = True  # nothing was computed since all KV was forgotten

    def changed(self, version: int | None = None) -> None:
        """The weights are of this version from the next step on; without one nobody knows of which.

        Rows that are there keep their version. Where KV is kept, too, nothing is stored before it is
        :meth:`forgotten`.
        """
        self.version, self._sure = version, version is not None
        self.changes += 1
        self.mixed = not self._empty
        if self._empty:
            self._rename()

    def computes(self) -> None:
        """A step computes or loads tokens."""
        self._sure = self._empty = False

    def paused(self) -> None:
        """Nothing is computed until :meth:`resumed`: weights may change, and nobody need say so."""
        self._sure = False

    def resumed(self) -> None:
        """What is computed from here on has a version if one was given since the pause."""
        if not self._sure:
            self.changed()

    def forgotten(self) -> None:
        """All KV was forgotten, as for other weights. The version stands if it was given since the last step."""
        if not self._sure:
            self._empty = False  # and renamed below
            self.changed()
        self.mixed, self._empty = False, True
        self._rename()

    def _rename(self) -> None:
        if self.changes:  # else they are as they were loaded
            known = self.version if self._named else None
            alone = AS_LOADED + 1 + secrets.randbits(62)  # no other engine has it, and it is no version
            self._namespace = replace(self._namespace, weights_version=alone if known is None else known)
        self._renamed(self._namespace)


__all__ = ["AS_LOADED", "Versions", "version_of"]
