"""Identity of one side of a transfer, and the compatibility check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_manager.errors import ConfigError
from transfer.errors import IncompatiblePeerError
from transfer.messages import PARTS_MAX, BootId, Part


@dataclass(frozen=True, slots=True)
class Identity:
    """One side of a transfer: its boot id, the fingerprint of its namespace, and the parts that each of its blocks has.

    The order of ``parts`` counts: sessions know a part by its place.
    """

    boot_id: BootId
    namespace: bytes
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        for field, value in (("boot_id", self.boot_id), ("namespace", self.namespace)):
            if not isinstance(value, bytes) or len(value) != 16:
                raise ConfigError(field, "16 bytes", repr(value))
        if not 1 <= len(self.parts) <= PARTS_MAX:
            raise ConfigError("parts", f"1 to {PARTS_MAX}", len(self.parts))
        for part in self.parts:
            if len(part.fingerprint) != 16 or not 1 <= part.nbytes <= 1 << 30 or not 1 <= len(part.name) <= 64:
                raise ConfigError("parts", "a name, a fingerprint of 16 bytes and 1 to 2**30 bytes", repr(part))

    @property
    def nbytes_max(self) -> int:
        """The largest record's payload."""
        return max(part.nbytes for part in self.parts)


def check_peer(own: Identity, namespace: bytes, parts: Sequence[Part]) -> None:
    """Raise :class:`IncompatiblePeerError` unless rows of a peer with these mean the same as one's own."""
    if namespace != own.namespace:
        raise IncompatiblePeerError("namespace", own.namespace.hex(), namespace.hex())
    wanted, got = [p.name for p in own.parts], [p.name for p in parts]
    if wanted != got:
        raise IncompatiblePeerError("parts", ", ".join(wanted), ", ".join(got)[:200])
    for mine, theirs in zip(own.parts, parts, strict=True):
        if mine.fingerprint != theirs.fingerprint:
            raise IncompatiblePeerError(f"{mine.name} layout", mine.fingerprint.hex(), theirs.fingerprint.hex())
        if mine != theirs:
            wanted_size = f"{mine.nbytes} bytes of {mine.block_tokens} tokens"
            raise IncompatiblePeerError(
                f"{mine.name} record", wanted_size, f"{theirs.nbytes} bytes of {theirs.block_tokens} tokens"
            )
