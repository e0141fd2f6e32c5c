"""Nodes over real sockets in one process: complete transfers, early ends, full tables, and what remains."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from transfer_nodes import PATIENCE_S, QUICK, ended, fetched, lend, nodes, released, until
from transfer_rows import NAMESPACE, VALID, CanarySink, identity_of, key_of, wanted

from cache_manager.errors import BlockBusyError
from cache_manager.keys import Namespace
from cache_manager.record import OfferedRecord, RecordHeader
from transfer.actions import OfferedBlock, Reason
from transfer.errors import LocalProtocolError, NodeClosedError, NodeFullError, TransferError
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Arrival, LinkEvent
from transfer.messages import BootId, Outcome, Part, Pull, Range, TransferId, encode
from transfer.node import COMMANDS_MAX, Node, new_transfer
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings
from transfer.zmq_sockets import SENT_MESSAGES_MAX

IN_SOCKETS_MAX = 16
"""Messages of 1 MiB that the buffers of two sockets have room for, and the peer's own queue."""


def test_many_requests_cross_and_every_block_comes_back(tmp_path: Path) -> None:
    """Goal: sixty-four pulls at once end complete, right, once, acknowledged; each offer is released once."""
    with nodes(tmp_path) as (prefill, decode):
        sinks = {}
        for request in range(64):
            transfer = lend(prefill, request, 1 + request % 5)
            sinks[transfer] = CanarySink(request)
            decode.pull(transfer, prefill.address, wanted(request, 1 + request % 5), sinks[transfer])
        done = ended(decode, set(sinks))
        for transfer, sink in sinks.items():
            result = done[transfer]
            assert result.complete
            assert (sink.wrong, sink.twice, len(sink.there)) == (0, 0, result.installed)
        assert {r.outcome for r in released(prefill, set(sinks)).values()} == {Outcome.ACKED}
        assert prefill.counters.offers_in_flight == decode.counters.pulls_in_flight == 0
        assert prefill.counters.errors == decode.counters.errors == 0


def test_a_sink_that_fails_costs_that_record_only(tmp_path: Path) -> None:
    """Goal: another generation, a busy block and a bug in the sink: stale, sent again, failed; the rest is there."""

    class Difficult(CanarySink):
        busy = 2

        def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
            if index == 0:
                return False
            if index == 1:
                raise RuntimeError("a bug of the engine")
            if index == 2 and self.busy:
                self.busy -= 1
                raise BlockBusyError("block 2", "a block at rest", "one in motion")
            return super().install(part, index, header, payload)

    with nodes(tmp_path) as (prefill, decode):
        transfer = lend(prefill, 1, 5)
        sink = Difficult(1)
        decode.pull(transfer, prefill.address, wanted(1, 5), sink)
        result = ended(decode, {transfer})[transfer]
        assert {(m.index, m.reason) for m in result.missing} == {(0, Reason.STALE), (1, Reason.FAILED)}
        assert sink.there == {2, 3, 4}
        assert sink.wrong == sink.busy == 0
        assert (decode.counters.engine_errors, decode.counters.records_stale) == (1, 1)
        assert decode.alive


def test_a_transfer_that_cannot_begin_is_reported_and_released(tmp_path: Path) -> None:
    """Goal: no room, a mistake, an offer or a pull begun twice: each is reported where the caller looks, nothing
    hangs."""
    with nodes(tmp_path, p_limits=replace(QUICK, transfers_max=1)) as (prefill, decode):
        first = lend(prefill, 1, 1)
        prefill.seal(first)  # with its blocks from the start: a mistake that does not end it
        second = lend(prefill, 2, 1)
        with pytest.raises(LocalProtocolError, match="not lent"):
            prefill.offer(first)
        assert "transfers_max" in released(prefill, {second})[second].detail
        third = lend(prefill, 1, 1, lease_s="soon")  # type: ignore[arg-type]
        assert prefill.alive
        assert released(prefill, {third})[third].outcome is Outcome.ABORTED
        decode.pull(first, "ipc:///nowhere/at/all", wanted(1, 1), CanarySink(1))
        with pytest.raises(LocalProtocolError, match="not pulled"):
            decode.pull(first, prefill.address, wanted(1, 1), CanarySink(1))
        decode.abort(first, "nobody is there")
        assert ended(decode, {first})[first].reason is Reason.ABORTED


