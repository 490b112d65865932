"""What the pool costs transformers, and what a shared prefix saves: `python -m kvslot.engines.hf.bench --json FILE`.

Ratios in one run, against transformers' own DynamicCache; SmolLM2-135M-Instruct in float32, one thread a process.
Steps are measured in that thread's CPU time, which is all they take and what a busy machine disturbs least; times to
first token by the clock.

    decode    one step at 2,048 tokens of context, the caches in turn; the median of the rounds' ratios
                  write_through         the pool written, a private copy read
                  gather                read in place: a prefix that another computed, and own tokens behind it
                  gather, one run       the same where both lie in one run of slots: a view, nothing is copied
                  gather, scattered     in dozens of runs
    ttft      time to first token of a prompt of which another process computed 2,048 tokens, against one nobody knows
    share     time in all calls of kvslot's client, of decode steps with 16 running sequences; round trips in them
    at once   several engines, the same prompt of 2,000 tokens at the same moment: tokens prefilled in all, when they
              wait for one another's work and when not; and the memory they then hold against a cache for each

Rows are plain: name, value, unit, what, note.  `--child` is an engine in a process of its own, which answers lines of
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any, Final, Self

from kvslot.api.client import Client, Control, Later, Namespace, Sequence
from kvslot.engines import fingerprint
from kvslot.engines.hf import model as models
from kvslot.engines.hf.cache import PoolCache
from kvslot.engines.hf.layout import Shape, shape_of

Row = dict[str, object]
ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
START_SECONDS: Final = 180.0
CONTEXT: Final = 2048
PROMPT: Final = 2000


def row(name: str, value: float, unit: str, what: str, note: str = "", samples: int | None = None) -> Row:
    """One line of the report."""
    return {"name": name, "value": value, "unit": unit, "what": what, "note": note, "samples": samples}


# -- what is measured --------------------------------------------------------------------------------------------------


def run(*, quick: bool = False, tell: Callable[[str], None] | None = None) -> list[Row]:
    """All rows.  Raises ModelMissing where the model cannot be had."""
    say = tell or (lambda text: None)
    os.environ.update(ENVIRONMENT)
    folder = models.smollm2(say)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    model, _ = models.load(folder)
    context, prompt, steps = (512, 500, 12) if quick else (CONTEXT, PROMPT, 40)
    rows: list[Row] = []
    with daemon(shape_of(model), 24 * (context + 600)) as socket:
        say("decode steps")
        rows += decode(model, socket, context=context, steps=steps)
        say("share of a step")
        rows += share(model, socket, steps=steps)
    engines = 2 if quick else 4
    with daemon(shape_of(model), (engines + 2) * (context + 600)) as socket, ExitStack() as stack:
        say("starting engines")
        children = [stack.enter_context(Child(socket, folder, number)) for number in range(engines)]
        for each in children:
            each.result()
        say("time to first token")
        rows += first_token(children[:2], context=context, rounds=1 if quick else 2)
        say("the same prompt at once")
        rows += at_once(socket, children, tokens=prompt)
    return rows


def decode(model: Any, socket: str, *, context: int = CONTEXT, steps: int = 40) -> list[Row]:
    """One decode step behind `context` tokens, each cache in turn."""
    torch = importlib.import_module("torch")
    ids = torch.tensor([_tokens(context, 1)])
    with (
        Client(socket, namespace=fingerprint.namespace(model, tenant="decode")) as client,
        torch.no_grad(),
        ExitStack() as stack,
    ):
        caches = _filled(model, client, ids, stack)
        runs = {name: len(each.sequences[0].extents) // 2 for name, each in caches.items() if name != "own"}
        times: dict[str, list[float]] = {name: [] for name in caches}
        gathering = _Gathering()
        token = torch.tensor([[17]])
        for step in range(steps + 2):
            names = list(caches)
            random.Random(step).shuffle(names)
            for name in names:
                gathering.name = name
                began = time.thread_time()
                model(input_ids=token, cache=caches[name], logits_to_keep=1)
                if step >= 2:
                    times[name].append(time.thread_time() - began)
        gathering.close()

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times["own"], strict=True))

    own_ms = 1e3 * statistics.median(times["own"])
    rest = {name: 1e3 * gathering.seconds.get(name, 0.0) / (steps + 2) for name in times}
    at = f"{context:,} tokens of context; DynamicCache {own_ms:.0f} ms"
    return [
        row("hf_decode_own_ms", own_ms, "ms", f"a decode step with DynamicCache at {context:,} tokens", "", steps),
        row("hf_decode_write_through", ratio("write_through"), "x", "decode step, write_through", at, steps),
        row(
            "hf_decode_gather", ratio("gather"), "x", "decode step, gather",
            f"{at}; {runs['gather']} runs; {rest['gather']:.1f} ms of it put the runs together, 0 for DynamicCache's "
            "append; the rest is attention over slot-major K and V",
            steps,
        ),
        row("hf_decode_gather_one_run", ratio("one run"), "x", "the same, all in one run: a view, no copy", at, steps),
        row(
            "hf_decode_gather_scattered", ratio("scattered"), "x", "the same, scattered",
            f"{runs['scattered']} runs; {rest['scattered']:.1f} ms of it gather", steps,
        ),
    ]  # fmt: skip


def _filled(model: Any, client: Client, ids: Any, stack: ExitStack) -> dict[str, Any]:
    """All caches, behind the same tokens; one prefill, whose K and V the others find or are given."""
    context = ids.shape[1]
    one = stack.enter_context(PoolCache(client, model, ids))
    model(input_ids=ids, cache=one, logits_to_keep=1)
    caches: dict[str, Any] = {"one run": one}
    for mode in ("write_through", "gather"):
        found = caches[mode] = stack.enter_context(PoolCache(client, model, ids, mode=mode))
        model(input_ids=ids, cache=found, logits_to_keep=1)  # all but the last token of it are hits
    apart = client.open_namespace(fingerprint.vouch(model, Namespace("scattered", "the same model")))
    with _holes(client, context):
        scattered = stack.enter_context(PoolCache(client, model, ids, namespace=apart, publish=False))
    own = importlib.import_module("transformers").DynamicCache(config=model.config)
    first = one.sequences[0].extents[0]
    slots = _slots(scattered)
    for number, layer in enumerate(one.layers):
        keys, values = (
            each.narrow(2, first, context).clone() for each in (layer.key_plane, layer.value_plane)
        )
        own.update(keys, values, number)
        layer.key_plane[0].transpose(0, 1).index_copy_(0, slots, keys[0].transpose(0, 1))
        layer.value_plane[0].transpose(0, 1).index_copy_(0, slots, values[0].transpose(0, 1))
    _pretend(scattered)
    return {**caches, "scattered": scattered, "own": own}


def share(model: Any, socket: str, *, rows: int = 16, steps: int = 40) -> list[Row]:
    """kvslot's part of decode steps with that many running sequences, and the round trips in them."""
    torch = importlib.import_module("torch")
    ids = torch.tensor([_tokens(64, 100 + each) for each in range(rows)])
    out: list[Row] = []
    with Client(socket, namespace=fingerprint.namespace(model, tenant="share")) as client, torch.no_grad():
        with PoolCache(client, model, ids, mode="write_through") as cache:
            model(input_ids=ids, cache=cache, logits_to_keep=1)
            token = torch.full((rows, 1), 17)
            model(input_ids=token, cache=cache, logits_to_keep=1)
            calls = _Timed(
                (Client, "submit"), (Client, "complete"), (Client, "take_copies"), (Client, "flush"),
                (Sequence, "append"),
            )  # fmt: skip
            adapter = _Timed((PoolCache, "_begin"), (PoolCache, "_end"))
            before = client.statistics()
            began = time.thread_time()
            for _ in range(steps):
                model(input_ids=token, cache=cache, logits_to_keep=1)
            took = time.thread_time() - began
            after = client.statistics()
            adapter.close()
            calls.close()
        step_ms = 1e3 * took / steps
        out.append(
            row(
                "hf_share_pct", 100 * calls.seconds / took, "%",
                f"all calls of the client, of a decode step with {rows} running sequences",
                f"{1e6 * calls.seconds / steps:.0f} us of {step_ms:.0f} ms; "
                f"{(after.frames_sent - before.frames_sent) / steps:.2f} frames a step",
                steps,
            )
        )  # fmt: skip
        out.append(
            row(
                "hf_round_trips", after.calls - before.calls, "", "synchronous round trips in them", "", steps
            )
        )
        out.append(
            row(
                "hf_adapter_pct", 100 * adapter.seconds / took, "%",
                "the same with the adapter's own work: checks, index arrays, plans",
                f"{1e6 * adapter.seconds / steps:.0f} us a step", steps,
            )
        )  # fmt: skip
    return out


