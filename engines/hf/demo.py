"""`make demo`: engines that share one pool, in a terminal.

    first      answers a question under a long system prompt, which it has to compute
    second     answers another question under the same one, which it finds; in the middle of it the first is killed
    third      starts when the others have ended, and finds the prompt still there

Each is a process of its own with transformers and a real model; a `kvslotd` that is started for this owns the pool.
The parent only asks questions and shows what comes: a line of JSON for each thing that happens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

DESCRIPTION: Final = (
    "Engines that share one pool: what one has computed the others find, and each survives the other."
)

SYSTEM: Final = """\
You are the guide of a planetarium. You answer the questions of visitors in one or two short sentences. These are \
your notes.

The Sun is a star. It holds more than 99 percent of the mass of the solar system. Light takes about eight \
minutes and twenty seconds from the Sun to the Earth. Its surface has a temperature of about 5,500 degrees \
Celsius, its core of about 15 million. It is about 4.6 billion years old, and turns hydrogen into helium.
Mercury is the smallest planet and the nearest to the Sun. A year on Mercury is 88 days long. It has no moon \
and almost no atmosphere, so that days are hot, up to 430 degrees Celsius, and nights are cold, down to \
minus 180.
Venus is about as large as the Earth. Its dense atmosphere of carbon dioxide makes it the hottest planet, \
with about 465 degrees Celsius at the surface. It turns backwards, and a day there is longer than a year. It \
has no moon.
The Earth is the third planet. Water covers 71 percent of its surface. It has one moon. Its axis is tilted \
by 23.4 degrees, which is why there are seasons.
The Moon is about 384,000 kilometres from the Earth and always shows it the same side. It has a quarter of \
the Earth's diameter. People landed on it first in 1969. It causes most of the tides.
Mars is called the red planet because of iron oxide, which is rust, in its dust. It has two small moons, \
Phobos and Deimos. Its volcano Olympus Mons, 22 kilometres high, is the highest known in the solar system. A \
day on Mars is 24 hours and 37 minutes long.
Jupiter is the largest planet, with more than twice the mass of all others together. Its Great Red Spot is a \
storm larger than the Earth. It has four large moons, Io, Europa, Ganymede and Callisto, and many small \
ones. It turns once in less than ten hours.
Saturn has the brightest rings. They are made of ice and rock, and are less than a kilometre thick in most \
places. Its largest moon, Titan, has a dense atmosphere and lakes of methane. Saturn is less dense than \
water.
Uranus lies on its side: its axis is tilted by 98 degrees. It was found in 1781, with a telescope. It is an \
ice giant, and looks pale blue because of methane.
Neptune is the planet farthest from the Sun. It takes 165 years to go round it once. Its winds are the \
fastest of all planets, up to 2,100 kilometres an hour. Its place was calculated before it was seen, in \
1846.
Pluto was counted as a planet until 2006 and is called a dwarf planet now. It is smaller than the Moon. \
Between Mars and Jupiter lie the asteroids; the largest of them, Ceres, is a dwarf planet too. Comets are \
bodies of ice and dust; near the Sun they grow tails that always point away from it.
The nearest star beyond the Sun is Proxima Centauri, 4.2 light years away. Our galaxy, the Milky Way, has \
more than 100 billion stars. A light year is the way that light goes in a year, about 9.5 trillion \
kilometres."""

QUESTIONS: Final = {
    "first": ("When did people first land on the Moon?", "What are the rings of Saturn made of?"),
    "second": ("Why are there seasons on Earth?",),
    "third": ("What causes the tides?",),
}
ANSWER_TOKENS: Final = 48
KILL_AFTER: Final = 10
"""Tokens of the first engine's second answer."""
POOL_TOKENS: Final = 16_384
START_S: Final = 180.0
"""For a model to be loaded on a busy machine."""


# -- an engine --------------------------------------------------------------------------------------------------------


