"""Real dialogues, many turns each, on a pool of a tenth of what they need together: every answer as without kvslot.

Two engines in processes of their own take turns at them: in each round every dialogue that is still going on has one
turn, by an engine drawn at random, so that one engine's history is the other's hit, if eviction has left it.  All share
a beginning (the tools of an airline's agent), some turns ask for two beams or speculate.  When one has ended, K and V
of what is still cached of it are compared with those of the model.  The engine that answers
without kvslot is a third process; it makes the answers that both must give.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..tools import Worker, counts, pooled, sound, tiny

TEXT = Path(__file__).parents[1] / "text"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "beams": {"num_beams": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@dataclass
class Report:
    """What came of it."""

    dialogues: int = 0
    turns: int = 0
    tokens: int = 0
    hits: int = 0
    evicted: int = 0
    checked: int = 0  # tokens whose K and V in the pool were compared
    wrong: list[str] = field(default_factory=list)


class Speaker:
    """How a model's prompts are made of words."""

    def __init__(self, model: str, preamble: int) -> None:
        tools = (TEXT / "tau_airline_tools.json").read_text()
        self.tokenizer: Any = None
        if model == "tiny":
            self.begin = _bytes(f"Tools: {tools}"[:preamble])
        else:
            from ..tools import smollm2

            self.tokenizer = smollm2()[1]
            self.begin = self.tokenizer.encode(f"<|im_start|>system\nTools: {tools}")[:preamble]

    def turn(self, words: str, limit: int) -> list[int]:
        """What a user says, and the beginning of the answer."""
        if self.tokenizer is None:
            return [*_bytes(f"\nU: {words}")[:limit], *_bytes("\nB: ")]
        said = self.tokenizer.encode(f"<|im_end|>\n<|im_start|>user\n{words}")[:limit]
        end: list[int] = self.tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")
        return [*said, *end]


def _bytes(text: str) -> list[int]:
    return [max(each, 1) for each in text.encode("ascii", "replace")]


def dialogues(
    count: int,
    *,
    model: str = "tiny",
    append: str = "chain",
    seed: int = 1,
    new: int = 24,
    preamble: int = 600,
    limit: int = 200,
    share: float = 0.1,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Holds `count` dialogues; raises where the pool is not sound at the end.

    `new`: tokens of each answer.  `preamble`, `limit`: tokens of the common beginning, and of each user's turn at most.
    `share`: of all tokens that the pool has room for.
    """
    rng = random.Random(seed)
    with gzip.open(TEXT / "mtbench101_sample.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    chosen = [[turn["user"] for turn in row["history"]] for row in rng.sample(rows, count)]
    speaker = Speaker(model, preamble)
    turns = [[speaker.turn(words, limit) for words in each] for each in chosen]
    need = sum(preamble + sum(len(turn) + new for turn in each) for each in turns)
    longest = max(preamble + sum(len(turn) + new for turn in each) for each in turns)
    # Two beams of the longest, or a tenth of all, whichever is more.
    slots = max(int(share * need), longest + 4 * new + 200)
    arguments = {"name": model} if model != "tiny" else {}
    shape: Any = tiny() if model == "tiny" else _smollm2()
    report = Report(count)
    with (
        pooled(shape, append=append, blocks=slots // 16 + 2) as daemon,
        Worker(daemon.socket, arguments) as one,
        Worker(daemon.socket, arguments) as two,
        Worker(daemon.socket, arguments) as plain,
    ):
        del shape
        going = [(number, list(speaker.begin), each) for number, each in enumerate(turns)]
        while going:
            rng.shuffle(going)
            for number, history, left in going:
                history += left.pop(0)
                kind = rng.choice(["plain", "plain", "plain", "beams", "lookup"])
                more: dict[str, Any] = {
                    "beams": {"num_beams": 2},
                    "lookup": {"prompt_lookup_num_tokens": 3},
                }.get(kind, {})
                plain.start("alone", ids=[history], new=new, **(more if kind == "beams" else {}))
                said = rng.choice([one, two]).do(
                    "generate", ids=[history], new=new, mode=rng.choice(["gather", "write_through"]), **more
                )
                (want,) = plain.result()
                report.turns += 1
                report.tokens += len(history)
                report.hits += sum(said["hits"])
                if said["tokens"] != [want]:
                    report.wrong.append(
                        f"dialogue {number} of seed {seed}, {len(history)} tokens with {said['hits']} hit, {kind}"
                    )
                history += want
                if not left:
                    try:
                        report.checked += plain.do("check", ids=history)
                    except RuntimeError as error:
                        report.wrong.append(f"dialogue {number} of seed {seed}: {error}")
                if tell is not None:
                    tell(
                        f"{report.turns} turns, {report.hits} of {report.tokens} tokens hit, {len(report.wrong)} wrong"
                    )
            going = [each for each in going if each[2]]
        report.evicted = counts(daemon)["evicted_tokens"]
        for each in (one, two, plain):
            each.close()
        sound(daemon)
    return report


def _smollm2() -> Any:
    from transformers import AutoConfig  # pyright: ignore[reportMissingImports] - an extra

    from kvslot.engines.hf import model

    folder = model.cached()
    assert folder is not None
    return AutoConfig.from_pretrained(folder, local_files_only=True)
