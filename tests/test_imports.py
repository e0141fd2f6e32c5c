"""What importing the packages loads: the front door must stay cheap, and open without any optional package."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from waiting import GIVE_UP_S

HEAVY = ("torch", "triton", "zmq", "mooncake", "transformers", "tokenizers", "matplotlib")
HEAVY += ("aiohttp",)


def loaded_by(code: str) -> set[str]:
    """The top-level modules in a fresh interpreter after ``code``."""
    script = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=GIVE_UP_S, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["cache_manager", "transfer", "kvroute", "paged_engine", "bench"])
def test_no_import_goes_in_a_circle(package: str) -> None:
    """Goal: every module can be read after those that it needs. Method: take modules away that import none of what is
    left, until none can be; imports in functions and for types count."""
    graph = grimp.build_graph(package)
    left = {module: graph.find_modules_directly_imported_by(module) & graph.modules for module in graph.modules}
    while ready := {module for module, needed in left.items() if not needed & left.keys()}:
        for module in ready:
            del left[module]
    assert sorted(left) == [], "in a circle, or in need of one"


def test_importing_kvroute_loads_nothing_heavy() -> None:
    """Goal: ``import kvroute`` in under 100 ms. Method: neither numpy nor anything slower is in sys.modules."""
    assert not loaded_by("import kvroute") & {*HEAVY, "numpy", "msgspec"}


@pytest.mark.parametrize(
    "code",
    [
        "import cache_manager",
        "import transfer",
        "import kvroute; [getattr(kvroute, name) for name in kvroute.__all__]",
        "import kvroute.routing, kvroute.routes, kvroute.integrations.fastdeploy, kvroute.capture",
        "import kvroute.capture.errors",
        "import kvroute.cli, kvroute.encodings, kvroute.connector",
    ],
)
def test_nothing_optional_is_loaded_before_it_is_used(code: str) -> None:
    assert not loaded_by(code) & set(HEAVY)


def test_every_public_name_is_there_and_no_other() -> None:
    import kvroute

    assert dir(kvroute) == sorted(kvroute.__all__)
    assert all(getattr(kvroute, name) is not None for name in kvroute.__all__)
    stub = ast.parse(Path(kvroute.__file__).with_suffix(".pyi").read_text())
    told = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(told) <= set(kvroute.__all__)
    homes = {name: importlib.import_module(home) for name, home in told.items()}
    assert all(getattr(home, name) is getattr(kvroute, name) for name, home in homes.items())
    with pytest.raises(AttributeError, match="no attribute 'routing_specs'"):
        kvroute.routing_specs  # noqa: B018 - the access is the test


def test_every_error_has_one_root() -> None:
    import kvroute

    errors = [e for n in kvroute.__all__ if isinstance(e := getattr(kvroute, n), type) and issubclass(e, Exception)]
    assert len(errors) > 10
    assert all(issubclass(error, kvroute.KVRouteError) for error in errors)


def test_an_error_prints_under_the_name_that_users_import() -> None:
    """Goal: the name in a traceback is one to catch. Method: a traceback of a process that never named the error."""
    code = "import kvroute; kvroute.Namespace('m', weights_version=-1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert done.stderr.splitlines()[-1].startswith("kvroute.SpecError: namespace.weights_version: wanted ")


def test_help_says_something_of_every_public_name() -> None:
    import kvroute

    silent = []
    for name in set(kvroute.__all__) - {"__version__"}:
        thing = getattr(kvroute, name)
        assert thing.__doc__, name
        assert not thing.__doc__.startswith("NewType"), name
        for member, given in vars(thing).items() if isinstance(thing, type) else ():
            call = getattr(given, "__func__", given)
            if not member.startswith("_") and (callable(call) or isinstance(call, property)) and not call.__doc__:
                silent.append(f"{name}.{member}")
    assert silent == []
