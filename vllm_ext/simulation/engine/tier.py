"""KV between device and host memory in virtual time: the connector that serves, its copies replaced by a link's model.

Both sides of the connector are real, vLLM's own or ours: the scheduler's side with its manager and eviction policy, and
the worker's side with its queue of stores. Only the copies below, `OffloadingWorker`, are modelled. They begin and are
looked for where vLLM's model runners do it (``kv_connector_model_runner_mixin.py``, ``gpu/kv_connector.py``,
``gpu_worker.py``):

    host       | launch k: submit stores of step k - 1, wait for those whose blocks step k takes, launch the forward,
               |           submit loads of step k, look which copies are through by now: reported with step k's output
               |           (loads within step k are submitted before its forward, and waited for before the report)
    device     |      forward k - 1      |      forward k      |
    to host    |                         | stores of step k - 1      a store begins when forwards launched before it end
    to device  |                                               | loads of step k       and so does a load

Copies of one direction go one after the other, and both directions slow each other down: see `cost.link.TransferLink`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from vllm_ext.config import parse
from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.kv.connector.options import transfer_config
from vllm_ext.kv.connector.scheduler import TierScheduler
from vllm_ext.kv.eviction.retention import RetentionCachePolicy
from vllm_ext.kv.int8.geometry import SHARE
from vllm_ext.simulation.cost.link import Direction
from vllm_ext.simulation.cost.spec import build_link
from vllm_ext.simulation.engine.harness import KvShape
from vllm_ext.simulation.engine.simulated_copies import SimulatedCopies
from vllm_ext.systems import build

if TYPE_CHECKING:
    from vllm_ext.simulation.spec import EngineSpec, Resolved

TIER_KEY = "kv_tier"
_DTYPES = {1: "fp8", 2: "bfloat16", 4: "float32"}


def connector_options(resolved: Resolved, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `make_scheduler` is told of a connector: nothing, vLLM's with ``kv_offload``, ours with ``kv_tier``.

    Args:
        resolved: The settings, and how large a block is.
        options: The engine's, with its system: which form of KV that wants.

    Raises:
        ValueError: (ConfigError included) both are asked for, or the host's memory is smaller than one chunk.
    """
    engine, hardware = resolved.spec.engine, resolved.hardware
    tier, offload = tier_config(engine), engine.kv_offload
    records = parse({TIER_KEY: engine.options.get(TIER_KEY, {})}).kv_tier.device_int8_share
    # KV of all devices is one worker's: as many layers more, each of a device's heads. So a chunk takes the same bytes,
    # records of 8 bits and their padding included, and one simulated worker reports for all: the devices of a group
    # copy side by side and are through together.
    devices, kv_dtype_bytes = hardware.spec.tensor_parallel, hardware.spec.kv_dtype_bytes
    block_bytes, layers = hardware.kv_bytes_per_block(engine.block_size) * devices, hardware.model.layers * devices
    kv_shape = KvShape(block_bytes, layers, _DTYPES.get(kv_dtype_bytes, f"of {kv_dtype_bytes} bytes"))
    if offload is None:
        if tier is None:
            return {"kv_shape": kv_shape} if records else {}
        config = transfer_config(build(parse(options)).tier(tier))
        config.engine_id = "simulated"  # vLLM's default is a random number
        return {"kv_transfer_config": config, "kv_shape": kv_shape}
    if tier is not None:
        allowed = "must be left out beside kv_offload, which is vLLM's own connector: an engine has one connector"
        raise ConfigError(TIER_KEY, engine.options[TIER_KEY], allowed)
    if records:
        raise ConfigError(SHARE, records, "must be 0 beside kv_offload, vLLM's own connector, which knows no records")
    chunk_bytes = block_bytes * offload.blocks_per_chunk
    if offload.cpu_bytes < chunk_bytes:
        raise ValueError(f"cpu_bytes={offload.cpu_bytes!r}: must hold at least one chunk of {chunk_bytes} bytes")
    config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id="simulated",
        kv_connector_extra_config={
            "cpu_bytes_to_use": offload.cpu_bytes,
            "eviction_policy": offload.policy,
            "offload_prompt_only": offload.offload_prompt_only,
            "blocks_per_chunk": offload.blocks_per_chunk,
        },
    )
    return {"kv_transfer_config": config, "kv_shape": KvShape(block_bytes)}


