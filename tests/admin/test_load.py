"""Load reports over HTTP, with engine cores that answer what they like."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from tests.support.admin_server import Client, server
from vllm_ext.admin.load import router

URL = router.prefix


def tells(method: str) -> dict[str, Any]:
    assert method == "vllm_ext_load"
    return {"number": 1}


def dead(_: str) -> Any:
    raise EngineDeadError


def test_every_engine_tells_and_no_key_is_asked_for() -> None:
    answer = server(Client(tells, tells), tier=False, policy=False, load=True, key=None).get(URL)
    assert answer.status_code == 200
    assert answer.json() == {"engines": [{"engine": 0, "number": 1}, {"engine": 1, "number": 1}]}


def test_it_is_there_only_where_it_was_asked_for(monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_EXT_ADMIN_KEY", "key-of-the-administrator")
    client = Client(tells)
    assert server(client).get(URL).status_code == 404
    assert server(client, tier=False, policy=False).get(URL).status_code == 404
    assert client.asked == []


def test_it_opens_no_other_part() -> None:
    opened = server(Client(tells), tier=False, policy=False, load=True)
    assert opened.get("/vllm-ext/policy").status_code == 404
    assert opened.get("/vllm-ext/kv-tier").status_code == 404


def test_an_engine_that_is_dead_or_hangs_is_503(monkeypatch: Any) -> None:
    monkeypatch.setattr("vllm_ext.admin.engines._PATIENCE_S", 0.05)

    async def sleeps() -> None:
        await asyncio.sleep(60)

    for answer in (dead, lambda _: sleeps()):
        assert server(Client(answer), tier=False, policy=False, load=True).get(URL).status_code == 503
