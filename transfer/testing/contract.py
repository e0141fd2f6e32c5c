"""The contract of every ``Link``, as a test class: subclass it, say how to make one, and run pytest.

.. code-block:: python

    class TestMyLink(LinkContract):
        def make_server(self, directory: Path) -> Link: ...
        def make_client(self, directory: Path) -> Link: ...

A message's bytes are a function of its number alone, so that a cut, mixed or overwritten one is recognised by its
content. The links under test lose no message while both ends live. Needs ``pytest`` and ``numpy``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from transfer.link import Arrival, Link, LinkEvent, Peer, PeerFound, PeerLost

PATIENCE_S: Final = 60.0
SIZES: Final = (0, 1, 4096, 29_696, 300_000)
MANY: Final = 100_000


def payload(number: int, nbytes: int) -> bytearray:
    return bytearray(np.random.default_rng(number).bytes(nbytes))


def poll_until(link: Link, enough: Callable[[list[LinkEvent]], bool], *others: Link) -> list[LinkEvent]:
    """The items of ``link`` until there are enough; the others are polled, too, and must have none."""
    came: list[LinkEvent] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while not enough(came):
        assert time.monotonic() < give_up_s, f"only {came} came"
        came += link.poll(0.01)
        for other in others:
            assert all(isinstance(item, PeerFound) for item in other.poll(0.0))
    return came


def arrivals(came: list[LinkEvent]) -> list[Arrival]:
    return [item for item in came if isinstance(item, Arrival)]


class LinkContract:
    """Subclass and say how to make the two ends."""

    def make_server(self, directory: Path) -> Link:
        raise NotImplementedError

    def make_client(self, directory: Path) -> Link:
        raise NotImplementedError

    def lose(self, end: Link) -> None:
        """The process of this end is gone."""
        end.close()

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Link]:
        link = self.make_server(tmp_path)
        yield link
        link.close()

    @pytest.fixture
    def client(self, tmp_path: Path, server: Link) -> Iterator[Link]:  # noqa: ARG002 - the server comes first
        link = self.make_client(tmp_path)
        yield link
        link.close()

    def meet(self, server: Link, client: Link) -> tuple[Peer, Peer]:
        """The client's name for the server, and the server's name for the client."""
        there = client.connect(server.address)
        give_up_s = time.monotonic() + PATIENCE_S
        while not client.send(there, b"hello"):
            assert time.monotonic() < give_up_s, "no connection"
            client.poll(0.01)
            server.poll(0.0)
        (hello,) = arrivals(poll_until(server, lambda came: bool(arrivals(came)), client))
        assert bytes(hello.control) == b"hello"
        hello.release()
        return there, hello.peer

    def test_messages_arrive_whole_and_in_order_both_ways(self, server: Link, client: Link) -> None:
        """Goal: control and bulk are the bytes that were sent. Method: sizes from 0 to ones that are not copied."""
        there, here = self.meet(server, client)
        for sender, receiver, peer in ((client, server, there), (server, client, here)):
            for number in range(8):
                bulk = [payload(100 * number + i, nbytes) for i, nbytes in enumerate(SIZES)]
                if sender is client:
                    bulk = []  # clients' messages are small
                give_up_s = time.monotonic() + PATIENCE_S
                while not sender.send(peer, b"message %d" % number, [memoryview(b) for b in bulk]):
                    assert time.monotonic() < give_up_s
                    sender.poll(0.01)
                (arrival,) = arrivals(poll_until(receiver, lambda came: bool(arrivals(came)), sender))
                assert bytes(arrival.control) == b"message %d" % number
                assert [bytes(view) for view in arrival.bulk] == bulk
                arrival.release()

    def test_bulk_stays_until_it_is_released(self, server: Link, client: Link) -> None:
        """Goal: views of an arrival outlive later arrivals. Method: keep the first over many others."""
        _, here = self.meet(server, client)
        first = payload(1, 29_696)
        assert server.send(here, b"first", [memoryview(first)])
        (kept,) = arrivals(poll_until(client, lambda came: bool(arrivals(came)), server))
        for number in range(64):
            while not server.send(here, b"next", [memoryview(payload(number, 29_696))]):
                server.poll(0.01)
            for arrival in arrivals(poll_until(client, lambda came: bool(arrivals(came)), server)):
                arrival.release()
        assert bytes(kept.bulk[0]) == first
        kept.release()

    def test_a_full_link_says_so_and_loses_nothing(self, server: Link, client: Link) -> None:
        """Goal: full is ``False``; taken messages arrive whole. Method: no reads until a send is refused."""
        _, here = self.meet(server, client)
        taken = 0
        body = payload(7, 64 << 10)
        while server.send(here, b"%d" % taken, [memoryview(body)]):
            taken += 1
            server.poll(0.0)
            assert taken < MANY, "a link without a bound"
        got: list[Arrival] = []
        give_up_s = time.monotonic() + PATIENCE_S
        while len(got) < taken:
            assert time.monotonic() < give_up_s, (taken, len(got))
            came = arrivals(client.poll(0.01))
            for arrival in came:
                assert bytes(arrival.bulk[0]) == body
                arrival.release()
            got += came
            server.poll(0.0)
        assert sorted(int(bytes(a.control)) for a in got) == list(range(taken)), "each once, in whatever order"
        assert server.send(here, b"again"), "room again"

    def test_a_send_to_an_absent_peer_is_refused(self, server: Link) -> None:
        """Goal: no message is taken for a peer that is not there. Method: send to a made-up name."""
        assert not server.send(Peer(b"nobody"), b"x", [b"y"])

    def test_connecting_twice_is_connecting_once(self, server: Link, client: Link) -> None:
        there, _ = self.meet(server, client)
        assert client.connect(server.address) == there

    def test_poll_answers_no_more_than_it_was_asked_for(self, server: Link, client: Link) -> None:
        there, _ = self.meet(server, client)
        give_up_s = time.monotonic() + PATIENCE_S
        for number in range(6):
            while not client.send(there, b"%d" % number):
                assert time.monotonic() < give_up_s
                client.poll(0.01)
        got: list[Arrival] = []
        while len(got) < 6:
            assert time.monotonic() < give_up_s
            came = server.poll(0.01, 2)
            assert len(came) <= 2
            got += arrivals(came)
            client.poll(0.0)
        assert [bytes(a.control) for a in got] == [b"%d" % n for n in range(6)]

    def test_wake_ends_a_poll(self, server: Link) -> None:
        """Goal: another thread can make poll return. Method: a poll that would outlast the test's patience."""
        waker = threading.Timer(0.05, server.wake)
        waker.start()
        start_s = time.monotonic()
        assert server.poll(PATIENCE_S) == []
        assert time.monotonic() - start_s < PATIENCE_S / 2
        waker.join()

    def test_a_server_that_goes_is_reported(self, server: Link, client: Link) -> None:
        """Goal: a sender learns that its peer went. Method: the server closes."""
        there, _ = self.meet(server, client)
        self.lose(server)
        came = poll_until(client, lambda came: PeerLost(there) in came)
        assert not arrivals(came)
        assert not client.send(there, b"still there?")

    def test_nothing_is_taken_for_a_client_that_has_gone(self, server: Link, client: Link) -> None:
        """Goal: messages for a peer that went do not pile up. Method: the client closes; a send is refused soon."""
        _, here = self.meet(server, client)
        self.lose(client)
        give_up_s = time.monotonic() + PATIENCE_S
        while server.send(here, b"still there?"):
            assert time.monotonic() < give_up_s, "it is still taken"
            server.poll(0.01)
        assert not server.send(here, b"still there?")

    def test_close_ends_while_the_peer_does_not_read(self, server: Link, client: Link) -> None:
        """Goal: messages for a peer that does not read keep no link open. Method: close, twice."""
        _, here = self.meet(server, client)
        for number in range(4):
            server.send(here, b"x", [memoryview(payload(number, 1_000_000))])
        server.close(0.0)
        server.close()


__all__ = ["LinkContract"]
