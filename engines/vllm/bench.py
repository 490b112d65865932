"""What the connector costs vLLM, and what a shared prefix saves: `python -m kvslot.engines.vllm.bench --json FILE`.

A daemon, and at most two vLLM processes at a time, each with one thread, so that two cores are not contended for.
Only one of them works at any moment; they take turns, each first as often as the other.

    overhead   prompts that nobody has seen, with the connector and without, in one process: prefill and some tokens
    ttft       a prompt that nobody has seen (cold); the same in the other process (warm); again there (own)
    share      time spent in the connector's methods, of all steps, while 8 requests run
    region     all of these for the second form, in which vLLM's own memory is shared
    sync       ttft with loads that are made before the forward, not beside it

The model is SmolLM2-135M-Instruct in float32, out of the folder $KVSLOT_MODELS.  Runs as `--child` what it measures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from kvslot.engines.vllm.configuration import block_bytes
from kvslot.engines.vllm.region import record_bytes

MODEL: Final = "SmolLM2-135M-Instruct"
BLOCK: Final = 32
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
WAIT_SECONDS: Final = 30.0

Row = dict[str, object]


class Engine:
    """A vLLM process that answers lines of JSON."""

    def __init__(self, model: Path, connector: dict[str, object], log: Path) -> None:
        options: dict[str, object] = {
            "model": str(model),
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 4096,
            "block_size": BLOCK,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "kv_transfer_config": {
                "kv_connector": "KvslotConnector",
                "kv_connector_module_path": "kvslot.engines.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": connector,
            },
        }
        self._log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-Im", "kvslot.engines.vllm.bench", "--child", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, **ENVIRONMENT},
                text=True,
            )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(
            f"vLLM ended with {self._process.wait()}: {self._log.read_text(errors='replace')[-2000:]}"
        )

    def run(self, *prompts: list[int], tokens: int, detached: bool = False) -> dict[str, Any]:
        """Wall and CPU seconds, cached tokens, output, and seconds in the connector and in all steps.

        `detached`: vLLM is not to know of its connector meanwhile.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"prompts": prompts, "tokens": tokens, "detached": detached}) + "\n"
        )
        self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def child(options: str) -> None:
    """The process of an engine."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    vllm: Any = importlib.import_module("vllm")
    tokens_prompt = importlib.import_module("vllm.inputs").TokensPrompt
    llm = vllm.LLM(**json.loads(options))
    core = llm.llm_engine.engine_core.engine_core
    spent = [0.0, 0.0]  # in the connector, in steps
    state: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state")
    scheduler_side, worker_side = core.scheduler.connector, state._KV_CONNECTOR_AGENT
    for each in (scheduler_side, worker_side):
        for name in CALLS:
            setattr(each, name, _timed(getattr(each, name), spent, 0))
    core.step_fn = _timed(core.step_fn, spent, 1)
    print("@true", file=out, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        spent[:] = [0.0, 0.0]
        if command["detached"]:
            core.scheduler.connector = state._KV_CONNECTOR_AGENT = None
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(
            [tokens_prompt(prompt_token_ids=each) for each in command["prompts"]],
            vllm.SamplingParams(temperature=0, max_tokens=command["tokens"], ignore_eos=True),
            use_tqdm=False,
        )
        answer = {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "cached": [each.num_cached_tokens for each in outputs],
            "tokens": [list(each.outputs[0].token_ids) for each in outputs],
            "connector": spent[0],
            "steps": spent[1],
        }
        core.scheduler.connector, state._KV_CONNECTOR_AGENT = scheduler_side, worker_side
        print("@" + json.dumps(answer), file=out, flush=True)


CALLS: Final = (
    "handle_preemptions", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups", "start_load_kv", "wait_for_save", "get_transfer_results",
    "get_block_ids_with_load_errors", "build_connector_worker_meta", "wait_for_layer_load", "save_kv_layer",
)  # fmt: skip


def _timed(function: Callable[..., Any], spent: list[float], which: int) -> Callable[..., Any]:
    clock = time.perf_counter

    def timed(*arguments: Any, **words: Any) -> Any:
        start = clock()
        try:
            return function(*arguments, **words)
        finally:
            spent[which] += clock() - start

    return timed


@contextmanager
def daemon(folder: Path, model: Path) -> Iterator[str]:
    """A daemon with a pool of 384 blocks for the model, and a directory; its socket."""
    config = json.loads((model / "config.json").read_text())
    socket = folder / "s"
    file = folder / "kvslot.toml"
    file.write_text(
        f'socket = "{socket}"\n[[pool]]\nname = "vllm"\nblocks = 385\nblock_size = {BLOCK}\n'
        f"opaque_block_bytes = {block_bytes(config, BLOCK, 'float32')}\n"
        f'[[pool]]\nname = "directory"\nblocks = 4097\nblock_size = {BLOCK}\n'
        f"opaque_block_bytes = {record_bytes(BLOCK)}\n"
    )
    with (folder / "kvslotd.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-Im", "kvslot.daemon", "--config", str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + WAIT_SECONDS
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no daemon: {(folder / 'kvslotd.log').read_text()[-1000:]}")
            time.sleep(0.02)
        yield str(socket)
    finally:
        process.terminate()
        process.wait()


class Prompts:
    """Prompts that nobody has seen."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, length: int) -> list[int]:
        return [self._random.randrange(100, 40_000) for _ in range(length)]


def row(name: str, value: float, unit: str, what: str, note: str = "", samples: int = 0) -> Row:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "what": what,
        "note": note,
        "samples": samples or None,
    }