def first_token(children: list[Child], *, context: int = CONTEXT, rounds: int = 2) -> list[Row]:
    """Time to first token with a prefix that the other process computed, against a prompt that nobody knows."""
    cold, warm = [], []
    for number in range(rounds):
        one, two = children[number % 2], children[1 - number % 2]
        prefix = _tokens(context, 1000 + number)
        first = one.ask(prefix + _tokens(16, 2000 + number))
        second = two.ask(prefix + _tokens(16, 3000 + number))
        assert first["hit"] == 0, first
        assert second["hit"] == context, second
        cold.append(first["first_s"])
        warm.append(second["first_s"])
    ratio = statistics.median(a / b for a, b in zip(warm, cold, strict=True))
    return [
        row("hf_ttft_cold_s", statistics.median(cold), "s", f"time to first token of {context + 16:,} tokens"),
        row(
            "hf_ttft_warm", ratio, "x",
            f"time to first token where another process computed {context:,} of them",
            f"{1e3 * statistics.median(warm):.0f} ms, of which 16 tokens' prefill is most; the namespace's digest is "
            "taken once, when an engine starts",
            rounds,
        ),
    ]  # fmt: skip


def at_once(socket: str, children: list[Child], *, tokens: int = PROMPT) -> list[Row]:
    """The same prompt in all engines at the same moment: tokens prefilled in all, with waiting and without; memory."""
    computed: dict[bool, int] = {}
    took: dict[bool, float] = {}
    held = 0
    for wait in (True, False):
        ids = _tokens(tokens, 5000 + wait)
        began = time.perf_counter()
        for number, each in enumerate(children):
            each.start(do="ask", ids=[*ids, 100 + number], wait=wait, keep=True)
        answers = [each.result() for each in children]
        took[wait] = time.perf_counter() - began
        computed[wait] = sum(each["computed"] for each in answers)
        if wait:
            held = _held(socket)
        for each in children:
            each.call(do="drop")
    count, bytes_each = len(children), _slot_bytes(socket)
    apart = count * (tokens + 1)
    return [
        row(
            "hf_at_once_waiting", computed[True], "tokens",
            f"prefilled in all by {count} engines that start the same {tokens:,} tokens at once, each with a token of "
            "its own behind, when they wait for one another's work",
            f"{took[True]:.1f} s until the last had its first token",
        ),
        row(
            "hf_at_once", computed[False], "tokens", "the same, when they do not wait", f"{took[False]:.1f} s",
        ),
        row(
            "hf_memory", held / apart, "x", f"K and V held for {count} engines with the same prompt in one pool, "
            "against a cache for each",
            f"{held * bytes_each / 1e6:.0f} MB, {apart * bytes_each / 1e6:.0f} MB apart; 1/{count} is "
            f"{1 / count:.2f}; the rest is room to grow",
        ),
    ]  # fmt: skip


