"""kvroute's door and hooks in the installed SGLang, with its own plugin loader: all or none are hooked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sglang
from conftest import engine_environment

from kvroute import ConfigError
from kvroute.integrations.sglang import plugin, versions
from kvroute.integrations.sglang.hooks import HOOKS

TESTED = f"SGLang {' or '.join(versions.TESTED)}"
STARTED = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.managers.scheduler import Scheduler
from kvroute.integrations.sglang import versions
asked, missing = json.loads(sys.argv[1])
for name in missing:
    versions.PLACES[name] = versions.Place((versions.PLACES[name].names[0] + "_of_another_version",))
arguments = SimpleNamespace(enable_return_routed_experts=asked, enable_unified_cache_external_linker=False)
try:
    Scheduler.__init__(object.__new__(Scheduler), arguments, None)
except Exception as error:
    ended = f"{type(error).__name__}: {error}"
hooked = []
for name, place in versions.PLACES.items():
    if name not in missing and (there := versions.name_of(place)):
        owner, function = versions.resolved(there)
        if getattr(owner, function).__code__.co_filename.endswith("sglang/plugin.py"):
            hooked.append(name)
print(json.dumps([ended, hooked]))
"""


def started(
    plugins: Path, *, asked: bool, missing: tuple[str, ...] = (), untested: str = ""
) -> tuple[str, set[str], str]:
    """How a scheduler's start ended, in a process that loaded plugins as SGLang does; what was hooked, and the log."""
    environment = engine_environment(plugins, kvroute=True) | {"KVROUTE_SGLANG": json.dumps({"untested": untested})}
    command = [sys.executable, "-W", "ignore", "-c", STARTED, json.dumps([asked, missing])]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ended, hooked = json.loads(done.stdout.splitlines()[-1])
    return ended, set(hooked), done.stderr


def test_every_name_is_there() -> None:
    """Goal: the table is of this SGLang, whose version was judged. A name that nothing hooks is not in the table."""
    version = sglang.__version__
    assert not any(versions.absent(version, part) for part in ("", *versions.PARTS, versions.WEIGHTS_SETTING))
    assert versions.unfit(sglang.__version__, "") is None
    assert HOOKS.keys() == versions.PLACES.keys()
    older = {hook for hook, place in versions.PLACES.items() if place.until < versions.release(version)}
    assert versions.hooked(version).keys() == HOOKS.keys() - older


def test_a_scheduler_that_returns_routed_experts_has_every_hook(plugins: Path) -> None:
    ended, hooked, log = started(plugins, asked=True)
    assert hooked == versions.hooked(sglang.__version__).keys()
    assert "ConfigError" not in ended  # it ended later, for want of real arguments
    assert "Failed to" not in log


def test_where_nobody_asks_for_routed_experts_nothing_is_hooked_and_one_line_says_so(plugins: Path) -> None:
    _, hooked, log = started(plugins, asked=False, missing=("flushed",))
    assert hooked == set()
    assert log.count("kvroute does nothing here: routed experts are not asked for") == 1


@pytest.mark.parametrize("untested", ["", sglang.__version__])
def test_a_server_without_one_of_the_names_does_not_start(plugins: Path, untested: str) -> None:
    """Goal: never silent, also under ``untested``. Method: a name that is absent; the error says which one."""
    ended, hooked, _ = started(plugins, asked=True, missing=("flushed",), untested=untested)
    assert hooked == set()
    assert "flush_cache_of_another_version" in ended
    assert ended.startswith(f"ConfigError: SGLang with kvroute: wanted {TESTED}, or one with sglang.srt.managers")


def test_a_version_that_was_not_judged_is_refused_or_accepted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.unfit("9.9", "") == (f"{TESTED}, or untested='9.9'", "9.9")
    assert versions.unfit("9.9", "9.9") is None
    lacking = versions.Place(("sglang.srt.managers.scheduler.Scheduler.flush_cache",), ("no_such_parameter",))
    monkeypatch.setitem(versions.PLACES, "flushed", lacking)
    told = versions.unfit("9.9", "9.9")
    assert told is not None
    assert "flush_cache(no_such_parameter)" in told[0]


def test_a_hook_that_fails_undoes_the_earlier_ones() -> None:
    """Goal: SGLang is as it was. Method: three places, the last of which is a C type's, which cannot be set."""
    place = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
    create = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.create"
    before = [vars(versions.resolved(each)[0])[versions.resolved(each)[1]] for each in (place, create)]
    with pytest.raises(ConfigError, match=r"wanted a function at builtins\.dict\.copy, got .*TypeError"):
        plugin.hook_all(dict.fromkeys((place, create, "builtins.dict.copy"), lambda function, *_: function))
    after = [vars(versions.resolved(each)[0])[versions.resolved(each)[1]] for each in (place, create)]
    assert all(one is other for one, other in zip(before, after, strict=True))
