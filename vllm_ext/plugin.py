"""The entry point that vLLM calls in every process of every engine started in this environment.

It makes `--scheduler-cls NAME` and our flags known and does nothing else until the user chooses a system.
"""

from __future__ import annotations

import logging
import sys

_registered = False


def register() -> None:
    """Install the hooks that make our options known; idempotent.

    If vLLM has no place for them it says so once and leaves vLLM as it is.

    Raises:
        ValueError: The environment asks for a benchmark mode in a way that is not allowed. A benchmark that
            silently ran without it would measure something else.
    """
    global _registered  # noqa: PLW0603 - once in a process
    if _registered:
        return
    _registered = True
    from vllm_ext.kv.host.affinity import note_allowed_cores

    note_allowed_cores()
    try:
        from vllm_ext.hooks import registry

        registry.install("base", check=False)  # these check themselves once a feature is chosen
    except Exception as error:  # noqa: BLE001 - an installed but unused package must not keep vLLM from starting
        _logger().warning("vllm-ext is inactive, vLLM runs without it: %s", error)
    _take_attention_slot()
    from vllm_ext import envs

    if envs.bench_forced_length():
        from vllm_ext.simulation.recorded import forced_length

        forced_length.install()
    if envs.bench_step_record():
        from vllm_ext.simulation.recorded import recorder

        recorder.install()


def _take_attention_slot() -> None:
    """Let engines be told to use our attention backend, and an engine core divide its memory; nothing else changes.

    Both check themselves once a feature is chosen.
    """
    from vllm.platforms import current_platform

    from vllm_ext.attention.slot import take_slot
    from vllm_ext.hooks import registry

    try:
        take_slot()
        if current_platform.is_cpu():
            registry.install("attention-slot", check=False)
        if "vllm.v1.engine.core" in sys.modules:  # this is an engine core's process; else it is imported by nobody yet
            registry.install("kv-arena", check=False)
    except Exception as error:  # noqa: BLE001 - as above
        _logger().warning("vllm-ext can't serve attention, nor keep KV in 8 bits on the device: %s", error)


def _logger() -> logging.Logger:
    """Return a child of vLLM's logger, which is configured in each of its processes."""
    return logging.getLogger("vllm.vllm_ext")
