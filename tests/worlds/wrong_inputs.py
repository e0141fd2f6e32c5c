"""Inputs that are wrong, a hundred and more, by where they are given, each with the field that its error has to name.

``python tests/worlds/wrong_inputs.py`` prints each with its text.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import kvroute
from kvroute.cli import USAGE, main
from kvroute.connector.answers import routes
from kvroute.connector.fields import options_of
from kvroute.connector.settings import Settings
from kvroute.integrations.sglang.settings import VARIABLE, lending_of
from kvroute.integrations.vllm.config import carrier_of, settings_of


class Wrong(NamedTuple):
    """An input, where it is given, the part of its error that names the field, and the call."""

    where: str
    what: str
    field: str
    call: Callable[[Path], object]


def error_of(wrong: Wrong, home: Path) -> str:
    """The text of its error. ``AssertionError`` for none, and for one that is not kvroute's."""
    try:
        returned = wrong.call(home)
    except kvroute.KVRouteError as error:
        return str(error)
    raise AssertionError(f"{wrong.what}: no error, but {returned!r}")


class CommandError(kvroute.KVRouteError):
    """What a command has written."""


def typed(*words: str) -> Callable[[Path], object]:
    """A command, whose ``{}`` is a directory of its own. Its error is the line that it writes."""

    def call(home: Path) -> object:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main([word.replace("{}", str(home)) for word in words])
            except SystemExit as ended:
                status = int(ended.code or 0)
        assert status == USAGE, (status, out.getvalue(), err.getvalue())
        lines = err.getvalue().splitlines()
        assert len(lines) == 1, lines
        raise CommandError(lines[0])

    return call


