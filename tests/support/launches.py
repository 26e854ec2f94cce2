"""With what the Triton kernels of paged attention are launched, which says what Triton compiles; no kernel runs.

Needs Triton to compile kernels, not to interpret them; a GPU is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from vllm_ext.kernels.paged_attention import gpu_kernel

KERNELS = ("plan", "attend", "merge")
ALIGNMENT = 16
"""Triton compiles another variant where a pointer, or a number, is a multiple of it."""
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What tells one variant of a kernel from another."""

    kernel: str
    types: tuple[tuple[str, str], ...]
    """Of the arguments that are no constants."""
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    """Arguments that are multiples of `ALIGNMENT`."""
    options: tuple[tuple[str, Any], ...]
    """Warps and stages."""


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Note what `gpu` launches, instead of launching it."""
    found: list[Launch] = []
    with ExitStack() as stack:
        for name in KERNELS:
            stack.enter_context(patch.object(gpu_kernel, name, _Recorder(getattr(gpu_kernel, name), name, found)))
        yield found


class _Recorder:
    """Stands for a kernel."""

    def __init__(self, kernel: Any, name: str, found: list[Launch]) -> None:
        self._kernel, self._name, self._found = kernel, name, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._note

    def _note(self, *arguments: Any, **named: Any) -> None:
        params = self._kernel.params
        values = dict(zip((param.name for param in params), arguments, strict=False)) | named
        constants, types, aligned = {}, {}, []
        for param in params:
            value = values.pop(param.name)
            special = not param.do_not_specialize
            if param.is_constexpr or (special and type(value) is int and value == 1):
                constants[param.name] = value
                continue
            types[param.name] = _type_of(value)
            if special and _is_aligned(value):
                aligned.append(param.name)
        parts = (tuple(part.items()) for part in (types, constants))
        self._found.append(Launch(self._name, *parts, tuple(aligned), tuple(values.items())))


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % ALIGNMENT == 0
