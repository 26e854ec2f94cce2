"""Both kernels are measured on the same step, and asked whether they write the same pages."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from vllm_ext.attention import measure
from vllm_ext.attention.measure import Sizes
from vllm_ext.attention.plan import Kernel, KernelPlan, Kind
from vllm_ext.kernels import native
from vllm_ext.kernels.paged_attention import cpu

current_platform.import_kernels()
SIZES = Sizes(dtype=torch.bfloat16, num_heads=4, num_kv_heads=2, head_dim=32, block_size=32, isa="vec")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which nothing is kept yet; the compiled kernel is at hand."""
    cpu.library()
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [32, 128])
def test_vllms_kernel_without_amx_writes_the_pages_that_ours_reads(dtype: torch.dtype, block_size: int) -> None:
    assert measure.pages_alike(Sizes(dtype, 4, 2, 64, block_size, "vec"))


@pytest.mark.parametrize("kind", list(Kind))
def test_both_compute_the_same_step(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    empty_like = torch.empty_like

    def noted(*args, **kwargs):
        outputs.append(empty_like(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(torch, "empty_like", noted)
    requests, query, context = measure._SHAPES[kind]
    stock, own = measure._calls(SIZES, requests, query, context)
    stock()
    expected = outputs[0].clone()
    outputs[0].fill_(float("nan"))
    own()
    torch.testing.assert_close(outputs[0].float(), expected.float(), rtol=2e-2, atol=2e-2)


def started(sizes: Sizes = SIZES) -> KernelPlan:
    """Return the plan of a process that starts."""
    return measure.measured_plan.__wrapped__(sizes)


@pytest.mark.usefixtures("cache")
def test_plan_is_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([0.5, 1.5, 0.25])
    monkeypatch.setattr(measure, "_ratio", lambda own, stock: next(found))
    plan = started()
    assert list(plan.serves.values()) == [Kernel.OWN, Kernel.STOCK, Kernel.OWN]
    assert plan.why.startswith("measured at start, our time over vLLM's: decode 0.50, short queries 1.50, prefill 0.25")


@pytest.mark.usefixtures("cache")
def test_later_starts_keep_the_plan_and_say_from_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they would measure: with another kernel the same request could get other tokens."""
    found = iter([0.99, 0.99, 0.99, 1.01, 1.01, 1.01])
    monkeypatch.setattr(measure, "_ratio", lambda own, stock: next(found))
    first, second = started(), started()
    assert second.serves == first.serves
    assert re.match(r"kept from \d{4}-\d\d-\d\d: measured at start, our time over vLLM's: decode 0\.99", second.why)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "sizes": lambda patch: None,
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
    "compiler": lambda patch: patch.setattr(native, "compiler_version", lambda: "g++ of tomorrow"),
    "machine": lambda patch: patch.setattr(native, "machine", lambda: "another machine"),
    "flags": lambda patch: patch.setattr(cpu, "FLAGS", ("-fopenmp", "-DNEW")),
    "vllm": lambda patch: patch.setattr(measure.vllm, "__version__", "0.99"),
    "steps": lambda patch: patch.setattr(measure, "_SHAPES", {**measure._SHAPES, Kind.DECODE: (8, 1, 1024)}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_times_depend_on_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before = measure._key(SIZES)
    CHANGES[what](monkeypatch)
    assert measure._key(replace(SIZES, num_heads=8) if what == "sizes" else SIZES) != before


def test_key_is_the_same_at_each_start() -> None:
    assert measure._key(SIZES) == measure._key(replace(SIZES))


@pytest.mark.usefixtures("cache")
def test_who_writes_which_pages_is_never_taken_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_ratio", lambda own, stock: 0.5)
    assert started().writer is Kernel.STOCK
    monkeypatch.setattr(measure, "pages_alike", lambda sizes: False)
    assert started().writer is Kernel.OWN


def test_large_models_are_measured_on_shorter_contexts() -> None:
    large = Sizes(torch.float32, 64, 64, 512, 32, "vec")
    assert 64 <= measure._context(large, 4, 1024) < 1024
    assert measure._context(SIZES, 4, 1024) == 1024


def test_page_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="a page must be contiguous"):
        measure.paged(torch.zeros(3, 32, 2, 64).transpose(1, 2))


def test_ratio_is_of_the_least_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does makes a call slower, never faster."""
    now = 0.0
    seconds = {"one": iter([9.0, 2.0, 5.0, 3.0]), "other": iter([8.0, 6.0, 4.0, 9.0])}

    def call(name: str):
        def run() -> None:
            nonlocal now
            now += next(seconds[name])

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    monkeypatch.setattr(measure, "_SECONDS", 30.0)
    assert measure._ratio(call("one"), call("other")) == 2.0 / 4.0
