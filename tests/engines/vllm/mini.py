"""An engine with vLLM's way of scheduling and none of its weight: planner and worker are the real ones.

Its blocks hold what a paint says: bytes made of the namespace, all tokens up to the block's last, and the layer.  So
a block that is foreign, stale, shifted or torn shows as soon as somebody looks, and the engine looks before every
forward.  Blocks are handed out last freed first, so that what is freed too early is overwritten soon.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvslot.api.client import Client, Namespace
from kvslot.engines.vllm.blocks import EngineBlocks, Placed
from kvslot.engines.vllm.link import Link
from kvslot.engines.vllm.messages import Orders
from kvslot.engines.vllm.planner import Planner
from kvslot.engines.vllm.region import Peers, Region, record_bytes, standing
from kvslot.engines.vllm.worker import RegionWorker, Worker

SIZE, LAYERS, WIDTH = 4, 3, 64
BLOCK_BYTES = LAYERS * WIDTH
POOL = {"blocks": 65, "block_size": SIZE, "opaque_block_bytes": BLOCK_BYTES}
DIRECTORY = {**POOL, "opaque_block_bytes": record_bytes(SIZE)}


@dataclass(eq=False)
class Request:
    """As much of vLLM's as the planner reads."""

    request_id: str
    all_token_ids: list[int]
    namespace: Namespace | str = field(default_factory=Namespace)
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    failed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def paint(namespace: object, tokens: list[int], layer: int) -> bytes:
    """A layer's block that ends with the last of `tokens`."""
    seed = hashlib.sha256(repr((namespace, tokens, layer)).encode()).digest()
    return (seed * (WIDTH // len(seed) + 1))[:WIDTH]


class Mini:
    """One engine process, without a process."""

    def __init__(
        self,
        socket: str,
        *,
        blocks: int = 40,
        asynchronous: bool = True,
        worker: Callable[[EngineBlocks], Worker] | None = None,
        check: Callable[[Client], None] = lambda client: None,
        clock: Callable[[], float] = time.monotonic,
        region: bool = False,
        **planner: Any,
    ) -> None:
        self.region = Region(LAYERS * blocks * WIDTH, blocks) if region else None
        self.peers = Peers()
        self.memory = self.region.memory if self.region else np.zeros(LAYERS * blocks * WIDTH, np.uint8)
        start = self.memory.ctypes.data
        layers = [Placed(start + i * blocks * WIDTH, blocks, WIDTH, WIDTH) for i in range(LAYERS)]
        engine = EngineBlocks([layers], {start: self.memory})
        if worker:
            self.worker = worker(engine)
        elif region:
            self.worker = RegionWorker(engine, self.region, asynchronous=asynchronous)
        else:
            self.worker = Worker(engine, asynchronous=asynchronous)
        if region:
            planner = {"valid": functools.partial(standing, self.peers), "writes": True, **planner}
        self.asynchronous = asynchronous
        self.link = Link(
            lambda: Client(socket, page=SIZE, append="chain", timeout=5.0), check, socket, clock=clock
        )
        self.planner = Planner(self.link, lambda request: request.namespace, SIZE, clock=clock, **planner)
        self.free = list(range(blocks - 1, 0, -1))  # block 0 is never handed out
        self.waiting: dict[str, Request] = {}  # for their loads
        self.held: dict[str, Request] = {}  # ended, and their load has not been reported

    def layer_bytes(self, layer: int, block: int) -> bytes:
        """What stands in a block."""
        return bytes(self.memory.reshape(LAYERS, -1, WIDTH)[layer, block])

    def take(self, request: Request, tokens: int) -> None:
        """Blocks for so many tokens."""
        while len(request.blocks) * SIZE < tokens:
            request.blocks.append(self.free.pop())

    def admit(self, request: Request, local: int = 0) -> int:
        """As the scheduler does it with a waiting request: what is to be loaded."""
        external = self.planner.matched(request, local)
        assert external % SIZE == 0
        assert local + external < request.num_tokens, "one token must be left to compute (S15)"
        self.take(request, request.num_tokens)
        self.planner.allocated(request, lambda: (request.blocks,), external)
        request.num_computed_tokens = request.cached = local + external
        if external and self.asynchronous:
            self.waiting[request.request_id] = request
        return external

    def step(self, scheduled: dict[Request, int] | None = None, finished: set[str] | None = None) -> Orders:
        """One step of the engine: `scheduled` requests compute so many tokens."""
        scheduled = scheduled or {}
        orders = self.order(scheduled)
        self.carry_out(orders, scheduled, finished)
        return orders

    def order(self, scheduled: dict[Request, int]) -> Orders:
        """The scheduler's half of a step; what the worker did before need not be known."""
        return self.planner.step(
            {each.request_id: count for each, count in scheduled.items()},
            {},
            lambda name: (next(each.blocks for each in scheduled if each.request_id == name),),
        )

    def carry_out(
        self, orders: Orders, scheduled: dict[Request, int], finished: set[str] | None = None
    ) -> None:
        """The worker's half, and its report."""
        self.worker.prepare(orders)
        if not self.asynchronous:
            self.worker.begin(orders)
        bad = set() if self.asynchronous else set(self.worker._results.bad_blocks)
        for request, count in scheduled.items():
            self.forward(request, count, bad)
        if self.asynchronous:
            self.worker.begin(orders)
        self.worker.end(orders)
        results = self.worker.results(finished or set(), idle=orders.idle)
        bad = self.worker.bad_blocks()
        # As vLLM does it, which may hear of bad blocks a step before it hears that their load has ended.
        for request in {**self.waiting, **{each.request_id: each for each in scheduled}}.values():
            for i, block in enumerate(request.blocks):
                if block in bad:
                    request.num_computed_tokens = min(request.num_computed_tokens, i * SIZE)
                    request.failed = True
        for name in results.received:
            if name in self.held:
                self.free += self.held.pop(name).blocks
            else:
                del self.waiting[name]
        report = self.worker.report()
        if report is not None:
            self.planner.report(report)

    def forward(self, request: Request, count: int, bad: set[int]) -> None:
        """Reads all blocks before, and writes those that the step completes."""
        first, end = request.num_computed_tokens, request.num_computed_tokens + count
        tokens = request.all_token_ids
        for i in range(first // SIZE):
            if request.blocks[i] in bad:
                return  # what is computed now is thrown away
            for layer in range(LAYERS):
                want = paint(request.namespace, tokens[: (i + 1) * SIZE], layer)
                assert self.layer_bytes(layer, request.blocks[i]) == want, (request, i, layer)
        view = self.memory.reshape(LAYERS, -1, WIDTH)
        for i in range(first // SIZE, end // SIZE):
            for layer in range(LAYERS):
                view[layer, request.blocks[i]] = np.frombuffer(
                    paint(request.namespace, tokens[: (i + 1) * SIZE], layer), np.uint8
                )
        request.num_computed_tokens = end

    def loaded(self, request: Request, steps: int = 2000) -> None:
        """Steps without work until the request's load has ended."""
        for _ in range(steps):
            if request.request_id not in self.waiting:
                return
            self.step()
        raise AssertionError("the load never ended")

    def finish(self, request: Request) -> None:
        """The request has ended or was aborted."""
        self.planner.finished(request)
        if self.waiting.pop(request.request_id, None) is not None:
            self.held[request.request_id] = request  # its blocks are being written
        else:
            self.free += request.blocks
        if self.held:
            self.step(finished={request.request_id})  # else vLLM makes no step when it has nothing to do

    def run(
        self,
        name: str,
        prompt: list[int],
        output: list[int] | None = None,
        *,
        namespace: Namespace | str | None = None,
        chunk: int = 10,
    ) -> Request:
        """A whole life of a request; `cached` of it says how many tokens were not computed."""
        request = Request(name, list(prompt), namespace if namespace is not None else Namespace())
        self.admit(request)
        self.loaded(request)
        while request.num_computed_tokens < request.num_tokens:
            self.step({request: min(chunk, request.num_tokens - request.num_computed_tokens)})
        for token in output or []:
            request.all_token_ids.append(token)
            self.take(request, request.num_tokens)
            self.step({request: 1})
        self.finish(request)
        return request

    def close(self) -> None:
        self.worker.close()
        self.planner.close()
        self.peers.close()
