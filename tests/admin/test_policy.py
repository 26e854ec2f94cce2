"""The switch of the policies over HTTP, with engine cores that answer what they like."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.admin_server import KEY, Client, server
from vllm_ext import envs
from vllm_ext.admin.policy import router

URL = router.prefix


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.ADMIN_KEY, KEY)


def settings(_: str, wanted: dict[str, Any] | None) -> dict[str, Any]:
    return {"order": "system", **(wanted or {})}


def refuses(*_: Any) -> dict[str, Any]:
    return {"problem": "order='x': must be another"}


@pytest.mark.parametrize(
    ("method", "body", "wanted", "order"),
    [("get", None, {}, "system"), ("post", {"order": "arrival"}, {"order": "arrival"}, "arrival"),
     ("delete", None, None, "system")],
)  # fmt: skip
def test_every_engine_is_told_and_answers(method: str, body: Any, wanted: Any, order: str) -> None:
    client = Client(settings, settings)
    answer = server(client).request(method, URL, json=body)
    assert answer.status_code == 200
    assert answer.json() == {"engines": [{"engine": number, "order": order} for number in (0, 1)]}
    assert client.asked == [(number, "vllm_ext_policy", wanted) for number in (0, 1)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"order": "x"}', "order='x': must be another"),
        ("[1]", "body: must be a JSON object"),
        ('"arrival"', "body: must be a JSON object"),
        ("null", "body: must be a JSON object"),
        ("", "body: Expecting value"),
        ("{", "body: Expecting property name"),
        ("[" * 100_000, "body: maximum recursion depth"),
    ],
)
def test_what_is_not_allowed_is_answered_in_a_line(body: str, said: str) -> None:
    answer = server(Client(refuses)).post(URL, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


def test_whole_number_that_an_engine_cannot_be_sent_reaches_it_as_one_that_it_refuses() -> None:
    client = Client(settings)
    server(client).post(URL, content=f'{{"max_num_batched_tokens": {10**30}, "least_ttft_ms": {10**18 - 1}}}')
    ((_, _, wanted),) = client.asked
    assert wanted == {"max_num_batched_tokens": 1e30, "least_ttft_ms": 10**18 - 1}
    assert [type(value) for value in wanted.values()] == [float, int]


def test_nothing_is_said_of_a_body_without_the_key() -> None:
    assert server(Client(refuses), key=None).post(URL, content="{").status_code == 401
    assert server(Client(refuses), policy=False).post(URL, content="{").status_code == 404


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("another-key-of-somebody", 401), (KEY, 200)])
def test_only_the_administrators_key_opens_it(key: str | None, status: int) -> None:
    client = Client(settings)
    assert server(client, key=key).post(URL, json={"order": "arrival"}).status_code == status
    assert len(client.asked) == (status == 200)


def test_each_part_is_there_only_where_it_was_asked_for() -> None:
    client = Client(settings)
    assert server(client, policy=False).get(URL).status_code == 404
    assert server(client, tier=False).get("/vllm-ext/kv-tier").status_code == 404
    assert client.asked == []
    assert server(client, tier=False).get(URL).status_code == 200
