"""The command line: ``kvroute demo``, ``prefill``, ``shm`` and more; what is heavy is imported where it is needed.

``demo``, ``demo-pd``, ``prefill``, ``decode`` and ``front`` live in ``paged_engine``, an example that the wheel brings
as a package of its own. It is named here and imported nowhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NoReturn

from cache_manager.errors import KVRouteError

FAILED, USAGE = 1, 2
"""Exit statuses: the job ran and found something wrong; it could not be started as asked."""


EXTRAS: Final = {
    "testing": ("hypothesis", "pytest"),
    "engine": ("torch", "transformers", "tokenizers", "rich"),
    "plot": ("matplotlib",),
    "serve": ("aiohttp", "prometheus_client"),
}
"""The optional parts of kvroute whose packages commands import, and these."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, ``FAILED`` or ``USAGE``."""
    given = sys.argv[1:] if arguments is None else arguments
    chosen = _parser(given).parse_args(given)
    try:
        return int(chosen.run(chosen))
    except KVRouteError as error:
        sys.stderr.write(f"kvroute {chosen.command}: {error}\n")
    except ModuleNotFoundError as error:
        package = (error.name or "kvroute").partition(".")[0]
        if package in ("kvroute", "cache_manager", "transfer"):
            raise
        extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
        remedy = f"pip install 'kvroute[{extra}]'" if extra else "no part of kvroute brings it"
        if package == "paged_engine":
            remedy = "install kvroute, or put examples/ of its source on PYTHONPATH"
        sys.stderr.write(f"kvroute {chosen.command}: needs {error.name}; {remedy}\n")
    except KeyboardInterrupt:
        sys.stderr.write(f"kvroute {chosen.command}: interrupted\n")
        return 130
    return USAGE


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="kvroute", description="Routing rows that follow KV blocks: never wrong, never silent.")
    parser.add_argument("--version", action="version", version=f"kvroute {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run a MoE model on a paged engine and judge every routing row")
    demo.set_defaults(run=_demo)
    demo.add_argument("--seed", type=_integer, default=0, metavar="N", help="of weights and workload (0)")
    demo.add_argument("--requests", type=_integer, default=96, metavar="N", help="turns of all conversations (96)")
    demo.add_argument("--device-blocks", type=_integer, metavar="N", help="KV blocks on the device (too few for all)")
    demo.add_argument("--host-blocks", type=_integer, metavar="N", help="KV blocks to swap to (as many)")
    demo.add_argument("--model", default="qwen3_moe", help="qwen3_moe, deepseek_v3, olmoe or mixtral (qwen3_moe)")
    demo.add_argument(
        "--store",
        metavar="URL",
        help="file:///directory that stays, mooncake://host:port/prefix of a pool, or the word mooncake for a pool "
        "that is started and ended (a directory that is removed)",
    )
    demo.add_argument(
        "--transfer-process", action="store_true", help="a process beside the engine moves KV, and has the store"
    )
    demo.add_argument("--device", default="cpu", help="where model and KV lie: cpu or cuda (cpu)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    demo.add_argument("--out", type=Path, default=Path("demo-output"), metavar="DIR", help="for the heat map")

    demo_pd = commands.add_parser("demo-pd", help="the demo through prefill, decode and front, a process each")
    demo_pd.set_defaults(run=_demo_pd)
    demo_pd.add_argument("--seed", type=_integer, default=0, metavar="N", help="of weights and workload (0)")
    demo_pd.add_argument("--requests", type=_integer, default=16, metavar="N", help="turns of all conversations (16)")
    demo_pd.add_argument("--model", default="qwen3_moe", help="qwen3_moe, deepseek_v3, olmoe or mixtral (qwen3_moe)")
    demo_pd.add_argument(
        "--network",
        choices=("auto", "loopback", "namespaces", "inside"),
        default="auto",
        help="namespaces: one for each process; auto: where the machine allows it (auto)",
    )
    demo_pd.add_argument("--link", choices=("zmq", "mooncake"), default="zmq", help="what carries blocks (zmq)")
    demo_pd.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")

    _server(commands, "prefill", "compute prompts and hold their blocks for decode", given)
    _server(commands, "decode", "go on from prompts that prefill has computed", given)
    _server(commands, "front", "HTTP front: completions through prefill and decode, with their routes", given)

    shm = commands.add_parser("shm", help="SharedMemory regions of this machine")
    shm.set_defaults(run=_shm)
    shm.add_argument("action", choices=("ls", "reap"), help="list them, or remove those whose owner is gone")

    keys = commands.add_parser("keys", help="make a CURVE key pair for prefill or decode")
    keys.set_defaults(run=_keys)
    keys.add_argument("directory", type=Path, metavar="DIR", help="where DIR/NAME.key and .key_secret are written")
    keys.add_argument("name", metavar="NAME", help="of the pair")

    fsck = commands.add_parser("fsck", help="check a file store: every header, every payload")
    fsck.set_defaults(run=_fsck)
    fsck.add_argument("directory", type=Path, metavar="DIR", help="of the store, as in file:///DIR")
    fsck.add_argument("--repair", action="store_true", help="take away what is not sound; nobody may write meanwhile")
    fsck.add_argument("--json", type=Path, metavar="FILE", help="write the report there")

    inspect = commands.add_parser("inspect", help="what is in a file store, by namespace, age and size")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("directory", type=Path, metavar="DIR", help="of the store, or of the stores below it")
    inspect.add_argument("--json", type=Path, metavar="FILE", help="write it there, too")
    prove = commands.add_parser("prove", help="play random lives of sequences against a paged-KV block manager")
    prove.set_defaults(run=_prove)
    prove.add_argument("adapter", nargs="?", metavar="MODULE:ADAPTER", help="a subclass of BlockManagerAdapter")
    prove.add_argument("--examples", type=_integer, default=300, metavar="N", help="fresh managers (300)")
    prove.add_argument("--steps", type=_integer, default=50, metavar="N", help="operations on each of them (50)")
    prove.add_argument("--seed", type=_integer, default=0, metavar="N", help="of the choice of operations (0)")
    prove.add_argument("--invariants", action="store_true", help="list what is claimed")

    doctor = commands.add_parser("doctor", help="what this machine lacks, and the command that helps")
    doctor.set_defaults(run=_doctor)
    doctor.add_argument(
        "--require", choices=("mooncake", "vllm"), help="count what this optional part lacks as a problem"
    )
    return parser


def _server(commands: Any, name: str, what: str, given: Sequence[str]) -> None:
    """A server's flags are its configuration's keys, which are looked up only for the one that is wanted."""
    parser = commands.add_parser(name, help=what)
    parser.set_defaults(run=_serve)
    if name in given:
        config = import_module("paged_engine.serving.config")
        config.add_flags(parser, config.KINDS[name])


def _version() -> str:
    try:
        return version("kvroute")
    except PackageNotFoundError:
        return "not installed: run from its source"


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted an integer, got {text!r}") from None


def _demo(chosen: Any) -> int:
    from rich.console import Console

    options = import_module("paged_engine.demo.options").DemoOptions(
        seed=chosen.seed,
        requests=chosen.requests,
        device_blocks=chosen.device_blocks,
        host_blocks=chosen.host_blocks,
        model=chosen.model,
        store=chosen.store,
        transfer_process=chosen.transfer_process,
        device=chosen.device,
        json=chosen.json,
        out=chosen.out,
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    return int(import_module("paged_engine.demo.command").demo(options, console))


def _serve(chosen: Any) -> int:
    command, config = import_module("paged_engine.serving.command"), import_module("paged_engine.serving.config")
    return int(command.serve(config.load(config.KINDS[chosen.command], vars(chosen))))


def _demo_pd(chosen: Any) -> int:
    from rich.console import Console

    options = import_module("paged_engine.demo_pd.options").DemoPDOptions(
        seed=chosen.seed,
        requests=chosen.requests,
        model=chosen.model,
        network=chosen.network,
        link=chosen.link,
        json=chosen.json,
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    return int(import_module("paged_engine.demo_pd.command").demo_pd(options, console))


def _shm(chosen: Any) -> int:
    from cache_manager.regions import list_regions, reap_orphans

    if chosen.action == "reap":
        removed = reap_orphans()
        for name in removed:
            sys.stdout.write(f"removed {name}\n")
        if not removed:
            sys.stdout.write("no orphans\n")
        return 0
    regions = list_regions()
    if not regions:
        sys.stdout.write("no regions\n")
    for region in regions:
        state = "in use" if region.in_use else "orphan"
        sys.stdout.write(f"{region.name}  mirrors {region.tier} blocks  {region.nbytes:,} bytes  {state}\n")
    return 0


def _keys(chosen: Any) -> int:
    from transfer.curve import make_keys, read_public

    public, secret = make_keys(chosen.directory, chosen.name)
    sys.stdout.write(f"{public}  {read_public(public).decode()}\n{secret}  keep it where it is: for its owner alone\n")
    return 0


def _fsck(chosen: Any) -> int:
    from cache_manager.storage.file import fsck

    report = fsck(chosen.directory, repair=chosen.repair)
    if chosen.json is not None:
        chosen.json.write_text(report.to_json())
    sys.stdout.write(report.to_text())
    return 0 if report.sound else FAILED


def _inspect(chosen: Any) -> int:
    from cache_manager.storage.inventory import inventory, stores_in, to_json, to_text

    found = [inventory(store, time.time()) for store in stores_in(chosen.directory)]
    if chosen.json is not None:
        chosen.json.write_text(to_json(found))
    sys.stdout.write(to_text(found))
    return 0


def _prove(chosen: Any) -> int:
    from kvroute.prove import list_invariants, prove_adapter

    if chosen.invariants or chosen.adapter is None:
        list_invariants()
        return 0 if chosen.invariants else USAGE
    budget = {"examples": chosen.examples, "steps": chosen.steps, "seed": chosen.seed}
    return 0 if prove_adapter(chosen.adapter, **budget) else FAILED


def _doctor(chosen: Any) -> int:
    from kvroute.doctor import Level, diagnose, look, report

    machine = look(vllm=chosen.require == "vllm")
    findings = diagnose(machine, require_mooncake=chosen.require == "mooncake")
    sys.stdout.write(report(findings))
    return FAILED if any(finding.level is Level.PROBLEM for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
