"""The commands of the demonstration, a small engine with servers of its own: ``paged_engine``.

That is an example, which the wheel brings as a package of its own. This module names it and never imports it.
"""

from __future__ import annotations

import socket
from typing import Final

from cache_manager.errors import ConfigError
from kvroute.arguments import ADDRESS, JSON, STORE_URL, Command, Flag, Integer, flag, number

_SEED = number("--seed", 0, "seed of the weights and the conversations", 0)
_REQUESTS = "how many requests: the turns of all conversations"
_FAMILY = flag(
    "--model",
    default="qwen3_moe",
    choices=("qwen3_moe", "deepseek_v3", "olmoe", "mixtral"),
    help="family of the small model",
)
_STORE = (
    "where blocks outlive the restart: file:///DIRECTORY, mooncake://HOST:PORT/PREFIX of a pool, or the word mooncake, "
    "for a pool that the demo starts and ends (by default a temporary directory)"
)
_SERVER_FLAGS: tuple[Flag, ...] = (
    flag("--host", default="127.0.0.1", help="HTTP address"),
    flag("--port", type=Integer(0, 65535), required=True, metavar="N", help="HTTP port (0: any)"),
    _FAMILY,
    number("--seed", 0, "seed of the weights", 0),
    number("--weights-version", 0, "of the weights: blocks of other versions never match", 0, 2**32 - 1),
    number("--device-blocks", 256, "KV blocks"),
    number("--host-blocks", 0, "KV blocks to swap to", 0),
)
_LENDS = flag(
    "--transfer-address",
    dest="peers",
    nargs=1,
    type=ADDRESS,
    required=True,
    metavar="URL",
    help="where to lend: tcp://127.0.0.1:PORT",
)
_FETCHES = flag(
    "--prefill",
    dest="peers",
    action="append",
    type=ADDRESS,
    default=[],
    metavar="URL",
    help="a transfer address to fetch from",
)

DEMONSTRATION: Final[dict[str, Command]] = {
    "demo": Command(
        "run a small MoE model with seeded weights on a paged engine, and judge every routing row",
        "paged_engine.demo:main",
        (
            *(_SEED, number("--requests", 96, _REQUESTS, 1, 100_000), _FAMILY, JSON),
            number("--device-blocks", None, "KV blocks on the device (by default fewer than needed, on purpose)"),
            number("--host-blocks", None, "KV blocks to swap to (by default as many)", 0),
            flag("--store", type=STORE_URL, metavar="URL", help=_STORE),
            flag("--device", default="cpu", choices=("cpu", "cuda"), help="device of model and KV"),
            flag("--transfer-process", action="store_true", help="a process beside the engine copies KV (on cpu)"),
        ),
    ),
    "demo-pd": Command(
        "the demo, a small model with seeded weights, through prefill and decode, a process each",
        "paged_engine.demo:main_pd",
        (_SEED, number("--requests", 16, _REQUESTS, 1, 100_000), _FAMILY, JSON),
    ),
    "prefill": Command(
        "demonstration server: compute prompts with a small model of seeded weights, and lend their blocks",
        "paged_engine.servers:prefill",
        (*_SERVER_FLAGS, _LENDS),
    ),
    "decode": Command(
        "demonstration server: go on from prompts of prefill, with the same small model of seeded weights",
        "paged_engine.servers:decode",
        (*_SERVER_FLAGS, _FETCHES),
    ),
}


def check_free(host: str, port: int) -> None:
    """Raise :class:`ConfigError` unless a server can listen there, before it builds its model."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        wanted = "an address that is free"
        got = f"{host}:{port} ({reason})"
        raise ConfigError("--host, --port", wanted, got) from error


__all__ = ["DEMONSTRATION", "check_free"]
