"""``kvroute demo-pd`` when one of its processes fails: it says which one, and what that said last."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from serving import ForkedPair, pair

from cache_manager.errors import StorageError
from cache_manager.progress import Progress
from paged_engine import drivers, processes
from paged_engine.options import Options
from paged_engine.pool import running_master
from paged_engine.processes import hold_port

pytestmark = pytest.mark.xdist_group("processes")


def test_a_process_that_does_not_start_is_named_with_its_last_line(tmp_path: Path) -> None:
    """Method: a flag that the command refuses."""
    with pair(tmp_path, "--seed", "-1") as servers, pytest.raises(processes.ServerError) as failed:
        servers.wait_ready()
    wanted = "argument --seed: wanted an integer of 0 or more, got '-1'; see kvroute prefill --help"
    assert str(failed.value).splitlines()[0] == f"prefill: ended with status 2; it last said: kvroute prefill: {wanted}"


def test_a_process_that_works_is_waited_for_and_one_that_does_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a slow machine is not called broken. Method: a process that is stopped, and a limit that passes at once
    when nothing is done; then it goes on, and the wait ends well."""
    with pair(tmp_path) as servers:
        servers.prefill.send(signal.SIGSTOP)
        monkeypatch.setattr(processes, "READY_S", 0.5)
        with pytest.raises(processes.ServerError, match=r"^prefill: not ready after \d+ s, \d+ s of them on a proc"):
            servers.prefill.wait_ready()
        servers.prefill.send(signal.SIGCONT)
        monkeypatch.undo()
        servers.wait_ready()


def test_a_pool_that_ends_at_once_is_not_waited_for() -> None:
    """Goal: a program that cannot start is told from one that is slow. Method: a flag that it refuses."""
    master = running_master(hold_port(), hold_port(), "--no_such_flag=1")
    with pytest.raises(
        StorageError, match=r"mooncake_master ended with status \d+; `kvroute doctor --require mooncake`"
    ):
        master.__enter__()


def test_a_process_that_dies_meanwhile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: decode is killed when both are ready, before the first request."""

    class Short(ForkedPair):
        def wait_ready(self) -> None:
            super().wait_ready()
            self.decode.kill()

    monkeypatch.setattr(drivers, "Pair", Short)
    console = io.StringIO()
    with pytest.raises(processes.ServerError) as failed:
        drivers.DemoPD(Options(requests=2), Progress(console)).run()
    assert str(failed.value).startswith("decode: ended with status -9; it last said: ")
    assert "seeded weights at" in str(failed.value).splitlines()[0]
