"""What stores do with a batch before they look at its records one by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from cache_manager.errors import RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, checksum

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


def one_each(answers: list[_T], asked: Sequence[object]) -> list[_T]:
    """``answers``; raises unless there is one for each key ``asked``: answers are matched to keys by position."""
    if len(answers) != len(asked):
        raise StorageError(f"the backend answered {len(answers)} of {len(asked)} keys")
    return answers


def is_sound(header: RecordHeader, key: BlockKey, payload: memoryview) -> bool:
    """Whether the payload is what the header says, and the header that of the key."""
    whole = header.key == key and header.payload_nbytes == payload.nbytes
    return whole and checksum(payload) == header.payload_xxh3


def flat(header: RecordHeader, payload: Buffer) -> memoryview:
    """The payload's bytes; :class:`RecordError` unless they are as many as the header says, and side by side."""
    view = memoryview(payload)
    if view.nbytes != header.payload_nbytes or not view.c_contiguous:
        raise RecordError("payload", f"{header.payload_nbytes} flat bytes", f"{view.nbytes}, strides {view.strides}")
    return view.cast("B")