# -- inside ------------------------------------------------------------------------------------------------------------


def _tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 49_000) for _ in range(count)]


@contextmanager
def daemon(shape: Shape, tokens: int) -> Iterator[str]:
    """A `kvslotd` with a pool for so many tokens of a model; its socket."""
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        socket, file = f"{folder}/s", Path(folder) / "kvslot.toml"
        pool = shape.toml().replace('size = "4GiB"', f"blocks = {tokens // 16 + 2}\nwatermark = 0.0")
        file.write_text(f'socket = "{socket}"\nlog_level = "error"\n{pool}')
        process = subprocess.Popen([sys.executable, "-Im", "kvslot.daemon", "--config", str(file)])
        try:
            end = time.monotonic() + START_SECONDS
            while not Path(socket).exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("kvslotd did not start")
                time.sleep(0.02)
            yield socket
        finally:
            process.terminate()
            process.wait(30)


class Child:
    """An engine in a process of its own."""

    def __init__(self, socket: str, folder: Path, number: int) -> None:
        words = [
            sys.executable,
            "-Im",
            "kvslot.engines.hf.bench",
            "--child",
            socket,
            str(folder),
            str(number),
        ]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT
        )

    def start(self, **command: object) -> None:
        """Says something; `result` has the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """The answer to the oldest."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine has ended with {self._process.wait()}")
        return json.loads(line)

    def call(self, **command: object) -> Any:
        """Both."""
        self.start(**command)
        return self.result()

    def ask(self, ids: list[int], **options: object) -> Any:
        """One prompt, up to its first token."""
        return self.call(do="ask", ids=ids, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def child(socket: str, folder: str, number: str) -> int:
    """An engine: a line of JSON in, a line out."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    model, _ = models.load(Path(folder))
    kept: list[PoolCache] = []
    with (
        Client(socket, name=f"bench {number}", namespace=fingerprint.namespace(model)) as client,
        torch.no_grad(),
    ):
        model(input_ids=torch.tensor([_tokens(8, 0)]))  # what is made at the first call is made
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            answer: dict[str, object] = {}
            if command["do"] == "ask":
                ids = torch.tensor([command["ids"]])
                began = time.perf_counter()
                cache = PoolCache(
                    client, model, ids, wait_for_commit=command.get("wait", False), patience=300.0
                )
                logits = model(input_ids=ids, cache=cache, logits_to_keep=1).logits
                token = int(logits[0, -1].argmax())
                answer = {
                    "first_s": time.perf_counter() - began,
                    "token": token,
                    "hit": cache.hits[0],
                    "computed": cache.computed,
                }
                if command.get("keep"):
                    kept.append(cache)
                else:
                    cache.close()
                del cache
            else:
                while kept:
                    kept.pop().close()
                client.settle()
            print(json.dumps(answer), flush=True)
        while kept:
            kept.pop().close()
    return 0


def _held(socket: str) -> int:
    """Slots that hold something for somebody."""
    with Control(socket) as control:
        (found,) = control.inspect("pools")
        return int(found["private"] + found["leased"])


def _slot_bytes(socket: str) -> int:
    with Control(socket) as control:
        (found,) = control.inspect("pools")
        return int(found["slot_bytes"])


@contextmanager
def _holes(client: Client, tokens: int) -> Iterator[None]:
    """Makes what is admitted within scattered: all free room is in pieces of 30 to 60 slots."""
    namespace = client.open_namespace(Namespace("holes", "none"))
    pieces: list[Sequence] = []
    rng = random.Random(5)
    while True:
        answer = client.allocate(_tokens(rng.randrange(30, 60), len(pieces) + 7), namespace=namespace)
        if isinstance(answer, Later):
            client.withdraw(answer.ticket)
        if not isinstance(answer, Sequence):
            break
        pieces.append(answer)
    freed = 0
    for each in pieces[::2]:
        freed += each.length
        each.free()
        if freed > 2 * tokens:
            break
    client.settle()
    try:
        yield
    finally:
        for each in pieces:
            if not each.ended:
                each.free()
        client.settle()


def _slots(cache: PoolCache) -> Any:
    from kvslot.api.client import indices

    torch = importlib.import_module("torch")
    return torch.from_numpy(indices.slot_indices(cache.sequences[0])).long()


def _pretend(cache: PoolCache) -> None:
    """What was copied into a cache's slots counts as computed."""
    row_ = cache._rows[0]
    row_.written = row_.sequence.length
    cache._columns = cache._width
    cache._publish = False
    for layer in cache.layers:
        layer.length = cache._columns


class _Timed:
    """Time spent in methods, nested ones counted once."""

    def __init__(self, *methods: tuple[type, str]) -> None:
        self.seconds = 0.0
        self._old = [(owner, name, getattr(owner, name)) for owner, name in methods]
        self._within = False
        for owner, name, method in self._old:
            setattr(owner, name, self._wrapped(method))

    def _wrapped(self, method: Any) -> Any:
        clock = time.thread_time

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return method(*args, **kwargs)
            self._within = True
            began = clock()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += clock() - began
                self._within = False

        return timed

    def close(self) -> None:
        """Puts them back."""
        for owner, name, method in self._old:
            setattr(owner, name, method)


class _Gathering:
    """Time in gathers, by cache."""

    def __init__(self) -> None:
        self.name = ""
        self.seconds: dict[str, float] = {}
        self._owner: Any = importlib.import_module("kvslot.engines.hf.cache").PoolLayer
        self._method = method = self._owner._gathered
        clock = time.thread_time

        def timed(*args: Any) -> Any:
            began = clock()
            out = method(*args)
            self.seconds[self.name] = self.seconds.get(self.name, 0.0) + clock() - began
            return out

        self._owner._gathered = timed

    def close(self) -> None:
        """Puts the method back."""
        self._owner._gathered = self._method


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file to write the rows to (default: printed)")
    parser.add_argument("--quick", action="store_true", help="shorter contexts, two engines")
    parser.add_argument("--child", nargs=3, metavar=("SOCKET", "FOLDER", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(*options.child)
    try:
        rows = run(quick=options.quick, tell=lambda text: print(text, file=sys.stderr, flush=True))
    except models.ModelMissing as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        Path(options.json).write_text(json.dumps(rows))
    else:
        for each in rows:
            print(f"{each['name']:28} {each['value']:10.4g} {each['unit']:7} {each['what']}. {each['note']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
