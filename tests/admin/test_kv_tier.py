"""The KV tier's part of the admin endpoint in vLLM's application, with engine cores that answer what they like."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.v1.engine.exceptions import EngineDeadError

from tests.support.admin_server import API_KEY, KEY, Answer, Client, server
from vllm_ext import envs
from vllm_ext.admin import engines
from vllm_ext.admin.kv_tier import router
from vllm_ext.admin.plugin import AdminPlugin
from vllm_ext.hooks import registry

URL = router.prefix
ROW = {"name": "a"}


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.ADMIN_KEY, KEY)


def found(_: str, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    page = {"conversations": [ROW], "cursor": 17, "more": False} if action == "list" else {"conversations": [ROW]}
    return {**page, "conversation": ROW, "action": action, "with": arguments}


def nobody(*_: Any) -> dict[str, Any]:
    return {"conversations": [], "conversation": None, "with_other_salts": 1}


def dead(*_: Any) -> Any:
    raise EngineDeadError


def text(answer: Any) -> str:
    return str(answer.json()["error"]["message"])


def test_every_engine_is_asked_and_named() -> None:
    client = Client(found, found)
    answer = server(client).get(f"{URL}/conversations?limit=2")
    asked = {"cursor": 0, "limit": 2}
    assert answer.status_code == 200
    assert [(row["engine"], row["action"], row["with"]) for row in answer.json()["engines"]] == [
        (0, "list", asked), (1, "list", asked)
    ]  # fmt: skip
    assert answer.json()["next"] is None
    assert {(number, method) for number, method, *_ in client.asked} == {
        (0, "vllm_ext_kv_tier"), (1, "vllm_ext_kv_tier")
    }  # fmt: skip


def test_pages_of_several_engines_have_one_cursor() -> None:
    """Each engine numbers its own conversations."""
    lengths = {0: 5, 1: 2}

    def engine(number: int) -> Answer:
        def answer(_: str, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
            first, limit = arguments["cursor"], arguments["limit"]
            rows = list(range(first + 1, lengths[number] + 1))
            return {"conversations": rows[:limit], "cursor": [first, *rows[:limit]][-1], "more": len(rows) > limit}

        return answer

    served, seen, following = server(Client(engine(0), engine(1))), {0: [], 1: []}, ""
    while following is not None:
        answer = served.get(f"{URL}/conversations?limit=2{following and '&cursor=' + following}").json()
        for part in answer["engines"]:
            assert set(part) == {"engine", "conversations"}
            seen[part["engine"]] += part["conversations"]
        following = answer["next"]
    assert seen == {0: [1, 2, 3, 4, 5], 1: [1, 2]}


def test_engines_that_know_a_conversation_drop_it() -> None:
    answer = server(Client(nobody, found)).post(f"{URL}/drop", json={"name": "a", "salt": "s"})
    assert answer.status_code == 200
    (row,) = answer.json()["engines"]
    assert (row["engine"], row["action"]) == (1, "drop")
    assert row["with"] == {"name": "a", "salt": "s"}


@pytest.mark.parametrize(
    ("method", "path", "body", "asked"),
    [
        ("post", "/drop", {"id": "5f0c6a1b-17"}, {"id": "5f0c6a1b-17"}),
        ("get", "/conversations/team%2Fa%20b%3Fc", None, {"name": "team/a b?c"}),
    ],
    ids=["by-its-id", "by-a-name-that-may-hold-anything"],
)
def test_a_conversation_is_meant(method: str, path: str, body: Any, asked: dict[str, Any]) -> None:
    client = Client(found)
    assert server(client).request(method, URL + path, json=body).status_code == 200
    assert client.asked[0][3] == asked


def test_an_unknown_conversation_is_404() -> None:
    client = server(Client(nobody, nobody))
    assert client.get(f"{URL}/conversations/a").status_code == 404
    answer = client.post(f"{URL}/drop", json={"name": "a"})
    assert answer.status_code == 404
    assert "name='a'" in text(answer)
    assert "2 with others are: give salt, or the id that the list shows" in text(answer)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *(
            ("/drop", body, field)
            for body, field in (
                ({}, "body"),
                ({"name": ""}, "body.name"),
                ({"name": 7}, "body.name"),
                ({"name": "a" * 257}, "body.name"),
                ({"name": "a", "sale": "s"}, "body.sale"),
                ({"name": "a", "salt": 7}, "body.salt"),
                ({"name": "a", "id": "i"}, "body"),
                ({"id": "i", "salt": "s"}, "body"),
            )
        ),
        *((f"/conversations?limit={limit}", None, "query.limit") for limit in ("0", "1001")),
        *((f"/conversations?cursor={cursor}", None, "query.cursor") for cursor in ("-1", "x", "1..2", "1", "1.2.3")),
    ],
)
def test_a_malformed_request_is_400_and_reaches_no_engine(path: str, body: Any, field: str) -> None:
    client = Client(found, found)
    answer = server(client).request("get" if body is None else "post", URL + path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert ("of 2 engines" in text(answer)) is path.endswith(("=1", "=1.2.3")), "a cursor of other engines"
    assert not client.asked


def test_an_engine_that_is_dead_or_does_not_answer_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    client = server(Client(found, dead))
    for answer in (client.get(URL), client.delete(f"{URL}/conversations"), client.post(f"{URL}/drop", json=ROW)):
        assert (answer.status_code, "an engine core has died" in text(answer)) == (503, True)
    monkeypatch.setattr(engines, "_PATIENCE_S", 0.01)
    answer = server(Client(found, lambda *_: asyncio.sleep(60))).get(URL)
    assert (answer.status_code, "did not answer" in text(answer)) == (503, True)


def test_emptying_resets_the_prefix_cache_of_every_engine() -> None:
    client = Client(lambda *_: True, lambda *_: False)
    answer = server(client).delete(f"{URL}/conversations").json()
    assert answer == {"engines": [{"engine": 0, "device_emptied": True}, {"engine": 1, "device_emptied": False}]}
    assert sorted(client.asked) == [(0, "reset_prefix_cache", False, True), (1, "reset_prefix_cache", False, True)]


@pytest.mark.parametrize("root_path", ["", "/", "/v", "/api", "/v1"])
@pytest.mark.parametrize("key", [None, "wrong", "", API_KEY])
def test_no_other_key_opens_it(root_path: str, key: str | None) -> None:
    """The inference key did: every client of the server could list and drop everybody's conversations."""
    client = Client(found)
    served = server(client, key=key, root_path=root_path)
    paths = {URL, f"{root_path.rstrip('/')}{URL}"}
    for path in paths:
        assert served.get(path).status_code in (401, 404)
        for header in (KEY, f"Basic {KEY}", f"Bearer  {KEY}"):
            assert served.get(path, headers={"Authorization": header}).status_code in (401, 404)
    assert not client.asked
    assert {served.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code for path in paths} <= {200, 404}
    assert client.asked


