"""What must be the same for a chunk on disk to be used: it names the folder, so other chunks are never looked at.

Block hashes say which tokens a chunk holds, not which model computed it, nor in which form. They are stable over a
restart: vLLM derives their first one from a fixed text (or from ``PYTHONHASHSEED``, which must then stay the same, or
nothing is found). What may bear the same hash and be something else is refused here.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from blake3 import blake3
from vllm.platforms import current_platform

from vllm_ext.config.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

    from vllm_ext.kv.host.geometry import TierGeometry

VERSION = 3
"""Of how chunks lie in files."""
_FIELD = "kv_tier.disk_dir"
MODEL_KEY = "vllm_ext_kv_tier_model"
"""Key of ``kv_connector_extra_config`` that tells the engine's process what the model is."""
_RANDOM_SEED_HASHES = "xxhash"
_FACT_LENGTH = 16


def note_model(vllm_config: VllmConfig, disk_dir: str) -> None:
    """Tell the engine's process what the model is, as far as its KV depends on it.

    Raises:
        ConfigError: that can't be known, or equal hashes may stand for different KV.
    """
    refuse_ambiguous(vllm_config, disk_dir)
    models = [vllm_config.model_config]
    if vllm_config.speculative_config is not None and vllm_config.speculative_config.draft_model_config is not None:
        models.append(vllm_config.speculative_config.draft_model_config)
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    load = vllm_config.load_config
    extra[MODEL_KEY] = {
        "models": [model_facts(model, disk_dir) for model in models],
        "loading": [str(load.load_format), repr(load.model_loader_extra_config)],
        "seed": vllm_config.model_config.seed if load.load_format == "dummy" else None,
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "attention": vllm_config.attention_config.compute_hash(),
    }


def refuse_ambiguous(vllm_config: VllmConfig, disk_dir: str) -> None:
    """Raise ConfigError where a restart may give the same hash to other KV, or another hash to the same."""
    cache, images = vllm_config.cache_config, vllm_config.model_config.multimodal_config
    algorithm = str(cache.prefix_caching_hash_algo)
    refused = {
        f"nothing is found after a restart with --prefix-caching-hash-algo {algorithm}: use sha256": (
            algorithm.startswith(_RANDOM_SEED_HASHES) and os.getenv("PYTHONHASHSEED") is None
        ),
        "not with LoRA: vLLM tells adapters by name and path, and another may be there after a restart": (
            vllm_config.lora_config is not None
        ),
        "not with --mm-processor-cache-gb 0 and no prefix cache: images are then told apart by number only": (
            images is not None and not images.mm_processor_cache_gb and not cache.enable_prefix_caching
        ),
        "needs all workers of an engine on one machine": vllm_config.parallel_config.nnodes > 1,
    }
    for allowed, is_so in refused.items():
        if is_so:
            raise ConfigError(_FIELD, disk_dir, allowed)


def model_facts(model: ModelConfig, disk_dir: str) -> dict[str, Any]:
    """Return what is known of a model without reading its weights.

    Raises:
        ConfigError: its weights lie where nothing tells whether they are the same as last time.
    """
    return {
        "name": str(model.model),
        "config": model.compute_hash(),
        "overrides": repr((model.hf_overrides, model.config_format)),
        "weights": weights_facts(str(model.model), model.revision, disk_dir),
    }


def weights_facts(name: str, revision: str | None, disk_dir: str) -> str:
    """Return what changes with a model's weights: the commit of the hub, or size and time of each file.

    Raises:
        ConfigError: as `model_facts`.
    """
    path = Path(name)
    if path.exists():
        files = (Path(folder, file) for folder, _, files in os.walk(path, followlinks=True) for file in files)
        folder, found = (path.parent, [path]) if path.is_file() else (path, [file for file in files if file.is_file()])
        stats = [(str(file.relative_to(folder)), file.stat()) for file in found]
        facts = sorted([name, str(stat.st_size), str(stat.st_mtime_ns)] for name, stat in stats)
        return blake3(json.dumps(facts).encode()).hexdigest()[:_FACT_LENGTH]
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        allowed = f"needs to know when the weights of {name} change: give the model as a local folder"
        raise ConfigError(_FIELD, disk_dir, allowed)
    return Path(config).parent.name  # .../snapshots/COMMIT/config.json


def format_facts(config: OffloadingConfig, geometry: TierGeometry) -> dict[str, Any]:
    """Return what a chunk's bytes depend on, beside the groups of layers and types that vLLM's `FileMapper` names."""
    parallel = config.parallel
    return {
        "format": VERSION,
        "vllm": vllm.__version__,
        "model": config.extra_config[MODEL_KEY],
        "bits": geometry.bits,
        "chunk_bytes": geometry.chunk_bytes,
        "record_bytes": geometry.record_bytes,
        "parallel": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "kv_layout": config.kv_cache_layout,
        # What decides how attention kernels lay out a page.
        "machine": [
            platform.machine(),
            torch.backends.cpu.get_cpu_capability(),
            str(torch.cpu._is_amx_tile_supported()),
            str(current_platform.get_device_name()),
        ],
    }
