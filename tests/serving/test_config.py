"""Configuration: files, flags above them, and a complaint for everything else."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute.cli import main
from paged_engine.serving.config import KINDS, DecodeConfig, FrontConfig, PrefillConfig, ServerConfig, add_flags, load

CURVE = ("curve_secret", "curve_clients", "curve_server")
ROOT = Path(__file__).parents[2]
LEAST = {
    "prefill": ["--port", "1", "--name", "p", "--transfer-address", "tcp://127.0.0.1:5"],
    "decode": ["--port", "1", "--name", "d"],
    "front": ["--port", "1", "--prefill", "p=http://h:1", "--decode", "d=http://h:2"],
}


def loaded(kind: type[ServerConfig], *flags: str) -> Any:
    parser = argparse.ArgumentParser()
    add_flags(parser, kind)
    return load(kind, vars(parser.parse_args(flags)))


def test_a_file_says_it_and_a_flag_wins(tmp_path: Path) -> None:
    file = tmp_path / "decode.toml"
    file.write_text('name = "d0"\nport = 7\nretry_s = 1\nhost_blocks = 3\n[prefills]\np0 = "tcp://127.0.0.1:9"\n')
    config = loaded(DecodeConfig, "--config", str(file), "--port", "8", "--drain-s", "2.5")
    assert config == DecodeConfig(
        name="d0", port=8, retry_s=1, host_blocks=3, drain_s=2.5, prefills={"p0": "tcp://127.0.0.1:9"}
    )


@pytest.mark.parametrize("command", KINDS)
def test_every_key_has_a_flag_that_reaches_it(command: str) -> None:
    """Goal: no flag without effect. Method: each key in turn by its flag, with a value that is not its default."""
    kind = KINDS[command]
    values = {int: "5", float: "31.5", bool: "true", str: "x"}
    special = {"model": "olmoe", "memory": "heap", "block_tokens": "24", "lease_max_s": "600", "lease_s": "31.5"}
    special |= {"transfer_address": "ipc:///tmp/x", "store": "memory:"}
    special |= {"routing_replay_config": '{"required": []}'}
    for f in fields(kind):
        flag = "--" + f.name.replace("_", "-")
        default = getattr(loaded(kind, *LEAST[command]), f.name)
        if isinstance(default, dict):
            address = "http://h:9" if command == "front" else "tcp://127.0.0.1:9"
            config = loaded(kind, *LEAST[command], flag.removesuffix("s"), f"other={address}")
            assert getattr(config, f.name)["other"] == address
            continue
        text = special.get(f.name, values[type(default)])
        both = [part for name in CURVE for part in ("--" + name.replace("_", "-"), "x") if hasattr(kind, name)]
        needed = both if f.name in CURVE else ["--store", "memory:"] if f.name == "transfer_process" else []
        config = loaded(kind, *LEAST[command], *needed, flag, text)
        assert getattr(config, f.name) != default
        assert str(getattr(config, f.name)).lower() == text


@pytest.mark.parametrize(
    ("command", "flags", "wanted"),
    [
        ("front", ["--port", "70000"], "port: wanted a port, 0 to 65535 (0: any), got 70000"),
        ("front", ["--port", "x"], "port: wanted a port, 0 to 65535 (0: any), got 'x'"),
        ("front", ["--prefill", "p0"], "prefills: wanted NAME=ADDRESS, got 'p0'"),
        ("front", ["--prefill", "p=ftp://h"], "prefills.p: wanted a URL http://host:port, got 'ftp://h'"),
        ("front", ["--drain-s", "0"], "drain_s: wanted a number of seconds above 0, got 0"),
        ("front", ["--drain-s", "nan"], "drain_s: wanted a number of seconds above 0, got nan"),
        ("prefill", ["--model", "gpt"], "model: wanted one of qwen3_moe, deepseek_v3, olmoe, mixtral, got 'gpt'"),
        ("prefill", ["--block-tokens", "12"], "block_tokens: wanted a multiple of 8, got 12"),
        ("prefill", ["--lease-s", "900"], "lease_max_s: wanted at least lease_s (900), got 300.0"),
        ("prefill", ["--transfer-address", "h:1"], "transfer_address: wanted ipc:///PATH or tcp://HOST:PORT"),
        ("decode", ["--prefill", "p=zmq"], "prefills.p: wanted ipc:///PATH or tcp://HOST:PORT"),
        ("decode", ["--prefill", "p=tcp://h:1", "--prefill", "p=tcp://h:2"], "prefills: wanted each name once"),
        ("prefill", ["--curve-secret", "k"], "curve_clients: wanted a file, as curve_secret is given, got ''"),
        ("decode", ["--curve-server", "k"], "curve_secret: wanted a file, as curve_server is given, got ''"),
        ("decode", ["--name", ""], "name: wanted a non-empty string, got ''"),
        ("decode", ["--routing-replay-config", '{"required": "routing"}'], "required: wanted a list of specs' names"),
        ("prefill", ["--routing-replay-config", "on"], "routing replay config: wanted JSON"),
        ("decode", ["--transfer-process", "true"], "transfer_process: wanted a store, and memory = 'shared'"),
    ],
)
def test_bad_values_are_one_line_that_names_the_key(
    command: str, flags: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    least = [] if "--prefill" in flags and command == "front" else LEAST[command]
    others = ["--port", "1", "--decode", "d=http://h:2"] if not least else []
    assert main([command, *least, *others, *flags]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert wanted in complaint


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("prot = 1", "did you mean 'port'?"),
        ('port = "1"', "port: wanted a port"),
        ("port = true", "port: wanted a port"),
        ("port = ", "--config: wanted TOML in"),
        ("port = 1\nprefills = 3", "prefills: wanted a table of names and addresses, got 3"),
        ("", "port: wanted a port, 0 to 65535 (0: any) (there is no default), got nothing"),
    ],
)
def test_a_bad_file_is_named(text: str, wanted: str, tmp_path: Path) -> None:
    file = tmp_path / "route.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        loaded(FrontConfig, "--config", str(file))
    assert wanted in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config: wanted a file that can be read"):
        loaded(PrefillConfig, "--config", str(tmp_path / "none"))


@pytest.mark.parametrize("command", KINDS)
def test_the_documents_table_of_keys_is_the_code(command: str) -> None:
    from paged_engine.serving.config import table

    assert table(KINDS[command]) in (ROOT / "docs" / "operations.md").read_text()
