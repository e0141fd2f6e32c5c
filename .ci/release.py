"""Cuts a release.

``python .ci/release.py prepare VERSION`` writes the version wherever it stands, and gives *Unreleased* of the changelog
its name. Commit that and tag it.

``python .ci/release.py cut TAG`` builds what the tag has, nothing of the working tree, into ``dist/``: the source
distribution and a wheel of it alone, notes (the changelog's section, what later versions read, which engines were
judged), an SBOM of the wheel with what it needs, sums. Both distributions are installed in clean environments of each
Python, and have to work there. ``--python`` names interpreters; without it those of 3.11, 3.12 and 3.13 that run here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PLACES = {
    "pyproject.toml": r'(?m)^version = "(.+)"$',
    "kvroute/__init__.py": r'(?m)^__version__ = "(.+)"$',
    "CITATION.cff": r"(?m)^version: (.+)$",
    "zensical.toml": r'(?m)^site_name = "kvroute (\S+)"',
}
"""The files that name the version."""
UNRELEASED = "## Unreleased"
VERSION = re.compile(r"\d+\.\d+\.\d+(?:rc\d+)?")
BUILD = ("build>=1.2", "hatchling>=1.25")
SBOM = "cyclonedx-bom==7.5.0"
CHECKS = (
    ("-m", "kvroute", "--version"),
    ("-m", "kvroute", "prove", "--invariants"),
    ("-m", "kvroute", "doctor"),
)
FOREIGN = """
import sys
try:
    import kvroute
except ImportError as error:
    sys.exit(0 if "distribution foreign-kit: pip uninstall -y foreign-kit" in str(error) else str(error))
sys.exit("kvroute was imported beside another distribution's transfer")
"""


class ReleaseError(Exception):
    """What stands against the release."""


def versions(tree: Path) -> dict[str, str]:
    """By file, the version that it names; a file without one is an error."""
    named = {}
    for file, pattern in PLACES.items():
        found = re.search(pattern, (tree / file).read_text())
        if not found:
            raise ReleaseError(f"{file}: names no version")
        named[file] = found[1]
    return named


def section(changelog: str, version: str) -> str:
    """Of the changelog, what is under the version's heading."""
    found = re.search(rf"(?ms)^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)", changelog)
    if not found or not found[1].strip():
        raise ReleaseError(f"CHANGELOG.md: wanted a section '## {version} (YYYY-MM-DD)' with changes")
    return found[1].strip()


def prepare(tree: Path, version: str, day: str) -> None:
    if not VERSION.fullmatch(version):
        raise ReleaseError(f"version: wanted X.Y.Z or X.Y.ZrcN, got {version!r}")
    changelog = tree / "CHANGELOG.md"
    text = changelog.read_text()
    if text.count(f"{UNRELEASED}\n") != 1:
        raise ReleaseError(f"CHANGELOG.md: wanted one heading {UNRELEASED!r}, got {text.count(UNRELEASED)}")
    versions(tree)
    for file, pattern in PLACES.items():
        content = (tree / file).read_text()
        found = re.search(pattern, content)
        assert found
        (tree / file).write_text(content[: found.start(1)] + version + content[found.end(1) :])
    changelog.write_text(text.replace(f"{UNRELEASED}\n", f"{UNRELEASED}\n\n## {version} ({day})\n"))


def notes(tree: Path, version: str) -> str:
    """What stands beside the files of a release."""
    compatibility = (tree / "docs" / "compatibility.md").read_text()
    table = re.search(r"(?ms)^\| kind \| number \|.*?(?=\n\n)", compatibility)
    judged = tested(tree)
    if not table:
        raise ReleaseError("docs/compatibility.md: has no table of kinds and numbers")
    return "\n".join(
        [
            f"# kvroute {version}",
            "",
            section((tree / "CHANGELOG.md").read_text(), version),
            "",
            "## Judged with",
            "",
            "| engine | releases |",
            "|---|---|",
            *(f"| {engine} | {', '.join(releases)} |" for engine, releases in judged.items()),
            "",
            "## Which data this version reads",
            "",
            table[0],
            "",
        ]
    )


def tested(tree: Path) -> dict[str, list[str]]:
    judged = {}
    for engine in ("vllm", "sglang"):
        source = (tree / "kvroute" / "integrations" / engine / "versions.py").read_text()
        releases = re.findall(r'^    Judged\("([^"]+)"', source, re.MULTILINE)
        if not releases:
            raise ReleaseError(f"kvroute/integrations/{engine}/versions.py: has no judged release")
        judged[{"vllm": "vLLM", "sglang": "SGLang"}[engine]] = releases
    return judged


