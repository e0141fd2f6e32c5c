"""The engine's configuration for routes: the JSON that FastDeploy's users already have, and kvroute's own keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import quote

import msgspec
import numpy as np
from msgspec import Meta

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage.url import StoreUrl

RoutingStoreType = Literal["local", "rdma"]
IdDtype = Literal["uint8", "uint16", "uint32"]

_Count = Annotated[int, Meta(ge=1)] | None
_SERVER = re.compile(r"(mooncake://)?[A-Za-z0-9.-]{1,253}:[0-9]{1,5}(/[^?#]*)?")
_BY_URL = ("routing_store_type", "local_store_dir", "rdma_store_server", "use_fused_put")
"""The keys that the URL ``rollout_store`` replaces."""


class RoutingReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``--routing-replay-config``.

    The first seven keys are FastDeploy's, with FastDeploy's meaning; ``routing_dtype``, ``num_moe_layers`` and
    ``moe_top_k`` follow from the model (:meth:`fitted`) and may be left out. kvroute's own is ``rollout_store``, the
    URL of a rollout store in place of ``routing_store_type`` and its keys. ``debug_mode``, FastDeploy's ids that are
    positions, is refused: ids are checked at capture, and ``kvroute verify`` judges a server.

    Raises :class:`ConfigError` for what cannot be followed; types are checked by :meth:`from_json`.
    """

    enable_routing_replay: bool = False
    routing_store_type: RoutingStoreType = "local"
    local_store_dir: Annotated[str, Meta(min_length=1)] = "./routing_replay_output"
    rdma_store_server: str = ""
    only_last_turn: bool = False
    use_fused_put: bool = False
    debug_mode: bool = False
    routing_dtype: IdDtype | None = None
    num_moe_layers: _Count = None
    moe_top_k: _Count = None
    rollout_store: str = ""

    def __post_init__(self) -> None:
        if self.enable_routing_replay:
            self._check_store()

    def _check_store(self) -> None:
        """What cannot be followed is refused with the reason, and not left aside."""
        if self.debug_mode:
            raise ConfigError("debug_mode", "false: ids are checked at capture; kvroute verify judges a server", True)
        if self.rollout_store:
            StoreUrl.parse(self.rollout_store)
            for field in msgspec.structs.fields(self):
                if field.name in _BY_URL and (value := getattr(self, field.name)) != field.default:
                    raise ConfigError(field.name, "no value beside rollout_store, which replaces it", repr(value))
        elif self.routing_store_type == "rdma" and not _SERVER.fullmatch(self.rdma_store_server):
            wanted = "HOST:PORT[/PREFIX] of a Mooncake master, which 'rdma' means here"
            raise ConfigError("rdma_store_server", wanted, repr(self.rdma_store_server))

    @property
    def rollout_url(self) -> str:
        """The URL of the rollout store that these keys name."""
        if self.rollout_store:
            return self.rollout_store
        layers = "?layers=all" if self.use_fused_put else ""
        return {
            "local": f"file://{quote(os.path.abspath(self.local_store_dir))}{layers}",
            "rdma": f"mooncake://{self.rdma_store_server.removeprefix('mooncake://')}{layers}",
        }[self.routing_store_type]

    @classmethod
    def from_json(cls, value: str | Mapping[str, Any] | None) -> Self:
        """The configuration that a JSON text, or its content as a mapping, describes.

        ``None``, an empty text, the texts ``None`` and ``null``, and ``{}`` mean all defaults, which is "off"; ``null``
        or the string ``"None"``, which FastDeploy's launchers pass for an absent option, mean the default of one key.
        Unlike in FastDeploy an unknown key is an error. :class:`ConfigError` names the key.
        """
        try:
            if isinstance(value, str):
                value = None if value.strip() in ("", "None") else msgspec.json.decode(value)
            if isinstance(value, Mapping):
                value = {key: v for key, v in value.items() if v is not None and v != "None"}
            return cls() if value is None else msgspec.convert(value, cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            wanted = "a JSON object with the keys " + ", ".join(cls.__struct_fields__)
            raise ConfigError("routing replay config", wanted, error) from error

    def fitted(self, spec: AuxBlockDataSpec) -> Self:
        """This configuration with the three keys that follow from the model filled in from its routing ``spec``.

        :class:`ConfigError` when one of them is there already and does not fit. ``routing_dtype`` may be wider than the
        spec's, because FastDeploy counts shared experts and a sentinel; the spec's is what comes back.
        """
        layers, top_k = spec.row_shape
        for name, wanted in (("num_moe_layers", layers), ("moe_top_k", top_k)):
            if getattr(self, name) not in (None, wanted):
                raise ConfigError(name, f"{wanted}, as the model has", getattr(self, name))
        routing_dtype = self.routing_dtype
        if routing_dtype is not None and np.dtype(routing_dtype).itemsize < np.dtype(spec.dtype).itemsize:
            raise ConfigError("routing_dtype", f"{spec.dtype} or wider for this model", routing_dtype)
        dtype = cast("IdDtype", spec.dtype)
        return msgspec.structs.replace(self, routing_dtype=dtype, num_moe_layers=layers, moe_top_k=top_k)