COMMANDS = {
    "kvroute": ((), "COMMAND"),
    "kvroute serve": (("serve",), "COMMAND"),
    "kvroute demo --requests 0": (("demo", "--requests", "0"), "--requests"),
    "kvroute demo --requests many": (("demo", "--requests", "many"), "--requests"),
    "kvroute demo --requests 100001": (("demo", "--requests", "100001"), "--requests"),
    "kvroute demo --seed -1": (("demo", "--seed", "-1"), "--seed"),
    "kvroute demo --model gpt": (("demo", "--model", "gpt"), "--model"),
    "kvroute demo --device tpu": (("demo", "--device", "tpu"), "--device"),
    "kvroute demo --store bogus://x": (("demo", "--store", "bogus://x"), "--store"),
    "kvroute demo --store /var/lib/kv": (("demo", "--store", "/var/lib/kv"), "--store"),
    "kvroute demo --store mooncake://": (("demo", "--store", "mooncake://"), "mooncake: master"),
    "kvroute demo --json DIR/": (("demo", "--json", "{}/"), "--json"),
    "kvroute demo --block 3": (("demo", "--block", "3"), "--block"),
    "kvroute demo-pd --requests 1.5": (("demo-pd", "--requests", "1.5"), "--requests"),
    "kvroute prefill": (("prefill",), "--port"),
    "kvroute prefill --port 70000": (
        ("prefill", "--port", "70000", "--transfer-address", "tcp://127.0.0.1:1"),
        "--port",
    ),
    "kvroute prefill --transfer-address bogus": (
        ("prefill", "--port", "0", "--transfer-address", "bogus"),
        "--transfer-address",
    ),
    "kvroute prefill --transfer-address tcp://127.0.0.1:99999": (
        ("prefill", "--port", "0", "--transfer-address", "tcp://127.0.0.1:99999"),
        "--transfer-address",
    ),
    "kvroute decode --prefill http://x": (("decode", "--port", "0", "--prefill", "http://x"), "--prefill"),
    "kvroute decode --weights-version -1": (("decode", "--port", "0", "--weights-version", "-1"), "--weights-version"),
    "kvroute decode --weights-version 4294967296": (
        ("decode", "--port", "0", "--weights-version", "4294967296"),
        "--weights-version",
    ),
    "kvroute decode --device-blocks 0": (("decode", "--port", "0", "--device-blocks", "0"), "--device-blocks"),
    "kvroute up": (("up",), "MODEL"),
    "kvroute up --port 0": (("up", "--port", "0", "m"), "--port"),
    "kvroute shm remove": (("shm", "remove"), "action"),
    "kvroute keys": (("keys",), "DIR"),
    "kvroute keys DIR a/b": (("keys", "{}", "a/b"), "name"),
    "kvroute fsck DIR": (("fsck", "{}/none"), "none"),
    "kvroute fsck DIR --json DIR": (("fsck", "{}", "--json", "{}"), "--json"),
    "kvroute prove": (("prove",), "adapter"),
    "kvroute prove nothing": (("prove", "nothing"), "adapter"),
    "kvroute prove no_such_module:X": (("prove", "no_such_module:X"), "adapter"),
    "kvroute prove os:nothing": (("prove", "os:nothing"), "adapter"),
    "kvroute prove os:PathLike": (("prove", "os:PathLike"), "adapter"),
    "kvroute prove --examples 0": (("prove", "os:X", "--examples", "0"), "--examples"),
    "kvroute verify": (("verify",), "--url"),
    "kvroute verify --url ftp://x": (("verify", "--url", "ftp://x", "--model", "."), "--url"),
    "kvroute verify --url 127.0.0.1:8000": (("verify", "--url", "127.0.0.1:8000", "--model", "."), "--url"),
    "kvroute verify --model DIR": (("verify", "--url", "http://127.0.0.1:1", "--model", "{}/none"), "config"),
    "kvroute verify --requests 0": (
        ("verify", "--url", "http://127.0.0.1:1", "--model", "m", "--requests", "0"),
        "--requests",
    ),
    "kvroute verify --dtype int8": (
        ("verify", "--url", "http://127.0.0.1:1", "--model", "m", "--dtype", "int8"),
        "--dtype",
    ),
    "kvroute verify --rollouts bogus:x": (
        ("verify", "--url", "http://127.0.0.1:1", "--model", "m", "--rollouts", "bogus:x"),
        "--rollouts",
    ),
    "kvroute bench --rounds 0": (
        ("bench", "--url", "http://127.0.0.1:1", "--model", "m", "--rounds", "0"),
        "--rounds",
    ),
    "kvroute bench --without x": (
        ("bench", "--url", "http://127.0.0.1:1", "--model", "m", "--without", "x"),
        "--without",
    ),
    "kvroute bench --model DIR": (("bench", "--url", "http://127.0.0.1:1", "--model", "{}/none"), "config"),
    "kvroute doctor --require slang": (("doctor", "--require", "slang"), "--require"),
    "kvroute doctor --url x": (("doctor", "--url", "x"), "--url"),
    "kvroute doctor --url http://127.0.0.1:1": (("doctor", "--url", "http://127.0.0.1:1"), "/v1/models"),
    "kvroute doctor --prefill URL": (("doctor", "--prefill", "http://127.0.0.1:1"), "--decode"),
    "kvroute doctor --url URL --require vllm": (
        ("doctor", "--url", "http://127.0.0.1:1", "--require", "vllm"),
        "--require",
    ),
}

SETTINGS: dict[str, Any] = {
    "store": "bogus://x",
    "rollouts": "bogus:",
    "weights": 7,
    "witness": "maybe",
    "strict": "yes",
    "untested": 0.34,
    "lend": "tcp://127.0.0.1:99999",
    "keys": "/nonexistent",
    "carrier": "pages",
    "lent_nbytes_max": 0,
    "weights_version": -1,
    "on_missing": "stop",
    "mtp": "yes",
    "routing_weights": 1,
    "field": "true",
}
"""A wrong value of each setting."""

