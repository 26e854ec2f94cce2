"""How many KV blocks a device holds beside the weights."""

from __future__ import annotations

from vllm_ext.simulation.cost.models import ModelShape
from vllm_ext.simulation.cost.spec import HardwareSpec

_RUNTIME_BYTES = 512 << 20
"""CUDA context, libraries' workspaces and CUDA graphs of one device: vLLM's start-up log shows some 0.3 to 0.8 GiB."""
_MAX_TENSOR_PARALLEL = 64
_GIB = 1 << 30


def num_kv_blocks(hardware: HardwareSpec, block_size: int, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Return the KV blocks of ``block_size`` tokens that each device holds.

    blocks = floor((memory * utilisation - weights - activations) / (block_size * KV bytes per token)), per device;
    or floor(``kv_memory_bytes`` / block bytes), where the hardware gives it.

    Args:
        hardware: Model, device and how it is split.
        block_size: Tokens of a block, at least 1.
        max_num_batched_tokens: Tokens of the largest step, for the activations.
        max_num_seqs: Rows of the largest step that are sampled, for the logits.

    Raises:
        OSError: the model's configuration can't be read.
        ValueError: not one block fits; the message says what is missing and over how many devices it would fit.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size!r}: must be at least 1")
    model = hardware.resolve_model()
    split = hardware.tensor_parallel
    block_bytes = block_size * model.kv_bytes_per_token(hardware.kv_dtype_bytes, split)
    if hardware.kv_memory_bytes is not None:
        if hardware.kv_memory_bytes < block_bytes:
            raise ValueError(f"kv_memory_bytes={hardware.kv_memory_bytes!r}: one block needs {block_bytes} bytes")
        return hardware.kv_memory_bytes // block_bytes
    reserve = activation_bytes(model, max_num_batched_tokens, max_num_seqs, split)
    free = _usable_bytes(hardware) - model.weight_bytes(split) - reserve
    if free < block_bytes:
        raise ValueError(_does_not_fit(hardware, model, block_bytes - free, max_num_batched_tokens, max_num_seqs))
    return int(free // block_bytes)


def activation_bytes(
    model: ModelShape, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel: int = 1
) -> float:
    """Return the bytes a device needs beside weights and KV.

    The largest step's hidden states (residual, input, output: 3 * hidden) with the widest of the projections (query,
    key and value, or the feed-forward block's, in and out) in 2 bytes; logits of all sampled rows twice in fp32; and a
    fixed part of 0.5 GiB.
    """
    attention = (model.heads + 2 * model.kv_heads) * model.head_dim + model.heads * model.head_dim
    widest = max(attention, (3 if model.gated else 2) * model.ffn) / tensor_parallel
    hidden = max_num_batched_tokens * (3 * model.hidden + widest) * 2
    return _RUNTIME_BYTES + hidden + 8 * max_num_seqs * model.vocab


def _usable_bytes(hardware: HardwareSpec) -> float:
    return hardware.resolve_device().memory_bytes * hardware.gpu_memory_utilization


def _does_not_fit(
    hardware: HardwareSpec, model: ModelShape, missing: float, max_num_batched_tokens: int, max_num_seqs: int
) -> str:
    def fits(split: int) -> bool:
        needed = model.weight_bytes(split) + activation_bytes(model, max_num_batched_tokens, max_num_seqs, split)
        return model.allows_tensor_parallel(split) and needed < _usable_bytes(hardware)

    larger = range(hardware.tensor_parallel + 1, _MAX_TENSOR_PARALLEL + 1)
    enough = next((split for split in larger if fits(split)), None)
    remedy = f"the smallest tensor_parallel that fits is {enough}" if enough else "no tensor_parallel is enough"
    weights = model.weight_bytes(hardware.tensor_parallel) / _GIB
    return (
        f"{model.name} does not fit on {hardware.device} with tensor_parallel={hardware.tensor_parallel} and "
        f"gpu_memory_utilization={hardware.gpu_memory_utilization}: {missing / _GIB:.1f} GiB per device are missing "
        f"for weights ({weights:.1f} GiB), activations and one KV block; {remedy}"
    )
