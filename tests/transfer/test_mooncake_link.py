"""The Mooncake link: the contract with real engines, both ways of bulk, failed writes, and forged words."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import random
import secrets
import signal
import socket
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_rows import CanarySink, identity_of, offered, wanted

from cache_manager.errors import ConfigError
from transfer import mooncake_calls as calls
from transfer import mooncake_wire as wire
from transfer.actions import Finished
from transfer.curve import CurveClient, make_keys, read_keys
from transfer.errors import RemoteProtocolError
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.links import open_link
from transfer.mooncake_engine import Arena, EngineProcess
from transfer.mooncake_link import MooncakeLink, MooncakeLinkSettings, MooncakeUnavailableError
from transfer.node import DecodeNode, PrefillNode
from transfer.testing.contract import PATIENCE_S, LinkContract, arrivals, payload, poll_until
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings

needs_mooncake = pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="needs the mooncake wheel")
SMALL = MooncakeLinkSettings(window_nbytes=4 << 20, quarantine_s=0.5, pause_s=0.2, bulk_nbytes_min=1, write_s=30.0)
RESTING = replace(SMALL, quarantine_s=3.0)


def server_at(directory: Path, settings: MooncakeLinkSettings = SMALL) -> MooncakeLink:
    return MooncakeLink(ZmqLink(ZmqSettings(bind=f"ipc://{directory}/p")), settings)


@needs_mooncake
class TestMooncake(LinkContract):
    def make_server(self, directory: Path) -> MooncakeLink:
        return server_at(directory)

    def make_client(self, directory: Path) -> MooncakeLink:
        return MooncakeLink(ZmqLink(), SMALL)


@needs_mooncake
def test_rows_cross_by_the_engine(tmp_path: Path) -> None:
    """Goal: nodes need not know; bulk really went by the engine. Method: canary rows, and both links' counts."""
    served, pulling = server_at(tmp_path), MooncakeLink(ZmqLink(), SMALL)
    patient = TransferLimits(lease_s=300.0, retry_s=PATIENCE_S)  # who asks again has records written that nobody awaits
    prefill, decode = PrefillNode(served, identity_of(1), patient), DecodeNode(pulling, identity_of(2), patient)
    done: list[Finished] = []
    sinks = {}
    for request in range(10):
        transfer = prefill.offer(offered(request, 100))
        sinks[transfer] = CanarySink(request)
        decode.pull(prefill.address, transfer, wanted(request, 100), sinks[transfer])
    give_up_s = time.monotonic() + PATIENCE_S * 2
    while len(done) < 10:
        assert time.monotonic() < give_up_s
        done += decode.poll()
        time.sleep(0.01)
    assert all(d.result.complete for d in done)
    assert all((s.wrong, s.twice, len(s.there)) == (0, 0, 100) for s in sinks.values())
    assert served.counts["messages_written"] == pulling.counts["messages_landed"] >= 10
    assert decode.close()
    assert prefill.close()
    assert served._engine.gone
    assert pulling._engine.gone
    assert len(prefill.poll()) == 10


@needs_mooncake
def test_a_write_that_fails_goes_by_zeromq_and_its_range_rests(tmp_path: Path) -> None:
    """Goal: a failed write is delivered the other way, the sender has its buffer at once, the range rests.

    Method: the receiver's engine is killed; the sender's engine finds nobody.
    """
    served, pulling = server_at(tmp_path, RESTING), MooncakeLink(ZmqLink(), RESTING)
    _, here = TestMooncake().meet(served, pulling)
    granted = served._sender.granted[here]  # the receiver's next engine will have another window
    os.kill(pulling.engine_pid, signal.SIGKILL)
    told: list[float] = []
    body = payload(1, 100_000)
    start_s = time.monotonic()
    assert served.send(here, b"x", [memoryview(body)], lambda: told.append(time.monotonic() - start_s))
    (arrival,) = arrivals(poll_until(pulling, lambda got: bool(arrivals(got)), served))
    assert bytes(arrival.bulk[0]) == body
    assert len(told) == 1
    assert served.counts["writes_failed"] == 1
    assert granted.window.taken == 1
    poll_until(served, lambda _: granted.window.taken == 0, pulling)
    assert time.monotonic() - start_s >= RESTING.quarantine_s
    pulling.close()
    served.close()


