"""Requests as the front end would send them, with prompts of their own unless ids are given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.simulation_parts import ask
from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.simulation.engine.harness import block_hasher
from vllm_ext.simulation.engine.request_factory import RequestFactory, TooLong
from vllm_ext.simulation.engine.token_runner import EOS_TOKEN_ID


def factory(*, caching: bool = False, reveal: bool = False, max_model_len: int = 160) -> RequestFactory:
    hasher = block_hasher() if caching else None
    return RequestFactory(max_model_len=max_model_len, hasher=hasher, reveal_lengths=reveal)


def test_request_carries_what_the_client_sent() -> None:
    asked = ask("a", 2.5, 3, priority=3, session_id="s", token_ids=(7, 8, 9))
    built = factory()(asked)
    assert (built.request_id, built.arrival_time, built.priority, built.session_id) == ("a", 2.5, 3, "s")
    assert (list(built.prompt_token_ids), built.max_tokens) == ([7, 8, 9], 64)
    assert built.sampling_params.eos_token_id == EOS_TOKEN_ID


@pytest.mark.parametrize(("prompt", "max_tokens", "bound"), [(10, 64, 64), (10, 5, 5), (150, 64, 10), (159, 64, 1)])
def test_bound_is_cut_at_the_context(prompt: int, max_tokens: int, bound: int) -> None:
    assert factory()(ask("a", prompt=prompt, max_tokens=max_tokens)).max_tokens == bound


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"prompt": 160}, TooLong, "prompt_tokens=160 of a: must be below the model's context of 160"),
        ({"prompt": 0}, ValueError, "prompt_tokens=0.* of a: must be at least 1"),
        ({"output": 0}, ValueError, "output_tokens=0.* of a: must be at least 1"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0 of a: must be at least 1"),
        ({"prompt": 3, "token_ids": (7, 8)}, ValueError, "token_ids of a: 2 of them, but prompt_tokens=3"),
    ],
)
def test_what_is_no_request_is_refused_and_only_a_long_one_is_answered(
    fields: dict[str, Any], error: type[ValueError], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        factory()(ask("a", **fields))
    assert caught.type is error


def test_invented_prompts_differ_in_their_first_block() -> None:
    build = factory(caching=True)
    hashes = [build(ask(f"r{i}", prompt=16)).block_hashes[0] for i in range(4200)]
    assert len(set(hashes)) == len(hashes)


def test_blocks_are_hashed_only_where_caching_is_on() -> None:
    assert len(factory(caching=True)(ask("a", prompt=40)).block_hashes) == 2
    assert not factory()(ask("a", prompt=40)).block_hashes


@pytest.mark.parametrize("extra_args", [None, {"osl": 5}])
def test_true_length_goes_to_oracles_only(extra_args: Any) -> None:
    asked = ask("a", output=9, extra_args=extra_args)
    assert factory()(asked).sampling_params.extra_args == extra_args
    assert factory(reveal=True)(asked).sampling_params.extra_args == {**(extra_args or {}), HIDDEN_LENGTH_KEY: 9}
    assert asked.extra_args == extra_args


def test_sampling_parameters_are_shared_only_between_equals() -> None:
    build = factory()
    plain, same, hinted = build(ask("a")), build(ask("b")), build(ask("c", extra_args={"osl": 5}))
    assert plain.sampling_params is same.sampling_params is not hinted.sampling_params
    assert build(ask("d", max_tokens=5)).max_tokens == 5
