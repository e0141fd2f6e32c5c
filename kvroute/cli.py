"""The command line: a table of commands, each with the function that runs it, which imports heavy modules then."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import REMAINDER
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from cache_manager.errors import KVRouteError
from kvroute import __version__, demonstration
from kvroute.arguments import JSON, ROLLOUTS_URL, SERVER_URL, Command, Flag, Integer, flag, number
from kvroute.findings import console, write_json

FAILED, USAGE = 1, 2
"""Exit statuses: the job ran and found something wrong; it could not be started as asked."""

EXTRAS: Final = {
    "engine": ("torch", "transformers", "tokenizers"),
    "serve": ("aiohttp",),
    "testing": ("hypothesis", "pytest"),
}
"""Packages that commands import, by the extra that brings them."""
INSTALL: Final = "in a clone of kvroute: pip install '.[{}]'"


def remedy_for(package: str) -> str:
    """The remedy for a package that a command could not import."""
    if package == "paged_engine":
        return "install kvroute, or put examples/ of its source on PYTHONPATH"
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    return INSTALL.format(extra) if extra else "no part of kvroute brings it"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, ``FAILED`` or ``USAGE``."""
    chosen = vars(_parser().parse_args(arguments))
    name = chosen.pop("command")
    try:
        if "host" in chosen:
            demonstration.check_free(chosen["host"], chosen["port"])
        run = COMMANDS[name].run
        if isinstance(run, str):
            module, _, function = run.partition(":")
            run = getattr(import_module(module), function)
        status = int(run(**chosen))
        sys.stdout.flush()
        return status
    except KVRouteError as error:
        sys.stderr.write(f"kvroute {name}: {error}\n")
    except ModuleNotFoundError as error:
        package = (error.name or "kvroute").partition(".")[0]
        if package in ("kvroute", "cache_manager", "transfer"):
            raise
        sys.stderr.write(f"kvroute {name}: needs {error.name}; {remedy_for(package)}\n")
    except BrokenPipeError:  # the reader of the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"kvroute {name}: interrupted\n")
        return 130
    return USAGE


