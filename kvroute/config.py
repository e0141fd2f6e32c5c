"""How an engine is told to keep routes: the JSON that FastDeploy's users already have, and kvroute's own keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, Self, cast, get_args
from urllib.parse import quote

import numpy as np

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage.url import StoreUrl

RoutingStoreType = Literal["local", "rdma", "response"]
IdDtype = Literal["uint8", "uint16", "uint32"]


_SERVER = re.compile(r"(mooncake://)?[A-Za-z0-9.-]{1,253}:[0-9]{1,5}(/[^?#]*)?")
_BY_URL = ("routing_store_type", "local_store_dir", "rdma_store_server", "use_fused_put")
"""What the URL ``rollout_store`` says in one."""
_FLAG = {"wanted": "true or false"}
_STRING = {"wanted": "a string"}
_COUNT = {"wanted": "an integer of 1 or more"}
_STORE_TYPE = {"wanted": "'local', 'rdma' or 'response'", "allowed": get_args(RoutingStoreType)}
_DTYPE = {"wanted": "'uint8', 'uint16' or 'uint32'", "allowed": get_args(IdDtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReplayConfig:
    """What ``--routing-replay-config`` says.

    The first seven keys are FastDeploy's, and mean what they mean there; ``routing_dtype``, ``num_moe_layers`` and
    ``moe_top_k`` follow from the model (:meth:`fitted`) and may be left out. The others are kvroute's own:
    ``required``, the specs whose rows a block must have to be stored and to be a hit (all, if not given; with ``[]`` KV
    without rows is a hit, and its rows are missing); ``block_store``, the URL of the store of blocks (empty: none); and
    ``rollout_store``, the URL of a rollout store in place of ``routing_store_type`` and its keys.
    ``docs/concepts/rollout-store.md`` lists what each key drives, and by which test that is known.

    ``debug_mode`` stores position canaries in place of expert ids: for finding misplaced rows, never for training.

    Raises :class:`ConfigError`, naming the key, what was wanted and what came.

    >>> RoutingReplayConfig.from_json('{"enable_routing_replay": true, "required": "routing"}')
    Traceback (most recent call last):
        ...
    cache_manager.errors.ConfigError: required: wanted a list of specs' names, got 'routing'
    """

    enable_routing_replay: bool = field(default=False, metadata=_FLAG)
    routing_store_type: RoutingStoreType = field(default="local", metadata=_STORE_TYPE)
    local_store_dir: str = field(default="./routing_replay_output", metadata=_STRING)
    rdma_store_server: str = field(default="", metadata=_STRING)
    only_last_turn: bool = field(default=False, metadata=_FLAG)
    use_fused_put: bool = field(default=False, metadata=_FLAG)
    debug_mode: bool = field(default=False, metadata=_FLAG)
    routing_dtype: IdDtype | None = field(default=None, metadata=_DTYPE)
    num_moe_layers: int | None = field(default=None, metadata=_COUNT)
    moe_top_k: int | None = field(default=None, metadata=_COUNT)
    required: tuple[str, ...] | None = None
    block_store: str = field(default="", metadata=_STRING)
    rollout_store: str = field(default="", metadata=_STRING)

    def __post_init__(self) -> None:
        names = self.required
        if names is not None:
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise ConfigError("required", "a list of specs' names", repr(names))
            object.__setattr__(self, "required", tuple(names))
        for f in fields(self):
            if f.name == "required":
                continue
            value = getattr(self, f.name)
            if not _fits(value, f.default, f.metadata.get("allowed")):
                raise ConfigError(f.name, f.metadata["wanted"], repr(value))
        if not self.local_store_dir:
            raise ConfigError("local_store_dir", "the path of a directory", "''")
        if self.enable_routing_replay:
            self._check_store()

    def _check_store(self) -> None:
        """What cannot be followed is refused with the reason, and not left aside."""
        kind: str = self.routing_store_type
        if self.rollout_store:
            kind = StoreUrl.parse(self.rollout_store).scheme
            for f in fields(self):
                if f.name in _BY_URL and getattr(self, f.name) != f.default:
                    wanted = "not to be given beside rollout_store, whose URL says it"
                    raise ConfigError(f.name, wanted, repr(getattr(self, f.name)))
        elif kind == "rdma" and not _SERVER.fullmatch(self.rdma_store_server):
            wanted = "HOST:PORT[/PREFIX] of a Mooncake master, which is what 'rdma' is here"
            raise ConfigError("rdma_store_server", wanted, repr(self.rdma_store_server))
        for name in ("only_last_turn", "use_fused_put"):
            if kind == "response" and getattr(self, name):
                raise ConfigError(name, "false: rollouts that are handed over in the response are not stored", True)

    @property
    def rollout_url(self) -> str:
        """The URL of the rollout store that these keys name."""
        if self.rollout_store:
            return self.rollout_store
        fused = f"?fused={str(self.use_fused_put).lower()}"
        match self.routing_store_type:
            case "local":
                return f"file://{quote(os.path.abspath(self.local_store_dir))}{fused}"
            case "rdma":
                return f"mooncake://{self.rdma_store_server.removeprefix('mooncake://')}{fused}"
            case "response":
                return "response:"

    def without_store(self) -> Self:
        """This configuration for an engine whose rollouts another one stores: every key of the store at its default,
        and each rollout handed over with its output.
        """
        return replace(
            self,
            routing_store_type="response",
            local_store_dir=type(self)().local_store_dir,
            rdma_store_server="",
            rollout_store="",
            use_fused_put=False,
            only_last_turn=False,
        )

    @classmethod
    def from_json(cls, value: str | Mapping[str, Any] | None) -> Self:
        """The configuration that a JSON text, or its content as a mapping, describes.

        Nothing at all (``None``, an empty text, the text ``None`` or ``null``, ``{}``) means every default, which is
        "off"; so does, for one key, ``null`` or the string ``"None"``, which FastDeploy's launchers pass for an option
        that was not given. Unlike in FastDeploy an unknown or repeated key is an error.
        """
        if isinstance(value, str):
            value = _parsed(value)
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError("routing replay config", "a JSON object", f"{type(value).__name__}: {value!r:.80}")
        names = [f.name for f in fields(cls)]
        for key in value:
            if key not in names:
                close = get_close_matches(str(key), names, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ConfigError("routing replay config", "the keys " + ", ".join(names), f"{key!r}{hint}")
        return cls(**{key: v for key, v in value.items() if v is not None and v != "None"})

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` reads back as an equal configuration."""
        return json.dumps({key: v for key, v in asdict(self).items() if v is not None})

    def fitted(self, spec: AuxBlockDataSpec) -> Self:
        """This configuration with the three keys that follow from the model filled in from its routing ``spec``.

        :class:`ConfigError` when one of them is there already and does not fit. ``routing_dtype`` may be wider than the
        spec's, because FastDeploy counts shared experts and a sentinel; the spec's is what comes back. With
        ``debug_mode`` it says nothing: canaries have a dtype of their own.
        """
        layers, top_k = spec.row_shape
        for name, wanted in (("num_moe_layers", layers), ("moe_top_k", top_k)):
            if getattr(self, name) not in (None, wanted):
                raise ConfigError(name, f"{wanted}, as the model has", getattr(self, name))
        given = self.routing_dtype
        if given is not None and not self.debug_mode and np.dtype(given).itemsize < np.dtype(spec.dtype).itemsize:
            raise ConfigError("routing_dtype", f"{spec.dtype} or wider for this model", given)
        dtype = cast("IdDtype", spec.dtype)
        return replace(self, routing_dtype=dtype, num_moe_layers=layers, moe_top_k=top_k)


def _parsed(text: str) -> Any:
    if text.strip() in ("", "None"):
        return None
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("routing replay config", f"JSON ({error})", f"{text!r:.80}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError("routing replay config", "each key once", f"{key!r} twice")
        found[key] = value
    return found


def _fits(value: object, default: object, allowed: tuple[str, ...] | None) -> bool:
    if value is None:
        return default is None
    if allowed is not None:
        return isinstance(value, str) and value in allowed
    if default is None:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return type(value) is type(default)
