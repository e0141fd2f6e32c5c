"""The one place where records are sealed before they are stored and verified after they are read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Final, TypeVar

from cache_manager.errors import ConfigError, RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.origins import ORIGIN_MAX
from cache_manager.ports import Absence, BoundedBackend, RecordCounters, StorageBackend
from cache_manager.record import Buffer, RecordHeader, checksum, nbytes_of
from cache_manager.spec import RecordLayout

_T = TypeVar("_T")
_MISS: Final = Absence.MISS  # a member's name takes longer to look up than a record to check


class RecordStore:
    """Records of one layout in a storage backend: a read returns the record that was put, or an :class:`Absence`.

    A record that fails its checks twice is counted as ``corrupt``, deleted from the backend and reported as
    ``Absence.CORRUPT``: it does not come back, and the same key can be stored anew. If the backend cannot delete it,
    that is counted too, and the record is found corrupt again. One bad record fails its own key only. Every method may
    be called from several threads. :class:`ConfigError` for a layout whose records the backend could never store.
    """

    def __init__(self, backend: StorageBackend, layout: RecordLayout) -> None:
        self.layout = layout
        self.backend = backend
        if isinstance(backend, BoundedBackend) and layout.nbytes > backend.record_nbytes_max:
            remedy = "give the store a larger quota"
            raise ConfigError("record", f"{backend.record_nbytes_max} bytes at most; {remedy}", layout.nbytes)
        self._fingerprint = layout.fingerprint
        self._nbytes = layout.nbytes
        self._valid_nbytes = layout.valid_nbytes
        # Unused bits of the bitmap: a spec's words may hold more bits than a block has tokens.
        width = 64 * layout.valid_words
        rows = layout.block_tokens
        unused = (1 << width) - (1 << rows)
        self._no_row = sum(unused << width * i for i in range(len(layout.specs)))
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()  # guards the counts, nothing else; a signal handler may ask meanwhile

    @property
    def counters(self) -> RecordCounters:
        """The counts of this moment, consistent with each other."""
        with self._lock:
            counts = self._counts.copy()
        put_nbytes = counts["stored"] * self._nbytes
        get_nbytes = counts["hits"] * self._nbytes
        return RecordCounters(**counts, put_nbytes=put_nbytes, get_nbytes=get_nbytes)

    def _count(self, **by: int) -> None:
        with self._lock:
            for name, number in by.items():
                if number:  # mostly one of several
                    self._counts[name] += number

    def put(
        self,
        keys: Sequence[BlockKey],
        payloads: Sequence[Buffer],  # layout.nbytes each
        valid: Sequence[bytes],  # 8 * layout.valid_words * specs bytes each
        generations: Sequence[int],
        origins: Sequence[int],
        *,
        replace: bool = False,
    ) -> list[RecordHeader | None]:
        """Seal and store records; the header of the record now stored under each key, or ``None``.

        That is the offered record, or the older one: :class:`StorageBackend` says which stays. The payloads have been
        copied when this returns. :class:`RecordError` when one does not fit the layout (nothing is stored then) and
        :class:`StorageError` when the backend fails.
        """
        fingerprint = self._fingerprint
        nbytes = self._nbytes
        for field, wanted, sizes in (
            ("payload size", nbytes, set(map(nbytes_of, payloads))),
            ("bitmap size", self._valid_nbytes, set(map(len, valid))),
        ):
            if sizes - {wanted}:
                raise RecordError(field, wanted, max(sizes - {wanted}))
        if origins and not 0 <= min(origins) <= max(origins) <= ORIGIN_MAX:
            raise RecordError("origin", f"0 to {ORIGIN_MAX}", f"{min(origins)} to {max(origins)}")
        headers = [
            RecordHeader(key, fingerprint, generation, origin, bits, nbytes, checksum(payload))
            for key, payload, bits, generation, origin in zip(keys, payloads, valid, generations, origins, strict=True)
        ]
        answers = one_each(self.backend.put(headers, payloads, replace=replace), keys)
        stored = sum(map(is_, answers, headers))
        kept = conflicts = 0
        for i, (offered, answer) in enumerate(zip(headers, answers, strict=True)) if stored < len(headers) else ():
            if answer is None or answer.fingerprint != fingerprint:
                answers[i] = None  # a record of another layout is corrupt for a reader of this one
            elif answer.key != offered.key:
                raise StorageError(f"the backend answered {offered.key.hex()} with a record of {answer.key.hex()}")
            elif answer is not offered:
                kept += answer.origin == offered.origin
                conflicts += answer.origin != offered.origin
        refused = len(answers) - stored - kept - conflicts
        self._count(stored=stored, kept=kept, conflicts=conflicts, refused=refused)
        return answers

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Fill each buffer (``layout.nbytes`` long) with the verified record of its key, or return why not.

        After an :class:`Absence` the buffer's content means nothing. :class:`RecordError` when a buffer does not fit
        the layout (nothing is read then) and :class:`StorageError` when the backend fails.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        for buffer in buffers:
            if buffer.nbytes != self._nbytes:
                raise RecordError("buffer size", self._nbytes, buffer.nbytes)
        found, misses, corrupt = self._read(keys, buffers)
        if corrupt:
            # What was read may be gone by now, and another record be there: what goes has to be corrupt twice.
            again: list[RecordHeader | Absence] = [_MISS] * len(corrupt)
            twice: list[int] = []
            missing = len(corrupt)
            try:
                again, missing, twice = self._read([keys[i] for i in corrupt], [buffers[i] for i in corrupt])
            except StorageError:
                if len(corrupt) == len(keys):
                    raise
            for i, header in zip(corrupt, again, strict=True):
                found[i] = header
            misses += missing
            corrupt = [corrupt[i] for i in twice]
        with self._lock:
            self._counts["hits"] += len(found) - misses - len(corrupt)
            if misses or corrupt:
                self._counts["misses"] += misses
                self._counts["corrupt"] += len(corrupt)
        if corrupt:
            self._quarantine([keys[i] for i in corrupt])
        return found

    def _read(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]
    ) -> tuple[list[RecordHeader | Absence], int, list[int]]:
        """Each record verified in its buffer, how many are missing, and which ones are corrupt."""
        found = one_each(self.backend.get_into(keys, buffers), keys)
        fingerprint = self._fingerprint
        nbytes = self._nbytes
        valid_nbytes = self._valid_nbytes
        no_row = self._no_row
        misses = 0
        corrupt: list[int] = []
        for i, header in enumerate(found):
            if header is _MISS:
                misses += 1
                continue
            buffer = buffers[i]
            if (  # as check_record, which calls more: every record that is read comes here
                not isinstance(header, RecordHeader)
                or header.key != keys[i]
                or header.fingerprint != fingerprint
                or header.payload_nbytes != nbytes
                or len(header.valid) != valid_nbytes
                or (no_row and int.from_bytes(header.valid, "little") & no_row)
                or checksum(buffer) != header.payload_xxh3
            ):
                found[i] = Absence.CORRUPT  # another key's or layout's, not whole, or rows more than a block has
                corrupt.append(i)
        return found, misses, corrupt

    def _quarantine(self, keys: Sequence[BlockKey]) -> None:
        try:
            self.backend.delete(keys)
        except StorageError:  # the other keys' records are good; these are checked again whenever they are read
            self._count(quarantine_failures=len(keys))

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether a record is there for each key; it is verified when it is read, not here."""
        return one_each(self.backend.contains(keys), keys)

    def usage(self) -> Mapping[str, int]:
        """The backend's own numbers; see :class:`StorageBackend`."""
        return self.backend.usage()

    def flush(self) -> None:
        """Return when every record put before is on stable storage, if the backend has any."""
        self.backend.flush()

    def close(self) -> None:
        """Close the backend; idempotent."""
        self.backend.close()


def one_each(answers: list[_T], asked: Sequence[object]) -> list[_T]:
    """``answers``; raises unless there is one for each key ``asked``: answers are matched to keys by position."""
    if len(answers) != len(asked):
        raise StorageError(f"the backend answered {len(answers)} of {len(asked)} keys")
    return answers


def is_sound(header: RecordHeader, key: BlockKey, payload: memoryview) -> bool:
    """Whether the payload is what the header says, and the header that of the key."""
    whole = header.key == key and header.payload_nbytes == payload.nbytes
    return whole and checksum(payload) == header.payload_xxh3