def overhead(engine: Engine, fresh: Prompts, rounds: int, suffix: str = "") -> list[Row]:
    """The connector where there is nothing to find, against the same process with the connector taken off.

    Of two processes one is faster than the other by some hundredths, whatever runs in them.
    """
    off: list[dict[str, Any]] = []
    on: list[dict[str, Any]] = []
    for i in range(2 * rounds + 4):
        without = i % 4 in (0, 3)
        done = engine.run(fresh(512), tokens=16, detached=without)
        if any(done["cached"]):
            raise RuntimeError("a prompt that nobody has seen was found")
        if i >= 4:  # the first are slow
            (off if without else on).append(done)
    walls = [min(each["wall"] for each in side) for side in (on, off)]
    middles = [statistics.median(each["wall"] for each in side) for side in (on, off)]
    cpus = [statistics.median(each["cpu"] for each in side) for side in (on, off)]
    share = 100 * sum(each["connector"] for each in on) / sum(each["steps"] for each in on)
    return [
        row(
            f"vllm_overhead{suffix}",
            walls[0] / walls[1],
            "x",
            "vLLM with the connector and no hits, 512 + 16 tokens",
            f"the same process with the connector taken off; least of {len(on)} each in turns, {walls[1]:.2f} s "
            f"without; medians {middles[0] / middles[1]:.3f}, of CPU time {cpus[0] / cpus[1]:.3f}",
            len(on),
        ),
        row(
            f"vllm_share{suffix}_pct",
            share,
            "%",
            "the same: time in the connector's calls, stores included",
            "",
            len(on),
        ),
    ]


def first_token(one: Engine, two: Engine, fresh: Prompts, rounds: int, suffix: str = "") -> list[Row]:
    """A prefix of 2,048 tokens that the other process computed."""
    cold: list[float] = []
    warm: list[float] = []
    own: list[float] = []
    other: list[float] = []
    for i in range(rounds + 1):
        first, second = (one, two) if i % 2 else (two, one)
        prefix = fresh(2048)
        a = first.run([*prefix, *fresh(8)], tokens=1)
        b = second.run([*prefix, *fresh(8)], tokens=1)
        c = second.run([*prefix, *fresh(8)], tokens=1)
        if (a["cached"], b["cached"], c["cached"]) != ([0], [2048], [2048]):
            raise RuntimeError(f"found {a['cached']}, {b['cached']} and {c['cached']} tokens")
        if i:
            cold.append(a["wall"])
            warm.append(b["wall"])
            own.append(c["wall"])
            other.append(b["connector"])
    middle = statistics.median
    note = f"cold {middle(cold):.2f} s, warm {1e3 * middle(warm):.0f} ms, vLLM's own cache {1e3 * middle(own):.0f} ms"
    what = "vLLM, time to first token with a prefix of 2,048 tokens that another process computed"
    return [
        row(f"vllm_ttft_warm{suffix}", middle(warm) / middle(cold), "x", what, note, rounds),
        row(
            f"vllm_ttft_warm{suffix}_ms",
            1e3 * middle(warm),
            "ms",
            f"{what}, as it is",
            f"{1e3 * middle(other):.1f} ms of it in the connector's calls",
            rounds,
        ),
    ]


def busy(engine: Engine, fresh: Prompts, suffix: str = "") -> list[Row]:
    """The connector's share of steps with eight requests."""
    engine.run(*[fresh(256) for _ in range(8)], tokens=4)
    done = engine.run(*[fresh(256) for _ in range(8)], tokens=40)
    return [
        row(
            f"vllm_share_busy{suffix}_pct",
            100 * done["connector"] / done["steps"],
            "%",
            "time in the connector, of steps with 8 requests of 256 + 40 tokens, stores included",
            f"{1e3 * done['connector']:.1f} ms of {done['steps']:.2f} s",
            1,
        )
    ]


def measure(model: Path, *, quick: bool = False, seed: int = 0) -> list[Row]:
    """All rows.  Raises RuntimeError where vLLM or the daemon fails."""
    fresh = Prompts(seed)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvs") as name, ExitStack() as stack:
        folder = Path(name)
        socket = stack.enter_context(daemon(folder, model))

        def engine(connector: dict[str, object], log: str) -> Engine:
            started = Engine(model, connector, folder / log)
            stack.callback(started.close)
            return started

        rounds = 4 if quick else 12
        one = engine({"socket": socket}, "one")
        rows += overhead(one, fresh, rounds)
        rows += busy(one, fresh)
        two = engine({"socket": socket}, "two")
        rows += first_token(one, two, fresh, 2 if quick else 4)
        one.close()
        two.close()
        if not quick:
            one, two = (engine({"socket": socket, "load": "sync"}, f"sync {i}") for i in range(2))
            rows += first_token(one, two, fresh, 4, "_sync")
            one.close()
            two.close()
        region: dict[str, object] = {"socket": socket, "pool": "directory", "form": "region"}
        one = engine(region, "region one")
        rows += overhead(one, fresh, rounds, "_region")
        rows += busy(one, fresh, "_region")
        two = engine(region, "region two")
        rows += first_token(one, two, fresh, 2 if quick else 4, "_region")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Exit code 2 where the model is missing."""
    parser = argparse.ArgumentParser(prog="python -m kvslot.engines.vllm.bench")
    models = Path(os.environ.get("KVSLOT_MODELS", "~/.cache/kvslot/models")).expanduser()
    parser.add_argument("--model", type=Path, default=models / MODEL, help="its folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go (default: printed)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", metavar="OPTIONS", help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    if told.child:
        child(told.child)
        return 0
    if not (told.model / "config.json").exists():
        print(f"no model in {told.model}: name its folder with --model, or KVSLOT_MODELS", file=sys.stderr)
        return 2
    rows = measure(told.model, quick=told.quick, seed=told.seed)
    text = json.dumps(rows, indent=1)
    if told.json:
        told.json.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
