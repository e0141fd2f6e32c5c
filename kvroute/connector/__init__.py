"""The two ends of a KV connector that keeps routing rows with the KV, free of any engine: for vLLM, SGLang or yours.

An engine's own connector translates its calls; :mod:`kvroute.integrations.vllm` needs a few lines a call. Two objects
do the work, and the first sends a :class:`StepMeta` to the other with each step:

* :class:`SchedulerRows`, where blocks are given out: generations, keys, how much of a hit has rows, routes at the end.
* ``worker.WorkerRows``, where the model runs: the rows, their life, and their binding to KV from other places.

A client calls :func:`routes`. Only the worker's end needs torch.
"""

from kvroute.connector.answers import (
    gathered,
    missing,
    mtp_missing,
    mtp_routes,
    routes,
    routing_weights,
    support,
    unseen,
)
from kvroute.connector.engine import Engine
from kvroute.connector.fills import Request
from kvroute.connector.key import Key, choice_key
from kvroute.connector.left import Tokens
from kvroute.connector.limits import Limits
from kvroute.connector.messages import Handshake, StepMeta
from kvroute.connector.scheduler import SchedulerRows
from kvroute.connector.settings import Settings

__all__ = [
    "Engine",
    "Handshake",
    "Key",
    "Limits",
    "Request",
    "SchedulerRows",
    "Settings",
    "StepMeta",
    "Tokens",
    "choice_key",
    "gathered",
    "missing",
    "mtp_missing",
    "mtp_routes",
    "routes",
    "routing_weights",
    "support",
    "unseen",
]
