"""An engine in sixty lines of code: a toy model whose K and V live in a kvslot pool, read and written in place.

    kvslotd --demo --socket ./kvslot.sock &
    python examples/engine.py --socket ./kvslot.sock "Once upon a time" "Once upon a midnight dreary"

The second prompt finds its beginning there already, and so does the whole of both when it is run again.
"""

import argparse
from typing import Any

import numpy as np

from kvslot import Client
from kvslot.api.client import Namespace, Sequence, indices


class Model:
    """Attention with random weights: no wisdom, but every byte of K and V that it reads decides what it says."""

    def __init__(self, client: Client) -> None:
        layers = [name[:-2] for name in client.pool.planes if name.endswith(".k")]
        self.planes = [(client.pool.plane(f"{each}.k"), client.pool.plane(f"{each}.v")) for each in layers]
        width, rng = self.planes[0][0][0].size, np.random.default_rng(0)  # a plane is (slots, heads, dim)
        self.embedding = rng.standard_normal((256, width))
        self.weights = rng.standard_normal((len(layers), 3, width, width)) / np.sqrt(width)

    def next(self, sequence: Sequence, tokens: list[int], start: int) -> int:
        """The token that follows; computes positions from `start` on, and reads those before from their slots."""
        slots = indices.slot_indices(sequence)
        x = self.embedding[tokens[start:]]
        for (keys, values), (wq, wk, wv) in zip(self.planes, self.weights, strict=True):
            keys[slots[start:]] = encoded(x @ wk, keys)
            values[slots[start:]] = encoded(x @ wv, values)
            scores = 4 * x @ wq @ decoded(keys[slots]).T / np.sqrt(x.shape[1])
            scores[np.triu(np.ones(scores.shape, dtype=bool), start + 1)] = -np.inf
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            read = shares / shares.sum(axis=1, keepdims=True) @ decoded(values[slots])
            x = np.tanh(3 * (x + read))  # steep, so that what was read outweighs what was there
        return int(np.argmax(self.embedding @ x[-1])) % 95 + 32


def encoded(x: Any, plane: Any) -> Any:
    """`x` as the plane holds it; bfloat16, which numpy lacks, is the upper half of a float32."""
    x = x.astype(np.float32).reshape(-1, *plane.shape[1:])
    return x.view(np.uint32) >> 16 if plane.dtype == np.uint16 else x


def decoded(rows: Any) -> Any:
    """What `encoded` made, as numbers, a row for each token."""
    rows = (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows
    return rows.reshape(len(rows), -1).astype(np.float64)


def generate(client: Client, model: Model, prompt: bytes, count: int) -> tuple[bytes, int]:
    """What the model says to the prompt, and how many tokens of that had not to be computed."""
    tokens = list(prompt)
    sequence = client.admit(tokens, wait_for_commit=True)
    for step in range(count):
        with client.step():
            if step:
                sequence.append(tokens[-1])
            client.pool.copy(client.take_copies())  # what is shared in part is copied before it is written on
            tokens.append(model.next(sequence, tokens, len(tokens) - 1 if step else sequence.hit))
    sequence.commit(wait=False)
    sequence.free()
    return bytes(tokens[len(prompt) :]), sequence.hit


def main() -> None:
    """Generates for each prompt in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--socket", default="", help="of kvslotd (default: the usual place)")
    parser.add_argument("--tenant", default="", help="whose cache to use")
    parser.add_argument("--tokens", type=int, default=16, help="to generate (16)")
    arguments = parser.parse_args()
    with Client(arguments.socket, namespace=Namespace(arguments.tenant)) as client:
        model = Model(client)
        for prompt in arguments.prompts:
            text, hit = generate(client, model, prompt.encode(), arguments.tokens)
            print(f"{prompt!r}: {text.decode()!r} ({hit} of {len(prompt.encode())} tokens were cached)")
        del model  # its views of the pool, which must be gone before the client is closed


if __name__ == "__main__":
    main()
