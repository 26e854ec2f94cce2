"""The routes of the KV tier's admin endpoint in vLLM's application, with engine cores that answer what they like."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext import serving_admin
from vllm_ext.patches import registry

Answer = Callable[..., Any]
URL, KEY = serving_admin.PREFIX, "k-1"
ROW = {"name": "a"}


class Client:
    """vLLM's client of so many engine cores."""

    def __init__(self, *answers: Answer) -> None:
        self.core_engines = [bytes([number]) for number in range(len(answers))]
        self.asked: list[tuple[Any, ...]] = []
        self._answers = answers

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        self.asked.append((engine[0], method, *args))
        answer = self._answers[engine[0]](method, *args)
        return await answer if asyncio.iscoroutine(answer) else answer


def server(client: Client, *, admin: bool = True, key: str | None = None, root_path: str = "") -> TestClient:
    """Build the application as vLLM does, as far as it matters here."""
    args = Namespace(
        api_key=[key] if key else None, allowed_origins=["*"], allow_credentials=False, allowed_methods=["*"],
        allowed_headers=["*"], enable_request_id_headers=False, middleware=[], log_error_stack=False,
    )  # fmt: skip
    app = FastAPI()
    app.state.args = args
    app.root_path = root_path
    plugin = serving_admin.AdminPlugin()
    plugin.attach_router(app)
    init_exception_handler(app)
    init_entrypoints_middleware(args, app, ())
    options = {"vllm_ext": {"kv_tier": {"gib": 1.0, "admin": admin}}}
    engine: Any = Namespace(vllm_config=Namespace(additional_config=options), engine_core=client)
    asyncio.run(plugin.init_state(engine, app.state, args))
    return TestClient(app, raise_server_exceptions=False)


def found(_: str, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"conversations": [ROW], "conversation": ROW, "action": action, "with": arguments}


def nobody(*_: Any) -> dict[str, Any]:
    return {"conversations": [], "conversation": None, "with_other_salts": 1}


def dead(*_: Any) -> Any:
    raise EngineDeadError


def refused(*_: Any) -> dict[str, Any]:
    return {"conversation": ROW, "refused": "it holds too much"}


def text(answer: Any) -> str:
    return str(answer.json()["error"]["message"])


def test_every_engine_is_asked_and_named() -> None:
    client = Client(found, found)
    answer = server(client).get(f"{URL}/conversations?offset=1&limit=2&sort=name")
    asked = {"offset": 1, "limit": 2, "sort": "name"}
    assert answer.status_code == 200
    assert [(row["engine"], row["action"], row["with"]) for row in answer.json()["engines"]] == [
        (0, "list", asked), (1, "list", asked)
    ]  # fmt: skip
    assert {(number, method) for number, method, *_ in client.asked} == {
        (0, "vllm_ext_kv_tier"), (1, "vllm_ext_kv_tier")
    }  # fmt: skip


@pytest.mark.parametrize("action", ["pin", "unpin", "drop"])
def test_engines_that_know_a_conversation_change_it(action: str) -> None:
    answer = server(Client(nobody, found)).post(f"{URL}/{action}", json={"name": "a", "salt": "s"})
    assert answer.status_code == 200
    (row,) = answer.json()["engines"]
    assert (row["engine"], row["action"]) == (1, action)
    assert row["with"] == {"name": "a", "salt": "s", "salt_tag": None}


def test_names_may_hold_anything() -> None:
    client = Client(found)
    assert server(client).get(f"{URL}/conversations/team%2Fa%20b%3Fc").status_code == 200
    assert client.asked[0][3] == {"name": "team/a b?c"}


def test_an_unknown_conversation_is_404() -> None:
    client = server(Client(nobody, nobody))
    assert client.get(f"{URL}/conversations/a").status_code == 404
    answer = client.post(f"{URL}/drop", json={"name": "a"})
    assert answer.status_code == 404
    assert "name='a'" in text(answer)
    assert "2 with others are: give salt or salt_tag" in text(answer)


def test_a_pin_that_no_engine_takes_is_409() -> None:
    answer = server(Client(refused, nobody)).post(f"{URL}/pin", json={"name": "a"})
    assert (answer.status_code, text(answer)) == (409, "name='a' was not pinned: it holds too much")
    assert server(Client(refused, found)).post(f"{URL}/pin", json={"name": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body.name"),
        ({"name": 7}, "body.name"),
        ({"name": "a" * 257}, "body.name"),
        ({"name": "a", "sale": "s"}, "body.sale"),
        ({"name": "a", "salt": 7}, "body.salt"),
        ({"name": "a", "salt": "s", "salt_tag": "t"}, "body"),
    ],
)
def test_a_malformed_request_is_400_and_reaches_no_engine(body: dict[str, Any], field: str) -> None:
    client = Client(found)
    answer = server(client).post(f"{URL}/drop", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not client.asked


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "offset=-1", "offset=x", "sort=age"])
def test_a_malformed_query_is_400(query: str) -> None:
    answer = server(Client(found)).get(f"{URL}/conversations?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"query.{query.partition('=')[0]}")


def test_a_dead_engine_is_503() -> None:
    client = server(Client(found, dead))
    for answer in (client.get(URL), client.delete(f"{URL}/conversations"), client.post(f"{URL}/pin", json=ROW)):
        assert answer.status_code == 503
        assert "an engine core has died" in text(answer)


def test_an_engine_that_does_not_answer_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_admin, "_PATIENCE_S", 0.01)
    answer = server(Client(found, lambda *_: asyncio.sleep(60))).get(URL)
    assert answer.status_code == 503
    assert "did not answer" in text(answer)


def test_emptying_resets_the_prefix_cache_of_every_engine() -> None:
    client = Client(lambda *_: True, lambda *_: False)
    answer = server(client).delete(f"{URL}/conversations").json()
    assert answer == {"engines": [{"engine": 0, "device_emptied": True}, {"engine": 1, "device_emptied": False}]}
    assert sorted(client.asked) == [(0, "reset_prefix_cache", False, True), (1, "reset_prefix_cache", False, True)]


@pytest.mark.parametrize("root_path", ["", "/", "/v", "/api", "/v1"])
def test_nobody_passes_without_the_servers_key(root_path: str) -> None:
    """vLLM's own guard takes the root path off as a string, so that under ``/`` nothing begins with ``/v1``."""
    client = Client(found)
    served = server(client, key=KEY, root_path=root_path)
    paths = {URL, f"{root_path.rstrip('/')}{URL}"}
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            assert served.get(path, headers=headers).status_code in (401, 404)
    assert not client.asked
    assert {served.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code for path in paths} <= {200, 404}
    assert client.asked


def test_without_the_option_there_is_no_such_path() -> None:
    client = Client(found)
    served = server(client, admin=False)
    assert served.get(URL).status_code == served.post(f"{URL}/drop", json=ROW).status_code == 404
    assert not client.asked


@pytest.fixture
def hooked() -> Iterator[None]:
    undo = registry.install("kv-admin")
    yield
    undo()


def test_vllm_is_given_the_plugin_beside_others(hooked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.plugins import load_endpoint_plugins
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    (plugin,) = load_endpoint_plugins(("generate",))
    assert isinstance(plugin, EndpointPlugin)
    assert isinstance(plugin, serving_admin.AdminPlugin)
    assert load_endpoint_plugins(("render",)) == []