def tier_config(engine: EngineSpec) -> KvTierConfig | None:
    """Return the options of our tier; None if there is none.

    Raises:
        ConfigError: an option is unknown, or its value can't be; or it asks for a disk, which is not simulated.
    """
    given = engine.options.get(TIER_KEY)
    if given is None:
        return None
    tier: KvTierConfig = parse({TIER_KEY: given}).kv_tier
    if tier.disk_dir:
        raise ConfigError("kv_tier.disk_dir", tier.disk_dir, "must be left out in a simulation, which has no disk")
    return tier if tier.gib else None


def build_tier(scheduler: Scheduler, resolved: Resolved) -> Tier:
    """Return the worker's side for a scheduler whose connector is described by `connector_options`."""
    connector, hardware, cost = worker_side(scheduler), resolved.hardware, resolved.spec.cost
    block_bytes = whole_bytes = hardware.kv_bytes_per_block(scheduler.cache_config.block_size)
    devices, layers, quantise_s = hardware.spec.tensor_parallel, hardware.model.layers, 0.0
    geometry = getattr(connector.connector_worker.spec, "geometry", None)
    if geometry is not None and geometry.record_bytes:
        block_bytes = geometry.chunk_bytes / devices
        if cost.quantise_bytes_per_s is not None:
            quantise_s = whole_bytes / cost.quantise_bytes_per_s
    copies = SimulatedCopies(
        build_link(hardware, cost),
        block_bytes=block_bytes,
        copies_per_block=layers,
        quantise_s_per_block=quantise_s,
        num_devices=devices,
    )
    return Tier(scheduler, connector, copies, num_layers=layers)


def worker_side(scheduler: Scheduler) -> Any:
    """Return the worker's side of a scheduler's connector, still without what copies."""
    return KVConnectorFactory.create_connector(scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config)