STORES = {
    "": "store",
    "/var/lib/rows": "store",
    "bogus://x": "store",
    "file:": "file",
    "file://{}?quota=much": "quota",
    "file://{}?quta=1GiB": "quta",
    "file://{}?mode=append": "mode",
    "file://{}?ttl=-1": "ttl",
    "memory:?quota=-5": "quota",
    "mooncake://": "mooncake",
    "mooncake://127.0.0.1:1/x?segment=much": "segment",
    "tiered:file://{}": "tiered",
    "tiered:file://{},bogus:": "store",
    "apart:bogus:": "store",
}
ROLLOUTS = {
    "": "url",
    "bogus:": "rollout store",
    "file:": "file",
    "file://{}?quta=1": "quta",
    "mooncake://": "mooncake",
}


def _spec(**changed: Any) -> Any:
    given = {"num_experts": 8, "top_k": 2, "layer_ids": [0, 1], "num_layers": 2, "block_tokens": 4}
    return kvroute.routing_spec(**{**given, **changed})


SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "num_experts=0": ({"num_experts": 0}, "num_experts"),
    "num_experts='8'": ({"num_experts": "8"}, "num_experts"),
    "top_k=0": ({"top_k": 0}, "top_k"),
    "top_k=9": ({"top_k": 9}, "top_k"),
    "layer_ids=[]": ({"layer_ids": []}, "layer_ids"),
    "layer_ids=[1, 1]": ({"layer_ids": [1, 1]}, "layer_ids"),
    "layer_ids=[0, 5]": ({"layer_ids": [0, 5]}, "layer_ids"),
    "layer_ids=[-1]": ({"layer_ids": [-1]}, "layer_ids"),
    "num_layers=0": ({"num_layers": 0}, "num_layers"),
    "block_tokens=0": ({"block_tokens": 0}, "block_tokens"),
    "block_tokens=2.5": ({"block_tokens": 2.5}, "block_tokens"),
}

NAMESPACE = kvroute.Namespace("m", weights_version=1)


def _blocks(**changed: Any) -> kvroute.AuxBlocks:
    specs = changed.pop("specs", [_spec()])
    return kvroute.AuxBlocks(specs, **{"blocks": 4, "namespace": NAMESPACE, "strict": True, **changed})


def _stored() -> kvroute.AuxBlocks:
    return _blocks(store=kvroute.open_store("memory:"))


def _ids(count: int, *experts: int) -> Any:
    return np.tile(list(experts or (5, 1)), (count, 2, 1))


def _routes(**changed: Any) -> kvroute.Routes:
    aux = _blocks()
    aux.renew([1])
    aux.write_step(np.arange(4, 8), {"routing": _ids(4)})
    return kvroute.Routes.from_rows(_spec(), aux.read("routing", [1], stop=4), **{"weights_version": 1, **changed})