@pytest.mark.parametrize("address", [None, 7, b"tcp://127.0.0.1:9", ["ipc:///x"], "tcp://x y", "tcp://127.0.0.1:*"])
def test_a_pull_from_an_invalid_address_is_refused(tmp_path: Path, address: object) -> None:
    """Goal: every pull ends, whatever a client's hand-over has for an address. Method: JSON values of every kind."""
    with nodes(tmp_path) as (prefill, decode):
        transfer = lend(prefill, 1, 2)
        decode.pull(transfer, address, wanted(1, 2), CanarySink(1))  # type: ignore[arg-type]
        result = ended(decode, {transfer})[transfer]
        assert (result.reason, len(result.missing)) == (Reason.ABORTED, 2)
        assert "address" in result.detail or "connect" in result.detail
        assert fetched(decode, prefill.address, transfer, 1, 2)
        assert decode.counters.errors == 0


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"KVRT\x04\x02\x00\x00" + b"\xdb" + b"\xff" * 60_000])
def test_hostile_lines_in_the_log_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture, garbage: bytes) -> None:
    """Goal: a peer that sends garbage does not fill the log, whatever number of names it uses. Method: 300 such
    messages under 30 names that have line breaks in them; each is counted, and one short line is written."""
    with nodes(tmp_path) as (prefill, _):
        for n in range(30):
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.ROUTING_ID, b"\n" * 60 + b"%d" % n)
                socket.connect(prefill.address)
                for _ in range(10):
                    socket.send(garbage)
                until(lambda: prefill.counters.bad_messages, (10 * n + 10).__eq__)
        (line,) = [record.getMessage() for record in caplog.records]
        assert "send invalid messages" in line
        assert len(line) < 500
        assert "\n" not in line


def test_the_first_pull_to_a_peer_waits_for_its_connection_alone(tmp_path: Path) -> None:
    """Goal: a pull that was refused before the link was connected is sent again without a pause. Method: pauses and
    retries that are longer than any patience, and two peers that are met for the first time."""
    patient = TransferLimits(lease_s=36_000, lease_max_s=360_000, retry_s=36_000, resend_s=36_000)
    for n in range(2):
        with nodes(tmp_path, patient) as (prefill, decode):
            assert fetched(decode, prefill.address, lend(prefill, n, 2), n, 2)


