"""What the KV tier relies on in vLLM's offloading connector without replacing it.

`vllm_ext.kv` subclasses both sides of the connector, its manager and its spec, and reads some of their private state.
Seam used: ``kv_connector_module_path``. Can go: when vLLM declares these classes stable.
"""

from __future__ import annotations

from vllm_ext.hooks.feature import Feature

FEATURE = Feature(
    name="KV tier",
    breaks_without="KV can't be kept in host memory",
    remove_when="vLLM declares the classes of its offloading connector stable",
    leave_out="--kv-tier-gib",
    optional=True,
)
OVERRIDING = (
    "vllm_ext.kv.connector.tiered:TieredConnector",
    "vllm_ext.kv.connector.tiered:TierWorkerMetadata",
    "vllm_ext.kv.connector.scheduler:TierScheduler",
    "vllm_ext.kv.connector.worker:LayerwiseWorker",
    "vllm_ext.kv.host.manager:TierManager",
    "vllm_ext.kv.connector.spec:TierSpec",
    "vllm_ext.kv.host.worker:TierWorker",
)
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_SIDE = f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_WORKER = f"{_OFFLOADING}.worker:OffloadingConnectorWorker"

HOOKS = FEATURE.relies(
    {
        f"{_OFFLOADING}.config:build_offloading_config": "says how large a block is",
        f"{_SIDE}.update_connector_output": "completes jobs after we noted which chunks are unreadable",
        f"{_SIDE}._remove_pending_job": "takes off the fences of blocks that idle chunks are copied from",
        f"{_OFFLOADING}.scheduler:RequestOffloadState.storable_chunks": "says how many of its chunks are whole",
        f"{_WORKER}.register_kv_caches": "hands our worker the caches",
        f"{_WORKER}.handle_preemptions": "submits stores and waits for them before their blocks are written",
        f"{_WORKER}.get_finished": "takes every job for successful; we report what failed beside it, and read which "
        "job is whose",
        f"{_WORKER}.build_connector_worker_meta": "reports jobs, to which we add what failed",
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager._free_chunk": "takes back chunks that we drop",
        "vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv": "goes on after a load; where it failed "
        "we take its request off the prefills under way",
    }
)