class Tier:
    """The worker's side of a scheduler's offloading connector, vLLM's own or ours.

    Args:
        scheduler: With such a connector.
        connector: The worker's side of it.
        copies: What it copies with.
        num_layers: Of the model: in so many parts the forward waits for loads within its step.
    """

    def __init__(self, scheduler: Scheduler, connector: Any, copies: SimulatedCopies, *, num_layers: int = 1) -> None:
        self.copies = copies
        self.hit_tokens = 0
        """Tokens whose KV was asked for from the host, and not computed again."""
        self._block_bytes = copies.block_bytes * copies.num_devices
        self._block_size = scheduler.cache_config.block_size
        self._num_layers = num_layers
        self._loads_in_step = False
        """Whether the step that is being launched has begun its loads already."""
        side: Any = scheduler.connector.connector_scheduler
        if isinstance(side, TierScheduler):
            side.prices.takes_cycles = False  # of the simulated device, whatever this process runs on
        self._manager = side.manager
        self._failed_stores = self._evicted_chunks = 0
        self._count_stores()
        self._connector = connector
        self._connector.connector_worker.worker = copies  # instead of register_kv_caches: there are none
        self._quiet_steps = 0

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Let the eviction policy read the time there, in seconds, if it reads any."""
        policy = self._manager._policy
        if isinstance(policy, RetentionCachePolicy):
            policy.clock = clock

    # --- the model runner's calls -----------------------------------------------------------------------------------

    def before_forward(self, output: SchedulerOutput, host_s: float, device_free_s: float) -> float:
        """Submit the last step's stores, wait for those whose blocks this step takes, and begin loads within it.

        Args:
            output: What ``schedule()`` returned.
            host_s: When the host could launch the step.
            device_free_s: When the device is through with the steps launched before.

        Returns:
            When the host can launch the step, in seconds.
        """
        copies = self.copies
        copies.step_begins(host_s, device_free_s)
        metadata = output.kv_connector_metadata
        self._connector.handle_preemptions(metadata)
        ready_s = copies.host_s
        self._loads_in_step = bool(getattr(metadata, "in_step", ()))
        if self._loads_in_step:
            self._connector.bind_connector_metadata(metadata)
            self._connector.start_load_kv(None)
        if copies.auditor is not None:
            copies.auditor.launched(output)
        return ready_s

    def forward_end_s(self, start_s: float, compute_s: float) -> float:
        """Return when a forward ends that begins at a moment, and waits for what is loaded within its step."""
        return self.copies.forward_end_s(start_s, compute_s, self._num_layers)

    def after_forward(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput, device_free_s: float
    ) -> ModelRunnerOutput:
        """Submit the step's other loads behind its forward, and report what is through at its launch.

        Returns:
            The model's output with the report, which reaches the scheduler when the step ends.
        """
        connector, metadata = self._connector, output.kv_connector_metadata
        self.copies.stream_s = device_free_s
        for job in metadata.load_jobs.values():
            self.hit_tokens += len(job.dst_spec.block_ids) * self._block_size
        if not self._loads_in_step:
            connector.bind_connector_metadata(metadata)
            connector.start_load_kv(None)
        self.copies.step_ends()
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        invalid_blocks = connector.get_block_ids_with_load_errors()
        report = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        quiet = report is None and not metadata.store_jobs and not output.num_scheduled_tokens
        self._quiet_steps = self._quiet_steps + 1 if quiet else 0
        if report is None:
            return model_output
        connector_output = KVConnectorOutput(
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=invalid_blocks,
            kv_connector_worker_meta=report,
        )
        if model_output is EMPTY_MODEL_RUNNER_OUTPUT:
            return ModelRunnerOutput.with_kv_conn_output_only(connector_output)
        model_output.kv_connector_output = connector_output
        return model_output

    def wake_s(self) -> float | None:
        """Return when the next copy will be through, if nothing else is under way; otherwise None.

        That is after two steps without tokens, new stores or reports: with async scheduling, the output of the last
        step that had some is then processed.
        """
        return self.copies.next_end_s() if self._quiet_steps >= 2 else None

    # --- the books --------------------------------------------------------------------------------------------------

    @property
    def used_fraction(self) -> float:
        """Share of the host's chunks that hold KV, or are being filled with it."""
        num_chunks: int = self._manager._num_chunks
        return (num_chunks - int(self._manager._get_num_free_chunks())) / num_chunks

    @property
    def transfer_bytes(self) -> float:
        """Bytes of all copies that are through, of all devices and both directions."""
        return (self.copies.loaded_blocks + self.copies.stored_blocks) * self._block_bytes

    def counters(self, duration_s: float) -> dict[str, float]:
        """Return totals for `RunData.counters`; bytes are of all devices, times of each of them."""
        copies = self.copies
        found = {
            "transfer_load_bytes": copies.loaded_blocks * self._block_bytes,
            "transfer_store_bytes": copies.stored_blocks * self._block_bytes,
            "transfer_waited_s": copies.waited_s,
            "transfer_exposed_s": copies.exposed_s,
            "tier_hit_tokens": self.hit_tokens,
            "tier_evicted_chunks": self._evicted_chunks,
            "tier_failed_stores": self._failed_stores,
            "tier_dropped_chunks": getattr(self._manager, "dropped_chunks", 0),
            "num_tier_chunks": self._manager._num_chunks,
        }
        if duration_s > 0:
            found["link_load_busy_fraction"] = copies.link.busy_s(Direction.TO_DEVICE) / duration_s
            found["link_store_busy_fraction"] = copies.link.busy_s(Direction.TO_HOST) / duration_s
        return found

    def _count_stores(self) -> None:
        original = self._manager.prepare_store

        def prepare_store(*args, **kwargs):  # type: ignore[no-untyped-def] # vLLM's signature, whatever it is
            prepared = original(*args, **kwargs)
            if prepared is None:
                self._failed_stores += 1
            else:
                self._evicted_chunks += len(prepared.evicted_keys)
            return prepared

        self._manager.prepare_store = prepare_store
