"""The exit status of a server: 1 where it ended because its engine died, vLLM's own in every other case."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.hooks import registry
from vllm_ext.hooks.errors import UpstreamChanged
from vllm_ext.launch import features
from vllm_ext.patches import exit_status


async def dummy_shutdown() -> None:
    """What vLLM returns if no signal came."""


async def shutdown() -> None:
    """Stands for uvicorn's, which vLLM returns after a signal."""


def ended(rest: Any, engine: Any) -> int:
    """Return the exit status of a server that ended so."""
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    async def serve_http(app: Any, *, sock: Any) -> Any:
        assert sock == "socket"
        del app.state  # as vLLM does when the application ends
        return rest()

    async def server() -> None:
        await (await exit_status._serve_http(serve_http, app, sock="socket"))

    try:
        asyncio.run(server())
    except SystemExit as stop:
        return int(str(stop.code))
    return 0


@pytest.mark.parametrize(
    ("rest", "errored", "status"),
    [
        pytest.param(dummy_shutdown, True, 1, id="engine-died"),
        pytest.param(dummy_shutdown, False, 0, id="uvicorn-ended"),
        pytest.param(shutdown, True, 0, id="signal-to-all-processes"),
        pytest.param(shutdown, False, 0, id="signal"),
    ],
)
def test_only_a_server_that_lost_its_engine_fails(rest: Any, errored: bool, status: int) -> None:
    assert ended(rest, SimpleNamespace(errored=errored)) == status


def test_a_server_without_an_engine_ends_as_before() -> None:
    assert ended(dummy_shutdown, None) == 0


def test_where_it_cannot_be_had_the_server_starts_all_the_same_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def verify(*groups: str) -> None:
        raise UpstreamChanged(f"{groups} changed")

    monkeypatch.setattr(registry, "verify", verify)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_ext"):
        features.let_failure_show()
    assert "may exit with status 0, as vLLM does: ('exit-status',) changed" in caplog.text
