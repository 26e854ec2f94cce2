"""Schedulers without a model: real scheduler and KV cache manager under a fabricated runner; workloads and measures."""