def run(*command: str | Path, at: Path | None = None, more: Mapping[str, str] | None = None) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(  # noqa: S603
        [str(word) for word in command],
        cwd=at,
        env=clean | dict(more or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def environment(place: Path, python: str, *packages: str | Path) -> Path:
    """The interpreter of a new environment that has these packages alone, and what they need."""
    run(python, "-m", "venv", place)
    interpreter = place / "bin" / "python"
    if packages:
        run(interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return interpreter


def pythons(named: list[str]) -> Iterator[tuple[str, str]]:
    """Interpreters, each with its version; what is missing is said."""
    for name in named or [f"python{version}" for version in PYTHONS]:
        try:
            yield name, run(name, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])").strip()
        except (OSError, ReleaseError):
            if named:
                raise ReleaseError(f"--python: {name} does not run") from None
            print(f"== {name} does not run here: NOT checked with it")


def check(work: Path, files: list[Path], python: str, version: str, example: str) -> None:
    """Each file, in an environment of its own, outside of the source."""
    away = work / "away"
    away.mkdir(exist_ok=True)
    for file in files:
        place = work / f"checked-{file.name}-{Path(python).name}"
        interpreter = environment(place, python, file)
        run(interpreter, "-m", "pip", "check", at=away)
        said = [run(interpreter, *command, at=away) for command in CHECKS]
        if said[0].strip() != f"kvroute {version}":
            raise ReleaseError(f"{file.name} says that it is {said[0].strip()!r}")
        run(interpreter, "-c", example, at=away)
        shutil.rmtree(place)


def check_beside_another(work: Path, python: str, wheel: Path) -> None:
    """Goal: a distribution that brings a ``transfer`` of its own, installed later, is named at import."""
    place = work / "foreign"
    (place / "transfer").mkdir(parents=True)
    (place / "transfer" / "__init__.py").write_text("")
    (place / "pyproject.toml").write_text(
        '[project]\nname = "foreign-kit"\nversion = "1"\n[tool.hatch.build.targets.wheel]\npackages = ["transfer"]\n'
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    )
    interpreter = environment(work / "beside", python, wheel)
    run(interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", place)
    run(interpreter, "-c", FOREIGN, at=work)
    run(interpreter, "-m", "pip", "uninstall", "--quiet", "-y", "foreign-kit")
    run(interpreter, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", wheel)
    run(interpreter, "-c", "import kvroute, transfer; transfer.Node", at=work)  # the remedy of the error


def cut(repository: Path, tag: str, named: list[str], out: Path) -> None:
    version = tag.removeprefix("v")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        tree = work / "source"
        tree.mkdir()
        if tag not in run("git", "tag", "--list", at=repository).split():
            raise ReleaseError(f"tag: wanted one of this repository, got {tag!r}")
        archive = work / "source.tar"
        run("git", "archive", "--output", archive, f"refs/tags/{tag}", at=repository)
        run("tar", "-xf", archive, "-C", tree)
        others = {file: name for file, name in versions(tree).items() if name != version}
        if others:
            raise ReleaseError(f"{tag}: wanted version {version} in every file, got {others}")
        text = notes(tree, version)
        known = list(pythons(named))
        if not known:
            raise ReleaseError("no interpreter to check with")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (out / "RELEASE.md").write_text(text)

        print("== build")
        builder = environment(work / "builder", known[0][0], *BUILD)
        when = run("git", "log", "-1", "--format=%ct", f"refs/tags/{tag}", at=repository).strip()
        run(builder, "-m", "build", "--no-isolation", "--outdir", out, tree, more={"SOURCE_DATE_EPOCH": when})
        files = [out / f"kvroute-{version}-py3-none-any.whl", out / f"kvroute-{version}.tar.gz"]

        example = re.search(r"(?ms)^```python\n(.*?)^```", (tree / "docs" / "package.md").read_text())
        if not example:
            raise ReleaseError("docs/package.md: has no example")
        for python, number in known:
            print(f"== wheel and source distribution in clean environments of Python {number}")
            check(work, files, python, version, example[1])
        print("== beside a distribution that brings a package of the same name")
        check_beside_another(work, known[0][0], files[0])

        print("== SBOM")
        shipped = environment(work / "shipped", known[0][0], files[0])
        run(shipped, "-m", "pip", "uninstall", "--quiet", "-y", "pip", "setuptools")  # of the environment, not of ours
        maker = environment(work / "maker", known[0][0], SBOM)
        bom = out / f"kvroute-{version}.cdx.json"
        arguments = ["environment", "--output-reproducible", "--mc-type", "library", "--pyproject", "pyproject.toml"]
        run(
            maker.with_name("cyclonedx-py"),
            *arguments,
            "--output-file",
            bom,
            shipped,
            at=tree,
            more={"SOURCE_DATE_EPOCH": when},
        )
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(out.iterdir())]
        (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
        print("\n".join(["", *sums]))
        print(f"checked with Python {', '.join(number for _, number in known)}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Cuts a release.")
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="write the version wherever it stands")
    preparing.add_argument("version")
    cutting = commands.add_parser("cut", help="build and check what a tag has")
    cutting.add_argument("tag")
    cutting.add_argument("--python", action="append", default=[], help="an interpreter to check with, several times")
    cutting.add_argument("--out", type=Path, default=ROOT / "dist", help="where files go; it is emptied first")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "prepare":
            prepare(ROOT, asked.version, datetime.now(UTC).strftime("%Y-%m-%d"))
        else:
            cut(ROOT, asked.tag, asked.python, asked.out)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
