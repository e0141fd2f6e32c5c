"""What the benchmarks measure beside kvroute, each in an environment of its own that the Makefile makes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.harness import ROOT, Peer, PeerError

VENVS = ROOT / "bench" / ".venvs"
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


@contextmanager
def peers_of(module: str, venvs: tuple[str, ...]) -> Iterator[tuple[list[Peer], list[str]]]:
    """``bench.peers.MODULE`` in each environment that is there; a line for each that is not."""
    peers, absent = [], []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-")))
        for venv in venvs:
            python = VENVS / venv / "bin" / "python"
            if not python.exists():
                absent.append(f"not installed: no {python.relative_to(ROOT)}; `make bench-peers` makes it")
                continue
            try:
                peer = Peer(python, f"bench.peers.{module}", logs / venv, ENVIRONMENT)
            except PeerError as error:
                absent.append(f"{venv} does not start: {error}")
                continue
            stack.callback(peer.close)
            peers.append(peer)
        yield peers, absent
