"""The cache-transfer process: how it begins and ends (a close meanwhile, a fork, no thread), and what it requires."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_parts import KV, NAMESPACE, ROWS, TOKENS, Memory, started

from cache_manager.blocks import AuxBlocks
from cache_manager.child import AskedChild
from cache_manager.errors import BlockStateError, TransferProcessError
from cache_manager.regions import SharedRegion
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.transfer_manager import CacheTransferManager, SharedPart, TransferSettings
from cache_manager.transfer_manager.commands import Flush

WAIT_S = 60.0


def ours() -> list[Path]:
    """The cache-transfer processes that this process has started."""
    asked = b"\0cache_manager.transfer_manager.process\0"
    lines = [path for path in Path("/proc").glob("[0-9]*/cmdline") if asked in read(path)]
    return [path for path in lines if read(path).split(b"\0")[-2] == str(os.getpid()).encode()]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The machine has no thread of that name."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_closing_when_it_has_been_set_up_and_not_been_taken(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no process is left that nobody can end. Method: another thread's close comes with the answer."""
    process, wait = CacheTransferManager(), AskedChild.wait

    def closed_meanwhile(worker: AskedChild[Any], future: Future[Any], *limit: float) -> object:
        answer = wait(worker, future, *limit)
        process.close()
        return answer

    monkeypatch.setattr(AskedChild, "wait", closed_meanwhile)
    with pytest.raises(TransferProcessError, match="closed"):
        process.start(memory.parts[0].device)
    assert process.pid is None
    assert not ours()


def test_a_fork_ends_no_process_of_its_parent(memory: Memory) -> None:
    """Goal: the engine's process goes on. Method: a forked child closes it, as leaving a ``with`` there would."""
    with started(memory.parts) as process:
        pid = process.pid
        child = os.fork()
        if not child:
            try:
                process.close()
            except BlockStateError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert process.running
        process.call(Flush())
        assert process.pid == pid


@pytest.mark.parametrize("which", ["kvroute-cache-transfer", "kvroute-cache-transfer-starter"])
def test_a_start_without_a_thread_leaves_no_process(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    process = CacheTransferManager()
    refuse(monkeypatch, which)
    with pytest.raises((OSError, TransferProcessError), match="can't start new thread"):
        process.start(memory.parts[0].device)
    process.close()
    assert process.pid is None
    assert not ours()


def test_a_restart_without_a_thread_is_tried_again(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with started(memory.parts, TransferSettings(restart_pause_s=0.05, restart_pause_max_s=0.2)) as process:
        assert process.pid is not None
        give_up_s = time.monotonic() + WAIT_S
        with monkeypatch.context() as away:
            refuse(away, "kvroute-cache-transfer")
            os.kill(process.pid, signal.SIGKILL)
            while caplog.text.count("not started again") < 2:
                assert time.monotonic() < give_up_s
                time.sleep(0.01)
        assert process.wait(WAIT_S)
        process.call(Flush())


def test_rows_that_are_not_required_may_be_missing(tmp_path: Path) -> None:
    """Goal: the process keeps the law of pairs of its blocks' owner. Method: only the first of two specs is written."""
    specs = [ROWS.specs[0], AuxBlockDataSpec("logprob", row_shape=(1,), dtype="float32", block_tokens=TOKENS)]
    kv = SharedRegion.create(KV, 4, tier="device", namespace=NAMESPACE.fingerprint)
    part = SharedPart("kv", kv, None, f"file://{tmp_path}/kv")
    process = CacheTransferManager(part, store=f"file://{tmp_path}/rows", required=[0])
    mover, required = process.start, ["topk_ids"]
    aux = AuxBlocks(specs, device_blocks=4, namespace=NAMESPACE, memory="shared", mover=mover, required=required)
    with process, aux:
        aux.allocate([0, 1], "a")
        rows = np.arange(TOKENS * 6, dtype=np.uint8).reshape(TOKENS, 3, 2)
        with aux.step(range(TOKENS)) as step:
            step.write("topk_ids", rows)
        key = aux.keys.key(None, range(TOKENS))
        assert aux.persist({key: 0}, owner="a") == {key: aux.origins([0])[0]}
        assert aux.restore({key: 1}, owner="a") == {key: True}
        assert np.array_equal(aux.read("topk_ids", [1]).values, rows)
        assert not aux.read("logprob", [1]).valid.any()
    kv.close()
