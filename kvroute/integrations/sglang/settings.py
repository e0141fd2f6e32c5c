"""The operator's settings."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from cache_manager.errors import ConfigError
from kvroute.connector.settings import Lending

VARIABLE: Final = "KVROUTE_SGLANG"
LINKER_NAME: Final = "KvrouteLinker"
LINKER_CONFIG: Final = "unified_cache_external_linker_config"
"""SGLang's argument, which 0.5.22 has not."""


def lending_of(linker: dict[str, Any] | None) -> Lending:
    """``linker_extra_config``, if ``--unified-cache-external-linker-config`` names our linker, or the environment's.

    Raises :class:`ConfigError` for invalid ones.
    """
    if linker is not None and linker.get("linker") == LINKER_NAME:
        return Lending.of(linker.get("linker_extra_config") or {}, "linker_extra_config")
    text = os.environ.get(VARIABLE) or "{}"
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(VARIABLE, "a JSON object", repr(text)) from error
    return Lending.of(settings, VARIABLE)


def uses_our_linker(server_args: Any) -> bool:
    """Whether KV and rows of this engine go to a store of kvroute, from each of its ranks."""
    linked = getattr(server_args, "enable_unified_cache_external_linker", False)
    return bool(linked) and (getattr(server_args, LINKER_CONFIG, None) or {}).get("linker") == LINKER_NAME


def settings_of_arguments(server_args: Any) -> Lending:
    """The settings of the engine with these server arguments; :class:`ConfigError` for invalid ones."""
    linked = getattr(server_args, "enable_unified_cache_external_linker", False)
    return lending_of(getattr(server_args, LINKER_CONFIG, None) if linked else None)


__all__ = ["LINKER_CONFIG", "LINKER_NAME", "VARIABLE", "lending_of", "settings_of_arguments", "uses_our_linker"]
