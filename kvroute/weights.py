"""A name for the weights of a model on this machine, for namespaces: rows of other weights never meet under a key."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".safetensors", ".bin", ".pt")
SAMPLES: Final = 16
SAMPLE_NBYTES: Final = 4096


def weights_digest(model: str, revision: str = "") -> str:
    """32 hex digits: other files, or files of another size or time of change, or at another place, have others.

    Of each file of weights in the directory ``model``, 16 places of 4 KiB are read. A ``model`` that is no directory is
    told by its name and revision. Hosts with copies of their own want a name of their own choice to meet.
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
