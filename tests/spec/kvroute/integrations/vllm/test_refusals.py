"""Arguments of vLLM that are refused, and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute.connector.carriers import ByKey, ByPairs, ByTransfer, Carrier, NoCarrier
from kvroute.connector.messages import Handshake
from kvroute.connector.settings import Settings
from kvroute.integrations.vllm.config import kv_names, refuse_mtp, refuse_shared_files, refuse_stages
from kvroute.integrations.vllm.connector import RowsWithKV
from kvroute.integrations.vllm.refusals import ARGUMENTS, refuse_arguments
from kvroute.integrations.vllm.routers import ROUTERS

PAGE = Path(__file__).parents[5] / "docs" / "vllm.md"


class ExecutorWithExternalLauncher:
    """Under the name of vLLM's executor."""


class OwnScheduler:
    """Somebody's own."""


VALUES: dict[str, Any] = {
    "parallel_config.prefill_context_parallel_size": 2,
    "parallel_config.decode_context_parallel_size": 2,
    "parallel_config.enable_dbo": True,
    "parallel_config.ubatch_size": 2,
    "parallel_config.enable_elastic_ep": True,
    "parallel_config.enable_fault_tolerance": True,
    "parallel_config.distributed_executor_backend": "external_launcher",
    "scheduler_config.scheduler_cls": OwnScheduler,
    "model_config.enable_prompt_embeds": True,
    "model_config.enable_return_routed_experts": True,
    "aux_output_config.enable_return_routed_experts": True,
    "cache_config.kv_sharing_fast_prefill": True,
    "cache_config.mamba_cache_mode": "all",
    "diffusion_config": SimpleNamespace(canvas_length=32),
}
"""A refused value of each argument that has one."""
TAKEN: dict[str, Any] = {
    "parallel_config.pipeline_parallel_size": 2,
    "parallel_config.data_parallel_size": 2,
    "parallel_config.ubatch_size": 0,
    "parallel_config.distributed_executor_backend": "mp",
    "scheduler_config.scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    "scheduler_config.async_scheduling": True,
    "cache_config.mamba_cache_mode": "align",
}


def configured(values: dict[str, Any]) -> Any:
    """vLLM's configuration with these values; it has no other fields, as another release may not."""
    config = SimpleNamespace()
    for name, value in values.items():
        *path, field = name.split(".")
        where = config
        for part in path:
            where.__dict__.setdefault(part, SimpleNamespace())
            where = getattr(where, part)
        setattr(where, field, value)
    return config


def test_every_refused_argument_has_a_value_here() -> None:
    assert VALUES.keys() == {name for name, argument in ARGUMENTS.items() if argument.refused}


@pytest.mark.parametrize("name", VALUES)
def test_an_argument_is_refused_by_its_name_and_value(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        refuse_arguments(configured(TAKEN | {name: VALUES[name]}))
    assert refusal.value.wanted == ARGUMENTS[name].text
    assert str(refusal.value.got).startswith(f"{name.split('.')[-1]}=")


def test_what_is_judged_is_taken() -> None:
    refuse_arguments(configured(TAKEN))
    refuse_arguments(SimpleNamespace())


STAGED: dict[str, Any] = {
    "one of KvrouteConnector, KvrouteOffloadingConnector": {"inner": "NixlConnector"},
    "no store or transfer of rows": {"carrier": ByKey("off")},
    "no store or transfer": {"carrier": ByTransfer()},
    "one KV cache group": {"groups": 2},
    "no drafts": {"drafts": SimpleNamespace(method="ngram")},
    "no data parallelism": {"data_parallel_size": 2},
    "all stages on the scheduler's host": {"nnodes": 2},
}
"""What is wanted beside pipeline parallelism, and a configuration without it."""


def stages_taken(
    pipeline_parallel_size: int,
    inner: str = "Connector",
    carrier: Carrier = NoCarrier(),  # noqa: B008 - a value
    groups: int = 1,
    drafts: Any = None,
    **parallel: int,
) -> None:
    said = {"pipeline_parallel_size": pipeline_parallel_size, "data_parallel_size": 1, "nnodes": 1, **parallel}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**said), speculative_config=drafts)
    refuse_stages(config, SimpleNamespace(kv_cache_groups=[None] * groups), carrier, inner)


@pytest.mark.parametrize("wanted", STAGED)
def test_stages_are_refused_beside_what_was_not_judged(wanted: str) -> None:
    """Goal: each is named, and taken without stages. Method: one after the other, beside two stages and one."""
    with pytest.raises(ConfigError, match=f"pipeline parallelism: wanted {wanted}.*pipeline_parallel_size=2"):
        stages_taken(2, **STAGED[wanted])
    stages_taken(1, **STAGED[wanted])


def test_stages_that_were_judged_are_taken() -> None:
    stages_taken(2)
    stages_taken(4, "OffloadingConnector", ByPairs(7))


