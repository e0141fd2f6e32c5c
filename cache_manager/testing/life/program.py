"""Programs: what Hypothesis chooses, what a failure is made short as, and the line that replays it.

A program is a list of operations; an operation is its name and its arguments, and is written as words:
``admit s1 001 14 - rows ok; free s1 once``. Tokens are digits, ``-`` is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life.world import Operation

ALL: Final = 14
"""A chunk that is large enough for any prompt of the kit's."""

_FLAGS: Final = {
    "rows": ("rows", "norows"),
    "ok": ("fails", "ok"),
    "once": ("twice", "once"),
    "running": ("alone", "running"),
}
SHAPES: Final[Mapping[str, tuple[str, ...]]] = {
    "admit": ("name", "tokens", "count", "salt", "rows", "ok"),
    "step": ("name", "tokens", "count", "rows", "ok"),
    "decode": ("names", "count", "rows"),
    "draft": ("name", "tokens", "count"),
    "free": ("name", "once"),
    "recompute": ("name", "count"),
    "abort": ("name", "tokens"),
    "lose": ("name", "tokens"),
    "fork": ("name", "name"),
    "swap": ("name", "ok"),
    "persist": ("name", "ok"),
    "settle": ("ok",),
    "reset": ("running",),
    "restart": (),
    "finish": (),
    "again": (),
}
"""The arguments of every operation, by kind; a flag is its first word where it is true."""

_WRITE: Final[Mapping[str, Callable[[Any], str]]] = {
    "tokens": lambda tokens: "".join(map(str, tokens)) or "-",
    "names": lambda names: ",".join(names) or "-",
    "salt": lambda salt: salt or "-",
}
_READ: Final[Mapping[str, Callable[[str], Any]]] = {
    "name": str,
    "count": int,
    "tokens": lambda word: [] if word == "-" else [int(digit) for digit in word],
    "names": lambda word: [] if word == "-" else word.split(","),
    "salt": lambda word: "" if word == "-" else word,
}


def written(program: Sequence[Operation]) -> str:
    """The program as one line.

    >>> written([("admit", "s1", [0, 1], 14, "", True, False), ("free", "s1", True)])
    'admit s1 01 14 - rows ok; free s1 twice'
    """
    return "; ".join(" ".join((kind, *map(_word, SHAPES[kind], given))) for kind, *given in program)


def read(line: str) -> list[Operation]:
    """The program of a line; :class:`InvalidInputError` for one that is none.

    >>> read("admit s1 01 14 - rows ok; free s1 twice")
    [('admit', 's1', [0, 1], 14, '', True, False), ('free', 's1', True)]
    """
    program: list[Operation] = []
    for part in filter(None, map(str.strip, line.split(";"))):
        kind, *words = part.split()
        shape = SHAPES.get(kind)
        if shape is None or len(words) != len(shape):
            wanted = f"one of {', '.join(SHAPES)}" if shape is None else f"{kind} {' '.join(shape)}"
            raise InvalidInputError("replay", wanted, part)
        try:
            program.append((kind, *map(_value, shape, words)))
        except ValueError as error:
            raise InvalidInputError("replay", f"{kind} {' '.join(shape)}", part) from error
    return program


def _word(shape: str, value: Any) -> str:
    if shape in _FLAGS:
        return _FLAGS[shape][0 if value else 1]
    return _WRITE.get(shape, str)(value)


def _value(shape: str, word: str) -> Any:
    if shape in _FLAGS:
        return _FLAGS[shape].index(word) == 0
    return _READ[shape](word)


__all__ = ["ALL", "SHAPES", "read", "written"]
