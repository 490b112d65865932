"""Engines killed at random moments while another generates: what the other says must not change by it.

The living engine and its victims draw from the same prompts, which share beginnings, so that it reads what they wrote,
waits for what they compute, and is in their way for memory; the pool holds a part of all prompts.  Whatever is
published by one that dies must be whole, and whatever it held must come back.  Words alone would not tell: K and V that
are found are compared with those of the model, too.
"""

from __future__ import annotations

import importlib
import random
import time
from dataclasses import dataclass, field
from typing import Any

from ..tools import Worker, check_pool, engine, pooled, sound, tiny, tokens

NEW = 24
STEMS = 5
LEAVES = 6


@dataclass
class Report:
    """What came of it."""

    killed: int = 0
    generations: int = 0
    hits: int = 0
    computed: int = 0
    checked: int = 0  # tokens whose K and V in the pool were compared
    wrong: list[str] = field(default_factory=list)


def prompts(seed: int) -> list[list[int]]:
    """Beginnings of 60 to 200 tokens, each with several ends of 5 to 60."""
    rng = random.Random(seed)
    out = []
    for stem in range(STEMS):
        begin = tokens(rng.randrange(60, 200), 1000 * seed + stem).tolist()[0]
        for leaf in range(LEAVES):
            end = tokens(rng.randrange(5, 60), 1000 * seed + 10 * stem + leaf + 500).tolist()[0]
            out.append(begin + end)
    return out


def kills(count: int, *, seed: int = 1, append: str = "chain", tell: Any = None) -> Report:
    """Kills `count` engines; raises where the pool is not sound at the end."""
    torch = importlib.import_module("torch")
    rng = random.Random(seed)
    model = tiny()
    asked = prompts(seed)
    want = {
        tuple(ids): model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[
            0, len(ids) :
        ].tolist()
        for ids in asked
    }
    report = Report()
    # A tenth to a third of what all prompts and answers take.
    with (
        pooled(model, append=append, blocks=85) as daemon,
        Worker(daemon.socket) as living,
        engine(daemon, model) as client,
    ):

        def look(ids: list[int], when: str) -> None:
            try:
                report.checked += check_pool(client, model, torch.tensor([[*ids, *want[tuple(ids)]]]))
            except AssertionError as error:
                report.wrong.append(f"{when} of seed {seed}: {error}")

        living.do("ready")
        victims = [Worker(daemon.socket)]
        for number in range(count):
            victim = victims.pop()
            victims.append(Worker(daemon.socket))  # the next one gets ready meanwhile
            victim.do("ready")
            mine, theirs = rng.choice(asked), rng.choice(asked)
            if rng.random() < 0.3:
                theirs = mine  # at the same moment
            options: dict[str, Any] = {
                "mode": rng.choice(["gather", "write_through"]),
                "wait_for_commit": rng.random() < 0.5,
                "prefill_chunk_size": rng.choice([None, 16, 50]),
            }
            if rng.random() < 0.2:
                options |= {"num_beams": 3, "prefill_chunk_size": None}
            victim.start(
                "generate",
                ids=[theirs],
                new=60,
                pause=0.005,
                hold=rng.choice([0, 0, 0.05]),
                timeout=5.0,
                **options,
            )
            time.sleep(rng.random() * 0.2)
            living.start(
                "generate", ids=[mine], new=NEW, pause=0.002, mode=rng.choice(["gather", "write_through"]),
                wait_for_commit=rng.random() < 0.5, timeout=60.0,
            )  # fmt: skip
            time.sleep(rng.random() ** 2 * 0.6)
            victim.kill()
            report.killed += 1
            said = living.result(120)
            report.generations += 1
            report.hits += sum(said["hits"])
            report.computed += said["computed"]
            if said["tokens"] != [want[tuple(mine)]]:
                report.wrong.append(
                    f"kill {number} of seed {seed}: {len(mine)} tokens with {said['hits']} hit"
                )
            look(mine, f"kill {number}")
            look(theirs, f"kill {number}")
            if tell is not None:
                tell(report)
        for ids in asked:  # what is cached now, whoever computed it
            said = living.do("generate", ids=[ids], new=NEW)
            report.hits += sum(said["hits"])
            if said["tokens"] != [want[tuple(ids)]]:
                report.wrong.append(
                    f"after all kills of seed {seed}: {len(ids)} tokens with {said['hits']} hit"
                )
            look(ids, "after all kills")
        for each in victims:
            each.close()
        living.close()
        sound(daemon)
    return report
