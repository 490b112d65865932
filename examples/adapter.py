"""What an adapter does for an engine with a scheduler: batches of requests that come and go, a paged kernel, a device
that runs behind, memory that runs short, a daemon that comes and goes.  See docs/integrations/your-engine.md.

    kvslotd --demo --socket ./kvslot.sock &
    python examples/adapter.py --socket ./kvslot.sock --page 16 "Once upon a time" "Once upon a midnight dreary"

The device is a stand-in on the CPU, whose results are there one step after they were asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvslot import Client
from kvslot.api.client import Later, Namespace, Never, OutOfRoom, Sequence, indices
from kvslot.api.wire import Disconnected, StaleSession


class Model:
    """Attention with random weights, over pages: what a kernel library would do on a device."""

    def __init__(self, layers: int, heads: int, dim: int, seed: int = 0) -> None:
        rng, self.shape = np.random.default_rng(seed), (layers, heads, dim)
        self.embedding = rng.standard_normal((256, heads * dim)).astype(np.float32)
        self.weights = rng.standard_normal((layers, 3, heads * dim, heads * dim)).astype(np.float32) / (
            heads * dim
        )

    def fingerprint(self) -> str:
        """Of all that decides what K and V are: content, never a name."""
        content = hashlib.sha256(repr(self.shape).encode())
        content.update(self.embedding.tobytes() + self.weights.tobytes())
        return content.hexdigest()[:32]

    def forward(
        self,
        planes: list[Any],
        page: int,
        tokens: list[list[int]],
        mapping: Any,
        table: Any,
        lengths: list[int],
    ) -> list[int]:
        """The next token of each row.  `tokens`: new ones; `mapping`: their slots; `table`: pages of all of a row."""
        x = self.embedding[np.concatenate(tokens)]
        ends = np.cumsum([len(each) for each in tokens])
        for (keys, values), (wq, wk, wv) in zip(planes, self.weights, strict=True):
            _write(keys, mapping, x @ wk)
            _write(values, mapping, x @ wv)
            read = [(_pages(keys, page)[row], _pages(values, page)[row]) for row in table]
            out = []
            for (k, v), end, new, length in zip(read, ends, tokens, lengths, strict=True):
                q = x[end - len(new) : end] @ wq
                k, v = (_read(each).reshape(-1, q.shape[1])[:length] for each in (k, v))
                scores = q @ k.T / np.sqrt(q.shape[1])
                scores[np.triu(np.ones(scores.shape, dtype=bool), length - len(new) + 1)] = -np.inf
                shares = np.exp(scores - scores.max(axis=1, keepdims=True))
                out.append(shares / shares.sum(axis=1, keepdims=True) @ v)
            x = x + np.concatenate(out)
        return [int(np.argmax(self.embedding @ x[end - 1])) % 95 + 32 for end in ends]


def _write(plane: Any, slots: Any, states: Any) -> None:
    states = states.astype(np.float32).reshape(-1, *plane.shape[1:])
    plane[slots] = (
        states.view(np.uint32) >> 16 if plane.dtype == np.uint16 else states
    )  # bfloat16: the upper half


def _read(pages: Any) -> Any:
    return (pages.astype(np.uint32) << 16).view(np.float32) if pages.dtype == np.uint16 else pages


def _pages(plane: Any, page: int) -> Any:
    return plane.reshape(-1, page, *plane.shape[1:])


@dataclass
class Request:
    """One prompt on its way."""

    prompt: bytes
    wanted: int
    answer: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    ticket: int = 0
    computed: int = 0  # positions given to the device
    hits: int = 0


class Engine:
    """Admits, runs in batches, publishes, gives back.  A step's results are taken in at the next one."""

    def __init__(
        self,
        socket: str,
        *,
        page: int = 16,
        append: str = "",
        tenant: str = "",
        batch: int = 8,
        patience: float = 30.0,
    ) -> None:
        self.patience = patience  # seconds that the daemon may be away for
        self.socket, self.page, self.append, self.tenant, self.batch = socket, page, append, tenant, batch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.planes: list[Any] = []  # empty: not connected
        self.flying: tuple[int, list[Request], list[int]] | None = None  # step, its rows, what they will say
        self.restarts = 0
        self.connect()

    # [connect]
    def connect(self) -> None:
        """A session, in a namespace that only engines with the very same K and V use."""
        self.client = Client(self.socket, page=self.page, append=self.append)
        layers = [name[:-2] for name in self.client.pool.planes if name.endswith(".k")]
        first = self.client.pool.planes[f"{layers[0]}.k"]
        self.model = Model(len(layers), *first.shape)
        self.namespace = self.client.open_namespace(Namespace(self.tenant, self.model.fingerprint()))
        self.planes = [(self.client.pool.plane(f"{n}.k"), self.client.pool.plane(f"{n}.v")) for n in layers]

    # [end]

    def run(self, requests: list[Request]) -> None:
        """Until all have their answers, though the daemon goes meanwhile: if it is back within `patience` seconds."""
        self.waiting.extend(requests)
        while self.waiting or self.running or self.flying:
            try:
                self.admit()
                self.step()
            except Disconnected:
                self.recover()

    # [admit]
    def admit(self) -> None:
        """Takes in what there is room for, the oldest first; a ticket keeps its place in the queue."""
        while self.waiting and len(self.running) < self.batch:
            request = self.waiting[0]
            tokens = list(request.prompt) + request.answer  # one that was put back goes on where it was
            found = self.client.allocate(
                tokens, namespace=self.namespace, ticket=request.ticket, wait_for_commit=True
            )
            if isinstance(found, Later):
                request.ticket = found.ticket
                if not self.running and not self.flying:
                    # Nothing else to do: until Ready, or a while.
                    self.client.events(found.retry_after_ms / 1e3)
                return
            if isinstance(found, Never):
                raise MemoryError(f"{len(tokens)} tokens never fit: there are {found.limit} slots")
            request.sequence, request.ticket, request.computed = found, 0, found.hit
            request.hits += found.hit
            self.running.append(self.waiting.popleft())

    # [end]

    # [step]
    def step(self) -> None:
        """Hands the next step to the device, and takes in what the one before has come to."""
        self.take_in()
        for request in [each for each in self.running if each.sequence and each.sequence.preempt_by]:
            self.put_back(request)  # the daemon needs its memory
        if not self.running:
            return
        number = self.client.submit()  # from here on nothing that this step reads is given to others
        rows: list[tuple[Request, Sequence, list[int]]] = []
        for request in list(self.running):
            sequence = request.sequence
            assert sequence is not None
            tokens = list(request.prompt) + request.answer
            try:
                if sequence.length < len(tokens):
                    sequence.append_all(tokens[sequence.length :])
            except OutOfRoom:
                self.put_back(request)
                continue
            rows.append((request, sequence, tokens[request.computed :]))
        said: list[int] = []
        if rows:
            self.client.pool.copy(
                self.client.take_copies()
            )  # on the device's stream, before it reads or writes
            sequences = [sequence for _, sequence, _ in rows]
            mapping = indices.slot_mapping(sequences, [len(new) for _, _, new in rows])
            table = indices.block_table(sequences, self.page)
            lengths = [sequence.length for sequence in sequences]
            said = self.model.forward(
                self.planes, self.page, [new for _, _, new in rows], mapping, table, lengths
            )
        self.flying = number, [request for request, _, _ in rows], said

    def take_in(self) -> None:
        """The device has ended its step: what it wrote may be published, what it read may be given back."""
        if self.flying is None:
            return
        (number, rows, said), self.flying = self.flying, None
        self.client.complete(number)
        for request, token in zip(rows, said, strict=True):
            sequence = request.sequence
            if sequence is None:
                continue  # it was put back meanwhile
            first = request.computed < len(request.prompt)
            request.computed = sequence.length
            request.answer.append(token)
            if len(request.answer) == request.wanted:
                sequence.commit(wait=False)
                sequence.free()
                request.sequence = None
                self.running.remove(request)
            elif first:
                sequence.commit(wait=False)  # others may begin with this prompt from now on
        self.client.flush()

    # [end]

    def put_back(self, request: Request) -> None:
        """Its memory goes back; it is started over from what it has said, most of which may still be cached."""
        if request.sequence is not None:
            request.sequence.commit(request.computed, wait=False)
            request.sequence.free()
            request.sequence = None
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.restarts += 1

    # [recover]
    def recover(self) -> None:
        """The connection has ended.  The same daemon has kept everything; another one has nothing of ours."""
        end, pause = time.monotonic() + self.patience, 0.01
        while True:
            try:
                if self.planes:
                    self.client.reconnect()
                else:
                    self.connect()
                break
            except StaleSession:
                self.flying, self.planes = None, []
                self.client.close()  # no view of its memory is left
            except Disconnected:  # it is down, and may be back in a moment
                if not self.planes:
                    self.client.close()
                if time.monotonic() > end:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
        for request in [each for each in self.running if each.sequence is None or each.sequence.ended]:
            request.sequence = None
            self.running.remove(request)
            self.waiting.appendleft(request)
        for request in self.waiting:
            request.ticket = 0

    # [end]

    def close(self) -> None:
        """Ends the session; no view of the pool may be left."""
        self.planes = []
        self.client.close()


def main() -> None:
    """Answers all prompts, in batches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--socket", default="", help="of kvslotd (default: the usual place)")
    parser.add_argument("--page", type=int, default=16, help="slots of the kernel's pages (16)")
    parser.add_argument("--tokens", type=int, default=16, help="to generate (16)")
    arguments = parser.parse_args()
    engine = Engine(arguments.socket, page=arguments.page)
    requests = [Request(prompt.encode(), arguments.tokens) for prompt in arguments.prompts]
    engine.run(requests)
    for request in requests:
        print(
            f"{request.prompt.decode()!r}: {bytes(request.answer).decode()!r} ({request.hits} tokens were cached)"
        )
    engine.close()


if __name__ == "__main__":
    main()
