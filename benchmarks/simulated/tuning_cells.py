"""Whose lengths are served on which devices, and at which settings vLLM comes there. A part of tuning.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simulated

from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import SimulationSpec

_CHAT: Mapping[str, Any] = {"max_tokens": 1024}
_WILDCHAT = "single_turn/wildchat_first1445.jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Where lengths of prompts and outputs come from."""

    path: str
    """Below the folder of data."""
    prompts: str = ""
    """File whose prompt lengths are drawn, where the first has none."""
    fields: Mapping[str, Any] = field(default_factory=lambda: _CHAT)
    """Of a `WorkloadSpec`."""

    def workload(self, data: Path) -> dict[str, Any]:
        """Return fields of a `WorkloadSpec`."""
        prompts = {"prompts_from": str(data / self.prompts)} if self.prompts else {}
        drawn = {"source": str(data / self.path), "sample": "with-replacement", "over_context": "cut"}
        return {**drawn, **prompts, **self.fields}


_SHAREGPT = Lengths(path="multi_turn/sharegpt.jsonl.gz")
_AZURE = Lengths(path="traces/azure_2023_conv.csv.gz")
_ALPACA = {"where": {"src": ("random9k", "subset5k")}, "min_output_tokens": 1, **_CHAT}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A workload on a device."""

    lengths: Lengths
    hardware: HardwareSpec
    max_model_len: int
    modern: bool = False
    """Whether it is none of those that papers measured."""
    texts: bool = False
    """Whether it has prompts and answers of many lengths, so that lengths can be predicted."""

    @property
    def files(self) -> list[str]:
        """What it needs below the folder of data."""
        return [*filter(None, (self.lengths.path, self.lengths.prompts))]

    def base(self, data: Path, seed: int) -> SimulationSpec:
        """Return the run of vLLM as it comes, at a rate that is to be set."""
        workload = {"rate_per_s": 1.0, **self.lengths.workload(data), "seed": seed}
        return simulated.vllm_as_it_comes(self.hardware, self.max_model_len, workload)


def _cells() -> Iterator[tuple[str, Cell]]:
    opt, llama = (HardwareSpec(model=model, device="a100-40") for model in ("opt-13b", "llama-2-7b"))
    yield "sharegpt, opt-13b, a100-40", Cell(lengths=_SHAREGPT, hardware=opt, max_model_len=2048, texts=True)
    wildchat = Lengths(path=_WILDCHAT)
    yield "wildchat, opt-13b, a100-40", Cell(lengths=wildchat, hardware=opt, max_model_len=2048, texts=True)
    lmsys = Lengths(path="single_turn/lmsys_output_lengths.csv.gz", prompts=_WILDCHAT)
    yield "lmsys, opt-13b, a100-40", Cell(lengths=lmsys, hardware=opt, max_model_len=2048)
    alpaca = Lengths(path="single_turn/alpaca.jsonl.gz", fields=_ALPACA)
    yield "alpaca, opt-13b, a100-40", Cell(lengths=alpaca, hardware=opt, max_model_len=2048)
    yield "azure-conv, llama-2-7b, a100-40", Cell(lengths=_AZURE, hardware=llama, max_model_len=4096)
    for model, devices in (("llama-3.1-8b", 1), ("llama-3.1-70b", 4)):
        for name, lengths in (("sharegpt", _SHAREGPT), ("azure-conv", _AZURE)):
            hardware = HardwareSpec(model=model, device="h100", tensor_parallel=devices)
            cell = Cell(lengths=lengths, hardware=hardware, max_model_len=8192, modern=True)
            yield f"{name}, {model}, {devices} x h100", cell


CELLS = dict(_cells())
