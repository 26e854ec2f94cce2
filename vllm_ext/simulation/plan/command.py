"""The command line of the server that was simulated."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from vllm_ext.config import KEY
from vllm_ext.simulation.cost.models import MODELS
from vllm_ext.simulation.plan.candidates import AS_IT_IS, Candidate
from vllm_ext.simulation.spec import SimulationSpec, resolve

VLLM_MEMORY_UTILIZATION = 0.92
"""vLLM 0.32's default of ``--gpu-memory-utilization``."""


def command_of(base: SimulationSpec, choice: Candidate) -> str:
    """Return the command line of the server, with every limit that was simulated."""
    hardware, engine, limits = base.hardware, base.engine, resolve(choice.on(base)).limits
    memory = hardware.gpu_memory_utilization
    given = {
        "--max-model-len": limits.max_model_len, "--max-num-seqs": limits.max_num_seqs,
        "--max-num-batched-tokens": limits.max_num_batched_tokens,
        "--tensor-parallel-size": hardware.tensor_parallel if hardware.tensor_parallel > 1 else None,
        "--gpu-memory-utilization": memory if memory != VLLM_MEMORY_UTILIZATION else None,
        "--kv-cache-memory-bytes": hardware.kv_memory_bytes, "--num-gpu-blocks-override": engine.num_blocks,
        "--watermark": choice.reserve or engine.watermark or None,
        "--block-size": engine.block_size if engine.block_size != 16 else None,
        "--scheduling-policy": "priority" if engine.scheduling_policy == "priority" else None,
        "--kv-cache-dtype": "fp8" if choice.fp8_kv or hardware.kv_dtype_bytes == 1 else None,
    }  # fmt: skip
    words = ["vllm", "serve", hardware.model]
    if base.replicas > 1:
        words = ["vllm-ext", "cluster", "serve", hardware.model, "--replicas", f"{base.replicas}"]
        words += ["--router", base.router] if base.router else []
    words += choice.system.flags
    words += [word for flag, value in given.items() if value is not None for word in (flag, f"{value}")]
    words += [] if engine.prefix_caching else ["--no-enable-prefix-caching"]
    words += [] if engine.async_scheduling else ["--no-async-scheduling"]
    words += [] if base.cost.cuda_graphs else ["--enforce-eager"]
    if (offload := engine.kv_offload) is not None:
        extra = {"cpu_bytes_to_use": offload.cpu_bytes, "eviction_policy": offload.policy,
                 "offload_prompt_only": offload.offload_prompt_only,
                 "blocks_per_chunk": offload.blocks_per_chunk}  # fmt: skip
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        words += ["--kv-transfer-config", json.dumps(connector)]
    options = {name: value for name, value in engine.options.items() if name != "policies"}
    if options and choice.system is not AS_IT_IS:
        words += ["--additional-config", json.dumps({KEY: options})]
    if engine.profiled and choice.system is not AS_IT_IS:
        words += ["--ext-profile", "auto"]
    return shlex.join(words)


def not_in_command(base: SimulationSpec, choice: Candidate) -> Iterator[str]:
    """Yield what was simulated and no flag of the command says."""
    hardware = base.hardware
    if hardware.model in MODELS:
        yield f"where your model is: {hardware.model} is its name in the simulator's table; put its path, or its id"
    if (width := hardware.weight_dtype_bytes) is not None:
        yield f"weights of {width:g} bytes per parameter: a model that is quantised so, or --quantization"
    if hardware.kv_dtype_bytes not in (1, 2):
        yield f"KV of {hardware.kv_dtype_bytes} bytes per number: a model that is served in such a --dtype"
    if base.engine.profiled and choice.system is not AS_IT_IS:
        yield "a profile of the device: run vllm-ext profile first"
