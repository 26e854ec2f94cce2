"""What the disk tier relies on in vLLM's tiered offloading without replacing it.

`vllm_ext.kv.disk*` subclass its manager, put a tier of ours behind it, and share its memory and its thread pool. They
are checked only when ``kv_tier.disk_dir`` is set. Seam used: none; vLLM finds such tiers by its own spec only, whose
worker refuses the CPU. Can go: when vLLM declares these classes stable.
"""

from __future__ import annotations

from vllm_ext.patches.patch import Reliance

_TIERING = "vllm.v1.kv_offload.tiering"
_MANAGER = f"{_TIERING}.manager:TieringOffloadingManager"
_PRIMARY = f"{_TIERING}.manager:CPUPrimaryTierOffloadingManager"
_POOL = f"{_TIERING}.fs.thread_pool:DualQueueThreadPool"
_REGION = "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion"
_VERSION = "0.32.0"


def _reliance(target: str, why: str, fingerprint: str) -> Reliance:
    return Reliance(
        target=target,
        feature="KV tier on disk",
        why=why,
        breaks_without="KV can't be kept on disk",
        remove_when="vLLM declares the classes of its tiered offloading stable",
        leave_out="kv_tier.disk_dir",
        optional=True,
        verified={_VERSION: fingerprint},
    )


HOOKS = (
    _reliance(f"{_MANAGER}.__init__", "both tiers are ours", "606d8c2ff1e2923d"),
    _reliance(f"{_MANAGER}.lookup", "says what is on its way, which we give up when it is late", "ed40ea7172a51917"),
    _reliance(f"{_MANAGER}.complete_store", "copies on to disk, but not what could not be written", "f85155505ca22444"),
    _reliance(f"{_MANAGER}.create_store_job", "keeps chunks in place while they are copied on", "f76563c62ab53053"),
    _reliance(
        f"{_MANAGER}._initiate_promotion", "we refuse to bring a chunk back twice for a request", "09f2d7c1c6078fc5"
    ),
    _reliance(f"{_MANAGER}._complete_promotion", "forgets what could not be brought back", "7be0a4514f8627c1"),
    _reliance(
        f"{_MANAGER}._process_finished_jobs", "lets go of chunks through our manager's methods", "68bcd6a28a2b68f8"
    ),
    _reliance(f"{_MANAGER}.reset_cache", "waits for copies under way before we forget the disk", "416eacb399deb48d"),
    _reliance(f"{_MANAGER}.shutdown", "ends our tier before its memory goes", "ced9f571a7a5012f"),
    _reliance(f"{_PRIMARY}.__init__", "binds names to our methods; we replace one of them", "288ad5ae73d3f2d9"),
    _reliance(f"{_PRIMARY}.shutdown", "gives the memory back", "f67d022b78698ffa"),
    _reliance(
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager._prepare_load",
        "counts who reads a chunk",
        "90a98134a34fe5f4",
    ),
    _reliance(f"{_TIERING}.base:SecondaryTierManager.__init__", "our tier is one", "fc9bf6c09143bc8c"),
    _reliance(f"{_TIERING}.backpressure:BackpressureDetector.__init__", "ours counts what waits", "cb06e095b577010a"),
    _reliance(f"{_POOL}.enqueue_store", "takes errands beside jobs", "8aa3b2ed9f78dda3"),
    _reliance(f"{_POOL}.get_finished", "returns them, too", "c22543bf7b807d62"),
    _reliance(f"{_POOL}.wait_idle", "waits for both", "7668fc041af491d1"),
    _reliance(f"{_REGION}.__init__", "maps the file, which we unlink when all have it", "a22d30616412a0fb"),
    _reliance(f"{_REGION}.cleanup", "must not unlink it again", "0f1faf3db8f12566"),
    _reliance(
        "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed",
        "block hashes are the same after a restart",
        "47f23592497dbf57",
    ),
    _reliance(
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        "block hashes tell inputs apart",
        "89a8b1487c461096",
    ),
    _reliance("vllm.config.model:ModelConfig.compute_hash", "tells models apart", "1b0563c9a1432acf"),
)
