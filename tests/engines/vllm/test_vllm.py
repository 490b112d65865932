"""Real vLLM processes on one pool.  Skipped where vLLM is not installed; `make test-vllm` runs them."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvslot.api.client import Control
from kvslot.engines.vllm.region import record_bytes

from ...faults.actors import rows
from ...restart.killing import kept
from ...tools.daemon import Running, running
from ...tools.wire import Wire
from .engine import BLOCK, TINY_BLOCK_BYTES, Engine, tiny_model

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: see docs/integrations/vllm.md", allow_module_level=True)

MODELS = Path(os.environ.get("KVSLOT_MODELS", "~/.cache/kvslot/models")).expanduser()
SMOL = MODELS / "SmolLM2-135M-Instruct"
POOL = {"name": "tiny", "blocks": 129, "block_size": BLOCK, "opaque_block_bytes": TINY_BLOCK_BYTES}

Start = Callable[..., Engine]


def prompt(seed: int, length: int, vocabulary: int = 500) -> list[int]:
    """Token ids that no other seed begins with."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, vocabulary) for _ in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with dummy weights."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """A daemon with a pool for the tiny model."""
    with running(pools=[POOL]) as daemon:
        yield daemon
        audit(daemon, sequences=0)


@pytest.fixture(scope="module")
def start(model: Path, daemon: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines of the tiny model on the daemon; they end with the module unless a test ends them."""
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        count = 0

        def start(**options: Any) -> Engine:
            nonlocal count
            count += 1
            connector = {"socket": str(daemon.socket), **options.pop("connector", {})}
            options = {"load_format": "dummy", "skip_tokenizer_init": True, "model": model, **options}
            engine = Engine(folder / f"{count}.log", connector=connector, **options)
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture(scope="module")
def first(start: Start) -> Engine:
    return start()


@pytest.fixture(scope="module")
def second(start: Start) -> Engine:
    """Another engine, which has computed nothing of what the first has."""
    return start()


def audit(daemon: Running, **gauges: int) -> None:
    """The pool is sound, and its gauges become these."""
    deadline = time.monotonic() + 15
    with Control(str(daemon.socket)) as control:
        while True:
            (row,) = control.inspect("pools")
            if all(row[name] == value for name, value in gauges.items()):
                break
            assert time.monotonic() < deadline, (row, gauges)
            time.sleep(0.02)
        assert control.audit().faults == []


BYTES = """
import hashlib
pieces = worker._engine.groups[0]
answer = [hashlib.sha256(b"".join(p.view[:, b].tobytes() for p in pieces)).hexdigest() for b in {blocks}]
"""


def test_the_second_reads_what_the_first_computed(daemon: Running, first: Engine, second: Engine) -> None:
    """An engine with an empty cache of its own loads the other's blocks, byte for byte, and says the same."""
    ids = prompt(1, 200)
    (cold,) = first.generate(ids, tokens=40)
    assert cold["cached"] == 0
    (warm,) = second.generate(ids, tokens=40)
    assert warm["cached"] == 192
    assert warm["tokens"] == cold["tokens"]
    assert warm["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
    (again,) = first.generate([*ids, *cold["tokens"], 5], tokens=4)
    (other,) = second.generate([*ids, *cold["tokens"], 5], tokens=4)
    assert again["tokens"] == other["tokens"]
    assert first.run(BYTES.format(blocks=list(range(1, 7)))) == second.run(
        BYTES.format(blocks=list(range(1, 7)))
    ), "the first six blocks of both engines hold this prompt"
    audit(daemon, sequences=0)
    assert second.statistics()["loaded_tokens"] >= 192


def test_one_token_is_left(first: Engine, second: Engine) -> None:
    """S15: a prompt of whole blocks that is cached to the last token has its last block computed."""
    ids = prompt(2, 4 * BLOCK)
    (cold,) = first.generate(ids)
    (warm,) = second.generate(ids)
    assert warm["cached"] == 3 * BLOCK
    assert warm["tokens"] == cold["tokens"]


def test_many_at_once(first: Engine, second: Engine) -> None:
    """Requests with a common beginning, batched, chunked and loaded while others compute: same tokens, less work."""
    head = prompt(3, 3 * BLOCK)
    prompts = [[*head, *prompt(100 + i, 20 + 7 * i)] for i in range(12)]
    cold = first.generate(*prompts, tokens=12)
    warm = second.generate(*prompts, tokens=12)
    assert [each["tokens"] for each in warm] == [each["tokens"] for each in cold]
    assert sum(each["cached"] for each in warm) >= 12 * 3 * BLOCK


def test_salts_and_tenants_do_not_meet(first: Engine, second: Engine) -> None:
    """S44: a prompt under one salt is not found under another, nor under none; under the same it is."""
    ids = prompt(4, 100)
    first.generate(ids, salt="a")
    assert second.generate(ids, salt="b")[0]["cached"] == 0
    assert second.generate(ids)[0]["cached"] == 0
    assert second.generate(ids, salt="a")[0]["cached"] == 96


def test_a_load_that_fails_is_computed(first: Engine, second: Engine) -> None:
    """The engine's own default would fail the request; with kvslot it is computed, and the answer is right."""
    ids = prompt(5, 200)
    (cold,) = first.generate(ids)
    second.run("worker._load, worker.kept = (lambda job: False), worker._load")
    (warm,) = second.generate(ids)
    second.run("worker._load = worker.kept")
    assert warm["tokens"] == cold["tokens"]
    assert warm["reason"] == "length"
    assert second.statistics()["load_failures"] == 1
    assert "Recovered from KV load failure" in second.text()
    time.sleep(0.3)
    ids = prompt(6, 200)
    first.generate(ids)
    assert second.generate(ids)[0]["cached"] == 192, "loads are made again"


ABORT = """
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
go = threading.Event()
kept = worker._load
worker._load = lambda job: go.wait(20) and kept(job)
engine = llm.llm_engine
engine.add_request("gone", TokensPrompt(prompt_token_ids={ids}), SamplingParams(temperature=0, max_tokens=4))
for _ in range(5):
    engine.step()
loading = len(worker._running)
name = next(iter(scheduler.requests))
core.abort_requests([name])
for _ in range(3):
    engine.step()
held = name in scheduler.requests
go.set()
for _ in range(200):
    engine.step()
    if name not in scheduler.requests:
        break
worker._load = kept
engine.abort_request(["gone"])
answer = [loading, held, name in scheduler.requests, len(planner._numbers)]
"""


def test_aborted_during_a_load(daemon: Running, first: Engine, second: Engine) -> None:
    """S01: a request that is aborted while its blocks are being filled leaves nothing, here or in the daemon."""
    ids = prompt(7, 200)
    first.generate(ids)
    assert second.run(ABORT.format(ids=ids)) == [1, True, False, 0]
    audit(daemon, sequences=0, leased=0)
    assert second.generate(ids)[0]["tokens"] == first.generate(ids)[0]["tokens"]


RESET = """
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
go = threading.Event()
kept = worker._load
worker._load = lambda job: go.wait(20) and kept(job)
engine = llm.llm_engine
how = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
engine.add_request("r", TokensPrompt(prompt_token_ids={ids}), how)
for _ in range(5):
    engine.step()
loading = len(worker._running)
if {made}:
    go.set()
    while worker._running:
        threading.Event().wait(0.01)
said = core.reset_prefix_cache(reset_connector=True)
go.set()
tokens = []
for _ in range(500):
    for output in engine.step():
        tokens = list(output.outputs[0].token_ids)
    if not engine.has_unfinished_requests():
        break
worker._load = kept
answer = [loading, said, planner.statistics().load_failures, tokens]
"""


def test_weights_that_change_during_a_load(start: Start, first: Engine) -> None:
    """vLLM says that it could not forget all, and computes what was being loaded; nothing that was stored before is
    found any more."""
    for made in (False, True):
        ids = prompt(13 + made, 200)
        (cold,) = first.generate(ids)
        with start() as engine:
            assert engine.run(RESET.format(ids=ids, made=made)) == [1, False, 1, cold["tokens"]]
            assert engine.run("answer = core.reset_prefix_cache(reset_connector=True)") is True
            assert engine.generate(ids)[0]["cached"] == 0
            assert engine.statistics()["hit_tokens"] == 192, "of the first time"


def test_preempted_by_vllm(start: Start, first: Engine) -> None:
    """With few blocks of its own vLLM preempts requests; they resume from the pool, and say what they would have."""
    prompts = [prompt(200 + i, 60) for i in range(6)]
    want = first.generate(*prompts, tokens=60)
    small = start(num_gpu_blocks_override=14, max_num_seqs=6, max_model_len=256)
    got = small.generate(*prompts, tokens=60)
    assert [each["tokens"] for each in got] == [each["tokens"] for each in want]
    assert small.statistics()["loaded_tokens"] > 0
    small.close()


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 64},
        {"dtype": "bfloat16"},
    ],
    ids=["block size", "dtype"],
)
def test_a_pool_of_other_blocks_is_not_used(start: Start, first: Engine, options: dict[str, Any]) -> None:
    """Another block size, or dtype, has blocks of other bytes: the log says what the pool would have to be."""
    first.generate(prompt(8, 200))
    other = start(**options)
    assert other.generate(prompt(8, 200))[0]["cached"] == 0
    assert "opaque_block_bytes = " in other.text()
    other.close()


