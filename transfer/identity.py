"""Identity of one side of a transfer, and the compatibility check."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.spec import RecordLayout, canonical_json
from transfer.errors import IncompatiblePeerError, RemoteProtocolError
from transfer.messages import FIELDS_MAX, BootId, Part, Refuse, Space, TransferId, decode, encode

_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")


def part_of(name: str, layout: RecordLayout, *, replicated: bool = False) -> Part:
    """A part whose records have ``layout``. ``replicated``: every rank of a model has the same records."""
    fields: dict[str, str] = {}
    for spec in layout.specs:
        described = spec.to_json()
        for key, value in (described | described["attrs"]).items():
            if key not in ("name", "attrs", "block_tokens") and len(fields) < FIELDS_MAX:
                fields[f"{spec.name}.{key}"[:64]] = canonical_json(value).decode()[:512]
    return Part(
        name=name,
        fingerprint=layout.fingerprint,
        nbytes=layout.nbytes,
        block_tokens=layout.block_tokens,
        replicated=replicated,
        fields=fields,
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """One side of a transfer: its boot id, the namespace of its rows, and the parts that each of its blocks has.

    The order of ``parts`` counts: sessions identify a part by its index. :class:`ConfigError` for an identity that no
    peer would accept.
    """

    boot_id: BootId
    namespace: Namespace
    parts: tuple[Part, ...]
    space: Space = field(init=False, repr=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        own = self.namespace
        salt = hashlib.blake2b(own.salt.encode(), digest_size=16, person=b"kvroute.salt/1").digest()
        space = Space(own.model, own.weights_version, salt, own.rank, own.world)
        object.__setattr__(self, "space", space)
        object.__setattr__(self, "digest", digest_of(space, self.parts))
        try:
            decode(encode(self.refuse(self.boot_id, TransferId(bytes(16)))))
        except RemoteProtocolError as error:
            raise ConfigError("identity", "what fits a message", error) from error

    def refuse(self, boot_id: bytes, transfer: TransferId) -> Refuse:
        """This side's identity in words, for the run ``boot_id`` of a peer that has another one."""
        return Refuse(boot_id, transfer, self.space, list(self.parts))


def digest_of(space: Space, parts: Sequence[Part]) -> bytes:
    """16 bytes, equal for two sides exactly where :func:`check_peer` finds no difference."""
    if all(part.replicated for part in parts):
        space = msgspec.structs.replace(space, rank=0, world=0)
    identity = _encoder.encode([space, list(parts)])
    return hashlib.blake2b(identity, digest_size=16, person=b"kvroute.peer/1").digest()


def check_peer(own: Identity, space: Space, parts: Sequence[Part]) -> None:
    """Raise :class:`IncompatiblePeerError`, which names the field and both values, unless a peer with these has rows of
    the same meaning. If every part is replicated, rank and world may differ.
    """
    scope = ["model", "weights_version", "salt"]
    if not all(part.replicated for part in own.parts):
        scope += ["rank", "world"]
    for name in scope:
        _same(f"namespace.{name}", getattr(own.space, name), getattr(space, name))
    _same("parts", [part.name for part in own.parts], [part.name for part in parts])
    for own_part, part in zip(own.parts, parts, strict=True):
        for name in sorted({*own_part.fields, *part.fields}):
            _same(f"{part.name}.{name}", own_part.fields.get(name), part.fields.get(name))
        for name in ("block_tokens", "nbytes", "replicated", "fingerprint"):
            _same(f"{part.name}.{name}", getattr(own_part, name), getattr(part, name))


def _same(name: str, wanted: object, got: object) -> None:
    if wanted != got:
        raise IncompatiblePeerError(name, _text(wanted), _text(got))


def _text(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
