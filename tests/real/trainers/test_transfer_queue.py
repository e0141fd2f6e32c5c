"""Rollouts whose handles are a column of a real TransferQueue, under the shipped contract."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import transfer_queue
from chats import loop_output
from hypothesis import settings
from routes_of import expert_rows, made_routes
from tensordict import TensorDict
from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN, construct_minimal_padding_template
from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from cache_manager.errors import ConfigError, InvalidInputError, StorageError
from kvroute.replay import verl
from kvroute.rollout import RolloutHandle, RolloutStore, fetch_shard, open_rollouts
from kvroute.rollout.transfer_queue import COLUMN, handles_of
from kvroute.routes import Split, shard_packed
from kvroute.testing.rollouts import RolloutContract, routes_of

numbers = count()


@pytest.fixture(scope="module")
def queue(cluster: None) -> Iterator[None]:  # noqa: ARG001 - a module is set up once
    conf = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
    transfer_queue.init(conf)
    yield
    transfer_queue.close()


class TestQueueRollouts(RolloutContract):
    """Each store has a partition of its own, and rows in a directory."""

    settings = settings(max_examples=6, stateful_step_count=10, deadline=None)

    @pytest.fixture(autouse=True)
    def _queue(self, queue: None) -> None:
        pass

    def make_store(self, directory: Path) -> RolloutStore:
        return open_rollouts(f"tq:?partition=test-{next(numbers)},file://{directory}/rollouts")

    def damage(self, directory: Path, store: RolloutStore, handle: RolloutHandle) -> RolloutHandle:
        file = directory / "rollouts" / f"{handle.rollout_id}.routes"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return handle


@pytest.mark.usefixtures("queue")
def test_a_rank_takes_a_batch_and_fetches_its_share(tmp_path: Path) -> None:
    """Goal: handles in place of rows in verl's and NeMo-RL's queue. Method: samples have other columns; the engine adds
    its own; a rank takes the batch, and reads its share by the handles. Deleting a rollout leaves the other columns."""
    keys, whole, tokens = ["a:0:0:0", "a:0:0:1"], [routes_of(1, 64), routes_of(2, 33)], [65, 34]
    columns = TensorDict({"score": torch.tensor([[1.0], [2.0]])}, batch_size=[2])
    transfer_queue.kv_batch_put(keys, "train", columns)
    store = open_rollouts(f"tq:?partition=train,file://{tmp_path}")
    assert [store.find(key) for key in keys] == [None, None]
    put = [store.put(key, routes) for key, routes in zip(keys, whole, strict=True)]
    batch = transfer_queue.kv_batch_get(keys, "train")
    handles = handles_of(batch)
    assert handles == put
    split = Split(pp=3, pp_rank=1, cp=2, cp_rank=1)
    assert np.array_equal(fetch_shard(store, handles, tokens, split), shard_packed(whole, tokens, split))
    assert [row.tolist() for row in batch["score"]] == [[1.0], [2.0]]
    store.delete(put[0])
    left = transfer_queue.kv_batch_get(keys, "train")
    assert handles_of(left) == [None, put[1]]
    assert [row.tolist() for row in left["score"]] == [[1.0], [2.0]]
    with pytest.raises(InvalidInputError, match="rollout handle"):
        handles_of({COLUMN: ["no handle"]})
    store.close()


@pytest.mark.usefixtures("queue")
def test_a_batch_of_verls_queue_has_the_rows_and_its_padding_none() -> None:
    """Goal: verl's V1 trainer, with rows in the queue. Method: the agent loop's samples, as verl puts them there,
    and verl's own synthetic sample, made of the first one, to fill the batch; what its workers get is aligned as its
    engine does it. Each sample's rows are the rollout's, and the synthetic one's are none of them."""
    keys, counts = ["v:0", "v:1"], [(5, 4), (2, 3)]
    samples = []
    for i, (prompt, response) in enumerate(counts):
        rows = verl.agent_loop(made_routes(i, prompt + response - 1), prompt, response)
        samples.append(loop_output(rows, [1] * prompt, [2] * response).as_dict())
    names = ("prompts", "responses", "response_mask", "routed_experts")
    samples = [{name: sample[name] for name in names} for sample in samples]
    transfer_queue.kv_batch_put(keys, "verl", list_of_dict_to_tensordict(samples))
    first = {name: value[0] for name, value in transfer_queue.kv_batch_get(keys[:1], "verl").items()}
    filled, tag = construct_minimal_padding_template(first, {}, 0)
    assert tag["is_padding"]
    padding = {name: filled[name] for name in names}
    transfer_queue.kv_batch_put(["v:pad"], "verl", list_of_dict_to_tensordict([padding]))
    batch = transfer_queue.kv_batch_get([*keys, "v:pad"], "verl")["routed_experts"].unbind()
    lengths = [sum(pair) for pair in counts] + [SYNTHETIC_PADDING_SEQ_LEN]
    numbers = torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    aligned = align_r3_router_replay_data(torch.nested.as_nested_tensor(list(batch), layout=torch.jagged), numbers)
    for i, (rows, length) in enumerate(zip(aligned.unbind(), lengths[:2], strict=False)):
        assert rows.dtype == torch.int16
        wanted = expert_rows(i, np.arange(length - 1), (1, 2, 3), 16, 4)
        assert np.array_equal(rows[: length - 1, 1:].numpy(), wanted)
    assert not aligned.unbind()[2].any()


@pytest.mark.parametrize("url", ["tq:", "tq:?column=x", "tq:file:///a,file:///b", "tq:?layers=all,file:///a"])
def test_a_url_without_one_store_of_rows_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="store"):
        open_rollouts(url)


@pytest.mark.usefixtures("queue")
def test_a_put_that_cannot_be_found_is_a_failure(tmp_path: Path) -> None:
    """Goal: no rows without a handle. Method: the queue ends; the rows of a put are gone again, earlier ones stay."""
    store = open_rollouts(f"tq:file://{tmp_path}")
    handle = store.put("x", routes_of(1))
    transfer_queue.close()
    with pytest.raises(StorageError, match="TransferQueue: "):
        store.put("y", routes_of(2))
    with pytest.raises(StorageError, match="TransferQueue: "):
        store.find("x")
    assert [path.name for path in tmp_path.iterdir()] == ["x.routes"]
    assert store.get(handle) == [routes_of(1)]
    store.close()
