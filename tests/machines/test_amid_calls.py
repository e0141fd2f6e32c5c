"""Moments inside a call, at which no public call can stop it: what another thread, a signal or a fork meets there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from amid_a_copy import when_copied
from blocks_house import TOKENS, House
from kv import SlotKV
from transfer_nodes import PATIENCE_S, lend, nodes, released
from transfer_rows import CanarySink, wanted
from waiting import GIVE_UP_S, until

from cache_manager.errors import BlockStateError, StorageError
from tests.machines.origins_of import origins_of
from transfer import Finished
from transfer.errors import NodeClosedError
from transfer.link import PeerFound, PeerLost
from transfer.messages import TransferId
from transfer.node import new_transfer
from transfer.testing.contract import LinkContract, arrivals, poll_until
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings


def test_a_close_that_meets_a_job_of_another_thread_refuses_no_later_one() -> None:
    """Goal: a close that could not be is as if it had never been asked for. Method: another thread begins a persist at
    the moment when the threads are told to end; later jobs."""
    house = House()
    engine = house.engine
    lives = engine.renew([0])
    house.fill(0, "mine")
    house.gate.open()
    assert house.begin_persist(0).wait(GIVE_UP_S)
    house.gate.__init__()

    def persists() -> None:
        with suppress(BlockStateError):  # it may be closed
            engine.persist({house.key: 0}, lives)

    other = threading.Thread(target=persists, daemon=True)

    def meets() -> None:
        with engine.jobs._changed:
            engine.jobs._changed.wait_for(lambda: engine.jobs._closing, 60)
        other.start()
        until(lambda: engine._lock.closed or len(engine.jobs) > 0, what="the persist has not begun")

    meeting = threading.Thread(target=meets, daemon=True)
    meeting.start()
    engine.jobs._threads.append(meeting)
    try:
        engine.close()
    except BlockStateError:
        assert house.begin_persist(0) is not None
    house.gate.open()
    other.join(GIVE_UP_S)
    house.close()


def test_ends_go_to_one_of_several_pollers(tmp_path: Path) -> None:
    """Goal: any thread may poll, and no end is lost. Method: another poll takes all in the middle of one."""
    with nodes(tmp_path) as (node, _):
        others = list[Any]()

        class Raced(deque[Any]):
            def popleft(self) -> Any:
                node._ended = deque(self)
                self.clear()
                others.extend(node.poll())
                return super().popleft()

        ends = [Finished(new_transfer(), 0, ()) for _ in range(3)]
        node._ended = Raced(ends)
        assert [*node.poll(), *others] == ends


def test_an_interrupted_call_leaves_no_id_that_is_never_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a call that a signal handler ended may be made again. Method: it ends when the command is handed over."""

    class Interrupted(deque[Any]):
        def append(self, _: Any) -> None:
            raise KeyboardInterrupt

    with nodes(tmp_path) as (prefill, _):
        transfer = new_transfer()
        with monkeypatch.context() as interrupted:
            interrupted.setattr(prefill, "_commands", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                prefill.offer(transfer)
        prefill.offer(transfer)
        prefill.withdraw(transfer, "it may be released now")
        assert released(prefill, {transfer})


def test_a_forked_child_gets_an_error_from_every_call(tmp_path: Path) -> None:
    """Goal: a fork has neither thread nor socket; its calls say so, its close does not touch the parent's, and neither
    waits for a lock that the parent's thread held just then. Method: fork with the lock held.
    """
    with nodes(tmp_path) as (prefill, decode):

        def child() -> None:
            for call in (
                lambda: lend(prefill, 1, 1),
                lambda: decode.pull(TransferId(bytes(16)), prefill.address, wanted(1, 1), CanarySink(1)),
            ):
                with contextlib.suppress(NodeClosedError):
                    call()
                    os._exit(2)
            os._exit(0 if prefill.close() and not prefill.alive else 1)

        process = multiprocessing.get_context("fork").Process(target=child)
        with prefill._lock, decode._lock:  # as the node's threads hold them for a moment
            process.start()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode == 0
        transfer = lend(prefill, 1, 1)
        assert prefill.close()
        assert [r.transfer for r in prefill.poll()] == [transfer]


def test_a_server_that_returns_is_found_again(tmp_path: Path) -> None:
    """Goal: one connect serves for a server's whole life and the next one's; in between no message for it is accepted,
    also where ZeroMQ would accept one. Method: the server is back, and ZeroMQ ready to send, before this end has been
    told so."""
    bind, client = f"ipc://{tmp_path}/p", ZmqLink()
    server = ZmqLink(ZmqSettings(bind=bind))
    there, _ = LinkContract().meet(server, client)
    server.close()
    poll_until(client, lambda came: PeerLost(there) in came)
    assert not client.send(there, b"nobody there")
    server = ZmqLink(ZmqSettings(bind=bind))
    assert client._servers[there].socket.poll(PATIENCE_S * 1000, zmq.POLLOUT)
    assert not client.send(there, b"lost")
    poll_until(client, lambda came: PeerFound(there) in came)
    assert client.connect(server.address) == there
    assert client.send(there, b"taken")
    (arrival,) = arrivals(poll_until(server, lambda came: bool(arrivals(came))))
    assert bytes(arrival.control) == b"taken"
    server.close()
    client.close()


@pytest.mark.parametrize("change", ["forgotten", "a pass begins", "forgotten and named again"])
def test_a_source_without_rows_that_changes_in_mid_move_names_nothing(change: str) -> None:
    """Goal: as above, where no row shows the change. Method: KV that has a name and no rows is copied; then it is
    forgotten, or part of it is overwritten. The control: nothing happens to it."""
    house = House()
    engine = house.engine
    (life, _) = engine.renew([0, 1]).tolist()
    assert engine.exchange.bind_origin(0, life, 77)

    def changes() -> None:
        if change == "a pass begins":
            engine.begin_step([3])
            return
        engine.forget([0])
        if change == "forgotten and named again":
            engine.exchange.bind_origin(0, life, 77)

    with when_copied(house.engine, changes):
        engine.copy([(0, 1)])
    assert origins_of(engine, [1])[0] not in (0, 77), "the KV there is of no computation that others know"
    for step in engine.steps:
        step.abort()
    engine.forget([0])
    assert engine.exchange.bind_origin(0, life, 77)
    engine.copy([(0, 1)])
    assert origins_of(engine, [0, 1]) == [77, 77]
    house.close()


def test_a_move_that_fails_brings_nothing_and_keeps_nothing() -> None:
    """Goal: a move succeeds whole or leaves its targets without rows. Method: the KV's copy fails; afterwards moves
    work again."""
    kv = SlotKV(6, 3, TOKENS)
    house = House(kv=kv)
    house.engine.renew([0, 1])
    rows = house.fill(0, "mine")
    house.fill(1, "before")
    kv.fail_next = StorageError
    with pytest.raises(StorageError, match="on purpose"):
        house.engine.copy([(0, 1)])
    assert not any(house.valid(1))
    (named,) = origins_of(house.engine, [1])
    assert named not in (0, *origins_of(house.engine, [0]))
    assert house.engine.in_flight == 0
    house.engine.assert_consistent()
    assert house.engine.renew([1]).tolist() == [2]
    house.engine.copy([(0, 1)])
    assert house.holds(1, rows)
    house.close()
