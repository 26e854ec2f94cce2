"""In torch, on the CPU: the few operators that a step of a Llama takes from vLLM's compiled CUDA extensions.

With vLLM's schemas, so that its Python calls them as it calls the compiled ones. Everything else that such a step needs
has a form in torch or Triton.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []
"""What is registered stays so while the library lives."""


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """Write x divided by its root mean square, times the weight; in fp32, rounded once."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    out.copy_(wide if weight is None else wide * weight.float())


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """Add x to the residual, and write the norm of the sum to x."""
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write the SiLU of the first half of x, times its second half."""
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write keys and values [tokens, heads, head_dim] to their slots in caches [blocks, block_size, heads, head_dim].

    Raises:
        NotImplementedError: a quantised cache.
    """
    if kv_cache_dtype != "auto":
        raise NotImplementedError(f"kv_cache_dtype={kv_cache_dtype!r}: the fake device has only 'auto'")
    written = slot_mapping >= 0
    slots, tokens = slot_mapping[written], slot_mapping.shape[0]
    block_size = key_cache.shape[1]
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache[slots // block_size, slots % block_size] = rows[:tokens][written]


def never(capability: int) -> bool:
    """Say that no kernel of a kind is built."""
    return False


def get_scheduler_metadata(*_: Any) -> torch.Tensor:
    """Return a plan that `attend` does not need."""
    return torch.zeros(64, dtype=torch.int32)


def attend(*arguments: Any) -> list[torch.Tensor]:
    """Return FlashAttention 3's attention of rows of queries to paged KV, in fp32, and nothing for its other results.

    Raises:
        NotImplementedError: an option that the models of these tests do not have.
    """
    call = types.SimpleNamespace(**dict(zip(_parameters(_FORWARD), arguments, strict=True)))
    if call.page_table is None or call.s_aux is not None or call.k.dtype != call.q.dtype or call.cp_world_size != 1:
        raise NotImplementedError("the fake device attends to paged KV of the queries' type, without sinks, on one GPU")
    starts, lengths, block_size = call.cu_seqlens_q.tolist(), call.seqused_k.tolist(), call.k.shape[1]
    for row, length in enumerate(lengths):
        queries = slice(starts[row], starts[row + 1])
        blocks = call.page_table[row, : -(-length // block_size)].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].float() for cache in (call.k, call.v))
        call.out[queries] = _attention(call.q[queries].float(), keys, values, call)
    return [call.out, *(call.out.new_empty(0) for _ in range(3))]


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Any) -> torch.Tensor:
    """Return attention of the last of so many tokens, all of [tokens, heads, head_dim]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (side.repeat_interleave(group, dim=1) for side in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * call.softmax_scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    ahead = torch.arange(len(keys)) - torch.arange(len(keys) - len(query), len(keys))[:, None]
    last = 0 if call.is_causal else call.window_size_right
    hidden = (ahead > last) if last >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
    if call.window_size_left >= 0:
        hidden |= ahead < -call.window_size_left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


_PLANNED = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor"
)
_FORWARD = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)


def _parameters(schema: str) -> list[str]:
    return re.findall(r"(\w+)[,)]", schema)


OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "_C": {
        "rms_norm(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()": rms_norm,
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()": fused_add_rms_norm,
        "silu_and_mul(Tensor! result, Tensor input) -> ()": silu_and_mul,
        "cutlass_scaled_mm_supports_fp8(int capability) -> bool": never,
        "cutlass_scaled_mm_supports_block_fp8(int capability) -> bool": never,
        "cutlass_group_gemm_supported(int capability) -> bool": never,
    },
    "_C_cache_ops": {
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()": reshape_and_cache_flash,
    },
    "_vllm_fa3_C": {_PLANNED: get_scheduler_metadata, _FORWARD: attend},
}
"""Implementations by schema, by vLLM's library."""


def install() -> None:
    """Define the operators. Once in a process."""
    for namespace, operators in OPERATORS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        _LIBRARIES.append(library)
        for schema, implementation in operators.items():
            library.define(schema)
            library.impl(schema.partition("(")[0], implementation, "CompositeExplicitAutograd")
