"""vLLM's OpenAI server: routes in the response, after a kill too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import models
import numpy as np
import pytest
import vllm
from engines import BLOCK, prompts
from fronts import in_a_session
from http_server import answering, kill
from nursery import Born
from ports import hold_port
from waiting import GIVE_UP_S, until

import kvroute
from cache_manager.storage.file import fsck
from kvroute.cli import main
from kvroute.integrations.vllm import choice_key, gathered, routes, unseen
from kvroute.rollout import RolloutStore, open_rollouts

MODULE = "vllm.entrypoints.openai.api_server"
PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"


def stored(directory: Path) -> int:
    """How many records lie in a store of files, which a server writes behind its answers."""
    return sum(extent.records for extent in fsck(directory).extents)


class Server:
    def __init__(self, port: int, process: subprocess.Popen[bytes] | Born) -> None:
        self.url, self.process = f"http://127.0.0.1:{port}", process

    def post(self, path: str, request_id: str | None = None, **body: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._sent(path, request_id, body) or "{}")
        return found

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, in order."""
        events = self._sent(path, None, {"stream": True, **body}).decode().splitlines()
        return [json.loads(each.removeprefix("data: ")) for each in events if each.startswith("data: {")]

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=GIVE_UP_S) as answer:  # noqa: S310
            return str(answer.read().decode())

    def _sent(self, path: str, request_id: str | None, body: dict[str, Any]) -> bytes:
        given = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
        given = {name: value for name, value in given.items() if value is not None}
        headers = {"Content-Type": "application/json"} | ({"X-Request-Id": request_id} if request_id else {})
        request = urllib.request.Request(self.url + path, json.dumps(given).encode(), headers)  # noqa: S310 (our own)
        try:
            with urllib.request.urlopen(request, timeout=GIVE_UP_S) as answer:  # noqa: S310
                content: bytes = answer.read()
        except urllib.error.HTTPError as error:
            error.add_note(error.read().decode())
            raise
        return content


@contextmanager
def serving(
    home: Path,
    shared: Path,
    log: Path,
    rollouts: str,
    *more: str,
    connector: str = "KvrouteExampleConnector",
    as_installed: bool = False,
) -> Iterator[Server]:
    """A server, until it is left; ``as_installed``: by ``kvroute up``, whose engine and worker import everything."""
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": "kvroute.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "shared_storage_path": str(shared / "kv"),
            "kvroute": {
                "store": f"file://{shared}/rows",
                "witness": "flagged",
                "rollouts": rollouts,
            },
        },
    }
    more = ("--enforce-eager", "--kv-transfer-config", json.dumps(transfer), *more)
    with running(home, log, *more, as_installed=as_installed, up=as_installed) as server:
        yield server


