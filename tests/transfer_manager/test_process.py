"""The cache-transfer process by its commands, and what becomes of them when it is killed, stopped or starved."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from shared_parts import DEVICE_BLOCKS, HOST_BLOCKS, Memory, started

from cache_manager.errors import BlockStateError, ConfigError, StorageError, TransferProcessError
from cache_manager.ports import BlockRecords, Found
from cache_manager.regions import list_regions
from cache_manager.transfer_manager import (
    CacheTransferManager,
    SharedPart,
    TransferSettings,
)
from cache_manager.transfer_manager.commands import Contains, Flush, Move, Persist, Restore

WAIT_S = 60.0


@pytest.fixture
def process(memory: Memory) -> Iterator[CacheTransferManager]:
    with started(memory.parts, TransferSettings(restart_pause_s=0.05)) as manager:
        yield manager


def out(memory: Memory, pairs: list[tuple[int, int]]) -> Move:
    targets = [t for _, t in pairs]
    return Move("device", "host", [s for s, _ in pairs], targets, memory.generations("host", targets))


def until(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def persist(memory: Memory, first: int, blocks: list[int]) -> Persist:
    generations = memory.generations("device", blocks)
    origins = [1000 + first + i for i in range(len(blocks))]
    valid = [memory.valid] * len(blocks)
    return Persist(BlockRecords(memory.keys(len(blocks), first), blocks, origins, valid, generations))


def stored(memory: Memory, first: int, count: int) -> list[Found]:
    """What an answer says when all of ``persist(memory, first, ...)`` is stored."""
    return [Found(1000 + first + i, memory.valid) for i in range(count)]


def restore(memory: Memory, first: int, blocks: list[int]) -> Restore:
    return Restore(list(memory.keys(len(blocks), first)), blocks, memory.generations("device", blocks))


def test_a_move_copies_every_part_and_nothing_else(memory: Memory, process: CacheTransferManager) -> None:
    before = {(p, b): memory.rows(p, "host", b) for p in range(2) for b in range(HOST_BLOCKS)}
    process.call(out(memory, [(3, 0), (4, 5)]))
    for part in range(2):
        assert memory.rows(part, "host", 0) == memory.rows(part, "device", 3)
        assert memory.rows(part, "host", 5) == memory.rows(part, "device", 4)
        assert all(memory.rows(part, "host", b) == before[part, b] for b in range(HOST_BLOCKS) if b not in (0, 5))


def test_a_block_of_another_generation_is_refused_and_not_written(
    memory: Memory, process: CacheTransferManager
) -> None:
    """The engine gave the target to somebody else after the command was made: nothing may be copied."""
    command = out(memory, [(3, 0)])
    memory.parts[0].host.words[0] = 99 << 16
    before = [memory.rows(part, "host", 0) for part in range(2)]
    with pytest.raises(TransferProcessError, match="host block 0: wanted generation 1, got 99"):
        process.call(command)
    assert before == [memory.rows(part, "host", 0) for part in range(2)]


def test_what_was_persisted_comes_back_in_every_part(memory: Memory, process: CacheTransferManager) -> None:
    assert process.call(persist(memory, 0, [1, 2])).stored == stored(memory, 0, 2)
    process.call(Flush())
    answer = process.call(restore(memory, 0, [8, 9, 10]))
    assert answer.restored == [*stored(memory, 0, 2), "miss"]
    assert process.call(Contains(list(memory.keys(3)))).there == [True, True, False]
    for part in range(2):
        assert memory.rows(part, "device", 8) == memory.rows(part, "device", 1)
        assert memory.rows(part, "device", 9) == memory.rows(part, "device", 2)


def test_a_key_whose_kv_is_lost_is_a_miss_though_its_rows_are_there(memory: Memory, tmp_path: Path) -> None:
    """Both parts or neither: the KV store loses everything between two lives of the process."""
    with started(memory.parts) as process:
        process.call(persist(memory, 0, [1]))
    shutil.rmtree(tmp_path / "kv")
    with started(memory.parts) as process:
        assert process.call(restore(memory, 0, [8])).restored == ["miss"]


def test_a_store_that_fails_is_a_storage_error_and_the_process_lives(memory: Memory) -> None:
    rows, kv = memory.parts
    with started([rows, kv]) as process:
        pid = process.pid
        bad = persist(memory, 0, [1])
        with pytest.raises(StorageError, match="bitmap size"):
            process.call(Persist(replace(bad.records, valid=[memory.valid + bytes(8)])))
        assert process.call(persist(memory, 0, [1])).stored == stored(memory, 0, 1)
        assert process.pid == pid


def test_a_killed_process_fails_what_is_in_flight_and_another_takes_over(
    memory: Memory, process: CacheTransferManager
) -> None:
    """Stopped first, so that the command is in flight for certain; then SIGKILL."""
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(process.call, each) for each in (out(memory, [(1, 1)]), persist(memory, 0, [2]))]
        worker = process._worker
        assert worker is not None
        until(lambda: worker.in_flight == 2)
        os.kill(first, signal.SIGKILL)
        for future in futures:
            with pytest.raises(TransferProcessError, match="lost"):
                future.result(WAIT_S)
    assert worker.in_flight == 0
    until(lambda: process.pid not in (None, first))
    assert process.call(persist(memory, 0, [2])).stored == stored(memory, 0, 1), "the new process has the store's lock"


def test_a_process_that_hangs_is_ended_at_the_deadline(memory: Memory) -> None:
    with started(memory.parts, TransferSettings(command_s=3.0, restart_pause_s=0.05)) as process:
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(TransferProcessError, match="lost"):
            process.call(out(memory, [(1, 1)]))
        until(lambda: process.pid not in (None, first))
        process.call(out(memory, [(1, 1)]))


def test_a_command_too_large_for_a_frame_costs_the_process_nothing(
    memory: Memory, process: CacheTransferManager
) -> None:
    first = process.pid
    with pytest.raises(AssertionError):
        process.call(Contains([bytes(32)] * 600_000))
    process.call(out(memory, [(1, 1)]))
    assert process.pid == first


def test_while_it_cannot_start_commands_are_refused_with_the_cause(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands where the store's directory was: restarts fail until it has gone."""
    place, aside = tmp_path / "rows", tmp_path / "aside"
    with started(memory.parts, TransferSettings(restart_pause_s=0.05, restart_pause_max_s=0.2)) as process:
        assert process.pid is not None
        place.rename(aside)
        place.touch()
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: "not started again" in caplog.text)
        until(lambda: not process._breaker.cause.startswith("it has ended"))
        with pytest.raises(TransferProcessError, match=r"not running: .* cannot open its store"):
            process.call(out(memory, [(1, 1)]))
        place.unlink()
        aside.rename(place)
        until(lambda: process.pid is not None)
        process.call(out(memory, [(1, 1)]))


