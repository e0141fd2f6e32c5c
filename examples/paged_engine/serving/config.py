"""The configuration of `kvroute prefill`, ``decode`` and ``front``: a TOML file, flags above it, one frozen object."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

from cache_manager.errors import ConfigError
from kvroute.config import RoutingReplayConfig
from paged_engine.engine.request import EngineConfig
from transfer.zmq_settings import check_address

PORT_MAX: Final = 65_535
MODEL_NAMES: Final = ("qwen3_moe", "deepseek_v3", "olmoe", "mixtral")


def _doc(wanted: str, doc: str) -> dict[str, str]:
    return {"wanted": wanted, "doc": doc}


def _key(default: Any, wanted: str, doc: str) -> Any:
    """A key: its default (``MISSING``: it has to be given), what a value must be, what it is for."""
    metadata = _doc(wanted, doc)
    return field(default=default, metadata=metadata) if default is not MISSING else field(metadata=metadata)


_COUNT, _COUNT_0 = "an integer of 1 or more", "an integer of 0 or more"
_SECONDS = "a number of seconds above 0"
_TEXT, _NAMES = "a string", "a table of names and addresses"
_FLAG = "true or false"
_PORT, _MODEL = "a port, 0 to 65535 (0: any)", "one of " + ", ".join(MODEL_NAMES)
_MEMORY = "'heap' or 'shared'"


def _is_names(value: Any) -> bool:
    return isinstance(value, dict) and all(k and isinstance(k, str) and isinstance(a, str) for k, a in value.items())


_WANTED: Final[Mapping[str, Callable[[Any], bool]]] = {
    _COUNT: lambda v: type(v) is int and v >= 1,
    _COUNT_0: lambda v: type(v) is int and v >= 0,
    _SECONDS: lambda v: type(v) in (int, float) and 0 < v < float("inf"),
    _TEXT: lambda v: isinstance(v, str),
    _NAMES: _is_names,
    _FLAG: lambda v: isinstance(v, bool),
    _PORT: lambda v: type(v) is int and 0 <= v <= PORT_MAX,
    _MODEL: lambda v: v in MODEL_NAMES,
    _MEMORY: lambda v: v in ("heap", "shared"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What every command has: where it listens, how much it takes on, and how it ends.

    Raises :class:`ConfigError` naming the key, what was wanted and what came.
    """

    command: ClassVar[str]

    host: str = _key("127.0.0.1", _TEXT, "address that HTTP is served on")
    port: int = _key(MISSING, _PORT, "port that HTTP is served on")
    requests_max: int = _key(64, _COUNT, "requests in flight at once; more are answered 503")
    body_max_nbytes: int = _key(16 << 20, _COUNT, "longest request body")
    request_timeout_s: float = _key(300.0, _SECONDS, "longest life of a request; then it ends with 504")
    drain_s: float = _key(10.0, _SECONDS, "time to finish requests after SIGTERM; then they are aborted")

    def __post_init__(self) -> None:
        for f in fields(self):
            if not _WANTED[f.metadata["wanted"]](getattr(self, f.name)):
                raise ConfigError(f.name, f.metadata["wanted"], repr(getattr(self, f.name)))
        if not self.host:
            raise ConfigError("host", "an address", "''")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServerConfig(ServerConfig):
    """What prefill and decode have: a model and the sizes of its engine."""

    name: str = _key(MISSING, _TEXT, "name by which the other commands' configurations know this one")
    model: str = _key("qwen3_moe", _MODEL, "model; its weights come from `seed`")
    seed: int = _key(0, _COUNT_0, "seed of the weights")
    weights_version: int = _key(0, _COUNT_0, "version of the weights, part of the namespace")
    salt: str = _key("", _TEXT, "separates tenants and adapters, part of the namespace")
    block_tokens: int = _key(16, _COUNT, "tokens in a KV block")
    device_blocks: int = _key(256, _COUNT, "KV blocks on the device")
    host_blocks: int = _key(0, _COUNT_0, "KV blocks to swap to")
    step_tokens: int = _key(64, _COUNT, "most tokens in one forward pass")
    sequences_max: int = _key(8, _COUNT, "sequences that run at once")
    memory: str = _key("shared", _MEMORY, "where rows lie")
    store: str = _key("", _TEXT, "URL of a store for rows and KV (empty: none)")
    transfer_process: bool = _key(False, _FLAG, "a process beside the engine moves blocks and opens the store")
    threads: int = _key(1, _COUNT, "threads of a forward pass")
    routing_replay_config: str = _key("", _TEXT, "JSON of a `RoutingReplayConfig` (empty: rows come with answers only)")

    def __post_init__(self) -> None:
        super(EngineServerConfig, self).__post_init__()
        if not self.name:
            raise ConfigError("name", "a non-empty string", "''")
        if self.transfer_process and not (self.store and self.memory == "shared"):
            raise ConfigError("transfer_process", "a store, and memory = 'shared'", f"{self.store!r}, {self.memory!r}")
        _ = self.engine, self.replay

    @property
    def replay(self) -> RoutingReplayConfig | None:
        """What ``routing_replay_config`` says; ``None`` when nothing is given, which is not the same as "off"."""
        text = self.routing_replay_config
        return RoutingReplayConfig.from_json(text) if text else None

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            block_tokens=self.block_tokens,
            device_blocks=self.device_blocks,
            host_blocks=self.host_blocks,
            step_tokens=self.step_tokens,
            sequences_max=self.sequences_max,
            memory="shared" if self.memory == "shared" else "heap",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(EngineServerConfig):
    """`kvroute prefill`."""

    command: ClassVar[str] = "prefill"

    transfer_address: str = _key(MISSING, _TEXT, "address that decode pulls blocks from, such as tcp://127.0.0.1:7001")
    curve_secret: str = _key("", _TEXT, "file of the own key pair (`kvroute keys`): transfers are encrypted")
    curve_clients: str = _key("", _TEXT, "directory with the public keys of the decodes that may pull")
    lease_s: float = _key(30.0, _SECONDS, "how long blocks wait for a decode that says nothing")
    lease_max_s: float = _key(300.0, _SECONDS, "how long blocks are held for a decode at most")
    transfers_max: int = _key(256, _COUNT, "transfers on offer at once; a further one is computed again by decode")

    def __post_init__(self) -> None:
        super(PrefillConfig, self).__post_init__()
        check_address(self.transfer_address, "transfer_address", curve=bool(self.curve_secret))
        _both("curve_secret", self.curve_secret, "curve_clients", self.curve_clients)
        if self.lease_max_s < self.lease_s:
            raise ConfigError("lease_max_s", f"at least lease_s ({self.lease_s})", self.lease_max_s)

    @property
    def replay(self) -> RoutingReplayConfig | None:
        """As it is given, but nothing is stored here: a sample's rollout is decode's, which ends it."""
        given = super(PrefillConfig, self).replay
        return given and given.without_store()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineServerConfig):
    """``kvroute decode``."""

    command: ClassVar[str] = "decode"

    prefills: dict[str, str] = field(
        default_factory=dict,
        metadata=_doc(_NAMES, "transfer addresses of the prefills to pull from, and no other"),
    )
    curve_secret: str = _key("", _TEXT, "file of the own key pair (`kvroute keys`): transfers are encrypted")
    curve_server: str = _key("", _TEXT, "file with the public key that the prefills must have")
    retry_s: float = _key(2.0, _SECONDS, "a pull without progress for so long is asked for again")
    retries_max: int = _key(3, _COUNT, "how often it is asked for again; then the prompt is computed here")
    transfers_max: int = _key(64, _COUNT, "pulls in flight at once")

    def __post_init__(self) -> None:
        super(DecodeConfig, self).__post_init__()
        _both("curve_secret", self.curve_secret, "curve_server", self.curve_server)
        for name, address in self.prefills.items():
            check_address(address, f"prefills.{name}", curve=bool(self.curve_secret))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig(ServerConfig):
    """``kvroute front``."""

    command: ClassVar[str] = "front"

    prefills: dict[str, str] = field(default_factory=dict, metadata=_doc(_NAMES, "URLs of the prefill servers"))
    decodes: dict[str, str] = field(default_factory=dict, metadata=_doc(_NAMES, "URLs of the decode servers"))
    model: str = _key("qwen3_moe", _MODEL, "name that requests must ask for")
    attempts_max: int = _key(3, _COUNT, "servers of a kind that a request is tried on")
    prefill_timeout_s: float = _key(60.0, _SECONDS, "longest wait for a prefill server's answer")
    connect_timeout_s: float = _key(2.0, _SECONDS, "longest wait for a connection to a server")
    health_s: float = _key(1.0, _SECONDS, "pause between looks at the servers' readiness")

    def __post_init__(self) -> None:
        super(FrontConfig, self).__post_init__()
        for key in ("prefills", "decodes"):
            servers = getattr(self, key)
            if not servers:
                raise ConfigError(key, "at least one server", "none")
            for name, url in servers.items():
                parts = urlsplit(url)
                if parts.scheme != "http" or not parts.hostname:
                    raise ConfigError(f"{key}.{name}", "a URL http://host:port", repr(url))


