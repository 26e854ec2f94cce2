"""What bounds an engine's steps: its own settings, and where they are left open vLLM's defaults for the device."""

from __future__ import annotations

from typing import NamedTuple

from vllm_ext.simulation.cost.devices import Device

_GIB = 1 << 30


class Limits(NamedTuple):
    """The engine's settings that bound a step, as vLLM names them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def serving_defaults(device: Device, tensor_parallel: int) -> tuple[int, int]:
    """Return the seats and the token budget that ``vllm serve`` takes on a device.

    The rules of ``EngineArgs.get_batch_defaults`` for the API server, which asks the device that it runs on.

    Returns:
        ``max_num_seqs`` and ``max_num_batched_tokens``.
    """
    if device.name == "cpu":
        return 128 * tensor_parallel, 2048 * tensor_parallel
    if device.memory_bytes >= 160 * _GIB:
        return 1024, 16_384
    if device.memory_bytes >= 70 * _GIB and not device.name.startswith("a100"):
        return 1024, 8192
    return 256, 2048


def completed(
    device: Device,
    tensor_parallel: int,
    *,
    max_model_len: int,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
) -> Limits:
    """Return the limits with vLLM's defaults where None is given.

    A default budget is at most what all seats can hold, and a default number of seats at most the budget.
    """
    seats, tokens = serving_defaults(device, tensor_parallel)
    seats = max_num_seqs or seats
    tokens = max_num_batched_tokens or min(tokens, seats * max_model_len)
    return Limits(max_model_len, max_num_seqs or min(seats, tokens), tokens)