def test_a_callback_that_fails_costs_no_block(tmp_path: Path) -> None:
    """Goal: when several offers end at once, each is reported, though ``notify`` raises at the first."""

    def fails() -> None:
        raise RuntimeError("a bug of the engine")

    prefill = Node(ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p")), identity_of(1), QUICK, notify=fails)
    transfers = {lend(prefill, request, 1) for request in range(4)}
    prefill.reset(Namespace("m", 2))
    assert {r.outcome for r in released(prefill, transfers).values()} == {Outcome.RESET}
    assert prefill.counters.engine_errors == 4
    assert prefill.close()


def test_a_notice_comes_when_there_is_something_to_poll(tmp_path: Path) -> None:
    """Method: ``notify`` polls, and nobody else does."""
    found = list[TransferId]()
    link = ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p"))
    prefill = Node(link, identity_of(1), QUICK, notify=lambda: found.extend(each.transfer for each in prefill.poll()))
    transfers = {lend(prefill, request, 1) for request in range(4)}
    prefill.reset(Namespace("m", 2))
    until(lambda: set(found), lambda got: got == transfers)
    assert prefill.close()
    assert prefill.poll() == []


def test_an_end_is_reported_though_the_link_fails(tmp_path: Path) -> None:
    """Goal: nobody waits for ever for the end of a transfer. Method: the link of decode raises at each message; a pull
    is aborted, and the node is closed with another one under way."""

    class BrokenLink(ZmqLink):
        def send(self, *_: Any, **__: Any) -> bool:
            raise TransferError("send: broken on purpose")

    with nodes(tmp_path) as (prefill, _):
        decode = Node(BrokenLink(ZmqSettings(bind=f"ipc://{tmp_path}/broken")), identity_of(7), QUICK)
        aborted, closed = new_transfer(), new_transfer()
        for transfer in (aborted, closed):
            decode.pull(transfer, prefill.address, wanted(0, 1), CanarySink(0))
        decode.abort(aborted, "on purpose")
        assert ended(decode, {aborted})[aborted].reason is Reason.ABORTED
        assert decode.close()
        assert [end.transfer for end in decode.poll()] == [closed]
        assert "broken on purpose" in decode.last_error


def test_memory_of_an_invalid_message_is_given_back(tmp_path: Path) -> None:
    """Goal: a hostile peer leaks no buffers. Method: the link counts what came and what was released."""

    class CountingLink(ZmqLink):
        came = released = 0

        def poll(self, timeout_s: float, most: int) -> list[LinkEvent]:
            return [
                self._counted(each) if isinstance(each, Arrival) else each for each in super().poll(timeout_s, most)
            ]

        def _counted(self, arrival: Arrival) -> Arrival:
            def release() -> None:
                arrival.release()
                self.released += 1

            self.came += 1
            return msgspec.structs.replace(arrival, release=release)

    link = CountingLink(ZmqSettings(bind=f"ipc://{tmp_path}/p"))
    prefill = Node(link, identity_of(1), QUICK)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(prefill.address)
        for _ in range(5):
            socket.send_multipart([b"no message", bytes(1 << 16)])
        until(lambda: prefill.counters.bad_messages, (5).__eq__)
    assert prefill.close()
    assert link.came == link.released == 5


@pytest.mark.parametrize("address", ["ipc://{}/p", "tcp://127.0.0.1:*"])
def test_a_peer_that_never_reads_keeps_no_block(tmp_path: Path, address: str) -> None:
    """Goal: large records for a peer that pulls and then reads nothing are released after the lease, though the peer
    stays connected; of more than a queue has room for, the link has taken what the queue has room for."""
    part = Part("kv", b"k" * 16, 1 << 20, 64)
    link = ZmqLink(ZmqSettings(bind=address.format(tmp_path)))
    own = Identity(BootId(b"p" * 16), NAMESPACE, (part,))
    prefill = Node(link, own, TransferLimits(lease_s=5.0))  # a busy machine fills the queues within it
    kept = bytearray(part.nbytes)
    records = [OfferedRecord(key_of(1, i), part.fingerprint, 1, 1, VALID, kept) for i in range(200)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvhwm = 1
        socket.reconnect_ivl = -1
        socket.connect(prefill.address)
        wants = [Range(0, 1, b"".join(record.key for record in records))]
        transfer = new_transfer()
        prefill.offer(transfer, [OfferedBlock(i, record.key, (record,)) for i, record in enumerate(records)])
        socket.send(encode(Pull(b"d" * 16, transfer, 1, own.digest, wants)))
        assert released(prefill, {transfer})[transfer].outcome is Outcome.EXPIRED
        assert prefill.counters.records_sent <= SENT_MESSAGES_MAX + IN_SOCKETS_MAX
        assert prefill.counters.sends_refused
        assert prefill.close()


def test_a_full_queue_is_an_error_at_once(tmp_path: Path) -> None:
    """Goal: the number of commands is bounded, and nothing of a refused command is held. Method: keep the thread busy
    in a sink."""
    blocked, go_on = threading.Event(), threading.Event()

    class Slow(CanarySink):
        def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
            blocked.set()
            assert go_on.wait(PATIENCE_S)
            return super().install(part, index, header, payload)

    prefill = Node(ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p")), identity_of(1), QUICK)
    decode = Node(ZmqLink(), identity_of(2), QUICK)
    first = lend(prefill, 1, 1)
    decode.pull(first, prefill.address, wanted(1, 1), Slow(1))
    assert blocked.wait(PATIENCE_S)
    others = [lend(prefill, n, 1) for n in range(2, 6)]
    for n, transfer in enumerate(others[:3], 2):
        decode.pull(transfer, prefill.address, wanted(n, 1), CanarySink(n))
    for _ in range(COMMANDS_MAX - 3):
        decode.abort(others[3], "it has not begun")
    with pytest.raises(NodeFullError, match="COMMANDS_MAX"):
        decode.pull(others[3], prefill.address, wanted(5, 1), CanarySink(5))
    go_on.set()
    assert all(d.complete for d in ended(decode, {first, *others[:3]}).values())
    assert fetched(decode, prefill.address, others[3], 5, 1)
    assert decode.close()
    assert prefill.close()


def test_close_ends_transfers_in_flight_and_reports_them(tmp_path: Path) -> None:
    """Goal: after close every offer is released and every pull done, and calls are refused."""
    prefill = Node(ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p")), identity_of(1), QUICK)
    decode = Node(ZmqLink(), identity_of(2), QUICK)
    transfers = [lend(prefill, n, 1) for n in range(3)]
    decode.pull(transfers[0], "ipc:///nowhere/at/all", wanted(0, 1), CanarySink(0))
    assert decode.close()
    assert prefill.close()
    assert ended(decode, {transfers[0]})[transfers[0]].reason is Reason.ABORTED
    assert {r.outcome for r in released(prefill, set(transfers)).values()} == {Outcome.ABORTED}
    assert not prefill.alive
    with pytest.raises(NodeClosedError):
        lend(prefill, 9, 1)
    with pytest.raises(NodeClosedError):
        decode.pull(transfers[1], "ipc:///x", [], CanarySink(1))
    assert decode.close()
    assert prefill.close()


def test_nodes_leave_nothing_behind(tmp_path: Path) -> None:
    """Goal: close gives everything back: descriptors, threads and files. Method: count before and after ten pairs."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def round_trip() -> None:
        with nodes(tmp_path) as (prefill, decode):
            transfer = lend(prefill, 1, 3)
            assert fetched(decode, prefill.address, transfer, 1, 3)
            released(prefill, {transfer})

    round_trip()
    before = held()
    for _ in range(10):
        round_trip()
    until(held, lambda now: now[0] <= before[0] and now[1] <= before[1])
    assert os.listdir(tmp_path) == []
    assert os.listdir(tmp_path) == []
