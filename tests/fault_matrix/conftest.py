"""What the tests of wire faults have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault_matrix.wire import prefill_node
from transfer.node import Node


@pytest.fixture
def prefill() -> Iterator[Node]:
    """Bound to a port of this machine; its thread must have survived the test without an error."""
    with prefill_node() as node:
        yield node
