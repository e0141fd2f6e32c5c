"""The settings that an operator writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import msgspec
from msgspec import inspect

from cache_manager.errors import ConfigError
from cache_manager.storage import StoreUrl, check_store_url
from kvroute.connector.versions import AS_LOADED
from kvroute.rollout import check_rollouts_url

RESPONSE: Final = "response:"
"""The setting ``rollouts`` that leaves routes in no store: the answers carry them, as JSON."""
APART_SCHEME: Final = "apart:"
"""How the setting ``rollouts`` begins where a process of its own has the store whose URL follows."""
VERSION: Final = "weights_version"
"""The spec of the rows' labels; see :func:`kvroute.weights_version_spec`."""

PLACE: Final = "kv_connector_extra_config.kvroute"
"""Where vLLM's operator writes them."""
OTHER_KINDS: Final = {
    "routing_weights": "this engine's hook has no weights (docs/concepts/kinds.md)",
    "sampling_support": "the engine's own answers have supports, and support(answer) reads them",
    "indexer_topk": "nothing captures it in this engine (docs/concepts/kinds.md)",
    "hidden_states": "engines have connectors of their own for them (docs/concepts/kinds.md)",
}
"""Names of rows that no connector of kvroute carries, and why."""
RANK: Final = "{rank}"
"""In the URL of a store: the number of the rank among those with stores of their own."""


