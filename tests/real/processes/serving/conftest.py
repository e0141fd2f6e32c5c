"""One thread: the matrices are small, and tests may run beside others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from serving import Plain, plain_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def plain() -> Iterator[Plain]:
    oracle = Plain(plain_model())
    yield oracle
    oracle.close()
