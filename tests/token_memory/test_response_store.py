"""Which responses are kept, and what goes with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_ext.config import ExtConfig, to_dict
from vllm_ext.launch import features
from vllm_ext.patches import response_store
from vllm_ext.token_memory.response_store import BoundedResponses


def ended(status: str = "completed") -> Any:
    return SimpleNamespace(status=status)


def test_the_least_recently_used_goes_with_all_that_is_kept_beside_it() -> None:
    messages, events = dict.fromkeys("abc", 0), {"a": 1}
    responses = BoundedResponses(2, messages, events)
    responses["a"], responses["b"] = ended(), ended()
    assert responses.get("a") is not None
    responses["c"] = ended()
    assert list(responses) == ["a", "c"] == list(messages)
    messages["d"] = 0
    responses["d"] = ended()
    assert list(responses) == ["c", "d"]
    assert not events
    assert responses.get("a") is None


def test_running_responses_stay_and_go_when_they_have_ended() -> None:
    responses = BoundedResponses(1, dict.fromkeys("ab", 0), {})
    responses["a"], responses["b"] = ended("queued"), ended("in_progress")
    assert list(responses) == ["a", "b"]
    responses["a"] = ended()
    assert list(responses) == ["b", "a"]
    responses["b"] = ended()
    assert list(responses) == ["b"]


def test_messages_of_requests_that_failed_are_bounded_too() -> None:
    messages = dict.fromkeys("xyz", 0)
    responses = BoundedResponses(1, messages, {})
    messages["a"] = 0
    responses["a"] = ended()
    assert list(messages) == ["z", "a"]


def test_a_response_whose_messages_went_while_it_ran_is_unknown() -> None:
    """Who went on from it would otherwise go on without its history, and not be told."""
    messages = dict.fromkeys("abc", 0)
    responses = BoundedResponses(1, messages, {})
    responses["c"] = ended()
    assert list(messages) == ["b", "c"]
    responses["a"] = ended()
    assert responses.get("a") is None
    assert list(responses) == ["c"]


class Serving:
    def __init__(self, config: ExtConfig) -> None:
        vllm_config = SimpleNamespace(additional_config={"vllm_ext": to_dict(config)})
        self.engine_client = SimpleNamespace(vllm_config=vllm_config)
        self.response_store: dict[str, Any] = {}
        self.msg_store: dict[str, Any] = {}
        self.event_store: dict[str, Any] = {}


def test_a_server_has_a_bound_only_if_one_was_chosen() -> None:
    for most, kind in ((0, dict), (3, BoundedResponses)):
        serving = Serving.__new__(Serving)
        response_store._init(Serving.__init__, serving, ExtConfig(response_store=most))
        assert type(serving.response_store) is kind
        groups = features.needed_groups(ExtConfig(response_store=most), "OPENAI_API_SERVER")
        assert ("response-store" in groups) == bool(most)
    assert "response-store" not in features.needed_groups(ExtConfig(response_store=3), "LLM_CLASS")
