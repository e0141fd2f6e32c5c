"""The link in memory: its contract, and that only the requested faults happen."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer.link import Link, PeerLost
from transfer.testing.contract import LinkContract
from transfer.testing.loopback import Faults, LoopbackLink, Network


def pair(faults: Faults = Faults(), seed: int = 1, **options) -> tuple[Network, LoopbackLink, LoopbackLink]:  # noqa: B008
    network = Network(seed, faults, **options)
    return network, network.endpoint("a"), network.endpoint("b")


def test_a_buffer_is_read_when_it_is_delivered() -> None:
    """Goal: a sender that changes a buffer too early is detected."""
    _, a, b = pair()
    buffer = bytearray(b"before")
    a.send(b.name, b"c", [buffer])
    buffer[:] = b"after!"
    assert bytes(b.poll(0.0)[0].bulk[0]) == b"after!"


def test_a_crash_is_reported_to_peers_and_drops_the_messages_of_the_crashed() -> None:
    now = [0.0]
    network, a, b = pair(Faults(delay=1.0, delay_s=5.0), clock=lambda: now[0])
    b.connect("loopback://a")
    memory = bytearray(b"as it was")
    assert a.send(b.name, b"c", [memory])
    network.crash("a")
    memory[:] = b"scribbled"
    now[0] = 9.0
    lost, arrival = b.poll(0.0)
    assert lost == PeerLost(a.name)
    assert bytes(arrival.bulk[0]) == b"as it was"
    assert not b.send(a.name, b"nobody there")
    again = network.endpoint("a")
    assert b.send(again.name, b"welcome back")


def test_full_is_an_answer() -> None:
    _, a, b = pair(queue_max=3)
    assert [a.send(b.name, b"c") for _ in range(4)] == [True, True, True, False]
    assert len(b.poll(0.0, limit=2)) == 2
    assert len(b.poll(0.0)) == 1


@pytest.mark.parametrize("fault", ["drop", "duplicate", "delay", "truncate", "flip", "full"])
def test_each_fault_happens_as_often_as_asked_and_alone(fault: str) -> None:
    now = [0.0]
    network, a, b = pair(Faults(**{fault: 0.5}), clock=lambda: now[0], queue_max=10_000)
    sent = [bytes([i]) * 20 for i in range(200)]
    taken = [control for control in sent if a.send(b.name, control)]
    now[0] = 99.0
    came = [arrival.control for arrival in b.poll(0.0, 1000)]
    assert 60 < network.happened[fault] < 140
    assert set(network.happened) - {"reorder"} == {fault}
    if fault == "drop":
        assert len(came) == 200 - network.happened["drop"]
    elif fault == "duplicate":
        assert len(came) == 200 + network.happened["duplicate"]
    elif fault == "delay":
        assert sorted(came) == sorted(sent)
        assert came != sent
        assert network.happened["reorder"]
    elif fault == "full":
        assert came == taken
        assert len(taken) < 200
    else:
        assert sum(c not in sent for c in came) == network.happened[fault]


def test_a_seed_is_a_history() -> None:
    def history(seed: int) -> list[bytes]:
        now = [0.0]
        _, a, b = pair(Faults(0.3, 0.3, 0.3, 1.0, 0.3, 0.3, 0.3), seed, clock=lambda: now[0])
        for i in range(50):
            a.send(b.name, bytes([i]) * 8)
        now[0] = 9.0
        return [arrival.control for arrival in b.poll(0.0, 1000)]

    assert history(3) == history(3) != history(4)


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

    test_a_full_link_says_so_and_loses_nothing = None  # type: ignore[assignment]  # a full inbox loses, as a network may
