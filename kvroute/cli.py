"""The command line: a table of commands, each with the function that runs it; heavy modules are imported when it runs.

``demo``, ``demo-pd``, ``prefill`` and ``decode`` live in ``paged_engine``, an example that the wheel brings as a
package of its own. This module names it and never imports it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EISDIR
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from cache_manager.errors import ConfigError, KVRouteError
from kvroute import __version__
from kvroute.findings import STDOUT, console, write_json

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
            _check_free(chosen["host"], chosen["port"])
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
        mine = commands.add_parser(name, help=command.what, description=command.what)
        for names, options in command.flags:
            if (default := options.get("default")) not in (None, (), [], ""):
                options = {**options, "help": f"{options['help']} ({default})"}
            mine.add_argument(*names, **options)
    return parser


def _shm(action: str) -> int:
    from cache_manager.regions import list_regions, reap_orphans

    if action == "reap":
        told = [f"removed {name}" for name in reap_orphans()] or ["no orphans"]
    else:
        line = "{0.name}  mirrors {0.tier} blocks  {0.nbytes:,} bytes  {1}"
        told = [line.format(each, "in use" if each.in_use else "orphan") for each in list_regions()] or ["no regions"]
    sys.stdout.write("\n".join([*told, ""]))
    return 0


def _keys(directory: Path, name: str) -> int:
    from transfer.curve import make_keys

    made = "" if directory.is_dir() else f"made {directory}\n"
    sys.stdout.write(f"{made}{make_keys(directory, name)}  for its owner alone: copy it to every engine's host\n")
    return 0


def _fsck(directory: Path, json: Path | None, **how: Any) -> int:
    from cache_manager.storage.file import fsck

    report = fsck(directory, **how)
    write_json(json, report.to_json())
    console(json).write(report.to_text())
    return 0 if report.sound else FAILED


def _directory(text: str) -> Path:
    return Path(text.removeprefix("file://"))


def _file(text: str) -> Path:
    """A file that can be written: told before the work whose findings go there. Its directory is made.

    ``-`` is standard output.
    """
    if text == str(STDOUT):
        return STDOUT
    try:
        if text.endswith(os.sep):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR), text)
        (file := Path(text)).parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        wanted = f"wanted a file that can be written, got {text!r} ({error.strerror})"
        raise argparse.ArgumentTypeError(wanted) from error
    return file


def _judged(judge: str, *among: str, **how: Any) -> Callable[[str], str]:
    """Reads a flag's text, which ``judge``, a function ``module:name``, takes; so are the words ``among``."""

    def read(text: str) -> str:
        module, _, function = judge.partition(":")
        try:
            if text not in among:
                getattr(import_module(module), function)(text, **how)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"wanted {error.wanted}, got {error.got}") from error
        return text

    return read


_STORE_URL = _judged("cache_manager.storage:check_store_url", "mooncake")
_ROLLOUTS_URL = _judged("kvroute.rollout:check_rollouts_url", "")
_SERVER_URL = _judged("kvroute.verify.asking:check_url")
_ADDRESS = _judged("transfer.zmq_settings:check_address", field="address", curve=False)


def _check_free(host: str, port: int) -> None:
    """Raise :class:`ConfigError` unless a server can listen there, before it builds its model."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ConfigError("--host, --port", "an address that is free", f"{host}:{port} ({reason})") from error


class _Integer(NamedTuple):
    """Reads a flag's value in ``[least, most]``."""

    least: int
    most: int

    def __call__(self, text: str) -> int:
        with suppress(ValueError):
            if self.least <= (value := int(text)) <= self.most:
                return value
        wanted = f"an integer of {self.least} " + ("or more" if self.most == _MOST else f"to {self.most}")
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")


_MOST: Final = 2**63 - 1

Flag = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """Its help text, the function (``module:name``) that gets its flags by name, and the flags."""

    what: str
    run: str | Callable[..., int]
    flags: tuple[Flag, ...] = ()


def _flag(*names: str, **options: Any) -> Flag:
    return names, options


def _number(name: str, default: int | None, what: str, least: int = 1, most: int = _MOST) -> Flag:
    return _flag(name, type=_Integer(least, most), default=default, metavar="N", help=what)