def test_another_model_never_hits(start: Start, first: Engine, tmp_path: Path) -> None:
    """The same shape under another configuration (rope here), and other weights, are namespaces of their own."""
    ids = prompt(9, 200)
    first.generate(ids)
    model = tiny_model(tmp_path / "tiny", rope_theta=5e5)
    with start(model=model) as other:
        assert other.generate(ids)[0]["cached"] == 0
        assert other.statistics()["requests"] == 1


def lora(folder: Path, seed: int) -> Path:
    """An adapter of the tiny model, with weights that change what it says."""
    safetensors = importlib.import_module("safetensors.numpy")
    numbers = np.random.default_rng(seed)
    folder.mkdir()
    weights = {}
    for layer in range(2):
        for what, out in (("q_proj", 64), ("v_proj", 32)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{what}"
            weights[f"{name}.lora_A.weight"] = numbers.standard_normal((8, 64)).astype("float32")
            weights[f"{name}.lora_B.weight"] = numbers.standard_normal((out, 8)).astype("float32")
    safetensors.save_file(weights, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 16,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
            }
        )
    )
    return folder


def test_adapters_never_meet(start: Start, tmp_path: Path) -> None:
    """An adapter of the same name and number with other weights never hits; the same weights elsewhere do."""
    one, two = lora(tmp_path / "one", 1), lora(tmp_path / "two", 2)
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    time.sleep(1.1)  # what is younger than the engine is not trusted
    ids = prompt(12, 100)
    with start(enable_lora=True, max_lora_rank=8) as engine:
        (plain,) = engine.generate(ids)
        (cold,) = engine.generate(ids, adapter=["style", 1, str(one)])
        assert (plain["cached"], cold["cached"]) == (0, 0)
        young = lora(tmp_path / "young", 3)
        engine.generate(ids, adapter=["new", 5, str(young)])
        assert engine.statistics()["bypassed"] == 1
    with start(enable_lora=True, max_lora_rank=8) as engine:
        assert engine.generate(ids, adapter=["style", 1, str(two)])[0]["cached"] == 0
        (warm,) = engine.generate(ids, adapter=["other", 7, str(copy)])
        assert warm["cached"] == 96
        assert warm["tokens"] == cold["tokens"]
        assert warm["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
        assert engine.generate(ids)[0]["cached"] == 96


def test_both_in_processes_of_their_own(start: Start, first: Engine) -> None:
    """vLLM's default: scheduler and worker are two processes; the worker joins the scheduler's session."""
    ids = prompt(10, 200)
    (cold,) = first.generate(ids)
    options = {"distributed_executor_backend": "mp"}
    with start(env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, **options) as spread:
        (warm,) = spread.generate(ids)
        assert warm["cached"] == 192
        assert warm["tokens"] == cold["tokens"]
        ids = prompt(11, 100)
        (said,) = spread.generate(ids, tokens=70)
    (again,) = first.generate([*ids, *said["tokens"], 3])
    assert again["cached"] >= 128, "its output, too"


@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_killed_in_mid_store(daemon: Running, start: Start, first: Engine, moment: str) -> None:
    """S31: of an engine killed with -9 while it stored, nothing is found; its prompt is computed and stored anew."""
    ids = prompt(20 + len(moment), 300)
    dying = start(max_num_batched_tokens=128)
    dying.run(f"""
import os, signal
kept, calls = worker._store, []
def store(order, pool):
    calls.append(1)
    if len(calls) == 2:
        half = {{"before": 0, "half": len(order.pool) // 2, "after": len(order.pool)}}[{moment!r}]
        worker._engine.store(pool, order.pool[:half], [table[:half] for table in order.engine])
        os.kill(os.getpid(), signal.SIGKILL)
    return kept(order, pool)
worker._store = store
""")
    dying.send(do="generate", prompts=[ids], tokens=4)
    assert dying.process.wait(60) == -signal.SIGKILL
    audit(daemon, sequences=0, quarantined=0, private=0)
    (after,) = first.generate(ids)
    assert after["cached"] <= 128, "at most what its first step had committed"
    first.run("scheduler.reset_prefix_cache()")
    (again,) = first.generate(ids)
    assert again["cached"] == 288
    assert again["tokens"] == after["tokens"]


def test_the_daemon_goes_and_comes_back(model: Path, tmp_path: Path) -> None:
    """Killed under a running engine: no request fails, no wrong token; started anew: both share again."""
    socket = tmp_path / "s"
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    options["connector"] = {"socket": str(socket)}
    ids = prompt(30, 200)
    with Engine(tmp_path / "log", model, **options) as engine:
        (want,) = engine.generate(ids)
        assert engine.statistics()["losses"] == 0
        for round_ in range(2):
            with running(pools=[POOL], socket=socket, code=None) as daemon:
                engine.run("planner._link._retry_at = 0")
                deadline = time.monotonic() + 20
                while not engine.run("answer = planner._link.client is not None"):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                engine.run("scheduler.reset_prefix_cache()")
                assert engine.generate(ids)[0]["cached"] == 0
                engine.run("scheduler.reset_prefix_cache()")
                (got,) = engine.generate(ids)
                assert got["cached"] == 192
                assert got["tokens"] == want["tokens"]
                daemon.process.kill()
                daemon.process.wait()
                engine.run("scheduler.reset_prefix_cache()")
                (got,) = engine.generate(ids)
                assert (got["cached"], got["tokens"]) == (0, want["tokens"])
                assert engine.statistics()["losses"] == round_ + 1
            socket.unlink(missing_ok=True)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_daemon_is_restarted(model: Path, tmp_path: Path, processes: int) -> None:
    """What was cached is found again, and of the sessions of before nothing holds it up: no process of vLLM's ended."""
    ids = prompt(31, 200)
    with kept([POOL]) as daemon:
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        options["connector"] = {"socket": str(daemon.socket)}
        if processes > 1:
            options["distributed_executor_backend"] = "mp"
            options["env"] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with Engine(tmp_path / "log", model, **options) as engine:
            (want,) = engine.generate(ids)
            daemon.manager.kill()
            deadline = time.monotonic() + 60
            number = 0
            while True:
                number += 1
                engine.generate(prompt(100 + number, 40))  # it is by steps that vLLM looks for its daemon
                with Wire(daemon.socket) as control:
                    states = [row["state"] for row in rows(control, "sessions")]
                    settled = bool(daemon.events("restart_settled"))
                if settled and states == ["live"] * processes:
                    break
                assert time.monotonic() < deadline, (states, settled)
                time.sleep(0.2)
            if processes == 1:
                engine.run("scheduler.reset_prefix_cache()")
            (got,) = engine.generate(ids)
            assert (got["cached"], got["tokens"]) == (192, want["tokens"])


def test_several_groups_of_layers(tmp_path: Path) -> None:
    """Windowed layers beside full ones have block tables of their own: a pool block holds all of them."""
    model = tiny_model(
        tmp_path / "gemma",
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=6,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
        rope_local_base_freq=10000.0,
    )
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    pool = {**POOL, "opaque_block_bytes": 3 * TINY_BLOCK_BYTES}
    ids = prompt(40, 300)
    with running(pools=[pool]) as daemon, ExitStack() as stack:
        plain = stack.enter_context(Engine(tmp_path / "plain", model, **options))
        (want,) = plain.generate(ids, tokens=20)
        plain.close()
        connector = {"socket": str(daemon.socket)}
        one = stack.enter_context(Engine(tmp_path / "one", model, connector=connector, **options))
        assert one.run("answer = len(scheduler.connector._groups)") > 1
        (cold,) = one.generate(ids, tokens=20)
        one.close()
        two = stack.enter_context(Engine(tmp_path / "two", model, connector=connector, **options))
        (warm,) = two.generate(ids, tokens=20)
        assert warm["cached"] == 288
        assert cold["tokens"] == want["tokens"] == warm["tokens"]
        assert warm["logprob"] == pytest.approx(want["logprob"], abs=1e-4)
        two.run("scheduler.reset_prefix_cache(); worker._load = lambda job: False")
        assert two.generate(ids, tokens=20)[0]["tokens"] == want["tokens"]
        two.close()
        audit(daemon, sequences=0)


REVOKED = """
kept = worker._load
def load(job):
    open({mark!r}, "w").write("at")
    while not __import__("os").path.exists({go!r}):
        __import__("time").sleep(0.01)
    return kept(job)
worker._load = load
"""


def test_the_second_form(model: Path, tmp_path: Path) -> None:
    """vLLM's own memory is what others read: nothing is copied to store, what is overwritten is computed, and an
    engine's death ends its entries."""
    pool = {**POOL, "opaque_block_bytes": record_bytes(BLOCK)}
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512}
    ids, others = prompt(60, 200), [prompt(61 + i, 400) for i in range(3)]
    with running(pools=[pool]) as daemon, ExitStack() as stack:
        options["connector"] = {"socket": str(daemon.socket), "form": "region"}

        def engine(name: str, **more: Any) -> Engine:
            return stack.enter_context(Engine(tmp_path / name, model, **{**options, **more}))

        one = engine("one", num_gpu_blocks_override=18)
        two = engine("two")
        (cold,) = one.generate(ids, tokens=40)
        assert one.run("answer = worker.copied_bytes") == 0
        (warm,) = two.generate(ids, tokens=40)
        assert (cold["cached"], warm["cached"]) == (0, 192)
        assert warm["tokens"] == cold["tokens"]
        assert warm["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
        # The first needs its blocks for something else; the second, in the middle of a load, notices.
        (cold,) = one.generate(others[0], tokens=8)
        mark, go = tmp_path / "mark", tmp_path / "go"
        two.run(REVOKED.format(mark=str(mark), go=str(go)))
        two.send(do="generate", prompts=[others[0]], tokens=8)
        while not mark.exists():
            time.sleep(0.01)
        one.generate(others[1], tokens=8)
        go.touch()
        (warm,) = two._read()
        assert warm["tokens"] == cold["tokens"]
        assert two.statistics()["load_failures"] == 1
        two.run("worker._load = kept")
        # What the second computed instead is found in its memory now.
        one.run("scheduler.reset_prefix_cache()")
        time.sleep(0.2)
        (again,) = one.generate(others[0], tokens=8)
        assert again["cached"] == 384
        assert again["tokens"] == cold["tokens"]
        (last,) = two.generate(others[2], tokens=8)
        two.process.kill()
        two.process.wait()
        (alone,) = one.generate(others[2], tokens=8)
        assert alone["cached"] == 0
        assert alone["tokens"] == last["tokens"]
        audit(daemon, sequences=0, quarantined=0)


@pytest.mark.slow
@pytest.mark.skipif(not (SMOL / "config.json").exists(), reason=f"no model in {SMOL}: see KVSLOT_MODELS")
def test_smollm2(tmp_path: Path) -> None:
    """A real model: the second engine answers under a long prompt that only the first has read, token for token."""
    ids = prompt(50, 500, 40000)
    pool = {"name": "smol", "blocks": 65, "block_size": BLOCK, "opaque_block_bytes": 46080 * BLOCK}
    with running(pools=[pool]) as daemon:
        with Engine(tmp_path / "plain", SMOL) as plain:
            (want,) = plain.generate(ids, tokens=24)
        with Engine(tmp_path / "one", SMOL, connector={"socket": str(daemon.socket)}) as one:
            (cold,) = one.generate(ids, tokens=24)
        with Engine(tmp_path / "two", SMOL, connector={"socket": str(daemon.socket)}) as two:
            (warm,) = two.generate(ids, tokens=24)
        assert (cold["cached"], warm["cached"]) == (0, 480)
        assert cold["tokens"] == want["tokens"] == warm["tokens"]
        assert warm["logprob"] == pytest.approx(want["logprob"], abs=1e-4)
        audit(daemon, sequences=0, sessions=0)
