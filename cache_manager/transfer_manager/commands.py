"""What an engine and its cache-transfer process say to each other: MessagePack, one frame a message, never pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from cache_manager.ports import BlockRecords, Found, HitPolicy, TierName


class PartSetUp(msgspec.Struct, frozen=True):
    """One kind of record that a block has, and where it lives: region names ("" for none) and a store's URL."""

    specs: list[dict[str, Any]]
    device: str
    host: str
    store: str


class SetUp(msgspec.Struct, frozen=True, tag="set_up"):
    """The first command: the rows and, if there is one, the KV.

    The words of the first part's regions say which generation a block is in. ``policy`` and ``required`` (indices of
    the rows' specs) are those of the law of pairs, :class:`~cache_manager.mover.PairMover`.
    """

    parts: list[PartSetUp]
    policy: HitPolicy
    required: list[int]


class Move(msgspec.Struct, frozen=True, tag="move"):
    """Copy every part of blocks; ``generations`` are those that the targets must be in, before and after."""

    source: TierName
    target: TierName
    sources: list[int]
    targets: list[int]
    generations: list[int]


class Persist(msgspec.Struct, frozen=True, tag="persist"):
    """Store every part of device blocks under their keys. Which rows are valid concerns the first part alone."""

    records: BlockRecords


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Fill every part of device blocks with what is stored under their keys."""

    keys: list[bytes]
    blocks: list[int]
    generations: list[int]


class Contains(msgspec.Struct, frozen=True, tag="contains"):
    """Which keys every part's store seems to have."""

    keys: list[bytes]


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Return when all that was persisted is on stable storage, as far as the stores have any."""


class Close(msgspec.Struct, frozen=True, tag="close"):
    """End: what runs is finished, the stores are closed."""


Command = SetUp | Move | Persist | Restore | Contains | Flush | Close


class Asked(msgspec.Struct, frozen=True):
    number: int
    command: Command


class Answer(msgspec.Struct, frozen=True):
    """How a command ended. A failed one has changed nothing that anyone may read.

    ``stored`` is, key by key, what is stored now; ``restored`` what has come, or the name of the ``Absence``; ``there``
    which keys seem to be stored. ``counters`` are those of the first part's ``RecordStore``, in the order of its
    fields. ``error`` is empty or says what failed; ``of_store`` that it was a store.
    """

    number: int = 0
    stored: list[Found | None] = []
    restored: list[Found | str] = []
    there: list[bool] = []
    counters: list[int] = []
    error: str = ""
    of_store: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
