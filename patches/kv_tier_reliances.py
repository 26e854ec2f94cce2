"""What the KV tier relies on in vLLM's offloading connector without replacing it.

`vllm_ext.kv` subclasses both sides of the connector, its manager and its spec, and reads some of their private state.
Seam used: ``kv_connector_module_path``. Can go: when vLLM declares these classes stable.
"""

from __future__ import annotations

from vllm_ext.patches.patch import Reliance

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"
_MANAGER = "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager"
_VERSIONS = ("0.31.0", "0.32.0")


def _reliance(target: str, why: str, *fingerprints: str) -> Reliance:
    """Return the reliance on a function; one fingerprint if it is the same in all verified versions, else one each."""
    return Reliance(
        target=target,
        feature="KV tier",
        why=why,
        breaks_without="KV can't be kept in host memory",
        remove_when="vLLM declares the classes of its offloading connector stable",
        leave_out="--kv-tier-gib",
        optional=True,
        verified=dict(zip(_VERSIONS, fingerprints * (len(_VERSIONS) // len(fingerprints)), strict=True)),
    )


HOOKS = (
    _reliance(f"{_CONNECTOR}.__init__", "we build its parts ourselves, with our classes", "3d9a17490be78205"),
    _reliance(
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
        "hands our worker the caches",
        "a57293e55dd452ef",
    ),
    _reliance(
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker.get_finished",
        "takes every job for successful; we report what failed beside it, and read which job is whose",
        "479d206ab09bef61",
    ),
    _reliance(
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker.handle_preemptions",
        "submits stores and waits for them before their blocks are written",
        "19810057560c5850",
    ),
    _reliance(
        f"{_OFFLOADING}.common:OffloadingWorkerMetadata.aggregate", "we add a field to the report", "cfac65890813cd35"
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler._build_store_jobs",
        "is shown only requests that give their blocks up, where stores are late",
        "a18d0b9b2cb2bbba",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.build_connector_meta",
        "calls it, and delivers the jobs that must be waited for",
        "1bb842983aa21c01",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.on_new_request",
        "makes the state of a request in which our eviction policy finds the order of chunks",
        "b2b069ee31d78f68",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.update_connector_output",
        "completes jobs after we noted which chunks are unreadable",
        "33bf45370b627644",
    ),
    _reliance(f"{_OFFLOADING}.config:build_offloading_config", "says how large a block is", "86c4ee88fbf4f281"),
    _reliance(f"{_MANAGER}.__init__", "its books are ours", "c57120ffb9be55ad"),
    _reliance(f"{_MANAGER}.prepare_store", "inserts chunks after we announced them", "383d27e846189de9"),
    _reliance(f"{_MANAGER}.complete_store", "we complete readable and unreadable chunks apart", "4f903484696bfa07"),
    _reliance(f"{_MANAGER}.complete_load", "we forget unreadable chunks after it", "c876f374cb013d31"),
    _reliance(
        "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec.__init__", "we count chunks anew after it", "436871840e6a842b"
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler._update_req_states",
        "says which blocks a step takes: idle chunks in them are copied before",
        "b060c269e8d2e905",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.get_num_new_matched_tokens",
        "finds what can be loaded; we decide whether within the step",
        "51b60f794d84a5e4",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.update_state_after_alloc",
        "makes the load that we give an owner of its own",
        "a7fa779697feca3c",
        "1ce90ac422228457",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.request_finished",
        "completes the chunks of a conversation's turn before we note them",
        "8962b8a5f8407cfb",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.reset_cache",
        "forgets jobs of ours with its own",
        "e3ac9179138fe032",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler._remove_pending_job",
        "takes off the fences of blocks that idle chunks are copied from",
        "08cfdf87db391e97",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler._calc_num_offloadable_tokens",
        "says how much of a request that has left may be kept",
        "cd5cb05638dbf8d8",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:RequestOffloadState.storable_chunks",
        "says how many of its chunks are whole",
        "48bbcf14f7996a69",
    ),
    _reliance(
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker.start_kv_transfers",
        "submits loads; those within a step we submit before",
        "e994d5cee7ca3911",
    ),
    _reliance(
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker.build_connector_worker_meta",
        "reports jobs, to which we add what failed",
        "2fdb89317ce1e92b",
    ),
    _reliance(f"{_MANAGER}.reset_cache", "empties the books, and we those of conversations", "c13099565540c4ef"),
    _reliance(f"{_MANAGER}._free_chunk", "takes back chunks that we drop", "305ca5a486188590"),
    _reliance(
        "vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv",
        "goes on after a load; where it failed we take its request off the prefills under way",
        "13204507fdd8f8f6",
        "e0e3e0c0d1badec2",
    ),
)