def test_kills_at_random_moments_never_lose_an_answered_record(memory: Memory) -> None:
    """Commands go on while the process is killed again and again: an answered persist stays, bytes stay right."""
    rng = random.Random(7)
    kept: dict[int, int] = {}
    settings = TransferSettings(restart_pause_s=0.01, restart_pause_max_s=0.02)
    with started(memory.parts, settings) as process, ThreadPoolExecutor(20) as threads:
        for turn in range(12):
            futures = {}
            for number in range(20):
                block = rng.randrange(6)
                command = persist(memory, turn * 20 + number, [block])
                futures[turn * 20 + number] = block, threads.submit(process.call, command)
            time.sleep(rng.random() * 0.01)
            pid = process.pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            for number, (block, future) in futures.items():
                try:
                    if future.result(WAIT_S).stored[0] is not None:
                        kept[number] = block
                except TransferProcessError:
                    continue
            until(lambda lost=pid: process.pid not in (None, lost))
        for number, block in kept.items():
            answer = process.call(restore(memory, number, [11]))
            assert answer.restored[0] != "miss", f"record {number}"
            for part in range(2):
                assert memory.rows(part, "device", 11) == memory.rows(part, "device", block)


def test_a_killed_engine_leaves_no_process_behind() -> None:
    """The engine is a process of its own here, killed for real; its transfer process ends and no region stays."""
    script = textwrap.dedent(
        """
        import sys, time
        from shared_parts import KV, NAMESPACE, ROWS, started
        from cache_manager.regions import SharedRegion
        from cache_manager.transfer_manager import SharedPart
        parts = [
            SharedPart(n, SharedRegion.create(l, 4, tier="device", namespace=NAMESPACE.fingerprint))
            for n, l in (("rows", ROWS), ("kv", KV))
        ]
        print(started(parts).pid, *(p.device.name for p in parts), flush=True)
        time.sleep(600)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as engine:
        assert engine.stdout is not None
        pid, *names = engine.stdout.readline().split()
        engine.kill()
        engine.wait()
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert not [region for region in list_regions() if region.name in names and region.in_use]


def test_parts_that_do_not_fit_each_other_are_refused(memory: Memory) -> None:
    rows, kv = memory.parts
    with pytest.raises(ConfigError, match=f"part kv: host blocks: wanted {HOST_BLOCKS}, as rows, got none"):
        started([rows, SharedPart("kv", kv.device, None, kv.store)])
    with pytest.raises(ConfigError, match="part kv: store: wanted one for every part, or none"):
        started([rows, SharedPart("kv", kv.device, kv.host)])
    assert rows.device.blocks == DEVICE_BLOCKS


def test_a_manager_moves_the_blocks_of_one_owner(memory: Memory, process: CacheTransferManager) -> None:
    """Goal: nobody's moves go to the blocks of another, and no process is left. Method: started again for others."""
    pid, (rows, _) = process.pid, memory.parts
    with pytest.raises(BlockStateError, match="not started"):
        process.start(rows.device, rows.host)
    assert process.pid == pid
    process.call(out(memory, [(3, 5)]))
    assert memory.rows(0, "host", 5) == memory.rows(0, "device", 3)


def test_a_store_that_cannot_be_opened_is_said_at_the_start(memory: Memory) -> None:
    rows, kv = memory.parts
    with pytest.raises(TransferProcessError, match="scheme: wanted one of"):
        started([SharedPart("rows", rows.device, rows.host, "nosuch:x"), kv])


ODD_PROCESS = """#!{python}
import os, socket, struct, sys, time
sys.path[:0] = {path!r}
from cache_manager.child import receive_frame, send_frame
from cache_manager.transfer_manager.commands import Answer, Close, SetUp, decode_asked, encode

end = socket.socket(fileno=int(sys.argv[-2]))
while (body := receive_frame(end)) is not None:
    asked = decode_asked(body)
    answer = encode(Answer(asked.number))
    if isinstance(asked.command, (SetUp, Close)):
        send_frame(end, answer)
    elif {how!r} == "half":
        end.sendall(struct.pack("<I", 100) + b"half")
    elif {how!r} == "garbage":
        send_frame(end, bytes(100))
    elif {how!r} == "unknown":
        send_frame(end, encode(Answer(asked.number + 7)))
    elif {how!r} == "twice":
        send_frame(end, answer)
        send_frame(end, answer)
"""


@pytest.mark.parametrize("how", ["half", "garbage", "unknown", "twice"])
def test_a_process_that_answers_what_it_should_not_is_ended(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Half an answer and then silence, no answer, one nobody asked for, one again: commands fail, nothing waits on.

    It does not end when it is closed either.
    """
    script = tmp_path / "odd"
    script.write_text(ODD_PROCESS.format(python=sys.executable, path=[p for p in sys.path if p], how=how))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    settings = TransferSettings(restart_pause_s=0.05, command_s=3.0, close_s=0.5)
    with started(memory.parts, settings) as process:
        first = process.pid
        if how == "twice":
            assert process.call(out(memory, [(1, 1)])).error == ""
        else:
            with pytest.raises(TransferProcessError, match="lost"):
                process.call(out(memory, [(1, 1)]))
        until(lambda: process.pid not in (None, first))


def test_closing_while_it_is_started_again(memory: Memory) -> None:
    """Whatever the new process has come to: close ends it and returns."""
    for pause_s in (0.0, 0.1, 0.2, 0.3, 0.5):
        process = started(memory.parts, TransferSettings(restart_pause_s=0.01))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        until(lambda process=process: process.pid is None)
        time.sleep(pause_s)  # where in its start the next one is found differs; the outcome may not
        process.close()
        assert process.pid is None
        with pytest.raises(TransferProcessError, match="closed"):
            process.call(out(memory, [(1, 1)]))


def test_a_set_up_that_takes_too_long_is_said(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: a process that says nothing."""
    script = tmp_path / "silent"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(TransferProcessError, match="lost"):
        started(memory.parts, TransferSettings(set_up_s=0.1))


def test_a_start_that_the_machine_refuses_is_tried_again(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with started(memory.parts, TransferSettings(restart_pause_s=0.05, restart_pause_max_s=0.2)) as process:
        assert process.pid is not None
        with monkeypatch.context() as away:
            away.setattr(sys, "executable", str(tmp_path / "none"))
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: caplog.text.count("not started again") > 1)
        until(lambda: process.pid is not None)
        process.call(out(memory, [(1, 1)]))
