"""What stores do with a batch before they look at its records one by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from cache_manager.errors import RecordError
from cache_manager.record import Buffer, RecordHeader

_T = TypeVar("_T")


def chunks(items: Iterable[_T], nbytes: Callable[[_T], int], room_nbytes: int) -> Iterator[list[_T]]:
    """``items`` in lists of at most ``room_nbytes`` bytes; a larger item has a list of its own.

    >>> list(chunks([3, 1, 1, 9, 2], nbytes=int, room_nbytes=4))
    [[3, 1], [1], [9], [2]]
    """
    chunk: list[_T] = []
    room = room_nbytes
    for item in items:
        size = nbytes(item)
        if chunk and size > room:
            yield chunk
            chunk = []
            room = room_nbytes
        chunk.append(item)
        room -= size
    if chunk:
        yield chunk


def flat(header: RecordHeader, payload: Buffer) -> memoryview:
    """The payload's bytes; :class:`RecordError` unless they are as many as the header says, and side by side."""
    view = memoryview(payload)
    if view.nbytes != header.payload_nbytes or not view.c_contiguous:
        raise RecordError("payload", f"{header.payload_nbytes} flat bytes", f"{view.nbytes}, strides {view.strides}")
    return view.cast("B")
