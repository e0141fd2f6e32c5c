"""A prefill engine here and a decode engine in a process of its own, whose KV goes over as vLLM's connectors bring it.

The prefill engine computes under noise, so that its choices are not those of any other computation: rows that the
decode engine hands out for the prompt can only be right if they are those of the very KV that it was given.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from engines import BLOCK, GIVE, MODULE, Engine, models, noise, prompts
from fronts import Front
from numpy.typing import NDArray
from ports import hold_port
from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from waiting import GIVE_UP_S

import kvroute
from bench.vllm_models import unpacked
from bench.vllm_peers import plugin
from kvroute.integrations.vllm import routes

Start = Any  # conftest's Engines
Model = Callable[..., Path]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "disable_log_stats": False,
    "skip_tokenizer_init": True,
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "qwen3_next": {"dtype": "bfloat16", "block_size": None, "max_model_len": 640},
}
"""How engines of these models differ; the last two have several KV cache groups."""
NIXL = {"kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}
ASKED = prompts(80, 10, 33, 1, shared=150)  # two of them end inside a block
LEFT_OPEN: list[Any] = []
"""Both ends of Mooncake's lookups, which vLLM does not close: the ZeroMQ context of one that is collected waits."""
STEPS = 20
HERE = Path(__file__).parent


def transfer(connector: str, settings: dict[str, Any], extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "kvroute": {"strict": True, **settings}},
        **more,
    }


@contextmanager
def decoder(
    home: Path, logs: Path, given: dict[str, Any], more: Mapping[str, Any] = MappingProxyType({}), **variables: str
) -> Iterator[Front]:
    """An engine in a process of its own, with ``more`` arguments, until it is left."""
    plugins = plugin(logs / "plugin", device="device_number:give")
    environment = {
        **{name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "HF_", "MC_", "MOONCAKE_"))},
        "PYTHONPATH": f"{plugins}:{HERE}:{os.environ.get('PYTHONPATH', '')}",
        **variables,
    }
    arguments = json.dumps({"model": str(home), **ENGINE, **more, "kv_transfer_config": given})
    peer = Front("bench.peers.vllm_engine", logs / "decode.log", environment, arguments)
    try:
        yield peer
    finally:
        peer.close()


