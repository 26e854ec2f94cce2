"""What the disk tier relies on in vLLM's tiered offloading without replacing it.

The modules of `vllm_ext.kv.disk` subclass its manager and its tier of files, and share its memory. They are checked
only when ``kv_tier.disk_dir`` is set. Seam used: none; vLLM finds tiers by their ``module_path`` in its own spec only,
whose host tier knows no conversations, and whose worker refuses the CPU. Can go: when vLLM declares these classes
stable.
"""

from __future__ import annotations

from vllm_ext.hooks.feature import Feature

FEATURE = Feature(
    name="KV tier on disk",
    breaks_without="KV can't be kept on disk",
    remove_when="vLLM declares the classes of its tiered offloading stable",
    leave_out="kv_tier.disk_dir",
    optional=True,
    only=("0.32.0", "0.33.0"),
)
OVERRIDING = (
    "vllm_ext.kv.disk.manager:DiskBackedManager",
    "vllm_ext.kv.disk.manager:HostTier",
    "vllm_ext.kv.disk.tier:DiskTier",
    "vllm_ext.kv.disk.tier:Backlog",
)
_TIERING = "vllm.v1.kv_offload.tiering"
_MANAGER = f"{_TIERING}.manager:TieringOffloadingManager"
_PRIMARY = f"{_TIERING}.manager:CPUPrimaryTierOffloadingManager"
_IO = f"{_TIERING}.fs.io"
_POOL = f"{_TIERING}.fs.thread_pool:DualQueueThreadPool"
_REGION = "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion"
_HASHES = "vllm.v1.core.kv_cache_utils"

HOOKS = FEATURE.relies(
    {
        f"{_MANAGER}.create_store_job": "keeps chunks in place while they are copied on",
        f"{_MANAGER}._process_finished_jobs": "lets go of chunks through our manager's methods",
        f"{_PRIMARY}.__init__": "binds names to our methods; we replace one of them",
        f"{_PRIMARY}.shutdown": "gives the memory back",
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager._prepare_load": "counts who reads a chunk",
        f"{_IO}:batch_store_block": "writes files, whole or not at all",
        f"{_IO}:batch_load_block": "reads files",
        "vllm.v1.kv_offload.file_mapper:FileMapper._compute_base_path": "names the folder by fields, ours among them",
        f"{_POOL}.enqueue_store": "takes a task for each chunk of a job",
        f"{_POOL}.enqueue_load": "takes a task for each chunk of a job",
        f"{_REGION}.__init__": "maps the file, which we unlink when all have it",
        f"{_REGION}.cleanup": "must not unlink it again",
        f"{_HASHES}:resolve_none_hash_seed": "block hashes are the same after a restart",
        f"{_HASHES}:generate_block_hash_extra_keys": "block hashes tell inputs apart",
        "vllm.config.model:ModelConfig.compute_hash": "tells models apart",
    }
)