KINDS: Final[Mapping[str, type[ServerConfig]]] = {
    kind.command: kind for kind in (PrefillConfig, DecodeConfig, FrontConfig)
}
AnyConfig = TypeVar("AnyConfig", bound=ServerConfig)


def add_flags(parser: argparse.ArgumentParser, kind: type[ServerConfig]) -> None:
    """``--config`` and a flag for every key of ``kind``; what is not given stays away from the namespace."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the keys below; flags win")
    for f in fields(kind):
        flag, doc = "--" + f.name.replace("_", "-"), f.metadata["doc"]
        if f.metadata["wanted"] == _NAMES:
            flag = flag.removesuffix("s")
            text = f"{doc}; may be repeated"
            parser.add_argument(
                flag, dest=f.name, action="append", default=argparse.SUPPRESS, metavar="NAME=ADDRESS", help=text
            )
            continue
        given = "" if _default(f) is MISSING else f" ({_default(f)})".replace("%", "%%")
        parser.add_argument(flag, dest=f.name, default=argparse.SUPPRESS, metavar="VALUE", help=doc + given)


def load(kind: type[AnyConfig], chosen: Mapping[str, Any]) -> AnyConfig:
    """The configuration that the file ``chosen["config"]`` and the other, given flags describe.

    :class:`ConfigError` names the key, what was wanted and what came; unknown keys of the file are errors.
    """
    path = chosen.get("config")
    values = _file(kind, path) if path is not None else {}
    for f in fields(kind):
        if f.name in chosen:
            values[f.name] = _flag(f, chosen[f.name])
    for f in fields(kind):
        if f.name not in values and _default(f) is MISSING:
            raise ConfigError(f.name, f"{f.metadata['wanted']} (there is no default)", "nothing")
    return kind(**values)


def _file(kind: type[ServerConfig], path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", "a file that can be read", f"{path} ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError("--config", f"TOML in {path}", error) from error
    names = [f.name for f in fields(kind)]
    for key in found:
        if key not in names:
            close = get_close_matches(key, names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"{kind.command} config", "the keys " + ", ".join(names), f"{key!r}{hint}")
    return found


def _flag(key: Field[Any], text: str | Sequence[str]) -> Any:
    """The value that a flag's text stands for; a text that is no number is left for the check of the whole."""
    wanted = key.metadata["wanted"]
    if wanted == _NAMES:
        pairs = [entry.partition("=") for entry in text]
        if any(not (name and sign and address) for name, sign, address in pairs):
            raise ConfigError(key.name, "NAME=ADDRESS", " ".join(map(repr, text)))
        if len({name for name, _, _ in pairs}) < len(pairs):
            raise ConfigError(key.name, "each name once", " ".join(map(repr, text)))
        return {name: address for name, _, address in pairs}
    assert isinstance(text, str)
    if wanted == _FLAG and text in ("true", "false"):
        return text == "true"
    for number in {_COUNT: (int,), _COUNT_0: (int,), _PORT: (int,), _SECONDS: (int, float)}.get(wanted, ()):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _both(first: str, given: str, second: str, with_it: str) -> None:
    if bool(given) != bool(with_it):
        missing, other = (second, first) if given else (first, second)
        raise ConfigError(missing, f"a file, as {other} is given", "''")


def _default(key: Field[Any]) -> Any:
    return key.default_factory() if key.default_factory is not MISSING else key.default


def table(kind: type[ServerConfig]) -> str:
    """The keys of ``kind`` as a Markdown table, as ``docs/operations.md`` has it."""
    lines = ["| key | default | wanted | what it is |", "|---|---|---|---|"]
    for f in fields(kind):
        default = _default(f)
        shown = "(none: must be given)" if default is MISSING else f"`{_toml(default)}`"
        lines.append(f"| `{f.name}` | {shown} | {f.metadata['wanted']} | {f.metadata['doc']} |")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "{}" if isinstance(value, dict) else str(value).lower()


__all__ = ["KINDS", "DecodeConfig", "EngineServerConfig", "FrontConfig", "PrefillConfig", "ServerConfig"]
__all__ += ["add_flags", "load", "table"]
