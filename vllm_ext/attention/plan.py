"""Which kernel serves which steps."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Kernel(enum.Enum):
    """A kernel for attention."""

    STOCK = "stock"
    OWN = "own"


class Kind(enum.Enum):
    """Steps by their longest query; its value says so."""

    DECODE = "decode"
    SHORT = "short queries"
    PREFILL = "prefill"

    @classmethod
    def of(cls, max_query_len: int) -> Kind:
        """Return the kind of a step whose longest query has so many tokens."""
        return cls.DECODE if max_query_len == 1 else cls.SHORT if max_query_len <= SHORT_TOKENS else cls.PREFILL


SHORT_TOKENS = 64
"""A query of up to so many tokens is short."""


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """Which kernel serves which kind of step, and which one writes the KV."""

    serves: Mapping[Kind, Kernel]
    writer: Kernel
    """Where both serve, pages look alike whoever writes them."""
    why: str

    @classmethod
    def all(cls, kernel: Kernel, why: str) -> KernelPlan:
        """Return the plan by which one kernel does everything."""
        return cls(serves=dict.fromkeys(Kind, kernel), writer=kernel, why=why)

    def describe(self, stock: str) -> str:
        """Return one line for the log.

        Args:
            stock: Name of vLLM's backend.
        """
        names = {Kernel.STOCK: stock, Kernel.OWN: "vllm-ext"}
        parts = []
        for kernel in Kernel:
            if kinds := [kind.value for kind in Kind if self.serves[kind] is kernel]:
                everything = len(kinds) == len(Kind)
                parts.append(f"{names[kernel]} serves {'all steps' if everything else ' and '.join(kinds)}")
        return f"attention: {', '.join(parts)} ({self.why})"


def plan_of(ratios: Mapping[Kind, float], *, pages_alike: bool) -> KernelPlan:
    """Return the faster kernel for each kind of step, or for all of them where a server must choose one.

    Args:
        ratios: Time of our kernel over that of vLLM's.
        pages_alike: Whether both read the same pages. Else whoever writes the KV serves everything: ours if it is
            faster in decode, where a server spends most of its steps, and loses no more elsewhere than it gains there.
    """
    found = ", ".join(f"{kind.value} {ratios[kind]:.2f}" for kind in Kind)
    why = f"measured at start, our time over vLLM's: {found}"
    if pages_alike:
        serves = {kind: Kernel.OWN if ratios[kind] < 1 else Kernel.STOCK for kind in Kind}
        return KernelPlan(serves=serves, writer=Kernel.STOCK, why=why)
    faster = ratios[Kind.DECODE] < 1 and ratios[Kind.DECODE] * max(ratios.values()) <= 1
    return KernelPlan.all(Kernel.OWN if faster else Kernel.STOCK, f"{why}; one for all, as their pages differ")