@needs_mooncake
def test_what_landed_is_a_copy(tmp_path: Path) -> None:
    """Goal: a late write into the window changes nothing that was handed out. Method: write there afterwards."""
    served, pulling = server_at(tmp_path), MooncakeLink(ZmqLink(), SMALL)
    there, here = TestMooncake().meet(served, pulling)
    body = payload(1, 100_000)
    assert served.send(here, b"x", [memoryview(body)])
    poll_until(served, lambda _: bool(served.counts["messages_written"]))
    (arrival,) = arrivals(poll_until(pulling, lambda got: bool(arrivals(got)), served))
    assert pulling.counts["messages_landed"] == 1
    window = pulling._arena.view[pulling._lent[there].offset :][: SMALL.window_nbytes]
    window[:] = b"\xee" * window.nbytes
    window.release()
    assert bytes(arrival.bulk[0]) == body
    pulling.close()
    served.close()


@needs_mooncake
def test_forged_words_change_nothing(tmp_path: Path) -> None:
    """Goal: wrong lives, ranges outside, grants from nowhere, FREE of what is being written: counted, not obeyed."""
    served, pulling = server_at(tmp_path), MooncakeLink(ZmqLink(), SMALL)
    there, here = TestMooncake().meet(served, pulling)
    life = pulling._lent[there].life
    forged = [
        wire.Landed(secrets.token_bytes(16), 0, [(0, 100)]),
        wire.Landed(life, 0, [(SMALL.window_nbytes - 1, 2)]),
        wire.Landed(life, 0, [(0, SMALL.window_nbytes), (0, 1)]),
        wire.Grant(life, 9, 4096, 4096),
    ]
    for message in forged:
        assert served._zmq.send(here, wire.encode(message), [b"control"])
    assert served._zmq.send(here, b"\x09nonsense")
    came = poll_until(pulling, lambda _: pulling.counts["bad_messages"] == 5)
    assert arrivals(came) == []
    pulling.close()
    served.close()