_SEED = _number("--seed", 0, "seed of the weights and the conversations", 0)
_REQUESTS = "how many requests: the turns of all conversations"
_MODEL = _flag(
    "--model",
    default="qwen3_moe",
    choices=("qwen3_moe", "deepseek_v3", "olmoe", "mixtral"),
    help="family of the small model",
)
_JSON = _flag("--json", type=_file, metavar="FILE", help="write the findings to this file, too; - is standard output")
_STORE = (
    "where blocks outlive the restart: file:///DIRECTORY, mooncake://HOST:PORT/PREFIX of a pool, or the word mooncake, "
    "for a pool that the demo starts and ends (by default a temporary directory)"
)
_SERVER: tuple[Flag, ...] = (
    _flag("--host", default="127.0.0.1", help="HTTP address"),
    _flag("--port", type=_Integer(0, 65535), required=True, metavar="N", help="HTTP port (0: any)"),
    _MODEL,
    _number("--seed", 0, "seed of the weights", 0),
    _number("--weights-version", 0, "of the weights: blocks of other versions never match", 0, 2**32 - 1),
    _number("--device-blocks", 256, "KV blocks"),
    _number("--host-blocks", 0, "KV blocks to swap to", 0),
)
_LENDS = _flag(
    "--transfer-address",
    dest="peers",
    nargs=1,
    type=_ADDRESS,
    required=True,
    metavar="URL",
    help="where to lend: tcp://127.0.0.1:PORT",
)
_FETCHES = _flag(
    "--prefill",
    dest="peers",
    action="append",
    type=_ADDRESS,
    default=[],
    metavar="URL",
    help="a transfer address to fetch from",
)

COMMANDS: Final[dict[str, Command]] = {
    "demo": Command(
        "run a small MoE model with seeded weights on a paged engine, and judge every routing row",
        "paged_engine.demo:main",
        (
            *(_SEED, _number("--requests", 96, _REQUESTS, 1, 100_000), _MODEL, _JSON),
            _number("--device-blocks", None, "KV blocks on the device (by default fewer than needed, on purpose)"),
            _number("--host-blocks", None, "KV blocks to swap to (by default as many)", 0),
            _flag("--store", type=_STORE_URL, metavar="URL", help=_STORE),
            _flag("--device", default="cpu", choices=("cpu", "cuda"), help="device of model and KV"),
            _flag("--transfer-process", action="store_true", help="a process beside the engine copies KV (on cpu)"),
        ),
    ),
    "demo-pd": Command(
        "the demo, a small model with seeded weights, through prefill and decode, a process each",
        "paged_engine.demo:main_pd",
        (_SEED, _number("--requests", 16, _REQUESTS, 1, 100_000), _MODEL, _JSON),
    ),
    "prefill": Command(
        "demonstration server: compute prompts with a small model of seeded weights, and lend their blocks",
        "paged_engine.servers:prefill",
        (*_SERVER, _LENDS),
    ),
    "decode": Command(
        "demonstration server: go on from prompts of prefill, with the same small model of seeded weights",
        "paged_engine.servers:decode",
        (*_SERVER, _FETCHES),
    ),
    "shm": Command(
        "SharedMemory regions of this machine",
        _shm,
        (_flag("action", choices=("ls", "reap"), help="list them, or remove those whose owner is gone"),),
    ),
    "keys": Command(
        "make a CURVE key pair for transfers",
        _keys,
        (
            _flag("directory", type=Path, metavar="DIR", help="where DIR/NAME.key_secret is written"),
            _flag("name", metavar="NAME", help="of the pair"),
        ),
    ),
    "fsck": Command(
        "list the content of a file store, by namespace and age, and check it",
        _fsck,
        (
            _flag("directory", type=_directory, metavar="DIR", help="of the store"),
            _flag("--payloads", action="store_true", help="read every payload, too"),
            _JSON,
        ),
    ),
    "prove": Command(
        "play random lives of sequences against a paged-KV block manager",
        "cache_manager.testing.life.command:main",
        (
            _flag("adapter", nargs="?", metavar="MODULE:ADAPTER", help="a subclass of BlockManagerAdapter"),
            _number("--examples", 300, "fresh managers"),
            _number("--steps", 50, "operations on each of them"),
            _number("--seed", 0, "of the choice of operations", 0),
            _flag("--invariants", action="store_true", help="list the invariants"),
        ),
    ),
    "verify": Command(
        "judge the routed experts that a server hands out, with kvroute or without, row by row",
        "kvroute.verify:main",
        (
            _flag("--url", required=True, type=_SERVER_URL, metavar="URL", help="http://HOST:PORT of vLLM or SGLang"),
            _flag("--model", type=Path, required=True, metavar="DIR", help="the checkpoint, or its config.json alone"),
            _flag(
                "--rollouts",
                default="",
                type=_ROLLOUTS_URL,
                metavar="URL",
                help="the rollout store that the engine leaves routes in",
            ),
            _number("--requests", 48, "prompts to send, or some more: they come in groups"),
            _number("--longest", None, "tokens of the longest prompt (512, or what the model takes)"),
            _number("--new", 16, "tokens to ask for"),
            _number("--seed", 0, "of the prompts", 0),
            _flag(
                "--dtype",
                default="auto",
                choices=("auto", "float32", "bfloat16", "float16"),
                help="the server's precision: a row whose experts rounding could change is unjudged",
            ),
            _JSON,
        ),
    ),
    "doctor": Command(
        "what this machine lacks, and the command that installs it",
        "kvroute.doctor:main",
        (_flag("--require", choices=("mooncake", "vllm", "sglang"), help="a lack of this part is a problem"), _JSON),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
