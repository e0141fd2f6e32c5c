"""The three servers of the demo as processes, each with a configuration file of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families

from cache_manager.errors import KVRouteError
from paged_engine.demo_pd.network import Network
from paged_engine.demo_pd.options import DemoPDOptions

READY_S: Final = 180.0
QUIET_S: Final = 60.0
END_S: Final = 60.0
POLL_S: Final = 0.1
ASK_S: Final = 10.0


class DemoServerError(KVRouteError):
    """A server did not do what the demo needs of it; the message has the end of its log."""


@dataclass(slots=True)
class Server:
    """One process, where it is reached, and what it says."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def check_alive(self) -> None:
        if (status := self.process.poll()) is not None:
            raise DemoServerError(f"{self.name} ended with status {status}:\n{self.tail()}")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=ASK_S) as answer:  # noqa: S310 - our own http URL
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics``; labelled ones as ``name{value}``."""
        status, text = self.get("/metrics")
        if status != 200:
            raise DemoServerError(f"{self.name}: /metrics answered {status}")
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                label = "".join(f"{{{value}}}" for value in sample.labels.values())
                found[sample.name.removeprefix("kvroute_") + label] = sample.value
        return found


class Servers:
    """Prefill, decode and route, started together and ended together."""

    def __init__(self, network: Network, directory: Path, options: DemoPDOptions) -> None:
        self._network = network
        self._directory = directory
        self._all: list[Server] = []
        hosts = [network.host(number) for number in range(3)]
        ports = [network.port(wanted) for wanted in (7001, 7002, 7003)]
        urls = [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        transfer = f"tcp://{hosts[0]}:{network.port(7010)}"
        engine, model = options.engine, options.model
        weights = {"model": model, "seed": options.seed}
        sizes = {
            "block_tokens": engine.block_tokens,
            "device_blocks": engine.device_blocks,
            "host_blocks": engine.host_blocks,
            "step_tokens": engine.step_tokens,
            "sequences_max": engine.sequences_max,
        }
        listen = [{"host": host, "port": port} for host, port in zip(hosts, ports, strict=True)]
        anywhere = {"transfer_address": transfer}
        try:
            self.prefill = self._start(
                0, "prefill", urls[0], {**listen[0], **weights, **sizes, "name": "p0", **anywhere}, {}
            )
            self.decode = self._start(
                1, "decode", urls[1], {**listen[1], **weights, **sizes, "name": "d0"}, {"prefills": {"p0": transfer}}
            )
            servers = {"prefills": {"p0": urls[0]}, "decodes": {"d0": urls[1]}}
            self.route = self._start(2, "front", urls[2], {**listen[2], "model": model, "health_s": 0.2}, servers)
        except BaseException:
            self.kill()
            raise

    def _start(
        self,
        number: int,
        command: str,
        url: str,
        keys: Mapping[str, object],
        tables: Mapping[str, Mapping[str, str]],
    ) -> Server:
        config, log = self._directory / f"{command}.toml", self._directory / f"{command}.log"
        lines = [f"{key} = {_toml(value)}" for key, value in keys.items()]
        for table, entries in tables.items():
            lines += [f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in entries.items())]
        config.write_text("\n".join(lines) + "\n")
        argv = (sys.executable, "-P", "-m", "kvroute.cli", command, "--config", str(config))
        with log.open("wb") as file:
            process = self._network.start(number, argv, file.fileno())
        self._all.append(Server(command, url, process, log))
        return self._all[-1]

    def wait_ready(self) -> None:
        """Return when a completion can be asked for."""
        deadline_s = time.monotonic() + READY_S
        while self.route.get("/readyz")[0] != 200:
            for server in self._all:
                server.check_alive()
            if time.monotonic() > deadline_s:
                raise DemoServerError(f"not ready within {READY_S} s: {self.route.get('/readyz')}")
            time.sleep(POLL_S)

    def wait_quiet(self) -> bool:
        """Return when nothing is held any more, or when time is over; whether every block has come back."""
        deadline_s = time.monotonic() + QUIET_S
        while time.monotonic() < deadline_s:
            if all(_quiet(server.metrics()) for server in (self.prefill, self.decode)):
                return True
            time.sleep(POLL_S)
        return False

    def end(self) -> dict[str, int]:
        """SIGTERM to all; their exit statuses. One that does not end in time is killed, and has status -9."""
        for server in reversed(self._all):
            server.process.send_signal(signal.SIGTERM)
        statuses = {}
        for server in self._all:
            try:
                statuses[server.name] = server.process.wait(END_S)
            except subprocess.TimeoutExpired:
                server.process.kill()
                statuses[server.name] = server.process.wait()
        return statuses

    def kill(self) -> None:
        for server in self._all:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _quiet(metrics: Mapping[str, float]) -> bool:
    free = all(metrics[f"blocks{{{tier}_free}}"] == metrics[f"blocks{{{tier}_total}}"] for tier in ("device", "host"))
    held = metrics.get("transfers{leased}", 0) + metrics.get("pulls{in_flight}", 0)
    return free and not held and not any(v for k, v in metrics.items() if k.startswith("sequences{"))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


__all__ = ["DemoServerError", "Server", "Servers"]