def asked(peer: Front, extra: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The decode engine's answers to the prompts, one after the other."""
    found = []
    for i, prompt in enumerate(ASKED):
        more = {"extra": [extra[i]]} if extra else {}
        found += peer.ask({"prompts": [prompt], "tokens": STEPS, **more})["answers"]
    return found


def by_source(peer: Front) -> dict[str, int]:
    """Tokens of prompts, by where the decode engine had their KV from, as it counts them."""
    found = peer.ask({"metric": "vllm:prompt_tokens_by_source", "by": "source"})
    return {name: int(tokens) for name, tokens in found.items()}


def clean(home: Path, prompt: list[int], answer: dict[str, Any]) -> NDArray[np.int64]:
    """The choices of transformers for these tokens, without any noise."""
    return models.routing(home, [*prompt, *answer["tokens"]])[:-1]


def ids(found: kvroute.Routes) -> NDArray[np.int64]:
    return np.sort(found.ids.astype(np.int64), axis=-1)


def told(answer: dict[str, Any]) -> NDArray[np.int64]:
    """The experts that the decode engine answers with, sorted; it answers with every row."""
    found, valid = (unpacked(answer["rows"][name]) for name in ("ids", "valid"))
    assert valid.shape == found.shape[:1]
    assert valid.all()
    return np.sort(found.astype(np.int64), axis=-1)


@pytest.fixture
def prefill(engine: Start, model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def made(given: dict[str, Any], family: str = "qwen3_moe") -> Engine:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(hold_port()))
        given = dict(given)
        extra = dict(given.pop("kv_connector_extra_config"))
        name, settings = given.pop("kv_connector"), extra.pop("kvroute")
        for known in ("kv_connector_module_path", "kv_role"):
            given.pop(known)
        found: Engine = engine(model(family), name, settings, extra, transfer=given, **HYBRID[family])
        return found

    return made


@pytest.fixture
def as_nixl_moves_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NIXL moves states of linear attention in one layout alone; vLLM asks for it once in a process."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    forget_the_layout()
    yield
    forget_the_layout()


def forget_the_layout() -> None:
    envs.disable_envs_cache()
    get_conv_state_layout.cache_clear()


@pytest.mark.usefixtures("as_nixl_moves_states")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_nixl_over_ucx(prefill: Any, model: Model, tmp_path: Path, family: str) -> None:
    """Goal: the decode engine computes nothing of a prompt and every row of it is there, those of the KV it was given.
    (The last token it does compute, as vLLM always does, for its logits.) Method: KV over UCX, partial blocks too; rows
    beside it by a transfer. They are the prefill engine's, under noise, and not transformers': what lies in the very
    blocks that it hands over says so.
    """
    pytest.importorskip("nixl")
    home = model(family)
    first = prefill(transfer("KvrouteNixlConnector", {}, {}, **NIXL), family)
    group = first.sent.engine.group
    assert bool(group) == (family != "qwen3_moe")
    with noise(first, layer=0, size=0.3, seed=4):
        given = [first.ask([prompt], max_tokens=1, extra_args={"kv_transfer_params": GIVE})[0] for prompt in ASKED]
    lent = [output.kv_transfer_params["remote_block_ids"][group] for output in given]
    last = int(family == "qwen3_next")  # a state of all tokens but the last goes over, so only decode computes that one
    before = [first.kept.blocks.read("routing", ids, 0, len(p) - last) for ids, p in zip(lent, ASKED, strict=True)]
    assert all(found.valid.all() for found in before)
    there = transfer("KvrouteNixlConnector", {}, {}, **NIXL)
    with decoder(home, tmp_path, there, HYBRID[family], VLLM_NIXL_SIDE_CHANNEL_PORT=str(hold_port())) as second:
        params = [{"kv_transfer_params": output.kv_transfer_params} for output in given]
        answers = asked(second, params)
        assert by_source(second)["local_compute"] in (0, last * len(ASKED))
        assert by_source(second)["external_kv_transfer"] > 0
    assert_of_the_kv(home, before, answers)


def assert_of_the_kv(home: Path, before: Sequence[Any], answers: Sequence[dict[str, Any]]) -> None:
    """Every row of the prompts is the one that prefill had ``before``, and is another than without noise."""
    changed = 0
    for prompt, own, answer in zip(ASKED, before, answers, strict=True):
        used, loaded = told(answer), slice(len(prompt) - 1)
        assert len(used) == len(prompt) + STEPS - 1
        theirs = np.sort(own.values.astype(np.int64), axis=-1)
        assert (used[loaded] == theirs[loaded]).all(), "of the KV that it used"
        changed += int((used != clean(home, prompt, answer))[loaded].any((1, 2)).sum())
    assert changed > 20, "another computation has other rows"


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_mooncake_hands_over(
    prefill: Any, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Goal: as over NIXL, with Mooncake's transfer engine, several KV cache groups, and the client's own names. Method:
    KV over TCP; vLLM is told the number of a device, without which it does not start on a CPU."""
    pytest.importorskip("mooncake")
    home = model(family)
    port = hold_port()
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(port))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    over_tcp = {"mooncake_protocol": "tcp", "num_workers": 2}
    first = prefill(transfer("KvrouteMooncakeConnector", {}, over_tcp), family)
    group = first.sent.engine.group
    assert group > 0
    names = [f"transfer-{i}" for i in range(len(ASKED))]
    finished = first.scheduler.connector.request_finished_all_groups
    lent = list[list[int]]()

    def finishing(request: Any, block_ids: Any) -> Any:
        lent.append(block_ids[group])
        return finished(request, block_ids)

    monkeypatch.setattr(first.scheduler.connector, "request_finished_all_groups", finishing)
    with noise(first, layer=0, size=0.3, seed=6):
        tickets = []
        for name, prompt in zip(names, ASKED, strict=True):
            params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
            (output,) = first.ask([prompt], max_tokens=1, extra_args={"kv_transfer_params": params})
            tickets.append(output.kv_transfer_params["kvroute"])
    last = int(family == "qwen3_next")  # as over NIXL
    before = [first.kept.blocks.read("routing", ids, 0, len(p) - last) for ids, p in zip(lent, ASKED, strict=True)]
    assert all(found.valid.all() for found in before)
    first.ask(prompts(81, 7), max_tokens=1)  # a step, with which vLLM tells its worker where the last prompt's KV is
    engine_id = first.llm.llm_engine.vllm_config.kv_transfer_config.engine_id
    where = {"remote_engine_id": engine_id, "remote_bootstrap_addr": f"http://127.0.0.1:{port}"}
    params = [
        {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": name, "kvroute": ticket, **where}}
        for name, ticket in zip(names, tickets, strict=True)
    ]
    there = transfer("KvrouteMooncakeConnector", {}, over_tcp)
    with decoder(home, tmp_path, there, HYBRID[family], VLLM_MOONCAKE_BOOTSTRAP_PORT=str(hold_port())) as second:
        answers = asked(second, params)
        assert by_source(second)["local_compute"] in (0, last * len(ASKED))
        assert by_source(second)["external_kv_transfer"] > 0
    assert_of_the_kv(home, before, answers)


@pytest.fixture
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Mooncake master; engines lend the memory, and it goes with them: one for each test."""
    mooncake = pytest.importorskip("mooncake")
    rpc, admin = hold_port(), hold_port()
    command = [str(Path(mooncake.__file__).with_name("mooncake_master")), "--rpc_address=127.0.0.1"]
    command += [f"--rpc_port={rpc}", "--metrics_host=127.0.0.1", f"--metrics_port={admin}", "--rpc_thread_num=2"]
    log = (tmp_path_factory.mktemp("mooncake") / "master.log").open("wb")
    with ExitStack() as stack:
        stack.enter_context(log)
        master = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(master.wait)
        stack.callback(master.kill)
        give_up_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", rpc), 1).close()
            except OSError:
                assert master.poll() is None, "the master ended"
                assert time.monotonic() < give_up_s, "the master did not start"
                time.sleep(0.1)
            else:
                break
        yield f"127.0.0.1:{rpc}"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_mooncake_has_kv_and_rows(
    prefill: Any, model: Model, pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Goal: one pool for KV and rows. Method: vLLM's MooncakeStoreConnector brings whole blocks to the decode engine,
    kvroute's store their rows, through one master; they are the prefill engine's, under noise, and not transformers'.
    """
    config = {"metadata_server": "P2PHANDSHAKE", "master_server_address": pool, "protocol": "tcp"}
    sizes = {"device_name": "", "global_segment_size": 64 << 20, "local_buffer_size": 16 << 20}
    (tmp_path / "mooncake.json").write_text(json.dumps(config | sizes))
    for name, value in {"MOONCAKE_CONFIG_PATH": str(tmp_path / "mooncake.json"), "VLLM_HOST_IP": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    home, settings = model(family), {"store": f"mooncake://{pool}/rows?host=127.0.0.1", "witness": "flagged"}
    given = [transfer("KvrouteMooncakeStoreConnector", settings, {"lookup_rpc_port": hold_port()}) for _ in range(2)]
    first = prefill(given[0], family)
    size = first.sent.engine.tokens
    assert bool(first.sent.engine.group) == (family != "qwen3_moe")
    client = first.scheduler.connector.connector_scheduler.client
    LEFT_OPEN.extend([client, get_kv_transfer_group().connector_worker.lookup_server])
    with noise(first, layer=0, size=0.3, seed=5):
        before = [routes(first.ask([prompt], max_tokens=1)[0]) for prompt in ASKED]
    first.kept.blocks.jobs.wait(10)
    client.executor.shutdown()  # it gets no more requests
    with decoder(home, tmp_path, given[1], HYBRID[family]) as second:
        answers = asked(second)
        sources = by_source(second)
    hits = [(len(prompt) - 1) // size * size for prompt in ASKED]
    assert [answer["cached"] for answer in answers] == hits
    assert sources["local_compute"] == sum(map(len, ASKED)) - sum(hits), "the ends behind whole blocks"
    changed = 0
    for prompt, hit, own, answer in zip(ASKED, hits, before, answers, strict=True):
        used = told(answer)
        assert (used[:hit] == ids(own)[:hit]).all(), "of the KV that it used"
        changed += int((used != clean(home, prompt, answer))[:hit].any((1, 2)).sum())
    assert changed > 20, "another computation has other rows"