class Common(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operator's settings in every engine."""

    store: str = ""  # URL of the store of rows that belong to KV from elsewhere; "": rows end with their blocks
    rollouts: str = RESPONSE  # routes go into the response; or the URL of the rollout store for them; "": nowhere
    weights: str = ""  # names the weights; by default a digest of where they are, their sizes, times and samples
    # Rows that come for KV that others kept are compared with it. KV does not show the last router's choice: that is
    # "missing" from the routes, or there and "flagged" in the answer.
    witness: Literal["missing", "flagged"] = "missing"
    strict: bool = False  # mistakes of bookkeeping raise: for tests
    untested: str = ""  # accept this untested version of the engine: "0.34"

    rollouts_may_be_apart: ClassVar[bool] = False

    @classmethod
    def of(cls, mapping: Any, where: str = PLACE) -> Self:
        """From the mapping that the operator wrote there. URLs and addresses are judged here, and opened later.

        Raises :class:`ConfigError` that names the setting, what was wanted and what came.
        """
        if not isinstance(mapping, Mapping):
            got = repr(mapping)
            raise ConfigError(where, "a mapping of settings (docs/settings.md)", got)
        wanted = {field.encode_name: _words(field.type) for field in inspect.type_info(cls).fields}  # type: ignore[attr-defined]
        for name, value in mapping.items():
            if name in OTHER_KINDS and name not in wanted:
                raise ConfigError(f"{where}.{name}", f"expert ids alone: {OTHER_KINDS[name]}", repr(value))
            if name not in wanted:
                raise ConfigError(where, f"some of {', '.join(wanted)} (docs/settings.md)", repr(name))
            try:
                msgspec.convert({name: value}, cls)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{where}.{name}", wanted[name], repr(value)) from error
        settings = msgspec.convert(mapping, cls)
        for name, check in settings.checks().items():
            try:
                check()
            except ConfigError as error:
                raise ConfigError(f"{where}.{name}", error.wanted, error.got) from error
        return settings

    def of_rank(self, rank: int) -> Self:
        """Those of one of the ranks with requests of their own."""
        return msgspec.structs.replace(self, store=self.store.replace(RANK, str(rank)))

    @property
    def shares_files(self) -> bool:
        """Whether all ranks would open one directory of files, which has one writer."""
        return "file:" in self.store and RANK not in self.store

    def checks(self) -> dict[str, Callable[[], object]]:
        """By setting that is not empty: what raises :class:`ConfigError` if its text cannot be used."""
        checks: dict[str, Callable[[], object]] = {}
        if self.store:
            checks["store"] = lambda: check_store_url(self.store)
        if self.rollouts not in ("", RESPONSE):
            checks["rollouts"] = lambda: _check_rollouts(self.rollouts, apart=self.rollouts_may_be_apart)
        return checks


def apart_url(rollouts: str) -> tuple[str, float]:
    """Of the setting ``rollouts``, ``apart:URL`` or ``apart:?call=30s,URL``: the URL, and the seconds of ``call``.

    Raises :class:`ConfigError` for anything else.

    >>> apart_url("apart:?call=5s,file:///var/rollouts")
    ('file:///var/rollouts', 5)
    """
    parsed = StoreUrl.parse(rollouts)
    parsed.allow("call")
    if len(parsed.tiers) != 1 or parsed.tiers[0].startswith((APART_SCHEME, RESPONSE)):
        wanted = "apart: and the URL of one rollout store"
        raise ConfigError("rollouts", wanted, repr(rollouts))
    return parsed.tiers[0], parsed.seconds("call", 30.0) or 0


def _check_rollouts(url: str, *, apart: bool) -> None:
    try:
        if not url.startswith(APART_SCHEME):
            check_rollouts_url(url)
        elif apart:
            check_rollouts_url(apart_url(url)[0])
        else:
            wanted = (
                "the URL of a rollout store that this engine's own process opens: only in vLLM and SGLang one is apart"
            )
            raise ConfigError("rollouts", wanted, repr(url))
    except ConfigError as error:
        wanted = f"{RESPONSE} or {error.wanted}"
        raise ConfigError("rollouts", wanted, error.got) from error


def _words(kind: inspect.Type) -> str:
    """What a setting of this type wants, in words.

    >>> _words(inspect.type_info(Literal["a", "b"] | None))
    "'a' or 'b' or null"
    """
    match kind:
        case inspect.UnionType(types):
            return " or ".join(map(_words, sorted(types, key=lambda member: isinstance(member, inspect.NoneType))))
        case inspect.LiteralType(values):
            return " or ".join(sorted(map(repr, values)))
        case inspect.IntType(ge=least, lt=end):
            return f"a whole number from {least}" + ("" if end is None else f" to {end - 1}")
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case _:
            return "null"


class Lending(Common, frozen=True):
    """An operator's settings in engines that lend rows to others: SGLang's."""

    rollouts_may_be_apart: ClassVar[bool] = True

    lend: str = "tcp://127.0.0.1:*"  # where rows are lent to other engines: ipc:///path or tcp://HOST:PORT
    lent_nbytes_max: Annotated[int, msgspec.Meta(ge=1)] = 4 << 30  # of copies of rows not fetched yet
    keys: str = ""  # the secret key file of all engines of a deployment; other hosts need one
    # The weights of the chosen experts go into the answers beside their ids, in the same record of each block.
    routing_weights: bool = False

    def checks(self) -> dict[str, Callable[[], object]]:
        checks = Common.checks(self)
        checks["lend"] = self._check_lend
        if self.keys:
            checks["keys"] = self._check_keys
        if self.routing_weights:
            checks["routing_weights"] = self._check_routing_weights
        return checks

    def _check_lend(self) -> None:
        from transfer.zmq_settings import check_address

        check_address(self.lend, "lend", curve=bool(self.keys))

    def _check_keys(self) -> None:
        from transfer.curve import read_keys

        read_keys(Path(self.keys))

    def _check_routing_weights(self) -> None:
        if self.rollouts != RESPONSE:
            wanted = (
                f"false, or rollouts {RESPONSE!r}: weights go into answers, and no rollout store has a part for them"
            )
            raise ConfigError("routing_weights", wanted, f"true beside rollouts {self.rollouts!r}")


class Settings(Lending, frozen=True):
    """An operator's settings in vLLM: ``kv_connector_extra_config["kvroute"]``."""

    # Version of the weights that are loaded at the start. Without one, rows have no version.
    weights_version: Annotated[int, msgspec.Meta(ge=0, lt=AS_LOADED)] | None = None
    # The carrier of rows to other engines: a "transfer" of their own beside the KV of whole requests, or the
    # "connector" with its store. "auto" is the transfer if the connector moves whole requests. Else, without a store,
    # rows go along with copies to the host and back where the connector tells of them.
    carrier: Literal["transfer", "connector", "auto"] = "auto"
    # Rows are returned in the engine's own field, routed_experts; its flag sets this. Then no rollouts are left unless
    # they are asked for: "auto" is "response:" without the field, and nowhere with it.
    field: bool = False
    rollouts: str = "auto"
    # An answer that lacks a row has no field, and the reason beside it; or its request fails.
    on_missing: Literal["none", "fail"] = "none"
    # The choices of an MTP draft's router for tokens that stand go into the answers, in a spec of their own.
    mtp: bool = False
    # "auto" is "missing"; beside a field and a store of rows for KV from elsewhere the operator has to choose.
    witness: Literal["missing", "flagged", "auto"] = "auto"  # type: ignore[assignment]

    rollouts_may_be_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rollouts == "auto":
            msgspec.structs.force_setattr(self, "rollouts", "" if self.field else RESPONSE)

    @classmethod
    def of(cls, mapping: Any, where: str = PLACE) -> Self:
        if isinstance(mapping, Mapping) and mapping.get("carrier") == "layer":
            wanted = "a 'store' and no carrier, or neither with KvrouteOffloadingConnector (no layer of KV has rows)"
            raise ConfigError(f"{where}.carrier", wanted, "'layer'")
        return super().of(mapping, where)

    @property
    def writes(self) -> bool:
        """Whether the engine stores rows: a store that it only reads takes none."""
        return bool(self.store) and _written(self.store)

    @property
    def reads(self) -> str:
        """The URL of a reader beside the worker's own store, opened perhaps before a writer has made its files.

        Of ``tiered:`` and ``apart:`` it is that of readers of what they hold. Empty: only the worker's process can read
        the store.
        """
        return _reader(self.store) if self.store else ""

    @property
    def opens(self) -> str:
        """The URL by which the worker opens the store."""
        return _opened(self.store) if self.store else ""


def _written(store: str) -> bool:
    """Whether a store at this URL takes records, or one that it holds does."""
    url = StoreUrl.parse(store)
    if url.tiers:
        return any(map(_written, url.tiers))
    return url.parameters.get("mode") != "read"


def _opened(store: str) -> str:
    """The store's URL, so that a reader of files may be opened before they are there."""
    url = StoreUrl.parse(store)
    if url.tiers:
        return _holding(url, [_opened(tier) for tier in url.tiers])
    if url.scheme != "file" or url.parameters.get("mode") != "read" or "absent" in url.parameters:
        return store
    return f"{store}&absent=wait"


def _reader(store: str) -> str:
    """The URL of a reader of this store in another process; empty if there can be none."""
    url = StoreUrl.parse(store)
    if url.tiers:
        readers = [reader for tier in url.tiers if (reader := _reader(tier))]
        if url.scheme == "tiered" and len(readers) < 2:
            return "".join(readers)
        return _holding(url, readers) if readers else ""
    if url.scheme == "memory":
        return ""
    if url.scheme == "file" and _written(store):
        return store.partition("?")[0] + "?mode=read&absent=wait"
    return _opened(store)


def _holding(url: StoreUrl, tiers: Sequence[str]) -> str:
    """The URL of a store like this one, which holds ``tiers``."""
    own = url.text.removesuffix(url.path)
    return own + ",".join(tiers)


__all__ = ["APART_SCHEME", "RESPONSE", "VERSION", "Common", "Lending", "Settings", "apart_url"]
