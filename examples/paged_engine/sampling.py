"""The choice of the next token."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_engine.request import Request


def sample(logits: NDArray[Any], request: Request, sample: int, position: int) -> int:
    """The token at ``position`` of one sample, from ``logits`` ``[vocabulary]``.

    Gumbel noise on the scaled logits draws from their softmax; it is a function of seed, request, sample and position,
    so the batch that the token was computed in cannot show.
    """
    if request.temperature == 0.0:
        return int(logits.argmax())
    return int((logits / request.temperature + _noise(request, sample, position, logits.size)).argmax())


def _noise(request: Request, sample: int, position: int, size: int) -> NDArray[Any]:
    name = f"{request.seed} {sample} {position} {request.draw or request.id}".encode()
    key = hashlib.blake2b(name, digest_size=16, person=b"kvroute.noise").digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).gumbel(size=size)
