"""What can go wrong, as types.

Three kinds of "no" never mix: absence is a value (``None``, ``False``, an invalid row), failure is an exception
under :class:`KVRouteError`, a bug is an ``AssertionError``.
"""

from __future__ import annotations


class KVRouteError(Exception):
    """Every failure that kvroute raises on purpose."""


class MismatchError(KVRouteError):
    """The message names the field, what was wanted and what came; ``of`` names the thing that has the field."""

    def __init__(self, field: str, wanted: object, got: object, *, of: str = "") -> None:
        super().__init__(f"{of}{field}: wanted {wanted}, got {got}")
        self.field = field
        self.wanted = wanted
        self.got = got


class InvalidInputError(MismatchError, ValueError):
    """An argument does not fit; nothing was changed."""


class SpecError(InvalidInputError):
    """An impossible spec, layout or namespace."""


class RowError(InvalidInputError):
    """Rows whose shape, dtype or values do not fit their spec."""


class SlotError(InvalidInputError):
    """A slot outside the pool, or twice in one step."""


class ConfigError(InvalidInputError):
    """An unknown configuration key, or an invalid value of one."""


class BlockStateError(InvalidInputError):
    """An event that a state does not allow, such as a second commit of a step, or a call of a set that was closed."""


class BlockBusyError(BlockStateError):
    """Not possible now, for the reason in the message; nothing was changed. Try again when that has ended."""


class FeedGapError(KVRouteError):
    """A batch of a feed is missing: what has become of blocks is not known, and all rows were forgotten."""


class NoSpaceError(KVRouteError):
    """A device, a file system or a quota has no room for memory that the process cannot do without."""

    def __init__(self, where: str, wanted_nbytes: int, free_nbytes: int, remedy: str) -> None:
        super().__init__(f"{where}: wanted {wanted_nbytes} bytes, got {free_nbytes} free; {remedy}")
        self.where = where
        self.wanted_nbytes = wanted_nbytes
        self.free_nbytes = free_nbytes
        self.remedy = remedy


class RegionError(KVRouteError):
    """A shared-memory region cannot be created or used."""


class RegionMissingError(RegionError):
    """No region has that name."""


class RegionMismatchError(RegionError, MismatchError):
    """A region exists but is not the one that was wanted; it was not mapped."""

    def __init__(self, region: str, field: str, wanted: object, got: object) -> None:
        super().__init__(field, wanted, got, of=f"region {region}: ")
        self.region = region


class TransferProcessError(KVRouteError):
    """The cache-transfer process failed, ended or is not running; the request has changed nothing."""


class StorageError(KVRouteError):
    """A storage backend failed; a miss is never reported this way."""


class StoreFormatError(StorageError, MismatchError):
    """A file or directory is not of the format that belongs in its place; it was left unchanged."""

    def __init__(self, path: str, field: str, wanted: object, got: object) -> None:
        super().__init__(field, wanted, got, of=f"{path}: ")
        self.path = path


class StoreMissingError(StorageError):
    """There is no store at that place, and the caller may not make one."""


class StoreReadOnlyError(StorageError):
    """The store was opened for reading only."""


class StoreLockedError(StorageError):
    """Another process writes this store."""


class StoreClosedError(StorageError):
    """The store was closed."""


class StoreUnavailableError(StorageError):
    """The store failed a moment ago and is not asked again until a probe succeeds; the message has the cause."""


class RecordError(StorageError, MismatchError):
    """Bytes that are not a sound record of the expected kind."""

    def __init__(self, field: str, wanted: object, got: object) -> None:
        super().__init__(field, wanted, got, of="record ")
