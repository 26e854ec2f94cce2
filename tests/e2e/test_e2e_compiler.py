"""An engine on a machine whose g++ is there but compiles nothing serves with vLLM's kernel, if it may."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engines
from test_e2e_attention import spec, steered
from test_e2e_equality import FEW

from tests.support.upstream import needs
from vllm_ext.kernels import native

pytestmark = [pytest.mark.e2e, needs("attention-slot")]
FAILING = """#!/bin/sh
[ "$1" = --version ] && echo "g++ 5.4.0" && exit 0
echo "error: too old" >&2
exit 1
"""


@pytest.fixture
def failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled by the engines that a test starts, nor was before."""
    script = tmp_path / "bin" / native.COMPILER
    script.parent.mkdir()
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 5.4.0" && exit 0\necho "error: too old" >&2\nexit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("failing_compiler")
def test_auto_serves_with_vllms_kernel_and_says_why(run_engines: Engines, llama: Path) -> None:
    found = run_engines([spec("upstream", llama, FEW, {}), spec("auto", llama, FEW, steered("fcfs", "auto"))])
    assert found["auto"].tokens == found["upstream"].tokens
    assert list(found["auto"].attention["steps"]) == ["stock"]
    log = Path(found["auto"].log).read_text()
    assert "attention: vLLM's kernel serves all steps: cpu.cpp: g++ 5.4.0 exited with status 1; error: too old" in log


@pytest.mark.usefixtures("failing_compiler")
def test_own_is_refused_by_its_option(run_engines: Engines, llama: Path) -> None:
    with pytest.raises(RuntimeError, match=r"attention\.kernel='own': must be stock or auto: .* error: too old"):
        run_engines([spec("own", llama, FEW, steered("fcfs", "own"))])
