"""What the KV tier relies on in vLLM's offloading connector without replacing it.

`vllm_ext.kv` subclasses both sides of the connector, its manager and its spec, and reads some of their private state.
Seam used: ``kv_connector_module_path``. Can go: when vLLM declares these classes stable.
"""

from __future__ import annotations

from vllm_ext.hooks.patch import Reliance

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"
_MANAGER = "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager"


def _reliance(target: str, why: str, fingerprint: str, *, v0_31: str = "", v0_33: str = "") -> Reliance:
    """Return the reliance on a function: its fingerprint in vLLM 0.32, and those of other versions that differ."""
    return Reliance(
        target=target,
        feature="KV tier",
        why=why,
        breaks_without="KV can't be kept in host memory",
        remove_when="vLLM declares the classes of its offloading connector stable",
        leave_out="--kv-tier-gib",
        optional=True,
        verified={"0.31.0": v0_31 or fingerprint, "0.32.0": fingerprint, "0.33.0": v0_33 or fingerprint},
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
        v0_33="4d84f73712bc3e1b",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.build_connector_meta",
        "calls it, and delivers the jobs that must be waited for",
        "1bb842983aa21c01",
        v0_33="c4c2e47d294c60f0",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.on_new_request",
        "makes the state of a request in which our eviction policy finds the order of chunks",
        "b2b069ee31d78f68",
        v0_33="44a7d23170eabc77",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.update_connector_output",
        "completes jobs after we noted which chunks are unreadable",
        "33bf45370b627644",
        v0_33="bb8b1c0cea2a7419",
    ),
    _reliance(
        f"{_OFFLOADING}.config:build_offloading_config",
        "says how large a block is",
        "86c4ee88fbf4f281",
        v0_33="6ec170dcc56da878",
    ),
    _reliance(f"{_MANAGER}.__init__", "its books are ours", "c57120ffb9be55ad", v0_33="de42d04431003d4a"),
    _reliance(
        f"{_MANAGER}.prepare_store",
        "inserts chunks after we announced them",
        "383d27e846189de9",
        v0_33="21b5cf539c133adc",
    ),
    _reliance(
        f"{_MANAGER}.complete_store",
        "we complete readable and unreadable chunks apart",
        "4f903484696bfa07",
        v0_33="f09cf5f979a845e6",
    ),
    _reliance(f"{_MANAGER}.complete_load", "we forget unreadable chunks after it", "c876f374cb013d31"),
    _reliance(
        "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec.__init__",
        "we count chunks anew after it",
        "436871840e6a842b",
        v0_33="301b4d296abf48bb",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler._update_req_states",
        "says which blocks a step takes: idle chunks in them are copied before",
        "b060c269e8d2e905",
        v0_33="4e9138a941e7c101",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.get_num_new_matched_tokens",
        "finds what can be loaded; we decide whether within the step",
        "51b60f794d84a5e4",
        v0_33="9f86516a64357aa2",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.update_state_after_alloc",
        "makes the load that we give an owner of its own",
        "1ce90ac422228457",
        v0_31="a7fa779697feca3c",
        v0_33="c2c6f8381d4f52f9",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.request_finished",
        "completes the chunks of a conversation's turn before we note them",
        "8962b8a5f8407cfb",
        v0_33="48876b4442118449",
    ),
    _reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.reset_cache",
        "forgets jobs of ours with its own",
        "e3ac9179138fe032",
        v0_33="4d385388fa9aa203",
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
        v0_33="02556b10fddcc14e",
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
        "e0e3e0c0d1badec2",
        v0_31="13204507fdd8f8f6",
    ),
)
