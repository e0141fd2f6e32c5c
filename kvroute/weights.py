"""A name for the weights of a model on this machine, for namespaces: rows of different weights never share a key."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".safetensors", ".bin", ".pt")
SAMPLES: Final = 16
SAMPLE_NBYTES: Final = 4096


def weights_digest(model: str, revision: str = "") -> str:
    """32 hex digits that change with the path, and with the files, their sizes and their times of change.

    Reads 4 KiB at 16 places of each file of weights in the directory ``model``. A ``model`` that is not a directory is
    identified by its name and revision. Hosts with separate copies need a chosen name to share rows.
    """
    digest, home = hashlib.blake2b(f"{model}@{revision}".encode(), digest_size=16), Path(model)
    for path in sorted(p for p in home.iterdir() if p.suffix in SUFFIXES) if home.is_dir() else ():
        status = path.stat()
        digest.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns}".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * status.st_size // SAMPLES)
                digest.update(file.read(SAMPLE_NBYTES))
    return digest.hexdigest()


__all__ = ["weights_digest"]
