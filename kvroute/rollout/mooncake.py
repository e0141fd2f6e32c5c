"""Rollouts as objects in a Mooncake pool.

A part is a record of its own, named by the put and its number; a manifest has what belongs to all parts. Both are
written before anybody learns the put's id, and never change. Pointers, records of fixed size under the rollout's name
and a number, say which put is the last one: records are written once and may be read for a while after they were
deleted, so that a further put takes the next number. Who was handed a handle needs none of them.

Every record is bound to its handle by the fingerprint in its header, and summed, so that a torn, foreign or damaged
object is never taken for a part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from cache_manager.errors import InvalidInputError, RecordError, StorageError
from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader, check_record, checksum
from cache_manager.storage.batch import chunks
from cache_manager.storage.mooncake import open_mooncake_store
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.grid import Range, Selection, cells_of
from kvroute.rollout.handle import PUT_ID_NBYTES, Manifest, RolloutHandle
from kvroute.rollout.ids import checked_id
from kvroute.rollout.port import CountingStore
from kvroute.rollout.settings import CutSettings
from kvroute.routes import Routes

SCHEME: Final = "mooncake"
POINTER_NBYTES: Final = 4096
BATCH_NBYTES: Final = 8 << 20
"""Of the records of one call."""
SCOPE: Final = b"rollouts"
"""The first bytes of every key here; a block's key begins with the digest of its namespace and layout."""
POINTER: Final = hashlib.blake2b(b"kvroute.rollout/2 pointer", digest_size=16).digest()
"""The fingerprint of pointers."""
POINTERS_MAX: Final = 64
"""Puts of one rollout id."""


class MooncakeRollouts(CountingStore):
    """A ``RolloutStore`` over a backend that takes records of any size, which it owns and closes: a ``MooncakeStore``.

    ``name_groups`` is told that the records of a put belong together, for a pool that evicts them together.
    """

    def __init__(
        self,
        backend: StorageBackend,
        cut: CutSettings | None = None,
        *,
        name_groups: Callable[[Mapping[BlockKey, str]], None] | None = None,
    ) -> None:
        self.backend = backend
        self._name_groups = name_groups
        self._cut = cut or CutSettings()
        super().__init__("the rollout store")

    def put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        self._check_open()
        checked_id(rollout_id)
        grid, manifest = self._cut.grid(routes), Manifest.of(routes).encode()
        put_id = os.urandom(PUT_ID_NBYTES)
        handle = RolloutHandle.of(SCHEME, rollout_id, put_id, routes, grid, manifest_nbytes=len(manifest))
        handle.check()
        cells = cells_of(routes.ids.astype(handle.dtype, copy=False))
        numbers = range(grid.parts)
        try:
            with self._undone(handle):
                for batch in chunks(numbers, grid.nbytes_of, BATCH_NBYTES):
                    self._store(handle, batch, [grid.cut(cells, part).data for part in batch])
                self._store(handle, [MANIFEST], [manifest])
                self._point(handle)
        except BaseException:
            self._count(put_failures=1)
            raise
        self._count(puts=1, put_nbytes=routes.ids.nbytes)
        return handle

    def find(self, rollout_id: str) -> RolloutHandle | None:
        self._check_open()
        number = self._last_pointer(checked_id(rollout_id))
        if number is None:
            return None
        key, page = _pointer_key(rollout_id, number), bytearray(POINTER_NBYTES)
        (found,) = self.backend.get_into([key], [memoryview(page)])
        try:
            if found is Absence.MISS:
                return None
            if isinstance(found, Absence):
                raise InvalidInputError("pointer", "a record", found.value)
            check_record(found, key, POINTER, page)
            handle = RolloutHandle.from_json(bytes(page).rstrip(b"\0"))
            if handle.rollout_id != rollout_id:
                raise InvalidInputError("pointer", rollout_id, handle.rollout_id)
        except (InvalidInputError, RecordError):
            self._count(corrupt=1)
            with suppress(StorageError):  # it is found damaged again, then
                self.backend.delete([key])
            return None
        return handle

    def get(
        self, handle: RolloutHandle, layers: Sequence[int] | None = None, spans: Sequence[Range] | None = None
    ) -> list[Routes] | Absence:
        self._check_open()
        wanted = Selection.of(handle.layer_ids, (handle.start, handle.stop), layers, spans)
        grid, nbytes, page = handle.grid, 0, bytearray(handle.manifest_nbytes)
        if (absence := self._load(handle, [MANIFEST], [page])) is not None:
            return self._absent(absence)
        try:
            manifest = Manifest.decode(page, handle.rows)
        except InvalidInputError:
            return self._absent(Absence.CORRUPT)
        # Only now is the handle known to be one that was put, and what it claims made room for.
        ids = wanted.room(handle.top_k, handle.dtype)
        cells = [cells_of(part) for part in ids]
        numbers = grid.needed(wanted.layers, wanted.rows)
        for batch in chunks(numbers, grid.nbytes_of, BATCH_NBYTES):
            room = [bytearray(grid.nbytes_of(part)) for part in batch]
            if (absence := self._load(handle, batch, room)) is not None:
                return self._absent(absence)
            for part, content in zip(batch, room, strict=True):
                grid.paste(part, content, cells, wanted.layers, wanted.rows)
                nbytes += len(content)
        try:
            found = handle.routes(ids, manifest, wanted)
        except InvalidInputError:
            return self._absent(Absence.CORRUPT)
        self._count(hits=1, get_nbytes=nbytes)
        return found

    def delete(self, handle: RolloutHandle) -> None:
        self._check_open()
        current = self.find(handle.rollout_id)
        if current is not None and current.put_id == handle.put_id:
            self.backend.delete([_pointer_key(handle.rollout_id, number) for number in range(POINTERS_MAX)])
        self._forget(handle)
        self._count(deletes=1)

    def flush(self) -> None:
        self._check_open()
        self.backend.flush()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                self.backend.flush()
            finally:
                self.backend.close()

    # ---------------------------------------------------------------- records

    @contextmanager
    def _undone(self, handle: RolloutHandle) -> Iterator[None]:
        """What was stored before a failure goes again, as far as the backend still answers."""
        try:
            yield
        except BaseException:
            with suppress(StorageError):
                self._forget(handle)
            raise

    def _forget(self, handle: RolloutHandle) -> None:
        self.backend.delete(list(keys_of(handle, [MANIFEST, *range(handle.grid.parts)])))

    def _store(self, handle: RolloutHandle, numbers: Sequence[int], contents: Sequence[Buffer]) -> None:
        bound, keys = handle.fingerprint, keys_of(handle, numbers)
        headers = [_header(key, bound, content) for key, content in zip(keys, contents, strict=True)]
        if self._name_groups is not None:
            self._name_groups(dict.fromkeys((header.key for header in headers), f"kvroute-rollout:{handle.put_id}"))
        stored = self.backend.put(headers, contents)
        if not all(stored):
            lost = sum(not each for each in stored)
            raise StorageError(f"rollout {handle.rollout_id}: no room for {lost} of {len(headers)} parts")

    def _point(self, handle: RolloutHandle) -> None:
        """Make this the put that is found by its rollout's id; then the one before goes."""
        page = handle.to_json().encode().ljust(POINTER_NBYTES, b"\0")
        if len(page) != POINTER_NBYTES:
            raise InvalidInputError("rollout handle", f"at most {POINTER_NBYTES} bytes of JSON", len(page))
        before, last = self.find(handle.rollout_id), self._last_pointer(handle.rollout_id)
        number = 0 if last is None else last + 1
        while number < POINTERS_MAX and not self._claim(
            _pointer_key(handle.rollout_id, number), page, handle.rollout_id
        ):
            number += 1  # another writer was here first
        if number >= POINTERS_MAX:
            raise StorageError(f"rollout {handle.rollout_id} was put {POINTERS_MAX} times; delete it first")
        if before is not None:
            with suppress(StorageError):  # nobody finds it any more; the pool evicts it
                self.backend.delete([_pointer_key(handle.rollout_id, number - 1)])
                self._forget(before)

    def _claim(self, key: BlockKey, page: bytes, rollout_id: str) -> bool:
        """Whether the page is stored under ``key`` now, and not one of another writer."""
        header = _header(key, POINTER, page)
        (stored,) = self.backend.put([header], [page])
        if stored is None:
            raise StorageError(f"rollout {rollout_id}: no room for a record of {POINTER_NBYTES} bytes")
        return stored.payload_xxh3 == header.payload_xxh3

    def _last_pointer(self, rollout_id: str) -> int | None:
        there = self.backend.contains([_pointer_key(rollout_id, number) for number in range(POINTERS_MAX)])
        return max((number for number, found in enumerate(there) if found), default=None)

    def _load(self, handle: RolloutHandle, numbers: Sequence[int], room: Sequence[bytearray]) -> Absence | None:
        """Fill the buffers with verified records, or say what is wrong with the first that is absent."""
        bound, keys = handle.fingerprint, list(keys_of(handle, numbers))
        found = self.backend.get_into(keys, [memoryview(each) for each in room])
        absence: Absence | None = None
        for key, header, content in zip(keys, found, room, strict=True):
            if isinstance(header, Absence):
                absence = header if absence is None or header is Absence.CORRUPT else absence
                continue
            try:
                check_record(header, key, bound, content)
            except RecordError:
                absence = Absence.CORRUPT
        return absence


