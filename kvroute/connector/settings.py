"""What the operator says, what the engine is, and what a scheduler and a worker tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator may say; ``kv_connector_extra_config["kvroute"]`` in vLLM."""

    store: str = ""  # URL of the rows' store, written by the worker; "": rows end with their blocks
    reader: str = ""  # URL by which the scheduler asks that store; by default the same, with mode=read for files
    rollouts: str = "response:"  # URL of the rollout store where routes are left; "": nowhere
    weights: str = ""  # names the weights; by default a digest of where they are, their sizes, times and samples
    # Of the weights that are loaded at the start. Where none is given, rows say nothing of a version.
    weights_version: Annotated[int, msgspec.Meta(ge=0, lt=AS_LOADED)] | None = None
    hits: Literal["auto", "gate", "mask"] = "auto"  # KV without rows is cut off a hit, or kept and its rows are missing
    # Rows that come for loaded KV are compared with it. It does not say what the last router chose: that is "missing"
    # from the routes, or there and "flagged" in the answer. "off" compares nothing: rows depend on tokens alone.
    witness: Literal["missing", "flagged", "off"] = "missing"
    # What carries rows to other engines: a "transfer" of their own beside the KV of whole requests; the "connector"
    # with its store; a "layer" of the model's paged KV, in which they go wherever the KV goes. "auto" is the transfer
    # where the connector moves whole requests, else the layer where there is no store, and model and connector can.
    carrier: Literal["transfer", "connector", "layer", "auto"] = "auto"
    lend: str = "tcp://127.0.0.1:*"  # where rows are lent to other engines: ipc:///path or tcp://HOST:PORT
    lent_nbytes_max: Annotated[int, msgspec.Meta(ge=1)] = 4 << 30  # of copies of rows that nobody has fetched yet
    keys: str = ""  # the secret key file that all engines of a deployment have; other hosts are let in with one only
    strict: bool = False  # mistakes of bookkeeping raise: for tests
    untested: str = ""  # go on with this version of the engine, which was not tested: "0.34"

    @classmethod
    def of(cls, given: Any) -> Self:
        """From the mapping that the operator wrote; :class:`ConfigError` for what it cannot be."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError("kv_connector_extra_config.kvroute", "those of docs/settings.md", str(error)) from error

    @property
    def writes(self) -> bool:
        return bool(self.store) and "mode=read" not in self.store

    @property
    def reads(self) -> str:
        """The URL of a reader of the store; one of files may be opened before its writer has made it."""
        url = self.reader or self.store
        if not url.startswith("file:"):
            return url
        if not self.reader and self.writes:
            url = self.store.partition("?")[0] + "?mode=read"
        return f"{url}&absent=wait" if "mode=read" in url and "absent=" not in url else url

    @property
    def opens(self) -> str:
        """The URL by which the worker opens the store."""
        return self.store if self.writes else msgspec.structs.replace(self, reader="").reads


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine at hand, as far as rows are concerned."""

    settings: Settings
    spec: AuxBlockDataSpec  # of routing
    namespace: Namespace
    blocks: int
    max_tokens: int  # of one step
    gate: bool  # hits are cut back to KV that has rows
    pages: bool  # rows are in a layer of the KV
    witness: Literal["missing", "flagged", "off"]  # "off" too where no KV is loaded
    drafts: bool = False  # a draft model computes in the same steps, and in the memory of their slots
    transfer: bool = False  # rows of prompts are lent to other engines, and fetched from them

    @property
    def layout(self) -> RecordLayout:
        """Of a block: rows, and the version of the weights that made each."""
        return RecordLayout((self.spec, weights_version_spec(self.tokens)))

    @property
    def tokens(self) -> int:
        """Of one block."""
        return self.spec.block_tokens

    @property
    def clock(self) -> int:
        """A block of rows that no request ever has: its generation is the number of the last step that has its rows."""
        return self.blocks

    @property
    def spares(self) -> range:
        """Blocks of rows that no request ever has, to which rows are copied that are still to be read."""
        return range(self.clock + 1, self.clock + 1 + SPARES)

    @property
    def unseen(self) -> bool:
        """Whether a witness leaves out what the last router chose: no later layer has KV."""
        last: int = self.spec.attrs["layer_ids"][-1]
        return self.witness != "off" and last == self.spec.attrs["num_layers"] - 1


@dataclass(slots=True)
class StepMeta:
    """What goes to the worker with a step."""

    inner: Any  # from the connector that moves the KV, whatever it says
    before: bytes  # of the feed: what has become of blocks
    after: bytes = b""  # of the feed: what to store when the step has written
    number: int = 0  # of the step, from 1
    tokens: int = 0  # that the step computes
    version: int | None = None  # of the weights that it computes with
    namespace: bytes = b""  # where rows are in the KV, its fingerprint; empty: of no weights that have a name
    joined: list[list[int]] = field(default_factory=list)  # blocks of each request that joins a step with loads
    loads: list[Run] = field(default_factory=list)  # blocks whose KV is loaded in this step
    landed: list[Run] = field(default_factory=list)  # blocks whose KV has come between steps
    full: list[Run] = field(default_factory=list)  # blocks that this step fills
    lends: list[Lend] = field(default_factory=list)  # what it fills of prompts that other engines go on from,
    withdrawn: list[bytes] = field(default_factory=list)  # transfers that are not those any more,
    fetches: list[Fetch] = field(default_factory=list)  # and what other engines lend us


@dataclass(frozen=True, slots=True)
class Handshake:
    """A worker's first message: what the inner connector has to say, and the region of the rows where it has them."""

    inner: Any
    region: str | None = None
    late: bool = False  # rows are written behind a device, when the scheduler may have its answers
    address: str = ""  # where rows are lent


@dataclass(frozen=True, slots=True)
class Told:
    """A worker's word after a step, beside that of the inner connector: fetches that nobody waits for any more."""

    inner: Any
    why: Mapping[str, Mapping[int, str]]  # what did not come, by request and by its blocks

    def aggregate(self, other: Any) -> Told:
        """With what another rank says, which has no rows."""
        return Told(other if self.inner is None else self.inner.aggregate(other), self.why)


__all__ = ["SPARES", "VERSION", "Engine", "Handshake", "Settings", "StepMeta", "Told"]
