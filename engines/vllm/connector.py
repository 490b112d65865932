"""The connector that vLLM loads: hands its calls to `Planner` (scheduler's side) and `Worker` (worker's side).

vLLM makes the class twice, first for the worker and then for the scheduler, in one process or in two.  The only module
here that imports vLLM; tested with 0.32.0, whose interface is not a stable one.

    scheduler   get_num_new_matched_tokens, update_state_after_alloc, build_connector_meta, update_connector_output,
                request_finished_all_groups
    worker      register_kv_caches, start_load_kv, wait_for_save, get_transfer_results, get_block_ids_with_load_errors,
                build_connector_worker_meta

A cache never is a reason to fail a request, so a failed load is always recomputed, whatever
`kv_load_failure_policy` says.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform

from kvslot.api.client import Client, default_socket
from kvslot.engines.vllm.blocks import EngineBlocks, Placed
from kvslot.engines.vllm.keys import Keys, Settings, facts, unsupported
from kvslot.engines.vllm.link import Link, Unfit
from kvslot.engines.vllm.messages import Orders, Report
from kvslot.engines.vllm.planner import Planner, Statistics
from kvslot.engines.vllm.region import Peers, Region, allocation, record_bytes, standing
from kvslot.engines.vllm.region import unsupported as region_unsupported
from kvslot.engines.vllm.worker import SWEEP_SECONDS, RegionWorker, Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvslot")


# The checkers do without vLLM, so they do not know the classes that these three extend.
@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    orders: Orders


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise AssertionError("engines of several workers are refused when they start")


_NOTHING = _Metadata(Orders())


class KvslotConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's prefixes in a kvslot pool, shared with the other engines of the host."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._settings = Settings.of(transfer.kv_connector_extra_config)
        self._groups = kv_cache_config.kv_cache_groups
        placed = {name for each in kv_cache_config.kv_cache_tensors for name in each.layers}
        # Layers that use another's K and V may be added to a group later on; they have no memory of their own.
        self._layers = [[name for name in group.layer_names if name in placed] for group in self._groups]
        self._blocks = kv_cache_config.num_blocks
        self._region: Region | None = None
        self._peers = Peers()
        self._sweep_at = 0.0
        self._reason = unsupported(vllm_config, kv_cache_config, on_cpu=current_platform.is_cpu())
        if not self._reason and self._settings.load == "sync" and len(self._groups) > 1:
            self._reason = (
                "load = 'sync' with several groups of layers, whose failures vLLM cannot recover from"
            )
        if not self._reason and self._settings.form == "region":
            self._reason = region_unsupported(len(self._groups))
        self._planner: Planner | None = None
        self._worker: Worker | None = None
        self._keys: Keys | None = None
        if role == KVConnectorRole.SCHEDULER:
            transfer.kv_load_failure_policy = "recompute"
            if not self._reason:
                self._plan(vllm_config, kv_cache_config)
            if self._reason:
                log.warning("kvslot: not used: %s", self._reason)

    def _plan(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        settings, model = self._settings, config.model_config
        size = config.cache_config.block_size
        by_region = settings.form == "region"
        width = sum(
            len(layers) * group.kv_cache_spec.page_size_bytes
            for layers, group in zip(self._layers, self._groups, strict=True)
        )
        keys = Keys(
            settings,
            model_folder(model.model, model.revision),
            facts(config, cache, version=vllm.__version__, isa=instruction_sets(config, cache)),
            dummy=str(config.load_config.load_format) == "dummy",
        )
        if keys.reason:
            self._reason = keys.reason
            return
        self._keys = keys
        socket = settings.socket or default_socket()
        link = Link(
            lambda: Client(
                socket,
                name=settings.name,
                pool=settings.pool,
                page=size,
                append="chain",
                timeout=settings.timeout,
            ),
            functools.partial(
                _check, block_size=size, block_bytes=record_bytes(size) if by_region else width
            ),
            socket,
        )
        self._planner = Planner(
            link,
            keys,
            size,
            store_output=settings.store == "all",
            valid=self._valid if by_region else None,
            writes=by_region,
        )

    def _valid(self, client: Client, blocks: Sequence[int]) -> int:
        """How many records, from the first on, name what still stands there."""
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS
            self._peers.sweep()
        return standing(self._peers, client, blocks)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is not made is a miss, and no more."""
        return False

    # -- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes vLLM's blocks in view."""
        engine = None
        if not self._reason:
            try:
                engine = engine_blocks(self._layers, kv_caches)
            except (KeyError, ValueError) as error:
                log.error("kvslot: not used: %s", error)
        asynchronous, timeout = self._settings.load == "async", self._settings.timeout
        if self._settings.form == "region":
            self._worker = RegionWorker(engine, self._region, asynchronous=asynchronous, timeout=timeout)
        else:
            self._worker = Worker(engine, asynchronous=asynchronous, timeout=timeout)

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """In the second form, vLLM's blocks are allocated where others can read them."""
        if self._reason or self._settings.form != "region":
            return None
        context: AbstractContextManager[Any] = allocation(self._blocks, self._keep)
        return context

    def _keep(self, region: Region) -> None:
        self._region = region

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before anything of a step is written."""
        if self._worker is not None and isinstance(kv_connector_metadata, _Metadata):
            self._worker.prepare(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts this step's loads."""
        orders = self._orders()
        if self._worker is not None and orders is not None:
            self._worker.begin(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are whole before a forward that reads them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are stored with all their layers when the forward has ended."""

    def wait_for_save(self) -> None:
        """Makes this step's stores."""
        orders = self._orders()
        if self._worker is not None and orders is not None and orders.stores:
            self._worker.end(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended, and those of them that have nothing of it."""
        if self._worker is None:
            return KVConnectorTransferResults()
        orders = self._orders()
        results = self._worker.results(finished_req_ids, idle=orders is not None and orders.idle)
        # With one group of layers the blocks tell vLLM more: it keeps what lies before the first bad one.
        failed = results.failed if len(self._groups) > 1 else set()
        return KVConnectorTransferResults(finished_recving=results.received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed."""
        if self._worker is None or len(self._groups) > 1:
            return set()
        return self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this worker has done, for the scheduler's side."""
        report = self._worker.report() if self._worker is not None else None
        return None if report is None else _WorkerMetadata(report)

    def _orders(self) -> Orders | None:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, _Metadata) else None

    # -- scheduler ---------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the pool has beyond those that vLLM has."""
        if self._planner is None:
            return 0, False
        found = self._planner.matched(request, num_computed_tokens)
        return found, bool(found) and self._settings.load == "async"

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has blocks for what is to be loaded."""
        if self._planner is not None:
            self._planner.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The orders of this step."""
        if self._planner is None:
            return _NOTHING
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        return _Metadata(
            self._planner.step(
                scheduler_output.num_scheduled_tokens,
                scheduler_output.scheduled_spec_decode_tokens,
                state.resolve_block_ids,
            )
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the worker has done."""
        metadata = connector_output.kv_connector_worker_meta
        if self._planner is not None and isinstance(metadata, _WorkerMetadata):
            self._planner.report(metadata.report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; its blocks may go: nothing is copied from them any more."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; its blocks may go: nothing is copied from them any more."""
        if self._planner is not None:
            self._planner.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        """vLLM forgets what it has cached, as it must when weights change: so does this engine, for good."""
        if self._planner is not None and self._keys is not None:
            self._keys.reset()
            self._planner.reset()
        return True

    def shutdown(self) -> None:
        """The engine ends."""
        if self._worker is not None:
            self._worker.close()
        if self._planner is not None:
            self._planner.close()
        self._peers.close()

    def statistics(self) -> Statistics | None:
        """Of the scheduler's side; None on the worker's, and where kvslot is not used."""
        return self._planner.statistics() if self._planner is not None else None


def _check(client: Client, *, block_size: int, block_bytes: int) -> None:
    """Raises Unfit unless the pool is made for this engine's blocks."""
    pool = client.pool.description
    if pool.granularity != "opaque" or set(client.pool.planes) != {"blocks"}:
        raise Unfit(f"pool {pool.name!r} is one of tokens; vLLM's needs opaque_block_bytes")
    theirs = client.pool.planes["blocks"].slot_bytes * pool.block_size
    if pool.block_size != block_size or theirs != block_bytes:
        raise Unfit(
            f"pool {pool.name!r} has blocks of {pool.block_size} tokens and {theirs} bytes, and this engine of "
            f"{block_size} and {block_bytes}: set block_size = {block_size}, opaque_block_bytes = {block_bytes}"
        )


def model_folder(model: str, revision: str | None) -> str:
    """The folder that a model was loaded from: itself, or its snapshot in the hub's cache."""
    if os.path.isdir(model):
        return model
    try:
        hub = importlib.import_module("huggingface_hub")
        return str(hub.snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever it is, there is no folder
        return model


def instruction_sets(config: VllmConfig, cache: KVCacheConfig) -> list[str]:
    """What the CPU backend packs K for, by group, and what it computes with."""
    out = [torch.backends.cpu.get_cpu_capability()]
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return [*out, "?"]
    size = config.cache_config.block_size
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        out.append(_get_attn_isa(spec.dtype, size, spec.head_size, str(config.cache_config.cache_dtype)))
    return out


def engine_blocks(groups: list[list[str]], tensors: dict[str, torch.Tensor]) -> EngineBlocks:
    """vLLM's tensors as blocks of bytes, without a copy.  Raises ValueError for tensors that are not blocks first."""
    memory: dict[int, Any] = {}
    placed: list[list[Placed]] = []
    for names in groups:
        layers: list[Placed] = []
        for name in names:
            tensor = tensors[name]
            if tensor.device.type != "cpu" or tensor.dim() < 2 or not tensor[0].is_contiguous():
                raise ValueError(f"{name}: {tuple(tensor.shape)} on {tensor.device} is not blocks of bytes")
            size = tensor.element_size()
            layers.append(
                Placed(tensor.data_ptr(), tensor.shape[0], tensor[0].numel() * size, tensor.stride(0) * size)
            )
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in memory:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                memory[storage.data_ptr()] = whole.numpy()
        placed.append(layers)
    return EngineBlocks(placed, memory)