PYTHON: dict[str, tuple[Callable[[], object], str]] = {
    "AuxBlockDataSpec(dtype='int7')": (lambda: kvroute.AuxBlockDataSpec("a", (2,), "int7", 4), "dtype"),
    "AuxBlockDataSpec(row_shape=(-1,))": (lambda: kvroute.AuxBlockDataSpec("a", (-1,), "uint8", 4), "row_shape"),
    "AuxBlockDataSpec(name='')": (lambda: kvroute.AuxBlockDataSpec("", (2,), "uint8", 4), "name"),
    "Namespace(rank=2, world=2)": (
        lambda: kvroute.Namespace("m", weights_version=1, rank=2, world=2),
        "namespace.rank",
    ),
    "Namespace(weights_version=-1)": (lambda: kvroute.Namespace("m", weights_version=-1), "weights_version"),
    "Namespace(weights_version=2**63)": (lambda: kvroute.Namespace("m", weights_version=2**63), "weights_version"),
    "AuxBlocks([])": (lambda: _blocks(specs=[]), "specs"),
    "AuxBlocks of one spec twice": (lambda: _blocks(specs=[_spec(), _spec()]), "spec"),
    "AuxBlocks(blocks=0)": (lambda: _blocks(blocks=0), "blocks"),
    "AuxBlocks(host_blocks=-1)": (lambda: _blocks(host_blocks=-1), "host_blocks"),
    "AuxBlocks(namespace='m')": (lambda: _blocks(namespace="m"), "namespace"),
    "renew([99])": (lambda: _blocks().renew([99]), "block"),
    "renew([1, 1])": (lambda: _blocks().renew([1, 1]), "block"),
    "write_step of a slot twice": (lambda: _write([4, 4], _ids(2)), "slots"),
    "write_step of a block never given out": (lambda: _write([8], _ids(1)), "slots"),
    "write_step of a slot outside": (lambda: _write([99], _ids(1)), "slots"),
    "write_step of an unknown spec": (lambda: _write([4], _ids(1), "logprob"), "spec"),
    "write_step of rows of another shape": (lambda: _write([4], np.zeros((1, 2, 3))), "routing"),
    "read of an unknown spec": (lambda: _blocks().read("logprob", [1], stop=1), "spec"),
    "read(stop=99)": (lambda: _blocks().read("routing", [1], stop=99), "stop"),
    "read(tier='disk')": (lambda: _blocks().read("routing", [1], stop=1, tier="disk"), "tier"),
    "read(tier='host') without host blocks": (lambda: _blocks().read("routing", [1], stop=1, tier="host"), "host"),
    "copy([(1, 9)])": (lambda: _blocks().copy([(1, 9)]), "block"),
    "swap_out without host blocks": (lambda: _blocks().swap_out([(1, 0)]), "host"),
    "persist without a store": (lambda: _blocks().persist({}, []), "store"),
    "persist(b'k')": (lambda: _persist(b"k"), "key"),
    "persist('k')": (lambda: _persist("k"), "key"),
    "reset(weights_version=-1)": (lambda: _blocks().reset(weights_version=-1), "weights_version"),
    "Routes.from_rows(weights_version='1')": (lambda: _routes(weights_version="1"), "weights_version"),
    "Routes.from_bytes(b'')": (lambda: kvroute.Routes.from_bytes(b""), "routes"),
    "Routes.from_json({})": (lambda: kvroute.Routes.from_json({}), "routes"),
    "Routes.validate of other tokens": (lambda: _routes().bind([1, 2, 3, 4, 5]).validate([9, 9, 9, 9, 9]), "token"),
    "Routes.slice(3, 99)": (lambda: _routes().slice(3, 99), "s"),
    "RolloutHandle.from_json({})": (lambda: kvroute.RolloutHandle.from_json({}), "handle"),
    "RegionView('none')": (lambda: kvroute.RegionView("none"), "none"),
    "routing_spec_from_hf('/none')": (
        lambda: kvroute.routing_spec_from_hf(Path("/none"), block_tokens=4),
        "config",
    ),
    "routing_spec_from_hf of a dense model": (
        lambda: kvroute.routing_spec_from_hf({"model_type": "llama"}, block_tokens=4),
        "config",
    ),
    "valid_rows of floats": (lambda: kvroute.valid_rows(_spec(), np.zeros((1, 2, 2))), "routing rows"),
    "routes of an answer without rows": (lambda: routes({"id": "a", "choices": [], "usage": {}}), "routes"),
    "routes of an error": (lambda: routes({"error": {"message": "no"}}), "routes"),
    "routes(index=3)": (lambda: routes({"id": "a", "usage": {}, "choices": [{"index": 0}]}, 3), "index"),
    "a request's option kvroute=7": (lambda: options_of(7), "kvroute"),
    "a request's option {'strat': 1}": (lambda: options_of({"strat": 1}), "kvroute"),
    "a request's option {'key': ''}": (lambda: options_of({"key": ""}), "kvroute.key"),
}


