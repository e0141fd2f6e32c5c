"""The two ends of a KV connector that keeps routing rows with the KV, free of any engine: for vLLM, SGLang or yours.

An engine's own connector translates its calls; :mod:`kvroute.integrations.vllm` does it in a few lines a call. Two
objects know what to do, and :class:`StepMeta` is what goes from one to the other with each step:

* :class:`SchedulerRows` where blocks are given out: generations, keys, how much of a hit has rows, routes at the end.
* ``worker.WorkerRows`` where the model runs: the rows, their life, and what binds them to KV that came from elsewhere.

A client has :func:`routes`. The worker's end needs torch, nothing else here does.
"""

from kvroute.connector.answers import gathered, missing, routes, unseen
from kvroute.connector.left import Tokens
from kvroute.connector.scheduler import Request, SchedulerRows
from kvroute.connector.settings import Engine, Handshake, Settings, StepMeta

__all__ = [
    "Engine",
    "Handshake",
    "Request",
    "SchedulerRows",
    "Settings",
    "StepMeta",
    "Tokens",
    "gathered",
    "missing",
    "routes",
    "unseen",
]