def test_its_key_opens_nothing_else_and_without_the_option_there_is_no_such_path() -> None:
    client = Client(found)
    assert server(client).get("/v1/models").status_code == 401
    served = server(client, tier=False)
    assert served.get(URL).status_code == served.post(f"{URL}/drop", json=ROW).status_code == 404
    assert not client.asked


@pytest.mark.parametrize("api_key", [KEY, None])
def test_a_server_whose_clients_have_the_key_does_not_start(
    api_key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_API_KEY", KEY, raising=False)
    with pytest.raises(ValueError, match=r"VLLM_EXT_ADMIN_KEY is one of the server's API keys") as caught:
        server(Client(found), api_key=api_key)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "what"), [(None, "is not set"), ("", "is not set"), ("short", "has 5 characters"), ("ä" * 20, "has 20")]
)
def test_without_a_key_there_is_no_endpoint(key: str | None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if key is None:
        monkeypatch.delenv(envs.ADMIN_KEY)
    else:
        monkeypatch.setenv(envs.ADMIN_KEY, key)
    with pytest.raises(ValueError, match=f"^VLLM_EXT_ADMIN_KEY {what}.*: the admin endpoint needs a key of its own"):
        server(Client(found))


def test_vllm_is_given_the_plugin_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    undo = registry.install("admin")
    try:
        from vllm.plugins import load_endpoint_plugins

        (plugin,) = load_endpoint_plugins(("generate",))
        assert isinstance(plugin, EndpointPlugin)
        assert isinstance(plugin, AdminPlugin)
        assert load_endpoint_plugins(("render",)) == []
    finally:
        undo()