class _Parser(argparse.ArgumentParser):
    """Reports a wrong call in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, *given: Any, **more: Any) -> Any:
        """A command's own parser reports what it does not know: its help is what the reader needs."""
        parsed, unknown = super().parse_known_args(*given, **more)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvroute", description="Routing rows that follow KV blocks: never wrong, never silent.")
    parser.add_argument("--version", action="version", version=f"kvroute {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        arguments = commands.add_parser(name, help=command.what, description=command.what)
        for names, options in command.flags:
            default = options.get("default")
            if default not in (None, (), [], ""):
                options = {**options, "help": f"{options['help']} ({default})"}
            arguments.add_argument(*names, **options)
    return parser


def _shm(action: str) -> int:
    from cache_manager.regions import list_regions, reap_orphans

    if action == "reap":
        lines = [f"removed {name}" for name in reap_orphans()] or ["no orphans"]
    else:
        line = "{0.name}  mirrors {0.tier} blocks  {0.nbytes:,} bytes  {1}"
        regions = list_regions()
        lines = [line.format(region, "in use" if region.in_use else "orphan") for region in regions] or ["no regions"]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def _keys(directory: Path, name: str) -> int:
    from transfer.curve import make_keys

    line = "" if directory.is_dir() else f"made {directory}\n"
    sys.stdout.write(f"{line}{make_keys(directory, name)}  for its owner alone: copy it to every engine's host\n")
    return 0


def _fsck(directory: Path, json: Path | None, **how: Any) -> int:
    from cache_manager.storage.file import fsck

    report = fsck(directory, **how)
    write_json(json, report.to_json())
    console(json).write(report.to_text())
    return 0 if report.sound else FAILED


def _directory(text: str) -> Path:
    return Path(text.removeprefix("file://"))


def _engine(name: str, what: str) -> Flag:
    return flag(name, type=SERVER_URL, metavar="URL", help=what)


_URL: Final = flag("--url", required=True, type=SERVER_URL, metavar="URL", help="http://HOST:PORT of vLLM or SGLang")
_MODEL_FLAG: Final = flag(
    "--model",
    type=Path,
    required=True,
    metavar="DIR",
    help="the checkpoint, or its config.json alone",
)
_ROLLOUTS: Final = flag(
    "--rollouts",
    default="",
    type=ROLLOUTS_URL,
    metavar="URL",
    help="the rollout store that the engine leaves routes in",
)
_DTYPE: Final = flag(
    "--dtype",
    default="auto",
    choices=("auto", "float32", "bfloat16", "float16"),
    help="the server's precision: a row whose experts rounding could change is unjudged",
)

COMMANDS: Final[dict[str, Command]] = {
    **demonstration.DEMONSTRATION,
    "up": Command(
        "start vLLM with kvroute's connector, and say what to type next",
        "kvroute.up:main",
        (
            flag("--cpu", action="store_true", help="on a CPU: eager, in float32, 4 GiB for KV"),
            flag("--host", default="127.0.0.1", help="HTTP address"),
            flag("--port", type=Integer(1, 65535), default=8000, metavar="N", help="HTTP port"),
            flag("model", metavar="MODEL", help="the directory of a checkpoint, or its name on the hub"),
            flag("arguments", nargs=REMAINDER, metavar="...", help="what follows MODEL is vLLM's"),
        ),
    ),
    "shm": Command(
        "SharedMemory regions of this machine",
        _shm,
        (flag("action", choices=("ls", "reap"), help="list them, or remove those whose owner is gone"),),
    ),
    "keys": Command(
        "make a CURVE key pair for transfers",
        _keys,
        (
            flag("directory", type=Path, metavar="DIR", help="where DIR/NAME.key_secret is written"),
            flag("name", metavar="NAME", help="of the pair"),
        ),
    ),
    "fsck": Command(
        "list the content of a file store, by namespace and age, and check it",
        _fsck,
        (
            flag("directory", type=_directory, metavar="DIR", help="of the store"),
            flag("--payloads", action="store_true", help="read every payload, too"),
            JSON,
        ),
    ),
    "prove": Command(
        "play random lives of sequences against a paged-KV block manager",
        "cache_manager.testing.life.command:main",
        (
            flag("adapter", nargs="?", metavar="MODULE:ADAPTER", help="a subclass of BlockManagerAdapter"),
            number("--examples", 300, "fresh managers"),
            number("--steps", 50, "operations on each of them"),
            number("--seed", 0, "of the choice of operations", 0),
            flag("--invariants", action="store_true", help="list the invariants"),
        ),
    ),
    "verify": Command(
        "judge the routed experts that a server hands out, with kvroute or without, row by row",
        "kvroute.verify:main",
        (
            *(_URL, _MODEL_FLAG, _ROLLOUTS),
            number("--requests", 48, "prompts to send, or some more: they come in groups"),
            number("--longest", None, "tokens of the longest prompt (512, or what the model takes)"),
            number("--new", 16, "tokens to ask for"),
            number("--seed", 0, "of the prompts", 0),
            _DTYPE,
            JSON,
        ),
    ),
    "bench": Command(
        "measure what rows cost a deployment: tokens per second and bytes, with rows and without, and judge them",
        "kvroute.verify.bench:main",
        (
            *(_URL, _MODEL_FLAG, _ROLLOUTS),
            flag(
                "--without",
                type=SERVER_URL,
                metavar="URL",
                help="a server of the same model without rows, to compare with (SGLang: the same, not asked for them)",
            ),
            number("--rounds", 3, "rounds of each, after one that is not counted"),
            number("--requests", 64, "requests in a round"),
            number("--at-once", 16, "requests that are sent together"),
            number("--prompt", 256, "tokens of each prompt"),
            number("--new", 64, "tokens to ask for"),
            number("--seed", 0, "of the prompts", 0),
            _DTYPE,
            JSON,
        ),
    ),
    "doctor": Command(
        "what this machine lacks, and the command that installs it; or what engines that run lack",
        "kvroute.doctor:main",
        (
            flag("--require", choices=("mooncake", "vllm", "sglang"), help="a lack of this part is a problem"),
            *(_engine("--url", "an engine that runs, or the proxy before --prefill and --decode: are there rows"),),
            *(_engine("--prefill", "vLLM's engine for prefill: does its KV come to --decode, and its rows"),),
            *(_engine("--decode", "vLLM's engine for decode"),),
            JSON,
        ),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
