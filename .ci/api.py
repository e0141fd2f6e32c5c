"""The page ``docs/api.md`` of the site: what users call, by its signatures and docstrings. Written by ``make docs``."""

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import kvroute

TRAINERS = ("transformers", "verl", "skyrl", "megatron", "slime", "nemo_rl", "prime_rl")
MODULES = (
    "kvroute.connector.answers",
    *(f"kvroute.replay.{trainer}" for trainer in TRAINERS),
    "kvroute.capture.capture",
    "cache_manager.testing.life",
    "transfer",
)
HEAD = """# API

For whoever calls kvroute: every public name with its signature and docstring, as the source has them. This page is made
of the source when the site is built.
"""


def said(thing: object) -> str:
    """A docstring as Markdown: roles and double backquotes become code, and examples blocks of it."""
    text = inspect.getdoc(thing) or ""
    text = re.sub(r":\w+:`~?([^`]+)`|``([^`]+)``", lambda found: f"`{found[1] or found[2]}`", text)
    return re.sub(r"(?ms)^>>>.*?(?=\n\n|\Z)", lambda found: f"```pycon\n{found[0]}\n```", text)


def described(name: str, thing: object) -> list[str]:
    """A name under a heading of its own, and below it the methods of a class."""
    lines = [f"### {name}", "", *signature(name, thing), said(thing), ""]
    for method, given in vars(thing).items() if inspect.isclass(thing) else ():
        call = given.__func__ if isinstance(given, (classmethod, staticmethod)) else given
        if method.startswith("_") or not (inspect.isfunction(call) or isinstance(given, property)) or not said(given):
            continue
        lines += [f"**{method}**", "", *(signature(method, call) if inspect.isfunction(call) else []), said(given), ""]
    return lines


def signature(name: str, thing: object) -> list[str]:
    try:
        told = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return []
    return ["```py", name + re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", told.replace("'", "")), "```", ""]


def main(page: Path) -> None:
    lines = [HEAD, "## kvroute", ""]
    for name in sorted(set(kvroute.__all__) - {"__version__"}, key=str.lower):
        lines += described(name, getattr(kvroute, name))
    for module in map(import_module, MODULES):
        lines += [f"## {module.__name__}", "", said(module), ""]
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name, thing in ((name, getattr(module, name)) for name in names):
            if getattr(thing, "__module__", "").startswith(module.__name__):
                lines += described(name, thing)
    page.write_text("\n".join(lines))


main(Path(sys.argv[1]))