MANIFEST: Final = -1
"""The number of the record that is no part."""


def keys_of(handle: RolloutHandle, numbers: Sequence[int]) -> Iterator[BlockKey]:
    """The keys of the parts with these numbers; :data:`MANIFEST` is one of them."""
    put_id = bytes.fromhex(handle.put_id)
    for number in numbers:
        yield _key(b"part", put_id + number.to_bytes(8, "little", signed=True))


def _pointer_key(rollout_id: str, number: int) -> BlockKey:
    return _key(b"rollout", number.to_bytes(2, "little") + rollout_id.encode())


def _key(kind: bytes, name: bytes) -> BlockKey:
    digest = hashlib.blake2b(name, digest_size=KEY_NBYTES - len(SCOPE), person=b"kvroute." + kind).digest()
    return BlockKey(SCOPE + digest)


def _header(key: BlockKey, fingerprint: bytes, content: Buffer) -> RecordHeader:
    nbytes = content.nbytes if isinstance(content, memoryview) else len(content)
    xxh3 = checksum(content)
    return RecordHeader(key, fingerprint, 0, xxh3 or 1, b"", nbytes, xxh3)  # equal content is of one origin


def open_mooncake_rollouts(url: StoreUrl) -> MooncakeRollouts:
    """``mooncake://HOST:PORT/PREFIX?fused=true&part=64KiB&...``.

    Further parameters are those of the store of that scheme; ``groups=plain`` makes a pool evict a rollout as a whole.
    """
    cut = CutSettings.from_url(url)
    grouped = url.choice("groups", ("none", "plain"), "none") == "plain"
    of_store = {k: v for k, v in url.parameters.items() if k not in (*CutSettings.PARAMETERS, "groups")}
    backend = open_mooncake_store(replace(url, parameters=of_store))
    return MooncakeRollouts(backend, cut, name_groups=backend.name_groups if grouped else None)


__all__ = ["MooncakeRollouts", "keys_of", "open_mooncake_rollouts"]
