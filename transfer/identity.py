"""Identity of one side of a transfer, and the compatibility check."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.spec import RecordLayout, canonical_json
from transfer.errors import IncompatiblePeerError
from transfer.messages import FIELDS_MAX, MODEL_MAX, PARTS_MAX, BootId, Part, Space


def part_of(name: str, layout: RecordLayout, *, replicated: bool = False) -> Part:
    """A part whose records have ``layout``. ``replicated``: every rank of a model has the same ones."""
    fields = {
        f"{spec.name}.{key}"[:64]: canonical_json(value).decode()[:512]
        for spec in layout.specs
        for key, value in ({**spec.to_json(), **spec.to_json()["attrs"]}).items()
        if key not in ("name", "attrs", "block_tokens")
    }
    told = dict(list(fields.items())[:FIELDS_MAX])
    return Part(name, layout.fingerprint, layout.nbytes, layout.block_tokens, replicated, told)


@dataclass(frozen=True, slots=True)
class Identity:
    """One side of a transfer: its boot id, the namespace of its rows, and the parts that each of its blocks has.

    The order of ``parts`` counts: sessions know a part by its place.
    """

    boot_id: BootId
    namespace: Namespace
    parts: tuple[Part, ...]
    space: Space = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.boot_id, bytes) or len(self.boot_id) != 16:
            raise ConfigError("boot_id", "16 bytes", repr(self.boot_id))
        if not 1 <= len(self.parts) <= PARTS_MAX:
            raise ConfigError("parts", f"1 to {PARTS_MAX}", len(self.parts))
        for part in self.parts:
            if len(part.fingerprint) != 16 or not 1 <= part.nbytes <= 1 << 30 or not 1 <= len(part.name) <= 64:
                raise ConfigError("parts", "a name, a fingerprint of 16 bytes and 1 to 2**30 bytes", repr(part))
        space = self.namespace
        if len(space.model) > MODEL_MAX:
            raise ConfigError("namespace.model", f"at most {MODEL_MAX} characters", len(space.model))
        salt = hashlib.blake2b(space.salt.encode(), digest_size=16, person=b"kvroute.salt/1").digest()
        told = Space(space.model, space.weights_version, salt, space.rank, space.world)
        object.__setattr__(self, "space", told)

    @property
    def nbytes_max(self) -> int:
        """The largest record's payload."""
        return max(part.nbytes for part in self.parts)


def check_peer(own: Identity, space: Space, parts: Sequence[Part]) -> None:
    """Raise :class:`IncompatiblePeerError`, which names the field and both values, unless rows of a peer with these
    mean the same as one's own. Where every part is replicated, rank and world may differ.
    """
    scope = ("model", "weights_version", "salt", "rank", "world")
    for name in scope[:3] if all(part.replicated for part in own.parts) else scope:
        _same(f"namespace.{name}", getattr(own.space, name), getattr(space, name))
    _same("parts", ", ".join(p.name for p in own.parts), ", ".join(p.name for p in parts))
    for mine, theirs in zip(own.parts, parts, strict=True):
        for name in sorted({*mine.fields, *theirs.fields}):
            _same(f"{mine.name}.{name}", mine.fields.get(name, "none"), theirs.fields.get(name, "none"))
        for name in ("block_tokens", "nbytes", "replicated", "fingerprint"):
            _same(f"{mine.name}.{name}", getattr(mine, name), getattr(theirs, name))


def _same(name: str, wanted: object, got: object) -> None:
    if wanted != got:
        both = (value.hex() if isinstance(value, bytes) else value for value in (wanted, got))
        raise IncompatiblePeerError(name, *both)