def engine(socket: str, folder: str, name: str) -> int:
    """Answers questions that come as lines, and says as lines of JSON what happens."""
    import torch  # pyright: ignore[reportMissingImports] - an extra
    from transformers import (  # pyright: ignore[reportMissingImports] - an extra
        AutoModelForCausalLM,
        AutoTokenizer,
    )

    from kvslot import Client
    from kvslot.engines import fingerprint
    from kvslot.engines.hf import PoolCache

    def say(event: str, **values: object) -> None:
        print(json.dumps({"event": event, **values}), flush=True)

    torch.set_num_threads(1)  # several engines share the processors
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    class Told:
        """What `generate` calls a streamer: it is given the prompt, then each token."""

        def __init__(self) -> None:
            self.ids: list[int] | None = None
            self.shown = ""

        def put(self, value: Any) -> None:
            """The prompt, then one token at a time."""
            ids = self.ids
            if ids is None:
                self.ids = []
                return
            ids += value.reshape(-1).tolist()
            text = tokenizer.decode(ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # half a character: the next token has the rest
                say("text", text=text[len(self.shown) :], tokens=len(ids))
                self.shown = text

        def end(self) -> None:
            """All is said."""

    with Client(socket, name=name, namespace=fingerprint.namespace(model), movable=True) as client:
        say("ready")
        for question in sys.stdin:
            talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.strip()}]
            asked = tokenizer.apply_chat_template(
                talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = asked["input_ids"]
            with torch.inference_mode(), PoolCache(client, model, ids, mode="write_through") as cache:
                say("admitted", prompt=ids.shape[1], hit=cache.hits[0])
                model.generate(
                    ids, attention_mask=asked["attention_mask"], cache=cache, streamer=Told(), do_sample=False,
                    max_new_tokens=ANSWER_TOKENS,
                )  # fmt: skip
            say("done")
    return 0


# -- the parent -------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """One question to one engine."""

    question: str
    asked: float
    prompt: int = 0
    hit: int = 0
    first_s: float = 0.0
    text: str = ""
    tokens: int = 0
    state: str = "computing"


@dataclass
class Engine:
    """A process, and what it has said."""

    name: str
    process: subprocess.Popen[str]
    answers: list[Answer] = field(default_factory=list)
    ready: bool = False
    ended: str = ""

    def ask(self, question: str) -> None:
        """Asks; the answer comes by events."""
        assert self.process.stdin is not None
        self.answers.append(Answer(question, time.monotonic()))
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()

    @property
    def busy(self) -> bool:
        """Whether it owes an answer."""
        return bool(self.answers) and self.answers[-1].state not in ("done", "killed")


class Demo:
    """The engines of one run, and the screen."""

    def __init__(self, socket: str, folder: str, log: IO[str]) -> None:
        self.socket = socket
        self.folder = folder
        self.engines: dict[str, Engine] = {}
        self.lines: list[str] = []
        self._log = log
        self._events: queue.Queue[tuple[Engine, dict[str, Any]]] = queue.Queue()
        self._screen: Any = None

    def start(self, name: str) -> Engine:
        """Starts an engine; it loads its model meanwhile."""
        words = [sys.executable, "-Im", "kvslot.engines.hf.demo", "--engine", name]
        words += ["--socket", self.socket, "--model", self.folder]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        made = self.engines[name] = Engine(name, process)
        threading.Thread(target=self._listen, args=(made,), daemon=True).start()
        return made

    def _listen(self, one: Engine) -> None:
        assert one.process.stdout is not None
        for line in one.process.stdout:
            with contextlib.suppress(ValueError):
                self._events.put((one, json.loads(line)))
        self._events.put((one, {"event": "ended"}))

    def until(self, done: Any, what: str) -> None:
        """Takes in what the engines say until `done()`."""
        end = time.monotonic() + START_S
        while not done():
            try:
                one, event = self._events.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise DemoFailed(f"nothing has come for {START_S:.0f} s while waiting until {what}") from None
            self._take(one, event)
            self.show()

    def _take(self, one: Engine, event: dict[str, Any]) -> None:
        answer = one.answers[-1] if one.answers else None
        match event["event"]:
            case "ready":
                one.ready = True
            case "ended":
                one.ended = one.ended or "ended"
                if one.busy and answer is not None:
                    answer.state = "killed"
                    if one.ended != "killed":
                        raise DemoFailed(f"the {one.name} engine has ended by itself")
                elif not one.ready:
                    raise DemoFailed(f"the {one.name} engine could not start")
            case "admitted" if answer is not None:
                answer.prompt, answer.hit = event["prompt"], event["hit"]
            case "text" if answer is not None:
                if not answer.tokens:
                    answer.first_s = time.monotonic() - answer.asked
                    answer.state = "answering"
                answer.text += event["text"]
                answer.tokens = event["tokens"]
            case "done" if answer is not None:
                answer.state = "done"
                self.plain(one, answer)

    def plain(self, one: Engine, answer: Answer) -> None:
        """On what is no terminal, a line for each answer."""
        if self._screen is None:
            print(
                f"{one.name:7} {_status(answer)}\n        {answer.question}\n        {answer.text.strip()}",
                flush=True,
            )

    def tell(self, line: str) -> None:
        """A line of the story."""
        self.lines.append(line)
        if self._screen is None:
            print(f"-- {line}", flush=True)
        self.show()

    @contextlib.contextmanager
    def screen(self) -> Iterator[None]:
        """Shows all of it while it happens, where there is a terminal."""
        from rich.console import Console
        from rich.live import Live

        console = Console(highlight=False)
        if not console.is_terminal:
            yield
            return
        with Live(console=console, refresh_per_second=12, vertical_overflow="visible") as live:
            self._screen = live
            self.show()
            yield
            self.show()

    def show(self) -> None:
        """The screen as things stand."""
        if self._screen is None:
            return
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        parts: list[Any] = [Text(f"· {line}", style="bold") for line in self.lines]
        for one in self.engines.values():
            body = Text()
            for answer in one.answers:
                body.append(f"{answer.question}\n", style="cyan")
                body.append(f"{answer.text.strip()}\n")
                body.append(f"{_status(answer)}\n", style="red" if answer.state == "killed" else "green")
            if not one.answers:
                body.append("ready\n" if one.ready else "loading the model ...\n", style="dim")
            border = "red" if one.ended == "killed" else "blue"
            parts.append(
                Panel(body, title=f"{one.name} engine, process {one.process.pid}", border_style=border)
            )
        self._screen.update(Group(*parts))

    def kill(self, one: Engine) -> None:
        """As the kernel would for want of memory: without a word."""
        one.ended = "killed"
        one.process.send_signal(signal.SIGKILL)
        one.process.wait()

    def close(self) -> None:
        """Ends all engines."""
        for one in self.engines.values():
            if one.process.poll() is None:
                assert one.process.stdin is not None
                one.process.stdin.close()
                try:
                    one.process.wait(10)
                except subprocess.TimeoutExpired:
                    one.process.kill()
                    one.process.wait()


class DemoFailed(Exception):
    """Something did not go as it should; the message says what."""


def _status(answer: Answer) -> str:
    if not answer.prompt:
        return "asked"
    found = f"{answer.hit:,} of {answer.prompt:,} prompt tokens found"
    if answer.state == "computing":
        return f"{found}, computing {answer.prompt - answer.hit:,} ..."
    words = f"{found}; first token after {answer.first_s:.2f} s; {answer.tokens} tokens"
    return f"{words}, killed" if answer.state == "killed" else words


def configuration(socket: Path, folder: str) -> str:
    """The daemon's: one pool laid out for the model."""
    return "\n".join(
        [
            f'socket = "{socket}"',
            'log_format = "json"',
            "[[pool]]",
            'name = "demo"',
            f'model_config = "{folder}/config.json"',
            'dtype = "float32"',
            f"blocks = {POOL_TOKENS // 16 + 1}",
            "block_size = 16",
            "",
        ]
    )


def play(demo: Demo) -> None:
    """The story."""
    from kvslot.api.client import Control

    first, second = demo.start("first"), demo.start("second")
    demo.tell("One daemon, one pool. Two engines load the same model.")
    demo.until(lambda: first.ready and second.ready, "the engines are ready")
    demo.tell("The first has to compute the system prompt.")
    first.ask(QUESTIONS["first"][0])
    demo.until(lambda: not first.busy, "the first has answered")
    demo.tell(
        "The second is asked something else under the same system prompt. It computes only the question."
    )
    first.ask(QUESTIONS["first"][1])
    second.ask(QUESTIONS["second"][0])
    demo.until(
        lambda: first.answers[-1].tokens >= KILL_AFTER and second.answers[-1].tokens > 0, "both are answering"
    )
    demo.kill(first)
    demo.tell("The first was killed with -9 in the middle of its answer. The second goes on.")
    demo.until(lambda: not second.busy, "the second has answered")
    demo.tell("A third engine starts, and starts warm.")
    third = demo.start("third")
    demo.until(lambda: third.ready, "the third is ready")
    third.ask(QUESTIONS["third"][0])
    demo.until(lambda: not third.busy, "the third has answered")
    with Control(demo.socket) as control:
        faults = control.audit().faults
    cold, warm = first.answers[0], second.answers[0]
    demo.tell(
        f"Audit of the pool: {'; '.join(faults) if faults else 'sound'}. Time to first token: {cold.first_s:.2f} s "
        f"cold, {warm.first_s:.2f} s in the second engine, {third.answers[0].first_s:.2f} s in the third."
    )
    if faults or not warm.hit or not third.answers[0].hit:
        raise DemoFailed("the second and the third should have found what the first computed")


def run(folder: str) -> int:
    """A daemon, the engines and the story; the exit code."""
    with tempfile.TemporaryDirectory(prefix="kvslot-") as name:
        place = Path(name)
        socket, toml, log = place / "kvslot.sock", place / "kvslotd.toml", place / "log.txt"
        toml.write_text(configuration(socket, folder), encoding="utf-8")
        with log.open("w", encoding="utf-8") as out:
            daemon = subprocess.Popen(
                [sys.executable, "-Im", "kvslot.daemon", "--config", str(toml)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
            demo = Demo(str(socket), folder, out)
            try:
                _wait_for(socket, daemon)
                with demo.screen():
                    play(demo)
                return 0
            except DemoFailed as failed:
                print(f"demo: {failed}\n{log.read_text(encoding='utf-8')[-2000:]}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                return 130
            finally:
                demo.close()
                daemon.terminate()
                daemon.wait()


def _wait_for(socket: Path, daemon: subprocess.Popen[bytes]) -> None:
    from kvslot.api.client import Control
    from kvslot.api.wire import Disconnected

    end = time.monotonic() + 60
    while True:
        try:
            Control(str(socket)).close()
            return
        except Disconnected:
            if daemon.poll() is not None or time.monotonic() > end:
                raise DemoFailed("the daemon did not start") from None
            time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m kvslot.engines.hf.demo", description=DESCRIPTION,
        epilog="example: make demo, which installs what this needs and fetches the model once",
    )  # fmt: skip
    parser.add_argument(
        "--model", default="", metavar="DIR", help="a model folder (SmolLM2-135M-Instruct, fetched once)"
    )
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--socket", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.engine:
        return engine(arguments.socket, arguments.model, arguments.engine)
    folder = arguments.model
    if not folder:
        from kvslot.engines.hf.model import ModelMissing, smollm2

        try:
            folder = str(smollm2(lambda words: print(words, file=sys.stderr, flush=True)))
        except ModelMissing as missing:
            print(f"demo: {missing}", file=sys.stderr)
            return 3
    return run(folder)


if __name__ == "__main__":
    sys.exit(main())
