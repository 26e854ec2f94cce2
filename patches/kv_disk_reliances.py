"""What the disk tier relies on in vLLM's tiered offloading without replacing it.

The modules of `vllm_ext.kv.disk` subclass its manager, put a tier of ours behind it, and share its memory and its
thread pool. They are checked only when ``kv_tier.disk_dir`` is set. Seam used: none; vLLM finds such tiers by its own
spec only, whose worker refuses the CPU. Can go: when vLLM declares these classes stable.
"""

from __future__ import annotations

from vllm_ext.hooks.patch import Reliance

_TIERING = "vllm.v1.kv_offload.tiering"
_MANAGER = f"{_TIERING}.manager:TieringOffloadingManager"
_PRIMARY = f"{_TIERING}.manager:CPUPrimaryTierOffloadingManager"
_POOL = f"{_TIERING}.fs.thread_pool:DualQueueThreadPool"
_REGION = "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion"


def _reliance(target: str, why: str, fingerprint: str, *, v0_33: str = "") -> Reliance:
    """Return the reliance on a function: its fingerprint in vLLM 0.32, and that of 0.33 if it differs."""
    return Reliance(
        target=target,
        feature="KV tier on disk",
        why=why,
        breaks_without="KV can't be kept on disk",
        remove_when="vLLM declares the classes of its tiered offloading stable",
        leave_out="kv_tier.disk_dir",
        optional=True,
        verified={"0.32.0": fingerprint, "0.33.0": v0_33 or fingerprint},
    )


HOOKS = (
    _reliance(f"{_MANAGER}.__init__", "both tiers are ours", "606d8c2ff1e2923d", v0_33="69b20028bdcbe485"),
    _reliance(
        f"{_MANAGER}.lookup",
        "says what is on its way, which we give up when it is late",
        "ed40ea7172a51917",
        v0_33="58e95aa81f075d15",
    ),
    _reliance(f"{_MANAGER}.complete_store", "copies on to disk, but not what could not be written", "f85155505ca22444"),
    _reliance(f"{_MANAGER}.create_store_job", "keeps chunks in place while they are copied on", "f76563c62ab53053"),
    _reliance(
        f"{_MANAGER}._initiate_promotion", "we refuse to bring a chunk back twice for a request", "09f2d7c1c6078fc5"
    ),
    _reliance(f"{_MANAGER}._complete_promotion", "forgets what could not be brought back", "7be0a4514f8627c1"),
    _reliance(
        f"{_MANAGER}._process_finished_jobs",
        "lets go of chunks through our manager's methods",
        "68bcd6a28a2b68f8",
        v0_33="2d8bf35c03a10f32",
    ),
    _reliance(
        f"{_MANAGER}.reset_cache",
        "waits for copies under way before we forget the disk",
        "416eacb399deb48d",
        v0_33="f1bd726db1f0240a",
    ),
    _reliance(
        f"{_MANAGER}.shutdown", "ends our tier before its memory goes", "ced9f571a7a5012f", v0_33="bb2078c844c92440"
    ),
    _reliance(
        f"{_PRIMARY}.__init__",
        "binds names to our methods; we replace one of them",
        "288ad5ae73d3f2d9",
        v0_33="7cba79ea9e3dc3a0",
    ),
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
    _reliance(
        f"{_REGION}.__init__",
        "maps the file, which we unlink when all have it",
        "a22d30616412a0fb",
        v0_33="5dde7dcacbeabcf5",
    ),
    _reliance(f"{_REGION}.cleanup", "must not unlink it again", "0f1faf3db8f12566", v0_33="d7b039315f132bcb"),
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
    _reliance(
        "vllm.config.model:ModelConfig.compute_hash", "tells models apart", "1b0563c9a1432acf", v0_33="7f6c0e63ffea8ec6"
    ),
)
