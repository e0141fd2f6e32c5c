"""The operator's settings, the engine's facts, and the messages between a scheduler and a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

import msgspec

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from kvroute.connector.tickets import Fetch, Lend
from kvroute.connector.versions import AS_LOADED
from kvroute.routing import weights_version_spec
from kvroute.witness import Run

VERSION: Final = "weights_version"
"""The spec of the rows' labels; see :func:`kvroute.weights_version_spec`."""
SPARES: Final = 64
FIELD_SPARES: Final = 512
"""Beside them, where rows are returned with their tokens: one row that is missing costs the answer its field."""


class Common(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operator's settings in every engine."""

    store: str = ""  # URL of the store of rows that belong to KV from elsewhere; "": rows end with their blocks
    rollouts: str = "response:"  # URL of the rollout store where routes are left; "": nowhere
    weights: str = ""  # names the weights; by default a digest of where they are, their sizes, times and samples
    # Rows that come for KV that others kept are compared with it. KV does not show the last router's choice: that is
    # "missing" from the routes, or there and "flagged" in the answer.
    witness: Literal["missing", "flagged"] = "missing"
    strict: bool = False  # mistakes of bookkeeping raise: for tests
    untested: str = ""  # accept this untested version of the engine: "0.34"

    @classmethod
    def of(cls, given: Any, where: str = "kv_connector_extra_config.kvroute") -> Self:
        """From the mapping that the operator wrote there; :class:`ConfigError` for an invalid one."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            wanted = f"some of {', '.join(cls.__struct_fields__)} (docs/settings.md)"
            raise ConfigError(where, wanted, str(error)) from error


class Settings(Common, frozen=True):
    """An operator's settings in vLLM: ``kv_connector_extra_config["kvroute"]``."""

    # Version of the weights that are loaded at the start. Without one, rows have no version.
    weights_version: Annotated[int, msgspec.Meta(ge=0, lt=AS_LOADED)] | None = None
    # The carrier of rows to other engines: a "transfer" of their own beside the KV of whole requests; the "connector"
    # with its store; a "layer" of the model's paged KV, in which they go wherever the KV goes. "auto" is the transfer
    # if the connector moves whole requests, else the layer if there is no store and both model and connector allow it.
    carrier: Literal["transfer", "connector", "layer", "auto"] = "auto"
    lend: str = "tcp://127.0.0.1:*"  # where rows are lent to other engines: ipc:///path or tcp://HOST:PORT
    lent_nbytes_max: Annotated[int, msgspec.Meta(ge=1)] = 4 << 30  # of copies of rows not fetched yet
    keys: str = ""  # the secret key file of all engines of a deployment; other hosts need one
    # Rows are returned in the engine's own field, routed_experts; its flag sets this. Then no rollouts are left unless
    # they are asked for: "auto" is "response:" without the field, and nowhere with it.
    field: bool = False
    rollouts: str = "auto"
    # An answer that lacks a row has no field, and the reason beside it; or its request fails.
    on_missing: Literal["none", "fail"] = "none"
    # "auto" is "missing"; beside a field and a store of rows for KV from elsewhere the operator has to choose.
    witness: Literal["missing", "flagged", "auto"] = "auto"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.rollouts == "auto":
            msgspec.structs.force_setattr(self, "rollouts", "" if self.field else "response:")

    @property
    def writes(self) -> bool:
        return bool(self.store) and "mode=read" not in self.store

    @property
    def reads(self) -> str:
        """The URL of a reader of the store; a reader of files may be opened before the writer has made them."""
        if not self.store.startswith("file:"):
            return self.store
        url = self.store.partition("?")[0] + "?mode=read" if self.writes else self.store
        return url if "absent=" in url else f"{url}&absent=wait"

    @property
    def opens(self) -> str:
        """The URL by which the worker opens the store."""
        return self.store if self.writes else self.reads


@dataclass(frozen=True, slots=True)
class Engine:
    """The facts about an engine that matter for rows."""

    settings: Settings
    spec: AuxBlockDataSpec  # of routing
    namespace: Namespace
    blocks: int
    max_tokens: int  # of one step
    gate: bool  # hits are cut to KV that has rows
    pages: bool  # rows are in a layer of the KV
    witness: Literal["missing", "flagged", "off"]  # "off": no KV is loaded that others kept
    drafts: bool = True  # a draft model computes in the same steps, and uses the memory of their slots for its own
    transfer: bool = False  # rows of prompts are lent to other engines, and fetched from them

    @property
    def layout(self) -> RecordLayout:
        """The layout of a block: rows, and the version of the weights that made each."""
        return RecordLayout((self.spec, weights_version_spec(self.tokens)))

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        return self.spec.block_tokens

    @property
    def clock(self) -> int:
        """An extra block, used as progress counter: its generation is the number of the last step with written rows."""
        return self.blocks

    @property
    def spares(self) -> range:
        """Extra blocks, to which rows are copied that are still to be read."""
        return range(self.clock + 1, self.clock + 1 + SPARES + (FIELD_SPARES if self.settings.field else 0))

    @property
    def unseen(self) -> bool:
        """Whether a witness does not show the last router's choice, because no later layer has KV."""
        last: int = self.spec.attrs["layer_ids"][-1]
        return self.witness != "off" and last == self.spec.attrs["num_layers"] - 1


@dataclass(slots=True)
class StepMeta:
    """The worker's message with a step."""

    inner: Any  # the message of the connector that moves the KV
    before: bytes  # a batch of the feed: what has become of blocks
    after: bytes = b""  # a batch of the feed: what to store after the step has written
    number: int = 0  # of the step, from 1
    tokens: int = 0  # that the step computes
    version: int | None = None  # of the weights that it computes with
    namespace: bytes = b""  # where rows are in the KV, its fingerprint; empty: of no weights that have a name
    joined: Sequence[Sequence[int]] = ()  # blocks of each request that joins a step with loads
    loads: Sequence[Run] = ()  # blocks whose KV is loaded in this step
    landed: Sequence[Run] = ()  # blocks whose KV has come between steps
    full: Sequence[Run] = ()  # blocks that this step fills
    lends: Sequence[Lend] = ()  # what it fills of prompts that other engines go on from,
    withdrawn: Sequence[bytes] = ()  # transfers that are not those any more,
    fetches: Sequence[Fetch] = ()  # and what other engines lend us


@dataclass(frozen=True, slots=True)
class Handshake:
    """A worker's first message: that of the inner connector, and the region of the rows if this worker has them."""

    inner: Any
    region: str | None = None
    late: bool = False  # rows are written behind a device, perhaps after the scheduler has the answers
    address: str = ""  # where rows are lent


@dataclass(frozen=True, slots=True)
class Told:
    """A worker's message after a step, beside the inner connector's: fetches that no request waits for any more."""

    inner: Any
    why: Mapping[str, Mapping[int, str]]  # reasons for rows that did not come, by request and block

    def aggregate(self, other: Any) -> Told:
        """Merged with the message of another rank, which has no rows."""
        return Told(other if self.inner is None else self.inner.aggregate(other), self.why)


__all__ = ["SPARES", "VERSION", "Common", "Engine", "Handshake", "Settings", "StepMeta", "Told"]
