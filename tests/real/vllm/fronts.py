"""Front ends of vLLM in processes of their own, which a nursery forks: none of them imports vLLM once more."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from nursery import Born, Nursery, nursery

from bench.harness import Peer

SESSION = "import os, runpy; os.setsid(); runpy.run_module({!r}, run_name='__main__', alter_sys=True)"


def vllm_nursery() -> Nursery:
    return nursery("vllm_warm")


def in_a_session(module: str, *arguments: str, log: IO[Any], environment: Mapping[str, str]) -> Born:
    """``python -m MODULE ARGUMENTS``, which leads a session of its own."""
    command = ["-c", SESSION.format(module), *arguments]
    return vllm_nursery().start(command, stdout=log, stderr=log, env={**os.environ, **environment})


class _Asked:
    """As much of :class:`subprocess.Popen` as :class:`Peer` uses."""

    def __init__(self, stdin: IO[str], stdout: IO[str], born: Born) -> None:
        self.stdin, self.stdout, self._born = stdin, stdout, born
        self.pid, self.kill = born.pid, born.kill

    @property
    def returncode(self) -> int | None:
        return self._born.returncode

    def communicate(self) -> None:
        self.stdin.close()
        self.stdout.close()
        self._born.wait(60)


class Front(Peer):
    """``python -m MODULE ARGUMENTS``, asked as a peer of the benchmarks is."""

    nursery = staticmethod(vllm_nursery)

    def __init__(self, module: str, log: Path, environment: Mapping[str, str], *arguments: str) -> None:
        self._log = log
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        with log.open("wb") as output, os.fdopen(theirs_in), os.fdopen(theirs_out, "w"):
            born = self.nursery().start(
                ["-m", module, *arguments],
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=output,
                env={**os.environ, **environment},
            )
        self._process: Any = _Asked(os.fdopen(ours_in, "w"), os.fdopen(ours_out), born)
        self.version = str(self._answer()["version"])
