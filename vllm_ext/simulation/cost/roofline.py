"""Analytic cost of a step: work over what the device reaches, term by term.

    linear    compute C = flops * padded tokens / (peak * efficiency), weights M = bytes / bandwidth:
              max(C, M) + unhidden * min(C, M)
    experts   the same for the routed experts: compute of each token's k, weights of those that the step reaches
    head      the same for the output layer, on the rows that are sampled, and the traffic of their logits
    attention decode: max(KV bytes / bandwidth, flops / peak) of the held contexts;
              prefill: max(flops of the causal pairs, KV bytes of the contexts)
    tokens    element-wise kernels' traffic, KV written, all-reduced bytes
    fixed     all-reduce latency, gaps between kernels, launches

What the shorter of compute and weight traffic is not hidden by makes the efficiency ramp: n tokens reach
n / (n + unhidden * n0) of the peak, where n0 is the balance point. Tokens are padded to the tiles of matrix products.

Experts are computed as one grouped matrix product per projection. T tokens that each choose k of E experts, uniformly
and independently, reach R = E (1 - (1 - k / E)^T) of them. The weights of those are read once. Their T k rows are
spread evenly, and each expert's share is padded to a tile by itself, so that R * padded(T k / R) rows are computed.
Uneven routing, which reaches fewer experts and fills some more than others, is not modelled.
"""

from __future__ import annotations

import math

from vllm_ext.simulation.cost.devices import Device
from vllm_ext.simulation.cost.model_shape import Experts, ModelShape
from vllm_ext.simulation.cost.step_shape import CostModel, StepShape

_LOGIT_BYTES = 10
"""Traffic per logit: written in 2 bytes, read, written as fp32 and read by the sampler."""


