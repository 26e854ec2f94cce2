"""A machine whose g++ is there but compiles nothing: auto serves with vLLM's kernel, own is refused."""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_ext.attention import measure
from vllm_ext.attention.cpu import CpuBuilder
from vllm_ext.attention.plan import Kernel, KernelPlan
from vllm_ext.config.errors import ConfigError
from vllm_ext.kernels import native
from vllm_ext.kernels.paged_attention import cpu

current_platform.import_kernels()
FAILING = """#!/bin/sh
[ "$1" = --version ] && echo "g++ (Old) 5.4.0" && exit 0
echo "In file included from cpu.cpp:20:" >&2
echo "numbers.h:44:30: error: no such type" >&2
exit 1
"""
REASON = r"cpu\.cpp: g\+\+ \(Old\) 5\.4\.0 exited with status 1; numbers\.h:44:30: error: no such type"


def forget_compiler() -> None:
    for cached in (native.compiler_version, cpu.library, measure.measured_plan):
        cached.cache_clear()


@pytest.fixture
def failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled, nor was before."""
    script = tmp_path / "bin" / native.COMPILER
    script.parent.mkdir()
    script.write_text(FAILING)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))
    forget_compiler()
    yield
    forget_compiler()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """Of our logger alone, whether or not vLLM lets it hand on to the root's."""
    logger = logging.getLogger("vllm.vllm_ext")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def plan(kernel: str) -> KernelPlan:
    """Return what the builder of an engine without layers chooses."""
    config: Any = SimpleNamespace(
        additional_config={"vllm_ext": {"attention": {"kernel": kernel}}},
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_num_attention_heads=lambda _: 4),
        parallel_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return CpuBuilder(spec, [], config, torch.device("cpu")).plan


@pytest.mark.usefixtures("failing_compiler")
def test_auto_leaves_all_steps_to_vllm_and_warns_in_one_line(log: pytest.LogCaptureFixture) -> None:
    found = plan("auto")
    assert set(found.serves.values()) == {found.writer} == {Kernel.STOCK}
    (warning,) = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    assert "\n" not in warning
    assert re.fullmatch(f"attention: vLLM's kernel serves all steps: {REASON}", warning)


@pytest.mark.usefixtures("failing_compiler")
def test_own_is_refused_with_what_is_allowed_and_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=rf"^vllm_ext\.attention\.kernel='own': must be stock or auto: {REASON}$"
    ) as caught:
        plan("own")
    assert isinstance(caught.value.__cause__, native.CompileError), "the whole message is in the traceback"


@pytest.mark.usefixtures("failing_compiler")
def test_stock_asks_for_no_compiler(log: pytest.LogCaptureFixture) -> None:
    assert plan("stock").writer is Kernel.STOCK
    assert not [record for record in log.records if record.levelno >= logging.WARNING]
