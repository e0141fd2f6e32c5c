"""The pool that the Mooncake tests run against leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HOLD = """
import sys, time
from pathlib import Path
from mooncake_pool import Master, Owner

master = Master()
master.start()
owner = Owner(master)
owner.segment(Path(sys.argv[1]) / "segment", 1 << 20)
print(master.process.pid, owner.process.pid, flush=True)
time.sleep(300)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_master_and_owner_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    """Method: SIGKILL to it, as to a test run that is out of time."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as holder:
        assert holder.stdout is not None
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        assert len(pids) == 2
        assert all(runs(pid) for pid in pids)
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]
        assert names[0].startswith("mooncake_master"), names
        holder.kill()
        holder.wait()
    give_up_s = time.monotonic() + 120
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < give_up_s, f"{left} go on"
        time.sleep(0.02)
