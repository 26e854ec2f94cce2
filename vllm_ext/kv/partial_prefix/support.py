"""Whether an engine can compute across gaps, said in the process that the user sees; no wrong token is risked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKERS = {False: "vllm_ext.kv.partial_prefix.worker.GapWorker", True: "vllm_ext.kv.partial_prefix.worker_v2.GapWorker"}
"""By whether the runner is vLLM's V2: what tells workers to compute across gaps, and a scheduler that they do."""
GROUPS = {False: ("kv-gaps", "kv-gaps-fused", "kv-gaps-v1"), True: ("kv-gaps", "kv-gaps-fused", "kv-gaps-v2")}
"""The hooks of these."""


def crosses_gaps(vllm_config: VllmConfig) -> bool:
    """Return whether an engine's workers were told to compute across gaps."""
    return vllm_config.parallel_config.worker_extension_cls in WORKERS.values()


def obstacle(vllm_config: VllmConfig) -> str | None:
    """Return what keeps an engine from computing across gaps; None: nothing that is known before it starts."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    full_graphs = vllm_config.compilation_config.cudagraph_mode.mixed_mode().name == "FULL"
    multimodal = model.multimodal_config is not None and not model.multimodal_config.language_model_only
    context_parallel = parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    found = {
        "without prefix caching nothing is kept": not vllm_config.cache_config.enable_prefix_caching,
        "speculative decoding looks at tokens behind the last one": vllm_config.speculative_config is not None,
        "positions of this model are more than numbers (M-RoPE)": model.uses_mrope,
        "multimodal inputs are placed by the number of computed tokens": multimodal,
        "prompt embeddings are": model.enable_prompt_embeds,
        "context parallelism splits sequences by position": context_parallel,
        "pipeline parallelism was not tried": parallel.pipeline_parallel_size > 1,
        "hashes are finer than blocks": vllm_config.cache_config.prefix_match_unit is not None,
        "dual batch overlap splits batches by row": parallel.use_ubatching,
        "full CUDA graphs of mixed batches are replayed with rows of their own": full_graphs,
        "another --worker-extension-cls was given": parallel.worker_extension_cls not in ("", *WORKERS.values()),
    }
    return next((reason for reason, is_so in found.items() if is_so), None)
