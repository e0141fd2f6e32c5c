"""The documents are true: their examples run, their links have targets, their tables name things that exist."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import runpy
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from nursery import THIRD_PARTY, nursery

from cache_manager.testing.life import BlockManagerAdapter
from kvroute.connector.settings import Settings

ROOT = Path(__file__).parents[1]
OURS = ("kvroute", "transfer", "cache_manager")
PAGES = sorted(
    page
    for where in ("*.md", "docs/**/*.md", "bench/*.md", "bench/replay_study/*.md", "bench/results/**/*.md")
    for page in ROOT.glob(where)
)
COLUMNS = 78
PRINTED = ("text", "console")
EXAMPLES = [
    (page, i, code)
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize(("page", "i", "code"), EXAMPLES, ids=[f"{p.stem}-{i}" for p, i, _ in EXAMPLES])
def test_an_example_runs_as_it_stands(page: Path, i: int, code: str, tmp_path: Path) -> None:
    """An example that begins with its own file's name, ``# NAME.py``, is there for the later ones of its page."""
    for earlier in (text for known, at, text in EXAMPLES if known == page and at < i):
        if named := re.match(r"# (\w+\.py)\n", earlier):
            (tmp_path / named[1]).write_text(earlier)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    ran = nursery(*THIRD_PARTY).run(
        ["-c", code], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, warn="error", timeout=120
    )
    assert ran.returncode == 0, f"{page.name}, example {i}:\n{ran.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_names_what_there_is(page: Path) -> None:
    """Goal: code that cannot run here, as it needs an engine or its answer, names what kvroute has.

    Method: import what each snippet imports from kvroute, and look up what it asks of that.
    """
    for code in re.findall(r"^```py(?:thon)?\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        nodes, ours = list(ast.walk(ast.parse(code))), dict[str, Any]()
        for node in nodes:
            if isinstance(node, ast.Import):
                ours |= {each.name: import_module(each.name) for each in node.names if each.name in OURS}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
                try:
                    exec(ast.unparse(node), ours)  # noqa: S102 - our own page
                except ModuleNotFoundError as error:
                    if str(error.name).partition(".")[0] in OURS:
                        raise  # else it is a package that is not in this environment
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
                assert hasattr(ours[node.value.id], node.attr), f"{page.name}: {node.value.id}.{node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_fits_its_column(page: Path) -> None:
    """Goal: no code is cut in the site, whose column holds 78 characters. What a program printed is as it printed it:
    the site wraps it (``text``, ``console``)."""
    blocks = re.findall(r"^ *```(\w*).*?\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    code = [line for language, lines in blocks if language not in PRINTED for line in lines.splitlines()]
    assert [line for line in code if len(line) > COLUMNS] == []


def test_the_pictures_are_of_the_committed_results() -> None:
    """Goal: a picture shows the numbers of its page. Method: what the script draws of them now."""
    pictures = runpy.run_path(str(ROOT / ".ci" / "pictures.py"))["PICTURES"]
    files = {file.stem: file.read_text() for file in (ROOT / "docs" / "images").glob("*.svg")}
    assert files == {name: draw().svg() for name, draw in pictures.items()}, "python .ci/pictures.py draws them"


def test_the_picture_of_training_tells_the_ratios_apart(tmp_path: Path) -> None:
    """Goal: no curve mixes runs of two ratios. Method: results with runs of one family and of fewer steps for a second
    ratio: a panel more, with its name, and the others stay as they were."""
    script = runpy.run_path(str(ROOT / ".ci" / "pictures.py"))
    study = json.loads(script["STUDY"].read_text())
    engine = [run for run in study["runs"] if run["old"] == "engine" and run["family"] == "qwen3_moe"]
    of_trainer = [{**run, "old": "trainer", "steps": run["steps"][:3]} for run in engine]
    drawn = []
    for number, more in enumerate(([], of_trainer)):
        results = tmp_path / f"{number}.json"
        runs = [run for run in study["runs"] if run["old"] == "engine"]
        results.write_text(json.dumps({"runs": runs + more}))
        drawn.append(script["replay_training"](results).parts)
    one, both = drawn
    titles = [part for part in both if "ratio to the" in part]
    assert [re.findall(r">(.*), ratio to the (\w+)'s", title) for title in titles] == [
        [("Qwen3-MoE", "engine")],
        [("DeepSeek-V3", "engine")],
        [("Qwen3-MoE", "trainer")],
    ]
    legend = 6  # a dot and a name for each kind of rows
    assert both[: len(one) - legend] == one[:-legend]
    assert len(both) > len(one)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Also to a heading of the page, by the name that both a source browser and the site give it."""
    for target, anchor in _links(page):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in _anchors(there), f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_the_navigation() -> None:
    """Each page once, in the site and in the page of pages; an entry without its page would be dead."""
    pages = sorted([*(page.relative_to(ROOT).as_posix() for page in PAGES), "docs/api.md"])  # by ``make docs``
    assert sorted(_entries(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])) == pages
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / target).resolve() for target, _ in _links(index) if target}
    assert [page for page in PAGES if page.is_relative_to(index.parent) and page != index and page not in listed] == []


def test_the_repository_has_one_address() -> None:
    """Goal: who copies a line gets the clone. Method: what pages say to clone, and what site and citation name."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    cloned = {(page.name, url) for page in PAGES for url in re.findall(r"git clone (\S+)", page.read_text())}
    assert ("README.md", address) in cloned
    assert {url for _, url in cloned} == {address}
    assert tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["repo_url"] == address
    assert f'repository-code: "{address}"' in (ROOT / "CITATION.cff").read_text()


def test_every_setting_is_on_its_page() -> None:
    """Those of vLLM, among which are SGLang's."""
    keys = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    assert len(keys) == len(set(keys))
    assert set(keys) == set(Settings.__struct_fields__)


def test_the_page_of_faults_names_tests_that_exist() -> None:
    """Also the rules of state machines, which are methods; and every numbered fault is there once."""
    page = (ROOT / "docs" / "faults.md").read_text()
    named = re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", page)
    assert len(named) > 150
    functions = {file: _functions(ROOT / file) for _, file in named}
    assert [f"{file}::{name}" for name, file in named if name not in functions[file]] == []
    matrix = [name for file in (ROOT / "tests" / "faults" / "matrix").glob("test_*.py") for name in _functions(file)]
    several = re.compile(r"(?:(?<=test_)|(?<=\d_))r(\d\d)_")
    numbered = sorted((int(each), name) for name in matrix for each in several.findall(name))
    rows = re.findall(r"^\| R(\d+) \| [^|]+\|[^|]+\|[^|]+\|[^|]+\| \[`(\w+)`\]", page, re.MULTILINE)
    assert numbered == [(int(row), name) for row, name in rows if name in matrix]
    assert [int(row) for row, _ in rows] == list(range(1, 24))


def test_every_test_that_a_page_names_exists() -> None:
    """Goal: no page claims what no test shows any more. Method: the names of test files and of functions."""
    there = set[str]()
    tests = [file for file in _tests() if file.name.startswith("test_")]
    for file in [*tests, *ROOT.glob("*/testing/**/*.py")]:
        there |= {file.stem, *_functions(file)}
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
    named = {(page.name, name) for page in pages for name in re.findall(r"`(test_[a-z0-9_]+)`", page.read_text())}
    assert len(named) > 20
    assert [each for each in sorted(named) if each[1] not in there] == []


def test_every_claim_with_a_name_is_an_invariant() -> None:
    """Goal: the page claims nothing by a name that no check has. Method: the names of its first column are in the
    source of tests, of contracts or of the kit; the files of the other columns are there."""
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs" / "invariants.md").read_text(), re.MULTILINE)
    files = [*_tests(), *ROOT.glob("*/testing/**/*.py")]
    checks = "\n".join(file.read_text() for file in files)
    named = {name for claim, *_ in rows for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", claim)}
    assert len(named) > 15
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", checks)] == []
    sources = [
        path.relative_to(ROOT) for home in (*OURS, "examples") for path in [ROOT / home, *(ROOT / home).glob("**/*")]
    ]
    for _, kept_by, checked_in in rows[2:]:
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", kept_by):
            assert any(f"/{path}/".endswith(f"/{name.strip('/')}/") for path in sources), name
        for name in re.findall(r"`([\w/]+\.py)`", checked_in):
            assert (ROOT / name).exists() or [file for file in _tests() if file.match(f"*/{name}")], name


def test_the_map_has_every_module_and_no_other() -> None:
    """Goal: the page of the architecture is true. Method: what stands at the first level of each package is on it; what
    its tables and its two maps name first is in a package."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    there = {
        home: {path.stem for path in (ROOT / home).iterdir() if path.suffix == ".py" or path.is_dir()}
        - {"__init__", "__main__", "__pycache__", "errors"}
        for home in OURS
    }
    for home, modules in there.items():
        begin = page.index(f"## One page map of `{home}`")
        part = page[begin : page.find("\n## ", begin + 3)]
        prefixes = {word.split("_")[0] for word in re.findall(r"\b\w+_\*", part)}  # zmq_*
        missing = [
            name for name in modules if not re.search(rf"\b{name}\b", part) and name.split("_")[0] not in prefixes
        ]
        assert missing == [], home
    rows = re.findall(r"^\| (`.+?) \| ", page.partition("## One page map of `kvroute`")[2], re.MULTILINE)
    named = {name.strip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    files = {path.relative_to(ROOT / "kvroute").with_suffix("").as_posix() for path in (ROOT / "kvroute").glob("**/*")}
    assert sorted(named - files) == []


def test_the_numbers_of_formats_are_those_of_the_code() -> None:
    """Goal: an operator knows what an upgrade costs. Method: each number of the page, and its constant."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| `([\w.]+):(\w+)` \|", page, re.MULTILINE)
    assert len(rows) == 12
    for number, module, constant in rows:
        value = getattr(import_module(module), constant)
        assert str(value).rpartition("/")[2] == number, f"{module}:{constant}"


def test_the_kit_s_calls_have_their_signatures() -> None:
    """Goal: an adapter is written from the page. Method: the page's calls and those of the class, by their names, and
    their arguments by theirs."""
    page = (ROOT / "docs" / "concepts" / "life-cycle-kit.md").read_text()
    rows = page.partition("| call | of | copies |")[2].partition("\n\n")[0].splitlines()
    told = dict(re.findall(r"`(\w+)\(([\w, ]*)\)[^`]*`", "\n".join(row.split(" | ")[0] for row in rows)))
    methods = {name: call for name, call in vars(BlockManagerAdapter).items() if inspect.isfunction(call)}
    wanted = {name: ", ".join([*inspect.signature(call).parameters][1:]) for name, call in methods.items()}
    del wanted["__init__"]
    assert told == wanted


def test_every_failure_of_a_crossing_has_its_tests() -> None:
    """In the small engine and at the connector, each of which exists; and some with live engines of vLLM."""
    page = ROOT / "docs" / "prefill-decode.md"
    table = page.read_text().partition("\n| what happens | decode's rows")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 14
    for happens, _, *columns in rows:
        named = [re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", column) for column in columns]
        assert all(named[:2]), happens
        assert [each for column in named for each in column if each[0] not in _functions(ROOT / each[1])] == []


@cache
def _tests() -> list[Path]:
    """The files of the tests, without the environments that lie beside some of them."""
    files = []
    for folder, folders, names in os.walk(ROOT / "tests"):
        folders[:] = [name for name in folders if name != ".venv"]
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _text(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _links(page: Path) -> list[tuple[str, str]]:
    """Those that are relative: file, or nothing for the page itself, and heading."""
    return re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", _text(page))


def _anchors(page: Path) -> set[str]:
    names = {
        re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    }
    return {name.replace(" ", "-") for name in names} & {re.sub(r"[-\s]+", "-", name) for name in names}


def _entries(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in _entries(entry)]


def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
