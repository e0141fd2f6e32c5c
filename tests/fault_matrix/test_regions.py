"""Fault R18: a killed process and its shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from cache_manager.regions.directory import DIRECTORY
from tests.fault_matrix.blocks import make_aux

OWNER = """
import sys, time
from tests.fault_matrix.blocks import make_aux, write
aux = make_aux(memory="shared")
write(aux, 0, "a")
print(aux.region("device").name, aux.region("host").name, flush=True)
time.sleep(600)
"""


def test_r18_a_crash_loop_fills_no_shared_memory() -> None:
    """Fault: kill the process group of an engine, start the next, and again. kvroute: only the living have regions."""
    killed: list[str] = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            assert process.stdout is not None
            names = process.stdout.readline().split()
            assert len(names) == 2, "the owner did not start"
            assert not [name for name in killed if (DIRECTORY / name).exists()]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        assert all((DIRECTORY / name).exists() for name in names)
        killed += names
    with make_aux(memory="shared") as aux:
        assert not [name for name in killed if (DIRECTORY / name).exists()]
        assert (DIRECTORY / aux.region("device").name).exists()