@contextmanager
def running(
    home: Path,
    log: Path,
    *more: str,
    as_installed: bool = False,
    up: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """A server with these arguments, until it is left; ``up``: by the command of kvroute's that starts it on a CPU."""
    port = hold_port()
    arguments = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "512"]
    arguments += ["--num-gpu-blocks-override", "64", "--block-size", str(BLOCK)]
    arguments += ["--chat-template", "{% for each in messages %}{{ each.content }} {% endfor %}", *more]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [MODULE, *address, "--model", str(home)]
    if up:
        command = ["kvroute", "up", "--cpu", *address, str(home)]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO", **environment}
    process: subprocess.Popen[bytes] | Born
    with log.open("wb") as out:
        if as_installed:
            process = subprocess.Popen(
                [sys.executable, "-m", *command, *arguments],
                env={**os.environ, **environment},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        else:
            process = in_a_session(*command, *arguments, log=out, environment=environment)
    server = Server(port, process)
    with answering(process, server.url, log):
        yield server


def right(home: Path, answer: dict[str, Any], index: int = 0, **where: Any) -> int:
    """Every row of a completion is there and right; how many."""
    found, choice = routes(answer, index, **where), {each["index"]: each for each in answer["choices"]}[index]
    prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
    tokens = [*prompt, *choice["token_ids"]]
    assert found.complete
    assert len(found) == len(tokens) - 1
    assert found.token_hashes
    assert (np.sort(found.ids.astype(np.int64), axis=-1) == models.routing(home, tokens)[: len(found)]).all()
    return len(found)


def quick_start(answer: dict[str, Any]) -> dict[str, Any]:
    """The page's code that makes a model, reads an answer and feeds a trainer: the names of its first three
    examples."""
    examples = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    Path("answer.json").write_text(json.dumps(answer))
    names: dict[str, Any] = {}
    for code in examples[:3]:
        exec(code, names)  # noqa: S102 (the page's own lines)
    return names


STOPS = [f"t{i}" for i in range(5, 500, 8)]


def word_of(answer: dict[str, Any], at: int) -> str:
    return f"t{answer['choices'][0]['token_ids'][at]}"


def no_rows(answer: dict[str, Any], index: int, why: str, **where: Any) -> None:
    with pytest.raises(kvroute.RowError, match=why):
        routes(answer, index, **where)


def keyed() -> tuple[str, dict[str, Any]]:
    """A key that is never used again, and what a request says with it."""
    key = str(uuid.uuid4())
    return key, {"kv_transfer_params": {"kvroute": {"key": key}}}


def of_choice(key: str, index: int, n: int) -> str:
    return choice_key(key, index % n) if n > 1 else key


def lists(server: Server, home: Path, store: RolloutStore) -> int:
    """Lists of prompts, each with one completion and two, with a stop string and without: how many rows were right."""
    asked, found = prompts(81, 40, 50, 45), 0
    for n in (1, 2):
        for stop in (None, STOPS):
            key, carried = keyed()
            body = {"prompt": asked, "n": n, "max_tokens": 20, "temperature": 1.0, "seed": 5, "stop": stop, **carried}
            answer = server.post("/v1/completions", **body)
            assert len(answer["choices"]) == 3 * n
            keys = [of_choice(key, i, n) for i in range(3 * n)]
            found += sum(right(home, answer, i, rollouts=store, key=keys[i]) for i in range(3 * n))
            kept = {**answer, "choices": answer["choices"][-1:], "kv_transfer_params": None}
            assert right(home, kept, 3 * n - 1, rollouts=store, key=keys[-1]) >= 45
            no_rows(kept, 0, "index", rollouts=store, key=keys[0])
            no_rows(answer, n, f"completion {n} of cmpl-.*rollouts=")  # of the second prompt
    return found


def streams(server: Server, home: Path, store: RolloutStore) -> int:
    """Streams of completions and chats: how many rows were right."""
    (asked,) = prompts(82, 40)
    several = {"max_tokens": 16, "n": 2, "temperature": 1.0, "seed": 9}
    said, found = {"messages": [{"role": "user", "content": " ".join(f"t{i}" for i in asked)}]}, 0
    for path, body in (
        ("/v1/completions", {"prompt": asked, "max_tokens": 16}),
        ("/v1/completions", {"prompt": asked, **several, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": [asked, asked[:9]], **several, "stop": STOPS}),
        ("/v1/chat/completions", {**said, "max_tokens": 16, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {**said, **several, "stop": STOPS}),
    ):
        key, carried = keyed()
        chunks = server.stream(path, **body, **carried)
        for each in (chunks[0], chunks[-2], chunks[-1]):
            no_rows(each, 0, "gathered", rollouts=store, key=key, wait_s=60)
        answer, n = gathered(chunks), int(body.get("n", 1))
        indices = [each["index"] for each in answer["choices"]]
        found += sum(right(home, answer, i, rollouts=store, key=of_choice(key, i, n)) for i in indices)
        no_rows(answer, 0, "rollouts=")
        no_rows(answer, 0, "key=, the one that its request carried", rollouts=store, wait_s=60)
    whole = server.post("/v1/chat/completions", **said, **several)
    return found + sum(right(home, whole, i, rollouts=store) for i in (0, 1))


def responses(server: Server, home: Path, store: RolloutStore) -> None:
    """``/v1/responses`` has the engine's own binding, or the tokens where they are asked for."""
    asked = {"input": " ".join(f"t{i}" for i in range(9, 60)), "max_output_tokens": 8}
    more = {"ignore_eos": None, "return_token_ids": None}
    answer = server.post("/v1/responses", **asked, **more, enable_response_messages=True)
    tokens = [*answer["input_messages"][0]["tokens"], *answer["output_messages"][0]["tokens"]]
    for each in (answer, {**answer, "input_messages": None}):
        found = routes(each, rollouts=store)
        found.validate(tokens, rows=len(tokens) - 1)
        assert (np.sort(found.ids.astype(np.int64), axis=-1) == models.routing(home, tokens)[: len(found)]).all()
    no_rows(
        {**answer, "input_messages": None, "kv_transfer_params": None}, 0, "enable_response_messages", rollouts=store
    )


@pytest.mark.timeout(900)
def test_the_server_answers_routes_and_survives_a_kill(
    model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Goal: routes through HTTP, for completions, several at once, lists, streams, chats, responses, stop strings under
    ids that clients choose, and trainers; after SIGKILL of all processes another server over the same files hits KV
    with rows. Method: every row against transformers, and what ``kvroute verify`` asks and judges.
    """
    monkeypatch.chdir(tmp_path)
    home, (asked,) = model("qwen3_moe"), prompts(50, 100)
    with serving(home, tmp_path, tmp_path / "first.log", "response:", as_installed=True) as first:
        answer = first.post("/v1/completions", prompt=asked, max_tokens=20)
        assert right(home, answer) == 119
        assert quick_start(answer)["rows"].shape == (119, 3, 4)
        several = first.post("/v1/completions", prompt=asked, max_tokens=9, n=2, temperature=1.0, seed=3)
        assert [right(home, several, i) for i in (0, 1)] == [108, 108]
        until(lambda: stored(tmp_path / "rows") >= 96 // BLOCK, what="the prompt's rows were not stored")
        kill(first.process)
    line = (
        f"kvroute {kvroute.__version__} in vLLM {vllm.__version__}: 3 of 3 routed layers captured, "
        f"top 4 of 16 experts; 64 blocks of {BLOCK} tokens; carrier connector; store file://{tmp_path}/rows; "
        "rollouts in the answer; weights version unknown\n"
    )
    assert (tmp_path / "first.log").read_text().count(line) == 1  # once, whole, in a server as it is installed
    where = f"file://{tmp_path}/rollouts"
    with serving(home, tmp_path, tmp_path / "second.log", where) as second, closing(open_rollouts(where)) as left:
        again = second.post("/v1/completions", prompt=asked, max_tokens=20)
        assert right(home, again, rollouts=left) == 119
        assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
        assert unseen(again) == ((0, 96),)  # loaded from files that the first server wrote
        command = ["verify", "--url", second.url, "--model", str(home), "--rollouts", where, "--longest", "200"]
        command += ["--dtype", "float32"]
        assert main(command) == 0, capsys.readouterr().out
        assert re.search(r"^all +[1-9][\d,]+ +0 +0 +0$", told := capsys.readouterr().out, re.MULTILINE), told
        assert main(["doctor", "--url", second.url]) == 0, capsys.readouterr().out
        assert "an answer has the handle of its rows in a rollout store" in capsys.readouterr().out
        load = ["--rounds", "1", "--requests", "4", "--prompt", "40", "--new", "8", "--dtype", "float32"]
        bench = ["bench", "--url", second.url, "--model", str(home), "--rollouts", where, *load]
        assert main(bench) == 0, capsys.readouterr().out
        # 40 + 8 tokens, the last without a row: of a round that counts, one that does not, and four asked again
        assert f"rows: {12 * 47} right, 0 wrong, 0 missing, 0 unjudged" in capsys.readouterr().out
        told = second.metrics()
        for sample in (
            'kvroute:events_total{.*event="rows_committed"',
            *(f'kvroute:seconds_count{{.*what="{what}"' for what in ("persist", "restore", "answer")),
        ):
            assert re.search(rf"^{sample}.*}} [1-9]", told, re.MULTILINE), (sample, told)
        for prompt in (asked, *prompts(90, 60)):  # one id for all
            whole = second.post("/v1/completions", prompt=prompt, max_tokens=20)
            body = {"prompt": prompt, "max_tokens": 20}
            for n, more in ((1, {"stop": [word_of(whole, 5)]}), (2, {"stop": STOPS, "temperature": 1.0})):
                key, carried = keyed()
                stopped = second.post("/v1/completions", "the-client-s-own", **body, **carried, n=n, **more)
                assert stopped["id"] == "cmpl-the-client-s-own"
                most = len(prompt) + (5 if n == 1 else 19)
                keys = [of_choice(key, i, n) for i in range(n)]
                assert all(right(home, stopped, i, rollouts=left, key=keys[i]) <= most for i in range(n))
        assert lists(second, home, left) > 900
        assert streams(second, home, left) > 300
        responses(second, home, left)
