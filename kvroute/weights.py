"""Names for the weights of a model and for how an engine computes with them, for namespaces.

Rows of different weights, or of one checkpoint that two engines compute differently, never share a key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import Path
from typing import Any, Final

from cache_manager.errors import ConfigError

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
SAMPLES: Final = 16
SAMPLE_NBYTES: Final = 4096
NAME_FIELDS: Final = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version")
"""Keys of a configuration that say where it comes from, not what is computed."""


def weights_digest(model: str, revision: str = "") -> str:
    """32 hex digits that change with the path, and with the files, their sizes and their times of change.

    Reads 4 KiB at 16 places of each file of weights in the directory ``model``, or of the file ``model``. Any other
    ``model`` is identified by its name and revision. Hosts with separate copies need a chosen name to share rows.
    """
    digest = hashlib.blake2b(f"{model}@{revision}".encode(), digest_size=16)
    home = Path(model)
    files = [home] if home.is_file() else []
    if home.is_dir():
        files = sorted(path for path in home.iterdir() if path.suffix in SUFFIXES)
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns}".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * status.st_size // SAMPLES)
                digest.update(file.read(SAMPLE_NBYTES))
    return digest.hexdigest()


def configuration_digest(config: Mapping[str, Any], **others: Any) -> str:
    """32 hex digits that are equal for equal effective configurations, in every process and on every host.

    ``config`` is what the engine computes with after all overrides, as ``PretrainedConfig.to_dict()`` has it. The
    ``others`` are the engine's own choices: dtype, load format, quantization, dtype of the KV. The order of keys and
    the :data:`NAME_FIELDS` do not count, at any depth. :class:`ConfigError` names a value that has no text of its own.

    >>> configuration_digest({"rope_theta": 1e4}, dtype="float32") == configuration_digest({"rope_theta": 1e6})
    False
    """
    canonical = {"config": _canonical(config, "config"), "others": _canonical(others, "others")}
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _canonical(value: Any, field: str) -> Any:
    """``value`` as JSON's types; a key's type and a sequence's do not count."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        items = [(key, item) for key, item in value.items() if key not in NAME_FIELDS]
        return {str(key): _canonical(item, f"{field}.{key}") for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_canonical(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, AbstractSet):
        return sorted((_canonical(item, field) for item in value), key=json.dumps)
    if isinstance(value, Enum):
        return _canonical(value.value, field)
    if isinstance(value, Path) or type(value).__module__ == "torch":  # torch.dtype
        return str(value)
    to_dict: Callable[[], Any] | None = getattr(value, "to_dict", None)
    if to_dict is None or isinstance(value, type):
        wanted = "values of JSON"
        got = f"{type(value).__name__} {value!r}"
        raise ConfigError(f"model configuration {field}", wanted, got)
    return _canonical(to_dict(), field)


__all__ = ["configuration_digest", "weights_digest"]