def _write(slots: list[int], ids: Any, spec: str = "routing") -> object:
    aux = _blocks()
    aux.renew([1])
    return aux.write_step(np.array(slots), {spec: ids})


def _persist(key: Any) -> object:
    aux = _stored()
    lives = aux.renew([1])
    aux.write_step(np.arange(4, 8), {"routing": _ids(4)})
    return aux.persist({key: 1}, lives)


@contextlib.contextmanager
def _variable(text: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = text
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _in_sglang(text: str) -> object:
    with _variable(text):
        return lending_of(None)


def _linker(extra: Any) -> object:
    return lending_of({"linker": "KvrouteLinker", "linker_extra_config": extra})


def _in_vllm(extra: Any) -> object:
    return settings_of(SimpleNamespace(kv_connector_extra_config=extra))


SGLANG = {
    f"{VARIABLE}='store=x'": (lambda: _in_sglang("store=x"), VARIABLE),
    f"{VARIABLE}='[1]'": (lambda: _in_sglang("[1]"), VARIABLE),
    f'{VARIABLE}=\'{{"stor": ""}}\'': (lambda: _in_sglang('{"stor": ""}'), VARIABLE),
    f'{VARIABLE}=\'{{"store": "x"}}\'': (lambda: _in_sglang('{"store": "x"}'), f"{VARIABLE}.store"),
    f"{VARIABLE}='{{\"strict\": 2}}'": (lambda: _in_sglang('{"strict": 2}'), f"{VARIABLE}.strict"),
    "linker_extra_config=7": (lambda: _linker(7), "linker_extra_config"),
    "linker_extra_config={'rollouts': 'no'}": (lambda: _linker({"rollouts": "no"}), "linker_extra_config.rollouts"),
}
VLLM = {
    "kvroute: 7": (lambda: _in_vllm({"kvroute": 7}), "kv_connector_extra_config.kvroute"),
    "kvroute: {'stor': ''}": (lambda: _in_vllm({"kvroute": {"stor": ""}}), "kv_connector_extra_config.kvroute"),
    "a store where prefill lends rows": (
        lambda: carrier_of(Settings.of({"carrier": "transfer", "store": "memory:"}), "NixlConnector"),
        "carrier",
    ),
}


def _opened(open_it: Callable[[str], Any], url: str) -> Callable[[Path], object]:
    def call(home: Path) -> object:
        opened = open_it(url.replace("{}", str(home)))
        opened.close()
        return opened

    return call


def _without_home(call: Callable[[], object]) -> Callable[[Path], object]:
    return lambda _home: call()


INPUTS = [
    *(Wrong("command line", what, field, typed(*words)) for what, (words, field) in COMMANDS.items()),
    *(
        Wrong("settings in vLLM", f"{name}: {value!r}", name, lambda _, s={name: value}: Settings.of(s))
        for name, value in SETTINGS.items()
    ),
    *(Wrong("settings in vLLM", what, field, _without_home(call)) for what, (call, field) in VLLM.items()),
    *(Wrong("settings in SGLang", what, field, _without_home(call)) for what, (call, field) in SGLANG.items()),
    *(Wrong("open_store", url, field, _opened(kvroute.open_store, url)) for url, field in STORES.items()),
    *(Wrong("open_rollouts", url, field, _opened(kvroute.open_rollouts, url)) for url, field in ROLLOUTS.items()),
    *(Wrong("routing_spec", what, field, lambda _, c=changed: _spec(**c)) for what, (changed, field) in SPECS.items()),
    *(Wrong("Python", what, field, _without_home(call)) for what, (call, field) in PYTHON.items()),
]


if __name__ == "__main__":
    for wrong_input in INPUTS:
        with tempfile.TemporaryDirectory() as directory:
            try:
                text = error_of(wrong_input, Path(directory))
            except AssertionError as error:
                text = f"not as it should be: {error}"
        sys.stdout.write(f"{wrong_input.where} | {wrong_input.what} | {text}\n")
