"""Next turns on a real server: their histories have the very ids that were prompted and generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from forks import ForkServer
from servers import HANG_S, MODEL, Served

from vllm_ext.tiny_model import tokenizer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
QUESTIONS = ("What is the difference between being early and being quick?", "Say why in ten words, then in five.")
SAMPLED: dict[str, Any] = {"model": MODEL, "temperature": 1.0, "seed": 7}
TOKENIZER = tokenizer.train()
LETTERS = [TOKENIZER.token_to_id(letter) for letter in "ehnrt"]
"""Of which answers are made, each a token; the tokenizer has merges for them."""
SPELLED: dict[str, Any] = {"max_tokens": 24, "allowed_token_ids": LETTERS, "return_token_ids": True}
COUNTED = "vllm_ext:token_memory_tokens_total"


@pytest.fixture(scope="module")
def server(forks: ForkServer | None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("token_memory")
    (folder / "template.jinja").write_text(TEMPLATE)
    args = [
        "--scheduler-cls",
        "fcfs",
        "--ext-token-memory",
        "8",
        "--ext-response-store",
        "2",
        "--chat-template",
        str(folder / "template.jinja"),
    ]
    with Served(
        llama, args, log_path=folder / "server.log", forks=forks, env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    ) as running:
        yield running


def post(server: Served, route: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.base_url}/v1/{route}", json={**SAMPLED, **body}, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rendered(messages: list[dict[str, str]]) -> str:
    return "".join(f"<s>{m['role']}\n{m['content']}</s>" for m in messages) + "<s>assistant\n"


def chat(server: Served, messages: list[dict[str, str]], **more: Any) -> tuple[list[int], list[int], str]:
    """Ids of the prompt, ids of the answer, the answer."""
    answer = post(server, "chat/completions", messages=messages, **SPELLED, **more)
    choice = answer["choices"][0]
    return answer["prompt_token_ids"], choice["token_ids"], choice["message"]["content"]


def completion(server: Served, messages: list[dict[str, str]], **more: Any) -> tuple[list[int], list[int], str]:
    prompt = rendered(messages)
    answer = post(server, "completions", prompt=prompt, **SPELLED, **more)
    choice = answer["choices"][0]
    return choice["prompt_token_ids"], choice["token_ids"], choice["text"]


@pytest.mark.parametrize("ask", [chat, completion])
def test_the_next_turn_has_the_ids_of_prompt_and_answer(server: Served, ask: Any) -> None:
    messages = [said("user", f"{ask.__name__}: {QUESTIONS[0]}")]
    prompt, answer, text = ask(server, messages)
    messages += [said("assistant", text), said("user", QUESTIONS[1])]
    again, _, _ = ask(server, messages)
    encoded = TOKENIZER.encode(rendered(messages)).ids
    assert again[: len(prompt + answer)] == prompt + answer
    assert encoded[: len(prompt + answer)] != prompt + answer, "the tokenizer finds the same: nothing was tested"
    assert again[len(prompt + answer) :] == TOKENIZER.encode(f"</s><s>user\n{QUESTIONS[1]}</s><s>assistant\n").ids


def test_another_salt_finds_nothing_of_it(server: Served) -> None:
    messages = [said("user", f"salted: {QUESTIONS[0]}")]
    prompt, answer, text = chat(server, messages, cache_salt="one")
    messages += [said("assistant", text), said("user", QUESTIONS[1])]
    encoded = TOKENIZER.encode(rendered(messages)).ids
    assert chat(server, messages, cache_salt="two")[0] == encoded
    assert chat(server, messages)[0] == encoded
    assert chat(server, messages, cache_salt="one")[0][: len(prompt + answer)] == prompt + answer


def test_responses_find_their_history(server: Served) -> None:
    messages = [said("user", f"responses: {QUESTIONS[0]}")]
    first = post(server, "responses", input=messages, max_output_tokens=24)
    text = first["output"][0]["content"][0]["text"]
    before = server.metric(COUNTED, source="memory")
    post(server, "responses", input=[*messages, said("assistant", text), said("user", QUESTIONS[1])])
    known = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert server.metric(COUNTED, source="memory") - before == known


def test_the_responses_used_last_can_be_continued_and_older_ones_are_unknown(server: Served) -> None:
    ids = [post(server, "responses", input=f"{number}: {QUESTIONS[0]}", max_output_tokens=8)["id"] for number in "abc"]
    kept = [httpx.get(f"{server.base_url}/v1/responses/{known}", timeout=HANG_S).status_code for known in ids]
    assert kept == [404, 200, 200]
    before = server.metric(COUNTED, source="memory")
    post(server, "responses", input=QUESTIONS[1], previous_response_id=ids[1], max_output_tokens=8)
    assert server.metric(COUNTED, source="memory") > before


def test_a_prompt_of_ids_teaches_nothing(server: Served) -> None:
    """Who may choose ids must not choose those of others' texts."""
    text = rendered([said("user", f"ids: {QUESTIONS[0]}")])
    odd = [i for c in text.removeprefix("<s>").partition("</s>")[0] for i in TOKENIZER.encode(c).ids]
    post(server, "completions", prompt=[0, *odd, 1], max_tokens=4, echo=True)
    answer = post(server, "completions", prompt=text, max_tokens=1, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == TOKENIZER.encode(text).ids


def test_truncated_prompts_are_left_to_the_tokenizer(server: Served) -> None:
    before = server.metric("vllm_ext:token_memory_lookups_total", outcome="refused")
    post(server, "completions", prompt=rendered([said("user", QUESTIONS[0])]), max_tokens=1, truncate_prompt_tokens=8)
    assert server.metric("vllm_ext:token_memory_lookups_total", outcome="refused") == before + 1
    assert server.metric("vllm_ext:token_memory_checks_total") >= 1
    assert server.metric("vllm_ext:token_memory_mismatches_total") == 0
    assert server.metric("vllm_ext:token_memory_bytes") > 0
