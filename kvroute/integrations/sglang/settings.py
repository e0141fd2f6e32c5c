"""The operator's settings, and the supported engines."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from cache_manager.errors import ConfigError
from kvroute.connector.settings import Common

TESTED: Final = "0.5.23"
VARIABLE: Final = "KVROUTE_SGLANG"
LINKER: Final = "KvrouteLinker"


def settings_of(linker: dict[str, Any] | None) -> Common:
    """``linker_extra_config``, if ``--unified-cache-external-linker-config`` names our linker, or the environment's.

    Raises :class:`ConfigError` for invalid ones.
    """
    if linker is not None and linker.get("linker") == LINKER:
        return Common.of(linker.get("linker_extra_config") or {}, "linker_extra_config")
    written = os.environ.get(VARIABLE) or "{}"
    try:
        given = json.loads(written)
    except json.JSONDecodeError as error:
        raise ConfigError(VARIABLE, "a JSON object", repr(written)) from error
    return Common.of(given, VARIABLE)


def settings_of_engine() -> Common:
    """The settings of the SGLang engine in this process; :class:`ConfigError` names the first unsupported feature."""
    import sglang  # type: ignore[import-not-found]
    from sglang.srt import runtime_context as context  # type: ignore[import-not-found]

    memory, parallel, version = context.get_memory(), context.get_parallel(), sglang.__version__
    linker = memory.unified_cache_external_linker_config if memory.enable_unified_cache_external_linker else None
    settings, ours = settings_of(linker), linker is not None and linker.get("linker") == LINKER
    sizes = {each: getattr(parallel, each) for each in ("dp_size", "pp_size", "attn_cp_size")}
    loads = "an external linker" if memory.enable_unified_cache_external_linker else memory.hicache_storage_backend
    for wanted, got in {
        f"SGLang {TESTED}, or untested={version!r}": version not in (TESTED, settings.untested) and version,
        "no speculative decoding": context.get_spec().speculative_algorithm,
        "no data, pipeline or context parallelism": {each: size for each, size in sizes.items() if size > 1},
        f"no tensor parallelism with {LINKER}": ours and parallel.tp_size > 1 and f"tp_size {parallel.tp_size}",
        "no disaggregation": (context.get_disagg().disaggregation_mode or "null").removeprefix("null"),
        "hicache_host_memory_mode 'cache'": memory.hicache_host_memory_mode == "buffer_only" and "'buffer_only'",
        "no sparse attention from the host": memory.enable_hisparse and "enable_hisparse",
        f"a store for the rows of KV that is loaded, in {VARIABLE} or for {LINKER}": not settings.store
        and loads
        and f"none, beside {loads}",
    }.items():
        if got:
            raise ConfigError("SGLang with kvroute", wanted, got)
    return settings


__all__ = ["TESTED", "VARIABLE", "settings_of", "settings_of_engine"]