@pytest.mark.parametrize(
    ("ranks", "settings", "refused"),
    [
        (1, {"store": "file:///d"}, False),
        (2, {"store": "file:///d"}, True),
        (2, {"store": "tiered:memory:,apart:file:///d"}, True),
        (2, {"store": "file:///d/{rank}"}, False),
        (2, {"store": "file:///d?mode=read"}, False),
        (2, {}, False),
    ],
)
def test_ranks_do_not_write_one_store_of_files(ranks: int, settings: dict[str, str], refused: bool) -> None:
    """Goal: a store of files has one writer, and the configuration says so, not the second rank's start."""
    parallel, made = SimpleNamespace(data_parallel_size=ranks), Settings.of(settings)
    if refused:
        with pytest.raises(ConfigError, match=r"store: wanted a directory for each data-parallel rank"):
            refuse_shared_files(parallel, made)
    else:
        refuse_shared_files(parallel, made)
    assert "{rank}" not in made.of_rank(3).store


def test_stages_are_attached_in_their_order() -> None:
    """Goal: of each stage the rank that has rows, and of a stage of dense layers none. Method: four ranks' handshakes,
    keyed as vLLM's core does it; the inner connector's go to it."""
    attached = list[Handshake]()
    rows: Any = SimpleNamespace(scheduler_rows=SimpleNamespace(attach=lambda *stages: attached.extend(stages)))
    ranks = {
        (1, 0): Handshake(None, "b"),
        (0, 1): Handshake(None),
        (0, 0): Handshake(None, "a"),
        (2, 0): Handshake(None),
    }
    RowsWithKV.set_xfer_handshake_metadata_pp_aware(rows, ranks)
    assert [handshake.region for handshake in attached] == ["a", "b"]


def test_a_scheduler_without_a_first_rank_says_so() -> None:
    """Goal: no bare StopIteration in vLLM's core. Method: what the core of a second rank passes on."""
    rows: Any = SimpleNamespace(scheduler_rows=SimpleNamespace(attach=print))
    with pytest.raises(
        ConfigError, match="workers: wanted a first rank beside this scheduler, with rows, got 0 without"
    ):
        RowsWithKV.set_xfer_handshake_metadata_pp_aware(rows, {})


def table(heading: str) -> list[list[str]]:
    """The rows of the page's table under this heading."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_page_has_the_table_of_arguments() -> None:
    """Goal: the page says what the code does. Method: cell by cell."""
    assert table("Arguments") == [[f"`{name}`", argument.verdict] for name, argument in ARGUMENTS.items()]


def test_the_page_has_the_table_of_routers() -> None:
    rows = [[f"`{name}`", judged.sees, judged.verdict] for name, judged in ROUTERS.items()]
    assert [row for row in table("Routers") if re.fullmatch(r"`\w+`", row[0])] == rows


@pytest.mark.parametrize(
    ("asked", "answered", "names"),
    [
        (None, {}, {}),
        ({"remote_engine_id": None}, {"remote_engine_id": "e", "remote_request_id": "r-1", "remote_port": 7}, "NIXL"),
        ({"transfer_id": "t"}, {}, {"transfer_id": "t"}),  # Mooncake's router names it
        ({"transfer_id": "sidecar-r-1"}, {}, {}),  # MoRIIO's own name for a request without one
        ({"transfer_id": "t" * 300}, {}, {"transfer_id": "t" * 256}),
    ],
)
def test_what_names_a_request_s_kv(asked: Any, answered: dict[str, Any], names: Any) -> None:
    """Goal: a ticket repeats what decode's request has too, and no name that prefill's connector gave itself."""
    nixl = {"remote_engine_id": "e", "remote_request_id": "r-1"}
    request = SimpleNamespace(request_id="r-1", kv_transfer_params=asked)
    assert kv_names(request, answered) == (nixl if names == "NIXL" else names)
    assert kv_names(SimpleNamespace(request_id="d", kv_transfer_params=nixl | {"kvroute": {}})) == nixl


BESIDE_MTP: dict[str, Any] = {
    "drafts of MTP": {"method": "eagle3"},
    "drafts of MTP (speculative_config": {"method": ""},
    "one MTP layer": {"layers": 2},
    "a CPU with the V1 runner": {"device": "cuda"},
    "a CPU with the V1 runner: ": {"v2": True},
    "KvrouteConnector: ": {"inner": "OffloadingConnector"},
    "one KV cache group": {"groups": 2},
    "one rank": {"world_size": 2},
    "one rank: ": {"data_parallel_size": 2},
}
"""What is wanted beside rows of an MTP layer, and a configuration without it."""


def mtp_taken(
    method: str = "mtp",
    layers: int = 1,
    device: str = "cpu",
    inner: str = "Connector",
    groups: int = 1,
    *,
    v2: bool = False,
    **parallel: int,
) -> None:
    draft = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=layers))
    drafts = SimpleNamespace(method=method, draft_model_config=draft)
    config = SimpleNamespace(
        speculative_config=drafts if method else None,
        parallel_config=SimpleNamespace(**{"world_size": 1, "data_parallel_size": 1, **parallel}),
        device_config=SimpleNamespace(device_type=device),
        use_v2_model_runner=v2,
    )
    refuse_mtp(config, SimpleNamespace(kv_cache_groups=[None] * groups), inner)


@pytest.mark.parametrize("wanted", BESIDE_MTP)
def test_rows_of_an_mtp_layer_are_refused_beside_what_was_not_judged(wanted: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"vLLM with kvroute: mtp: wanted {wanted}")):
        mtp_taken(**BESIDE_MTP[wanted])
    mtp_taken()
