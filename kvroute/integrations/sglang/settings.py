"""The operator's settings, and the supported engines."""

from __future__ import annotations

import json
import os
from typing import Any, Final, Literal

from cache_manager.errors import ConfigError
from kvroute.connector.settings import Common

TESTED: Final = "0.5.23"
VARIABLE: Final = "KVROUTE_SGLANG"
LINKER: Final = "KvrouteLinker"


class Settings(Common, frozen=True):
    """``linker_extra_config`` of KvrouteLinker, or without it the JSON in the environment variable KVROUTE_SGLANG."""

    # The last router's choices for KV that others kept, which a comparison with the KV cannot prove.
    witness: Literal["missing", "flagged"] = "missing"
    rows: bool = True  # a page that lacks rows is neither stored nor a hit; false: it is both, and they are missing


def settings_of(linker: dict[str, Any] | None) -> Settings:
    """From ``--unified-cache-external-linker-config``, if that names our linker, or from the environment.

    Raises :class:`ConfigError` for invalid ones.
    """
    if linker is not None and linker.get("linker") == LINKER:
        return Settings.of(linker.get("linker_extra_config") or {}, "linker_extra_config")
    written = os.environ.get(VARIABLE) or "{}"
    try:
        given = json.loads(written)
    except json.JSONDecodeError as error:
        raise ConfigError(VARIABLE, "a JSON object", repr(written)) from error
    return Settings.of(given, VARIABLE)


def settings_of_engine() -> Settings:
    """The settings of the SGLang engine in this process; :class:`ConfigError` names the first unsupported feature."""
    import sglang  # type: ignore[import-not-found]
    from sglang.srt import runtime_context as context  # type: ignore[import-not-found]

    memory, parallel, version = context.get_memory(), context.get_parallel(), sglang.__version__
    linker = memory.unified_cache_external_linker_config if memory.enable_unified_cache_external_linker else None
    settings, ours = settings_of(linker), linker is not None and linker.get("linker") == LINKER
    loads = memory.enable_unified_cache_external_linker or memory.hicache_storage_backend is not None
    for wanted, got in {
        f"SGLang {TESTED}, or untested={version!r}": version not in (TESTED, settings.untested),
        "no speculative decoding": context.get_spec().speculative_algorithm is not None,
        "no data, pipeline or context parallelism": max(parallel.dp_size, parallel.pp_size, parallel.attn_cp_size) > 1,
        f"no tensor parallelism with {LINKER}": parallel.tp_size > 1 and ours,
        "no disaggregation": context.get_disagg().disaggregation_mode not in (None, "null"),
        "pages on the host that are kept (hicache_host_memory_mode)": memory.hicache_host_memory_mode == "buffer_only",
        "no sparse attention from the host": memory.enable_hisparse,
        f"a store for the rows of KV that is loaded, in {VARIABLE} or for {LINKER}": loads and not settings.store,
    }.items():
        if got:
            raise ConfigError("SGLang with kvroute", wanted, f"SGLang {version} as it is configured")
    return settings


__all__ = ["TESTED", "VARIABLE", "Settings", "settings_of", "settings_of_engine"]
