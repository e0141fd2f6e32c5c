"""How vLLM starts in a separate process, with kvroute as its plugin and connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.engines import installed
from bench.harness import QUIET_VLLM

ON_CPU = {
    **QUIET_VLLM,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
    "OMP_NUM_THREADS": "1",
}
HOST_OF_CPU = {"spec_name": "HostSpec", "spec_module_path": "bench.peers.vllm_host"}
"""How vLLM offloads KV where there is no GPU."""
MODULE = "kvroute.integrations.vllm"
CONNECTORS = "bench.peers.vllm_connectors"


def plugin(directory: Path, **others: str) -> Path:
    """A directory for ``PYTHONPATH`` that names kvroute's plugin to vLLM, as an installed kvroute does, and others."""
    return installed(directory, "vllm.general_plugins", kvroute=f"{MODULE}.field:take_over", **others)


def connector(name: str, module: str = MODULE, **extra: Any) -> dict[str, Any]:
    """The fields of ``KVTransferConfig`` for a connector of ``module``."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