def ports_of(pid: int) -> set[int]:
    """The TCP ports that a process listens on."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def crosses(served: MooncakeLink, pulling: MooncakeLink, here: Peer, number: int) -> None:
    body = payload(number, 100_000)
    assert served.send(here, b"x", [memoryview(body)])
    (arrival,) = arrivals(poll_until(pulling, lambda got: bool(arrivals(got)), served))
    assert bytes(arrival.bulk[0]) == body
    arrival.release()


@needs_mooncake
@pytest.mark.parametrize("hold", [False, True], ids=["closed", "held open"])
def test_garbage_at_the_engines_ports_costs_no_message(tmp_path: Path, hold: bool) -> None:
    """Goal: whoever reaches the native ports, which listen everywhere, cannot end a node or change a byte.

    Method: random bytes and huge lengths at all ports of both engines, before and between messages; the native
    process may do as it likes.
    """
    served, pulling = server_at(tmp_path), MooncakeLink(ZmqLink(), SMALL)
    _, here = TestMooncake().meet(served, pulling)
    noise = random.Random(1)
    with contextlib.ExitStack() as held:
        for number in range(3):
            for link in (served, pulling):
                for port in ports_of(link.engine_pid):
                    for length in (0, 1, 1 << 20, 1 << 40, (1 << 64) - 1):
                        with contextlib.suppress(OSError):  # it may refuse
                            peer = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
                            held.callback(peer.close)
                            peer.sendall(struct.pack("<Q", length) + noise.randbytes(noise.choice((0, 9, 64, 4096))))
                            if not hold:
                                peer.close()
            crosses(served, pulling, here, number)
    pulling.close()
    served.close()


@needs_mooncake
def test_a_grant_of_nonsense_costs_a_failed_write(tmp_path: Path) -> None:
    """Goal: a window that is nowhere, elsewhere or beyond the address space: the message goes by ZeroMQ.

    Method: a client that grants such windows; the engine that was asked to write there is the same afterwards.
    """
    served, pulling = server_at(tmp_path), MooncakeLink(ZmqLink(), SMALL)
    there, here = TestMooncake().meet(served, pulling)
    engine = served.engine_pid
    port, base = pulling._engine.ready.port, pulling._engine.ready.base  # type: ignore[union-attr]
    nonsense = [(1, base), (port, 1), (port, (1 << 62) - 1), (port, base + pulling._arena.nbytes - 10), (65_535, base)]
    for number, (at_port, address) in enumerate(nonsense, 1):
        grant = wire.Grant(secrets.token_bytes(16), at_port, address, wire.WINDOW_NBYTES_MAX)
        assert pulling._zmq.send(there, wire.encode(grant))
        poll_until(served, lambda _, g=grant: served._sender.granted[here].grant == g, pulling)  # type: ignore[misc]
        crosses(served, pulling, here, number)
        assert served.counts["writes_failed"] == number
    assert served.engine_pid == engine
    assert not served._engine.gone
    pulling.close()
    served.close()


@needs_mooncake
def test_a_range_that_is_being_written_is_not_freed_by_a_word(tmp_path: Path) -> None:
    """Goal: FREE of a message in flight is not believed, that of a landed one is. Method: stop the sender's engine."""
    served, pulling = server_at(tmp_path), MooncakeLink(ZmqLink(), SMALL)
    there, here = TestMooncake().meet(served, pulling)
    granted = served._sender.granted[here]
    os.kill(served.engine_pid, signal.SIGSTOP)
    body = payload(1, 100_000)
    assert served.send(here, b"x", [memoryview(body)])
    assert pulling._zmq.send(there, wire.encode(wire.Free(granted.grant.life, 0)))
    assert pulling.send(there, b"said")
    assert arrivals(poll_until(served, lambda got: bool(arrivals(got)), pulling))
    assert granted.window.taken == 1
    os.kill(served.engine_pid, signal.SIGCONT)
    (arrival,) = arrivals(poll_until(pulling, lambda got: bool(arrivals(got)), served))
    assert bytes(arrival.bulk[0]) == body
    poll_until(served, lambda _: granted.window.taken == 0, pulling)
    pulling.close()
    served.close()


@needs_mooncake
def test_an_engine_that_dies_while_writing_gives_its_memory_back(tmp_path: Path) -> None:
    """Goal: the message goes by ZeroMQ at once, memory and window are free after the rest, another engine writes.

    Method: stop the sender's engine, send, kill it.
    """
    served, pulling = server_at(tmp_path), MooncakeLink(ZmqLink(), SMALL)
    _, here = TestMooncake().meet(served, pulling)
    os.kill(served.engine_pid, signal.SIGSTOP)
    body = payload(1, 100_000)
    assert served.send(here, b"x", [memoryview(body)])
    os.kill(served.engine_pid, signal.SIGKILL)
    (arrival,) = arrivals(poll_until(pulling, lambda got: bool(arrivals(got)), served))
    assert bytes(arrival.bulk[0]) == body
    sender = served._sender
    poll_until(served, lambda _: sender._staging.taken == sender.granted[here].window.taken == 0, pulling)
    give_up_s = time.monotonic() + PATIENCE_S
    while not served.counts["messages_written"]:
        assert time.monotonic() < give_up_s
        crosses(served, pulling, here, 2)
    assert served.counts["engines_lost"] == served.counts["writes_failed"] == 1
    pulling.close()
    served.close()


