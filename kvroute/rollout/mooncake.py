"""Rollouts as objects in a Mooncake pool.

The header of a rollout's record and every part are objects of their own, named by the put and a number. They are
written before any reader learns the put's id, and never change; the header proves the parts. A pointer, an object of
fixed size under the rollout's name, names a put; the pointer with the largest number names the last one. A number has
one of few places, which the first writer takes; old pointers are removed when the next one is there. The first number
is random: a process that still removes the pointers of an earlier life of the name would else remove the first of the
next. A caller with a handle needs no pointer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Final

import msgspec

from cache_manager.errors import InvalidInputError, StorageError
from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader, checksum
from cache_manager.storage.batch import chunks
from cache_manager.storage.mooncake import open_mooncake_store
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.parts import (
    BATCH_NBYTES,
    HEADER,
    SUPPORT,
    GoneError,
    PartStore,
    Record,
    checked_header,
    layers_option,
)
from kvroute.routes.parts import Range

POINTER_NBYTES: Final = 4096
SCOPE: Final = b"rollouts"
"""The first bytes of every key here; a block's key begins with the digest of its namespace and layout."""
FINGERPRINT: Final = hashlib.blake2b(b"kvroute.rollout/3", digest_size=16).digest()
"""The layout of every record here."""
POINTER_PLACES: Final = 64
"""Places of a rollout's pointers; all but one are free, unless many writers put it at once or removing one failed."""
NUMBERS: Final = 1 << 32
"""First numbers."""
LOOKS_MAX: Final = 8
"""Looks at a rollout's pointers while other processes move them."""
LAYERS: Final = 4
"""The default number of layers in a part: every object costs the pool's master memory and a caller time."""


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names the last put, unless another pointer has a larger number."""

    number: int
    handle: RolloutHandle


class MooncakeRollouts(PartStore):
    """A ``RolloutStore`` over a backend for records of any size, which it owns and closes: a ``MooncakeStore``."""

    scheme = "mooncake"

    def __init__(self, backend: StorageBackend, layers: int = LAYERS) -> None:
        self.backend = backend
        super().__init__("the rollout store", layers)

    def _write(self, handle: RolloutHandle, record: Record) -> RolloutHandle:
        header, body, support = record
        parts: list[Buffer] = [body[a:b] for a, b in pairwise(handle.starts(0, handle.parts))]
        parts += [support] * bool(handle.support_nbytes)
        keys = keys_of(handle)
        entries = zip(keys, [*parts, header], strict=True)
        try:
            for batch in chunks(entries, lambda entry: len(entry[1]), BATCH_NBYTES):
                headers = [_header(key, content) for key, content in batch]
                contents = [content for _, content in batch]
                stored = self.backend.put(headers, contents)
                lost = stored.count(None)
                if lost:
                    raise StorageError(f"rollout {handle.rollout_id}: no room for {lost} of {len(batch)} parts")
            before = self._point(handle)
        except BaseException:
            with suppress(StorageError):  # if the backend still answers
                self.backend.delete(keys)
            raise
        with suppress(StorageError):  # they are not found any more; the pool evicts them
            gone = list[BlockKey]()
            for key, pointer in before:
                gone += [key, *self._stored(pointer.handle)]
            self.backend.delete(gone)
        return handle

    def _find(self, rollout_id: str) -> RolloutHandle | None:
        pointers = self._pointers(rollout_id)
        return pointers[-1][1].handle if pointers else None

    def _read(self, handle: RolloutHandle, parts: Sequence[Range]) -> list[Buffer]:
        keys = list[BlockKey]()
        pages = list[memoryview]()
        buffers = list[Buffer]()
        for run in parts:
            whole = {HEADER: handle.header_nbytes, SUPPORT: handle.support_nbytes}
            starts = [0, whole[run]] if run in whole else handle.starts(*run)
            room = memoryview(bytearray(starts[-1] - starts[0]))
            buffers.append(room)
            keys += keys_of(handle, range(*run))
            pages += [room[a - starts[0] : b - starts[0]] for a, b in pairwise(starts)]
        answers = self.backend.get_into(keys, pages)
        if Absence.CORRUPT in answers:
            wanted = "records that are whole"
            raise InvalidInputError(f"rollout {handle.rollout_id}", wanted, "others")
        if Absence.MISS in answers:
            raise GoneError(f"rollout {handle.rollout_id}: not all parts are there")
        return buffers

    def _delete(self, handle: RolloutHandle) -> None:
        pointers = self._pointers(handle.rollout_id)
        # Those that were seen, and no others: a put just now has another place.
        known_keys = list[BlockKey]()
        if pointers and pointers[-1][1].handle.put_id == handle.put_id:
            known_keys = [key for key, _ in pointers]
        self.backend.delete([*known_keys, *self._stored(handle)])

    def _stored(self, handle: RolloutHandle) -> list[BlockKey]:
        """The keys of a put; of its header only, unless that is there and of this put: a handle may claim any number of
        parts, and without their header nobody finds them."""
        with suppress(GoneError, InvalidInputError), self._opened(handle) as read:
            (head,) = read([HEADER])
            checked_header(handle, head)
            return keys_of(handle)
        return keys_of(handle, range(*HEADER))

    def _close(self) -> None:
        self.backend.close()

    # ---------------------------------------------------------------- pointers

    def _pointers(self, rollout_id: str) -> list[tuple[BlockKey, Pointer]]:
        """The pointers by their numbers, with their keys. One that is damaged is counted, and removed."""
        places = pointers_of(rollout_id)
        for _ in range(LOOKS_MAX):
            keys = [key for key, stored in zip(places, self.backend.contains(places), strict=True) if stored]
            room = [bytearray(POINTER_NBYTES) for _ in keys]
            headers = self.backend.get_into(keys, [memoryview(page) for page in room])
            if Absence.MISS not in headers:
                break  # else one was removed meanwhile, and the next may be in a place that was empty
        pointers = []
        for key, header, page in zip(keys, headers, room, strict=True):
            if header is Absence.MISS:
                continue
            try:
                if isinstance(header, Absence):
                    raise InvalidInputError("pointer", "a record", header.value)
                pointers.append((key, _unpacked_pointer(page, rollout_id)))
            except InvalidInputError:
                self._count(corrupt=1)
                with suppress(StorageError):  # then it is found damaged again
                    self.backend.delete([key])
        return sorted(pointers, key=lambda entry: entry[1].number)

    def _point(self, handle: RolloutHandle) -> list[tuple[BlockKey, Pointer]]:
        """Make this the put that is found by its rollout's name; the pointers before."""
        pointers = self._pointers(handle.rollout_id)
        places = pointers_of(handle.rollout_id)
        first = pointers[-1][1].number + 1 if pointers else secrets.randbelow(NUMBERS)
        for number in range(first, first + POINTER_PLACES):
            page = _packed_pointer(Pointer(number, handle))
            header = _header(places[number % POINTER_PLACES], page)
            (stored,) = self.backend.put([header], [page])
            if stored is None:
                raise StorageError(f"rollout {handle.rollout_id}: no room for a record of {POINTER_NBYTES} bytes")
            if stored.payload_xxh3 == header.payload_xxh3:  # else another writer was here first
                return pointers
        raise StorageError(f"rollout {handle.rollout_id} has {POINTER_PLACES} pointers; delete it first")


