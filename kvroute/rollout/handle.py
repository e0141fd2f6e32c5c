"""A handle, with which a trainer fetches the rows. Pure: no I/O.

It names one put of one rollout, and says how the rows are cut into parts, so that a trainer's rank knows which parts it
needs. A few hundred bytes of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from cache_manager.errors import InvalidInputError, SpecError
from kvroute.rollout.ids import checked_id
from kvroute.routes.parts import Extent
from kvroute.routes.wire import FIXED_NBYTES, HEADER_NBYTES_MAX, SUPPORT_NBYTES_MAX, Header

FORMAT: Final = "kvroute.rollout/3"
SUPPORT_FORMAT: Final = "kvroute.rollout/4"
"""Of a rollout with sampling support: a reader that knows none refuses it by its number."""
PUT_ID_NBYTES: Final = 16
PART_NBYTES_MAX: Final = 16 << 20
"""Bytes of a part that a handle may claim."""


class RolloutHandle(Extent, frozen=True, kw_only=True, omit_defaults=True):
    """One put of one rollout. ``put_id`` is 32 lower-case hex digits, new for every put.

    ``store`` is the scheme of the store that it was put to. ``header_nbytes`` is the size of a record before its parts,
    ``support_nbytes`` that of its sampling support, 0 if it has none.
    """

    format: Literal["kvroute.rollout/3", "kvroute.rollout/4"] = FORMAT
    store: str
    rollout_id: str
    put_id: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * PUT_ID_NBYTES}}}\Z")]
    header_nbytes: Annotated[int, Meta(ge=FIXED_NBYTES, le=FIXED_NBYTES + HEADER_NBYTES_MAX)]
    support_nbytes: Annotated[int, Meta(ge=0, lt=SUPPORT_NBYTES_MAX)] = 0

    @classmethod
    def of(cls, store: str, header: Header, header_nbytes: int) -> Self:
        """The handle of a stored record, whose name is :attr:`name`."""
        put_id, _, rollout_id = header.name.partition(" ")
        fields = {name: getattr(header, name) for name in Extent.__struct_fields__}
        return cls(
            format=SUPPORT_FORMAT if header.support_nbytes else FORMAT,
            store=store,
            rollout_id=rollout_id,
            put_id=put_id,
            header_nbytes=header_nbytes,
            support_nbytes=header.support_nbytes,
            **fields,
        )

    @classmethod
    def from_json(cls, encoded: str | bytes | Mapping[str, Any]) -> Self:
        """The handle that :meth:`to_json` was called on, from its text or its content.

        Raises :class:`InvalidInputError` naming the field for anything else; no memory is allocated for claimed sizes.
        """
        try:
            if isinstance(encoded, (str, bytes)):
                handle = msgspec.json.decode(encoded, type=cls)
            else:
                handle = msgspec.convert(encoded, cls)
            handle.check()
        except (msgspec.MsgspecError, UnicodeError, RecursionError, SpecError, InvalidInputError) as error:
            wanted = f"an object of {FORMAT} or {SUPPORT_FORMAT}"
            raise InvalidInputError("rollout handle", wanted, error) from error
        return handle

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(self).decode()

    def check(self) -> None:
        """Raise :class:`InvalidInputError` unless the fields, each valid by itself, fit together."""
        checked_id(self.rollout_id, "rollout handle rollout_id")
        super().check()
        if (self.format == SUPPORT_FORMAT) != (self.support_nbytes > 0):
            wanted = f"{SUPPORT_FORMAT}, of a rollout with sampling support, or {FORMAT}, of one without"
            got = f"{self.format}, {self.support_nbytes}"
            raise InvalidInputError("rollout handle support_nbytes", wanted, got)
        if self.part_tokens > 1 and self.part_nbytes > PART_NBYTES_MAX:
            wanted = f"parts of at most {PART_NBYTES_MAX} bytes"
            raise InvalidInputError("rollout handle part_tokens", wanted, self.part_tokens)

    @property
    def name(self) -> str:
        """The name of the handle's record."""
        return f"{self.put_id} {self.rollout_id}"