@needs_mooncake
def test_an_engine_is_asked_for_nothing_once_it_ended() -> None:
    """Goal: calls after the end are refused or do nothing, in any order; its memory may go before or after."""
    arena = Arena(1 << 20)
    wakes = os.eventfd(0, os.EFD_CLOEXEC)
    engine = EngineProcess(arena, calls.Start("127.0.0.1", "tcp", "", arena.nbytes, True), wakes, 5.0)
    assert not engine.write(calls.Write(1, "127.0.0.1:1", 0, 4096, 10)), "not ready yet"
    engine.wait_ready(PATIENCE_S)
    assert engine.write(calls.Write(1, "nonsense", 0, 4096, 10))
    done: list[calls.Done] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while not done:
        assert time.monotonic() < give_up_s
        done = engine.take()
    assert done == [calls.Done(1, -1)]
    engine.end()
    engine.end()
    assert engine.gone
    assert not engine.write(calls.Write(2, "127.0.0.1:1", 0, 4096, 10))
    assert engine.take() == []
    arena.close()
    os.close(wakes)


@needs_mooncake
def test_a_fork_leaves_the_engine_to_its_parent(tmp_path: Path) -> None:
    """Goal: a forked copy's close ends nothing. Method: fork, close there, send here."""
    served, pulling = server_at(tmp_path), MooncakeLink(ZmqLink(), SMALL)
    _, here = TestMooncake().meet(served, pulling)

    def child() -> None:
        served.close()
        pulling.close()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    crosses(served, pulling, here, 1)
    assert served.counts["messages_written"] == 1
    pulling.close()
    served.close()


def test_a_link_is_chosen_by_its_name(tmp_path: Path) -> None:
    """Goal: a name that is none, and an engine beside encryption, are refused by the field's name."""
    link = open_link("zmq", ZmqSettings(bind=f"ipc://{tmp_path}/p"))
    assert isinstance(link, ZmqLink)
    link.close()
    with pytest.raises(ConfigError, match="link: wanted one of 'zmq', 'mooncake', got 'rdma'"):
        open_link("rdma")
    make_keys(tmp_path, "d")
    keys = read_keys(tmp_path / "d.key_secret")
    with pytest.raises(ConfigError, match="link"):
        open_link("mooncake", ZmqSettings(curve_client=CurveClient(keys, keys.public)))


@given(st.binary(max_size=200))
def test_decoding_raises_nothing_but_the_protocol_error(noise: bytes) -> None:
    for tag in (b"", b"\x01", b"\x02", b"\x03", b"\xff"):
        try:
            wire.decode(tag + noise)
        except RemoteProtocolError:
            continue


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_a_window_never_gives_a_byte_twice(steps: list[tuple[bool, int]]) -> None:
    """Goal: ranges that are taken do not overlap and lie inside. Method: against a byte map."""
    window, owners, taken = wire.Window(16_384), [0] * 16_384, {}
    for number, (take, nbytes) in enumerate(steps, 1):
        if take:
            at = window.take(number, nbytes)
            if at is not None:
                assert not any(owners[at : at + nbytes])
                owners[at : at + nbytes] = [number] * nbytes
                taken[number] = at, nbytes
        elif taken:
            gone = sorted(taken)[nbytes % len(taken)]
            at, n = taken.pop(gone)
            owners[at : at + n] = [0] * n
            window.give(gone)
    assert window.taken == len(taken)


def test_without_the_wheel_the_error_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no engine, a reason with a remedy, nothing left behind. Method: a wheel whose library is missing."""
    (tmp_path / "wheel" / "mooncake").mkdir(parents=True)
    (tmp_path / "wheel" / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "wheel" / "mooncake" / "engine.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
    monkeypatch.syspath_prepend(str(tmp_path / "wheel"))
    with pytest.raises(MooncakeUnavailableError, match=r"libibverbs.*pip install 'kvroute\[mooncake-cpu\]'"):
        server_at(tmp_path)
    assert not (tmp_path / "p").exists()
