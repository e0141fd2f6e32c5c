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


COLUMNS = 78
BARE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)


def signature(name: str, thing: object) -> list[str]:
    """On one line, or with one argument a line where that is longer than the site's column."""
    try:
        call = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    line = name + unqualified(str(call))
    lines = [line] if len(line) <= COLUMNS else arguments(name, call)
    return ["```py", *lines, "```", ""]


def arguments(name: str, call: inspect.Signature) -> list[str]:
    """``/`` and ``*`` stand where Python has them in the line."""
    lines, before = [f"{name}("], None
    for parameter in call.parameters.values():
        kind = parameter.kind
        if before is BARE[0] and kind is not BARE[0]:
            lines.append("    /,")
        if kind is BARE[2] and before not in BARE[1:]:
            lines.append("    *,")
        lines.append(argument(parameter))
        before = kind
    if before is BARE[0]:
        lines.append("    /,")
    returned = call.return_annotation
    if returned is inspect.Signature.empty:
        return [*lines, ")"]
    return [*lines, f") -> {unqualified(inspect.formatannotation(returned))}"]


def argument(parameter: inspect.Parameter) -> str:
    """Its default is ``...`` where the line would be too long: it is a call, which the docstring is about."""
    line = f"    {unqualified(str(parameter))},"
    if len(line) <= COLUMNS or parameter.default is inspect.Parameter.empty:
        return line
    return f"    {unqualified(str(parameter.replace(default=...)))},".replace("Ellipsis", "...")


def unqualified(annotation: str) -> str:
    """Without modules, and without what msgspec checks in a field."""
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", annotation.replace("'", ""))
    checked = re.compile(r"Annotated\[((?:[^\[\]]|\[[^\[\]]*\])*), Meta\([^()]*\)\]")
    while checked.search(text):
        text = checked.sub(r"\1", text)
    return text


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
