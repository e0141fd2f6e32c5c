"""Names for blocks: two blocks have one key exactly if their namespaces, layouts and tokens so far are equal.

A key is 32 bytes: 8 that name the *scope* (namespace and layout), then 24 that digest the chain of token blocks up to
and including this one. Every part that is digested carries a tag and its length, so that no two inputs share a byte
string; token ids are little-endian int64 whatever integer type they came in. Nothing is pickled.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, TypeGuard

from cache_manager.errors import InvalidInputError, SpecError
from cache_manager.slots import Values, integers, is_integer
from cache_manager.spec import RecordLayout

FORMAT = 2
SCOPE_NBYTES = 8
KEY_NBYTES = 32

BlockKey = NewType("BlockKey", bytes)
BlockKey.__doc__ = "The name of a block's content: 32 bytes, scope (8) and digest (24). ``KeyChain`` makes them."

Tokens = Sequence[int] | Values


def _part(tag: bytes, value: bytes) -> bytes:
    tag_nbytes = len(tag).to_bytes(1, "little")
    value_nbytes = len(value).to_bytes(8, "little")
    return tag_nbytes + tag + value_nbytes + value


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for two equal token prefixes to mean the same rows.

    ``salt`` separates tenants (and adapters such as a LoRA name); ``rank`` of ``world`` names the shard of the model
    whose rows these are.

    >>> Namespace("m", weights_version=17).fingerprint.hex()
    '0a6c1cadfc4d859f1f023b2b9cd894a9'
    """

    model: str
    weights_version: int
    salt: str = ""
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        for name in ("model", "salt"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise SpecError(f"namespace.{name}", "a string", repr(text))
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise SpecError(f"namespace.{name}", "a string that UTF-8 can hold", repr(text)) from error
        for name in ("weights_version", "rank", "world"):
            value = getattr(self, name)
            if not is_integer(value, 0, 1 << 63):
                raise SpecError(f"namespace.{name}", "an integer in [0, 2**63)", repr(value))
        if not self.rank < self.world:
            raise SpecError("namespace.rank", f"a rank below world={self.world}", self.rank)

    @property
    def canonical(self) -> bytes:
        """The one byte string that stands for these fields: each part is tagged and has its length in front."""
        parts = (
            _part(b"model", self.model.encode()),
            _part(b"weights", self.weights_version.to_bytes(8, "little")),
            _part(b"salt", self.salt.encode()),
            _part(b"rank", self.rank.to_bytes(8, "little")),
            _part(b"world", self.world.to_bytes(8, "little")),
        )
        return b"".join(parts)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal exactly for equal namespaces."""
        return hashlib.blake2b(self.canonical, digest_size=16, person=b"kvroute.ns/1").digest()


def is_key(key: object) -> TypeGuard[BlockKey]:
    """Whether ``key`` has the form of a key, of whatever namespace."""
    return isinstance(key, bytes) and len(key) == KEY_NBYTES


class KeyChain:
    """Derives the keys of a token sequence's blocks, for one namespace and one record layout.

    >>> from cache_manager.spec import AuxBlockDataSpec
    >>> layout = RecordLayout((AuxBlockDataSpec("r", row_shape=(2,), dtype="uint8", block_tokens=2),))
    >>> keys = KeyChain(Namespace("m", 1), layout)
    >>> first, second = keys.keys([1, 2, 3, 4, 5])
    >>> second == keys.key(first, [3, 4]) != keys.key(first, [4, 3])
    True
    >>> second.hex()
    '73961017831cdb4664103eb80bf669fbe811bca5311c912f266be67e9ddc905d'
    >>> adapter, adopted = keys.salted(b"lora-7").key(None, [1, 2]), keys.adopt(bytes(32))
    >>> len({first, adapter, adopted}), keys.owns(adapter), keys.owns(adopted)
    (3, True, True)
    """

    __slots__ = ("_full", "_layout", "_salts", "_seed", "block_tokens", "namespace", "scope")

    def __init__(self, namespace: Namespace, layout: RecordLayout, salts: tuple[bytes, ...] = ()) -> None:
        if not isinstance(namespace, Namespace):
            raise SpecError("namespace", "a Namespace", repr(namespace))
        self.namespace = namespace
        self.block_tokens = layout.block_tokens
        seed = hashlib.blake2b(digest_size=KEY_NBYTES - SCOPE_NBYTES, person=b"kvroute.key")
        seed.update(_part(b"format", FORMAT.to_bytes(2, "little")))
        seed.update(_part(b"namespace", namespace.canonical))
        seed.update(_part(b"layout", layout.fingerprint))
        self.scope = seed.digest()[:SCOPE_NBYTES]
        for salt in salts:
            seed.update(_part(b"salt", salt))
        self._layout = layout
        self._salts = salts
        self._seed = seed
        full_nbytes = 8 * self.block_tokens
        self._full = b"\x06tokens" + full_nbytes.to_bytes(8, "little")

    def salted(self, salt: bytes) -> KeyChain:
        """The chain of one tenant or adapter within the namespace: its keys have this chain's scope, and equal none of
        its keys.

        An empty salt is this chain itself.
        """
        if not isinstance(salt, bytes):
            raise InvalidInputError("salt", "bytes", repr(salt))
        if not salt:
            return self
        salts = (*self._salts, salt)
        return KeyChain(self.namespace, self._layout, salts)

    def key(self, parent: BlockKey | None, tokens: Tokens) -> BlockKey:
        """The key of the block holding ``tokens`` that follows the block with key ``parent`` (None: the first).

        A partial block (fewer than ``block_tokens`` tokens) has a key of its own, different from that of every longer
        block.
        """
        if parent is not None and not self.owns(parent):
            raise InvalidInputError("parent", "a key of this chain, or None", repr(parent))
        ids = _token_bytes(tokens)
        if not 1 <= len(ids) // 8 <= self.block_tokens:
            raise InvalidInputError("tokens", f"1 to {self.block_tokens} token ids", len(ids) // 8)
        digest = self._seed.copy()
        before = _part(b"parent", parent or b"")
        own = _part(b"tokens", ids)
        digest.update(before + own)
        return BlockKey(self.scope + digest.digest())

    def adopt(self, digest: bytes) -> BlockKey:
        """An engine's own hash of a block (and of everything before it) as a key of this namespace and layout.

        ``digest`` has 16 to 1,024 bytes, and is as good as the engine's hash is: blocks that it gives one digest share
        one key. Adopted keys and those made from tokens never meet.
        """
        if not isinstance(digest, bytes) or not 16 <= len(digest) <= 1024:
            got = f"{len(digest)} bytes" if isinstance(digest, bytes) else repr(digest)
            raise InvalidInputError("digest", "16 to 1024 bytes", got)
        seed = self._seed.copy()
        nbytes = len(digest).to_bytes(8, "little")
        seed.update(b"".join((_ADOPTED, nbytes, digest)))
        return BlockKey(self.scope + seed.digest())

    def keys(self, tokens: Tokens) -> list[BlockKey]:
        """The keys of all full blocks of ``tokens``, in order; a partial last block has none here."""
        ids = _token_bytes(tokens)
        step = self.block_tokens * 8
        keys: list[BlockKey] = []
        parent: BlockKey | None = None
        for at in range(0, len(ids) - step + 1, step):
            parent = self.following(parent, ids[at : at + step])
            keys.append(parent)
        return keys

    def owns(self, key: bytes) -> bool:
        """Whether ``key`` was made in this chain's namespace and layout."""
        return is_key(key) and key[:SCOPE_NBYTES] == self.scope

    def following(self, parent: BlockKey | None, ids: bytes) -> BlockKey:
        """:meth:`key` of a full block for callers who have its token ids as little-endian int64; nothing is checked."""
        digest = self._seed.copy()
        before = _PARENT + parent if parent else _FIRST
        digest.update(before + self._full + ids)
        return BlockKey(self.scope + digest.digest())


_PARENT = b"\x06parent" + KEY_NBYTES.to_bytes(8, "little")
_FIRST = _part(b"parent", b"")
_ADOPTED = b"\x07adopted"


def _token_bytes(tokens: Tokens) -> bytes:
    ids = integers(tokens, "tokens", "a flat sequence of integers")
    return ids.astype("<i8", copy=False).tobytes()