class Roofline:
    """Cost model of a model on ``tensor_parallel`` equal devices. Everything constant is computed once.

    Source: the roofline argument of Sarathi-Serve, section 3.2, and AccelGen, eq. 4; terms and constants ours.
    """

    def __init__(
        self,
        model: ModelShape,
        device: Device,
        tensor_parallel: int = 1,
        *,
        kv_dtype_bytes: int = 2,
        host_base_s: float = 0.0,
        host_per_request_s: float = 0.0,
    ) -> None:
        """Precompute the terms.

        Args:
            model: Its shape.
            device: What it runs on.
            tensor_parallel: Devices that share every layer.
            kv_dtype_bytes: Bytes of a KV element.
            host_base_s: Engine core's time per step, in seconds.
            host_per_request_s: Engine core's time per step and request, in seconds.

        Raises:
            ValueError: the heads can't be split over so many devices.
        """
        model.check_tensor_parallel(tensor_parallel)
        flops = device.peak_flops * device.gemm_efficiency * tensor_parallel
        bandwidth = device.memory_bytes_per_s * device.memory_efficiency
        weight_bandwidth = device.memory_bytes_per_s * device.weight_efficiency
        width = model.weight_bytes_per_parameter
        self._linear_s = 2.0 * model.linear_parameters / flops
        self._weights_s = model.linear_parameters * width / tensor_parallel / weight_bandwidth
        self._experts = model.experts
        self._expert_row_s = 2.0 * model.expert_parameters / flops
        self._expert_weights_s = model.expert_parameters * width / tensor_parallel / weight_bandwidth
        self._head_s = 2.0 * model.head_parameters / flops
        self._head_weights_s = model.head_parameters * width / tensor_parallel / weight_bandwidth
        self._logits_s = model.vocab / tensor_parallel * _LOGIT_BYTES / bandwidth
        self._unhidden = device.unhidden

        kv_bytes = model.kv_bytes_per_token(kv_dtype_bytes, tensor_parallel)
        self._kv_s = kv_bytes / bandwidth
        attention_flops = device.peak_flops * device.attention_efficiency * tensor_parallel
        self._pair_s = model.attention_flops_per_pair / attention_flops
        self._decode_context_s = max(self._kv_s, model.decode_flops_per_pair / attention_flops)

        elements = _element_wise_traffic(model, tensor_parallel) * max(2.0, width)
        reduces = 0 if tensor_parallel == 1 else model.layers * (1 if model.parallel_attention else 2)
        ring = 2 * (tensor_parallel - 1) / tensor_parallel * model.hidden * max(2.0, width)
        self._reduced_token_s = reduces * ring / (device.link_bytes_per_s * device.link_efficiency)
        self._token_s = (elements + kv_bytes) / bandwidth + self._reduced_token_s
        self._reduces_s = reduces * device.link_latency_s
        self._fixed_s = self._reduces_s + model.layers * device.layer_gap_s

        self._eager_s = model.layers * device.layer_launch_s
        self._step_s = device.step_launch_s
        self._ahead = device.launches_run_ahead
        self._graph_max = device.graph_max_requests
        self._tiles = (max(1, device.tile_tokens // 8), max(1, device.tile_tokens // 2), device.tile_tokens)
        self._host_base_s = host_base_s
        self._host_per_request_s = host_per_request_s

    def device_s(self, shape: StepShape) -> float:
        """Return the time the devices compute a step, in seconds."""
        _, tokens, decodes, sampled, decode_context, prefill_context, pairs = shape
        time = self._token_s * tokens + self._decode_context_s * decode_context + self._fixed_s
        time += self.linear_s(tokens)
        if self._experts is not None:
            time += self._experts_s(self._experts, tokens)
        if sampled:
            time += self._overlapped(self._head_s * self._padded(sampled), self._head_weights_s)
            time += self._logits_s * sampled
        if pairs:
            time += self._prefill_attention_s(prefill_context, pairs)
        if tokens > decodes or tokens > self._graph_max:  # no graph: launched kernel by kernel
            if not self._ahead:
                time += self._eager_s
            elif time < self._eager_s:
                time = self._eager_s
        return time + self._step_s

    def host_s(self, shape: StepShape) -> float:
        """Return the engine core's own time per step, in seconds."""
        return self._host_base_s + self._host_per_request_s * shape[0]

    def linear_s(self, tokens: int) -> float:
        """Return a step's time in the matrix products of all layers, routed experts aside, in seconds."""
        return self._overlapped(self._linear_s * self._padded(tokens), self._weights_s)

    def attention_s(self, shape: StepShape) -> float:
        """Return a step's time in attention, in seconds."""
        prefill = self._prefill_attention_s(shape.prefill_context_tokens, shape.prefill_pairs)
        return self._decode_context_s * shape.decode_context_tokens + prefill

    def all_reduce_s(self, tokens: int) -> float:
        """Return a step's time in all-reduces, in seconds."""
        return self._reduces_s + self._reduced_token_s * tokens

    def _prefill_attention_s(self, context: int, pairs: float) -> float:
        return max(self._pair_s * pairs, self._kv_s * context)

    def _overlapped(self, compute: float, weights: float) -> float:
        """Return the time of a matrix product: what the shorter of computing and reading is not hidden by counts."""
        return compute + self._unhidden * weights if compute > weights else weights + self._unhidden * compute

    def _experts_s(self, experts: Experts, tokens: int) -> float:
        """Return the time of the routed experts, in seconds: one grouped matrix product per projection."""
        if not tokens:
            return 0.0
        reached, rows = experts.reached(tokens), float(tokens * experts.per_token)
        if self._tiles[-1] > 1:
            share = rows / reached
            rows = reached * self._padded(math.ceil(share - 1e-9))  # not a tile more for an error of rounding
        return self._overlapped(self._expert_row_s * rows, self._expert_weights_s * reached)

    def _padded(self, rows: int) -> int:
        """Return the rows that are computed: small products have small tiles, so that the padding stays in bounds."""
        small, middle, large = self._tiles
        if rows <= middle:
            return -(-rows // small) * small
        tile = middle if rows <= 2 * large else large
        return -(-rows // tile) * tile


def _element_wise_traffic(model: ModelShape, tensor_parallel: int) -> float:
    """Return the elements read and written per token by what is not fused into matrix products, over all layers.

    Two norms with the residual (one, where attention is parallel) of 4 * hidden, on every device; rotary embedding or
    the like of 2 * (query + key), and the activation of 3 * ffn (2 without gate), split over the devices. With experts
    the activation of those that a token goes through, and the sum of their outputs of (k + 1) * hidden, not split.
    """
    norms = (4 if model.parallel_attention else 8) * model.hidden
    rotary = 2 * (model.heads + model.kv_heads) * model.head_dim
    factor, experts = 3 if model.gated else 2, model.experts
    dense = model.dense_layers * (norms + (rotary + factor * model.ffn) / tensor_parallel)
    if experts is None:
        return dense
    activation = factor * (experts.per_token * experts.ffn + experts.shared_ffn)
    outputs = (experts.per_token + 1) * model.hidden
    return dense + experts.layers * (norms + (rotary + activation) / tensor_parallel + outputs)


def pivot_tokens(cost: CostModel) -> int:
    """Return the smallest step of whole tiles of 128 tokens that reaches 95 % of the throughput of the best one.

    Attention is left aside; steps of up to 4096 tokens are tried.

    Source: AccelGen's pivot forward size S_pf, "throughput nearly saturates"; the share is ours.
    """

    def rate(tokens: int) -> float:
        return tokens / cost.device_s(StepShape(1, tokens, 0, 1, 0, 0, 0.0))

    tried = range(128, 4096 + 1, 128)
    best = max(map(rate, tried))
    return next(tokens for tokens in tried if rate(tokens) >= 0.95 * best)
