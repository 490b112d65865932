"""An engine process of a recorded load: chats in two namespaces, and writes down what it asked and got.

    python -I engine.py SOCKET NUMBER OUT

It opens with the prompt that all chats share, so that whoever comes later finds it; then says so on standard output,
and goes on when a line comes on standard input.  OUT gets a JSON list of requests in order.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from kvslot import Client
from kvslot.api.client import Namespace
from kvslot.api.client.sequence import Sequence

SALT = "sea-salt-and-pepper"
TENANTS = ("acme-incorporated", "globex-limited")
FIRST_TOKEN = 1_700_000_000
"""Ids that no other number of a trace looks like."""


def ids(source: random.Random, count: int) -> list[int]:
    return [FIRST_TOKEN + source.randrange(1 << 20) for _ in range(count)]


def system(tenant: str) -> list[int]:
    """The prompt that all chats of a tenant begin with; the tenants' have their first 40 tokens in common."""
    return ids(random.Random(0), 40) + ids(random.Random(tenant), 63)


def main(socket: str, number: int, out: str) -> None:
    done: list[dict[str, Any]] = []
    draw = random.Random(number)

    def ask(client: Client, tenant: str, prompt: list[int], output: list[int], told: int) -> None:
        """One request; the last `len(output) - told` tokens of its output are never told."""
        space = Namespace(tenant, "model", "", SALT)
        got = client.allocate(prompt, namespace=space)
        assert isinstance(got, Sequence), got
        got.commit()
        half = told // 2
        got.append_all(output[:half])
        got.commit()
        if draw.random() < 0.4:  # a draft that is rolled back
            got.append_all(ids(draw, 5))
            got.commit()
            got.trim(keep_to=len(prompt) + half)
        got.append_all(output[half:told])
        got.commit()
        got.free()
        done.append({"tenant": tenant, "prompt": prompt, "output": output[:told], "hit": got.hit})

    with Client(
        socket, name=f"engine-{number}", namespace=Namespace(TENANTS[0], "model", "", SALT)
    ) as client:
        if number == 0:
            for tenant in TENANTS:
                ask(client, tenant, system(tenant), ids(draw, 3), 3)
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(4):
            tenant = draw.choice(TENANTS)
            history = system(tenant)[: draw.choice((50, 103))]
            for _ in range(draw.randrange(1, 5)):
                history = history + ids(draw, draw.randrange(1, 30))
                output = ids(draw, draw.randrange(2, 40))
                ask(client, tenant, history, output, draw.choice((len(output), len(output) // 2)))
                history = history + output
    Path(out).write_text(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