def keys_of(handle: RolloutHandle, numbers: Sequence[int] | None = None) -> list[BlockKey]:
    """The keys of the parts with these numbers; by default of all, of the support (-2) and of the header (-1)."""
    put_id = bytes.fromhex(handle.put_id)
    if numbers is None:
        support = range(*SUPPORT) if handle.support_nbytes else ()
        numbers = [*range(handle.parts), *support, *range(*HEADER)]
    names = [number.to_bytes(8, "little", signed=True) for number in numbers]
    return [_key_of(b"part", put_id + name) for name in names]


def pointers_of(rollout_id: str) -> list[BlockKey]:
    """The keys of the places of a rollout's pointers; number ``n`` is in place ``n % PLACES``."""
    name = rollout_id.encode()
    return [_key_of(b"rollout", bytes([place]) + name) for place in range(POINTER_PLACES)]


def _key_of(kind: bytes, name: bytes) -> BlockKey:
    nbytes = KEY_NBYTES - len(SCOPE)
    digest = hashlib.blake2b(name, digest_size=nbytes, person=b"kvroute." + kind)
    return BlockKey(SCOPE + digest.digest())


def _header(key: BlockKey, content: Buffer) -> RecordHeader:
    xxh3 = checksum(content)
    return RecordHeader(key, FINGERPRINT, 0, xxh3 or 1, b"", len(content), xxh3)  # equal content has the same origin


def _packed_pointer(pointer: Pointer) -> bytes:
    page = msgspec.json.encode(pointer).ljust(POINTER_NBYTES)
    if len(page) != POINTER_NBYTES:
        wanted = f"less than {POINTER_NBYTES} bytes of JSON"
        raise InvalidInputError("rollout handle", wanted, len(page))
    return page


def _unpacked_pointer(page: Buffer, rollout_id: str) -> Pointer:
    try:
        pointer = msgspec.json.decode(page, type=Pointer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidInputError("pointer", "a number and a handle", error) from error
    pointer.handle.check()
    if pointer.handle.rollout_id != rollout_id:
        raise InvalidInputError("pointer", rollout_id, pointer.handle.rollout_id)
    return pointer


def open_mooncake_rollouts(url: StoreUrl) -> MooncakeRollouts:
    """``mooncake://HOST:PORT/PREFIX?layers=4&...``; further parameters are those of the store there."""
    layers = layers_option(url, LAYERS)
    of_store = {k: v for k, v in url.parameters.items() if k != "layers"}
    return MooncakeRollouts(open_mooncake_store(replace(url, parameters=of_store)), layers)
