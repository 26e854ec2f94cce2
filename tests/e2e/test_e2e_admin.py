"""The admin endpoint and the KV tier's metrics on a real server: what is seen, who may see it, and what it changes."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import EAGER
from forks import ForkServer
from servers import HANG_S, MODEL, Served, wait_until

from vllm_ext.scheduling.load_report.report import session_key

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

KEY = "secret-of-the-server"
ADMIN_KEY = "secret-of-the-administrator"
SALT = "secret-of-a-tenant"
TIER = "/vllm-ext/kv-tier"
CHUNK, CHUNKS = 32, 24
CHUNK_BYTES = 20480
"""Of the tiny model, in 8 bits."""
PROMPT_TOKENS = 3 * CHUNK + 8
OPTIONS = {"vllm_ext": {**EAGER["vllm_ext"], "kv_tier": {"store": "early"}}}
TTL_S = 0.01
"""By the server's clock, which goes by its steps; the steps of a prompt take longer."""
_openings = itertools.count(10, 8)


@pytest.fixture(scope="module")
def server(forks: ForkServer | None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Host memory for a few conversations, and a device that holds the last ones only; its time goes by its steps."""
    args = ["--scheduler-cls", "alise-published", "--additional-config", json.dumps(OPTIONS), "--api-key", KEY]
    args += [
        "--kv-tier-gib",
        str((CHUNKS + 0.5) * CHUNK_BYTES / 2**30),
        "--kv-tier-admin",
        "--ext-admin",
        "--ext-load-report",
    ]
    args += ["--enable-prompt-tokens-details"]
    args += ["--num-gpu-blocks-override", "18", "--max-num-seqs", "2", "--ext-metrics-interval-s", "0.2"]
    log, env = tmp_path_factory.mktemp("admin") / "server.log", {"VLLM_EXT_ADMIN_KEY": ADMIN_KEY}
    with Served(llama, args, log_path=log, forks=forks, env=env, modules=["turnstile", "held_copies"]) as running:
        yield running


def call(server: Served, method: str, path: str, body: Any = None, key: str | None = ADMIN_KEY) -> tuple[int, Any]:
    """Return the status and the parsed body of an answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(server.base_url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def done(server: Served, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Return the one engine's part of an answer."""
    status, answer = call(server, method, path, body)
    assert status == 200, answer
    (engine,) = answer["engines"]
    assert engine["engine"] == 0
    return dict(engine)


def prompt() -> list[int]:
    """Return a prompt that nobody else has."""
    first = next(_openings)
    return [first + number % 100 for number in range(PROMPT_TOKENS)]


def ask(server: Served, name: str, tokens: list[int], **body: Any) -> int:
    """Let a conversation take a turn; return how many tokens of its prompt were not computed."""
    wanted = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "vllm_xargs": {"conversation_id": name}}
    sent = {"model": MODEL, "prompt": tokens, **wanted, **body}
    status, answer = call(server, "POST", "/v1/completions", sent, key=KEY)
    assert status == 200, answer
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def press(server: Served, conversations: int) -> None:
    """Let others come, whose KV takes places on the device and in host memory."""
    for number in range(conversations):
        ask(server, f"other-{number}", prompt())


def row(server: Served, name: str) -> dict[str, Any]:
    """Return the one conversation of a name."""
    (found,) = done(server, "GET", f"{TIER}/conversations/{name}")["conversations"]
    return dict(found)


def test_a_conversation_is_listed_and_dropped(server: Served) -> None:
    kept, talk = prompt(), prompt()
    ask(server, "kept", kept)
    ask(server, "talk", talk, cache_salt=SALT)
    wait_until(lambda: row(server, "talk")["chunks"] == 3, "the last chunk was stored")
    listed = done(server, "GET", f"{TIER}/conversations")
    assert listed["total"] == 2
    assert [found["name"] for found in listed["conversations"]] == ["kept", "talk"]
    found = row(server, "kept")
    unused_s, number = found.pop("unused_s"), found.pop("id")
    assert unused_s >= 0
    assert found == {
        "name": "kept",
        "salt_tag": None,
        "turns": 1,
        "running": 0,
        "ttl_s": None,
        "chunks": 3,
        "bytes": 3 * CHUNK_BYTES,
    }
    other = row(server, "talk")
    assert other["id"] != number
    assert other["salt_tag"]
    first = call(server, "GET", f"{TIER}/conversations?limit=1")[1]
    second = call(server, "GET", f"{TIER}/conversations?limit=1&cursor={first['next']}")[1]
    shown = [page["engines"][0]["conversations"][0]["name"] for page in (first, second)]
    assert (shown, second["next"]) == (["kept", "talk"], None)

    status, refused = call(server, "POST", f"{TIER}/drop", {"name": "talk"})
    assert status == 404
    assert "give salt, or the id" in refused["error"]["message"], "without its salt it is another conversation"

    press(server, 6)  # off the device, and not out of host memory
    assert ask(server, "talk", talk, cache_salt=SALT) == 3 * CHUNK
    press(server, 6)
    answer = done(server, "POST", f"{TIER}/drop", {"id": other["id"]})
    assert (answer["dropped_chunks"], answer["left_chunks"]) == (3, 0)
    assert ask(server, "talk", talk, cache_salt=SALT) == 0
    assert SALT not in json.dumps(done(server, "GET", f"{TIER}/conversations?limit=1000"))


def test_statistics_add_up_and_metrics_follow(server: Served) -> None:
    press(server, 12)
    state = done(server, "GET", TIER)
    host = state["host"]
    assert (host["capacity_chunks"], state["chunk_bytes"], state["bits"]) == (CHUNKS, CHUNK_BYTES, 8)
    assert state["placed_chunks"] == host["used_chunks"] + sum(state["gone_chunks"].values())
    assert state["gone_chunks"]["room"] > 0
    assert state["quantise_s"]["store"] > 0
    stored, bits = state["stored_chunks"], "vllm_ext:kv_tier_"
    wait_until(lambda: server.metric(f"{bits}stored_chunks_total", engine="0") >= stored, "the metrics were fetched")
    assert server.metric(f"{bits}gone_chunks_total", reason="room") > 0
    assert server.metric(f"{bits}capacity_bytes", tier="host") == CHUNKS * CHUNK_BYTES
    assert server.metric(f"{bits}conversations") == state["conversations"]["kept"] + state["conversations"]["gone"]
    for what in ("copy", "quantise"):
        assert server.metric(f"{bits}{what}_seconds_total", direction="store") >= state[f"{what}_s"]["store"] > 0


def test_the_tier_is_emptied(server: Served) -> None:
    tokens = prompt()
    ask(server, "last", tokens)
    press(server, 1)
    assert done(server, "DELETE", f"{TIER}/conversations")["device_emptied"]
    state = done(server, "GET", TIER)
    assert state["host"]["used_chunks"] == 0
    assert state["gone_chunks"]["reset"] > 0
    assert ask(server, "last", tokens) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_client_may_not_ask_for_is_400(server: Served, stream: bool) -> None:
    """To end a conversation without a salt, which others may name too."""
    xargs = {"conversation_id": "kept", "kv_ttl_s": 1e-6}
    body = {"model": MODEL, "prompt": prompt(), "stream": stream, "vllm_xargs": xargs}
    status, answer = call(server, "POST", "/v1/completions", body, key=KEY)
    assert (status, answer["error"]["param"]) == (400, "kv_ttl_s")
    assert "kv_ttl_s=" in answer["error"]["message"]


def test_a_client_with_a_salt_ends_its_own_conversation(server: Served) -> None:
    tokens = prompt()
    for salt in (SALT, "another"):
        ask(server, "brief", tokens, cache_salt=salt)
    xargs = {"conversation_id": "brief", "kv_ttl_s": TTL_S}
    ask(server, "brief", tokens, cache_salt=SALT, vllm_xargs=xargs)
    press(server, 1)  # lives end in steps, and its prompt takes longer than that
    rows = done(server, "GET", f"{TIER}/conversations/brief")["conversations"]
    assert [(found["ttl_s"], found["chunks"]) for found in rows] == [(TTL_S, 0), (None, 3)]


def test_nothing_is_told_without_the_administrators_key(server: Served) -> None:
    for key in (None, "wrong", KEY):
        for method, path, body in (
            ("GET", "", None),
            ("DELETE", "/conversations", None),
            ("POST", "/drop", {"name": "a"}),
        ):
            assert call(server, method, TIER + path, body, key=key)[0] == 401


@pytest.mark.parametrize("path", ["", "/conversations", "/conversations/a"])
def test_a_server_that_was_not_asked_for_it_has_no_such_endpoint(alise: Served, path: str) -> None:
    assert call(alise, "GET", TIER + path, key=None)[0] == 404


def test_the_policies_are_switched_off_and_on_again(server: Served) -> None:
    policy = "/vllm-ext/policy"
    started = done(server, "GET", policy)
    assert started["order"] == "system"
    assert done(server, "POST", policy, {"order": "arrival", "least_tbt_ms": 40})["least_tbt_ms"] == 40
    wait_until(lambda: server.metric("vllm_ext:policy_by_arrival") == 1, "the gauge of the switch")
    status, answer = call(server, "POST", policy, {"max_num_batched_tokens": 1})
    assert (status, answer["error"]["message"][:25]) == (400, "max_num_batched_tokens=1:")
    assert call(server, "GET", policy, key=KEY)[0] == 401
    assert done(server, "DELETE", policy) == started
    wait_until(lambda: server.metric("vllm_ext:policy_by_arrival") == 0, "the gauge of the switch")


def test_routers_are_told_the_load_and_whose_kv_is_there_without_a_key_and_without_names(server: Served) -> None:
    ask(server, "told-of", prompt())
    status, answer = call(server, "GET", "/vllm-ext/load", key=None)
    assert status == 200
    (engine,) = answer["engines"]
    ask(server, "told-of-too", prompt())
    (later,) = call(server, "GET", "/vllm-ext/load", key=None)[1]["engines"]
    assert (later["started"], later["number"] > engine["number"]) == (engine["started"], True)
    assert later["seats"] == 2
    device, host = later["resident"][session_key("told-of-too")]
    assert max(device, host) >= PROMPT_TOKENS // CHUNK * CHUNK
    assert "told-of" not in json.dumps(later)
    assert server.metric("vllm_ext:load_step_age_seconds") == 0
