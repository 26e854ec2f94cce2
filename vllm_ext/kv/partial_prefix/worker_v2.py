"""Imported by workers with vLLM's V2 runner of an engine that computes across gaps; see `kv.partial_prefix.worker`."""

from __future__ import annotations

from vllm_ext.hooks import registry

registry.install("kv-gaps-fused")
registry.install("kv-gaps-v2")


class GapWorker:
    """Adds nothing to a worker with vLLM's V2 runner but what importing its module has done."""
