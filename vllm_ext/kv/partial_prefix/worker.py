"""Imported by every worker of an engine that computes across gaps: vLLM looks up `GapWorker` when it builds one."""

from __future__ import annotations

from vllm_ext.hooks import registry

registry.install("kv-gaps-fused")
registry.install("kv-gaps-v1")


class GapWorker:
    """Adds nothing to a worker with vLLM's V1 runner but what importing its module has done."""
