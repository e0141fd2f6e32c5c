"""The position canary: rows whose content says whose they are, so that a stale, shifted or foreign row shows itself.

Independent of the code under test: the value is a digest of what the row must belong to.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec


def canary_row(spec: AuxBlockDataSpec, *identity: object) -> NDArray[np.uint8]:
    """One row's bytes ``[row_nbytes]``, a function of ``identity`` (prefix, position, weights version, ...)."""
    seed = repr((spec.name, *identity)).encode()
    stream = b"".join(hashlib.sha256(seed + i.to_bytes(4, "little")).digest() for i in range(-(-spec.row_nbytes // 32)))
    return np.frombuffer(stream[: spec.row_nbytes], dtype=np.uint8)


def canary_rows(spec: AuxBlockDataSpec, identities: list[tuple[object, ...]]) -> NDArray[np.generic]:
    """Rows ``[n, *row_shape]`` in the spec's dtype, one for each identity."""
    raw = np.stack([canary_row(spec, *i) for i in identities]) if identities else np.empty((0, spec.row_nbytes), "u1")
    return raw.view(spec.numpy_dtype).reshape(len(identities), *spec.row_shape)
