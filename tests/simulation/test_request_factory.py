"""Requests as the front end would send them, with prompts of their own unless ids are given."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.simulation.harness import VOCAB_SIZE, block_hasher
from vllm_ext.simulation.request_factory import RequestFactory, TooLong
from vllm_ext.simulation.token_runner import EOS_TOKEN_ID

from .parts import ask


def factory(*, caching: bool = False, reveal: bool = False, max_model_len: int = 160) -> RequestFactory:
    hasher = block_hasher() if caching else None
    return RequestFactory(max_model_len=max_model_len, hasher=hasher, reveal_lengths=reveal)


def test_request_carries_what_the_client_sent() -> None:
    asked = ask("a", 2.5, 10, priority=3, session_id="s", extra_args={"osl": 7})
    built = factory()(asked)
    assert (built.request_id, built.arrival_time, built.priority, built.session_id) == ("a", 2.5, 3, "s")
    assert (built.num_prompt_tokens, built.max_tokens) == (10, 64)
    assert built.sampling_params.extra_args == {"osl": 7}
    assert built.sampling_params.eos_token_id == EOS_TOKEN_ID


def test_bound_is_cut_at_the_context() -> None:
    assert factory()(ask("a", prompt=150)).max_tokens == 10


def test_prompt_that_fills_the_context_is_too_long() -> None:
    assert factory()(ask("a", prompt=159)).max_tokens == 1
    with pytest.raises(TooLong, match="prompt_tokens=160 of a: must be below the model's context of 160"):
        factory()(ask("a", prompt=160))


@pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "max_tokens"])
def test_length_below_one_is_no_request(field: str) -> None:
    broken = dataclasses.replace(ask("a"), **{field: 0})
    with pytest.raises(ValueError, match=f"{field}=0.* of a: must be at least 1") as caught:
        factory()(broken)
    assert not isinstance(caught.value, TooLong)


def test_given_ids_are_used_and_counted() -> None:
    assert list(factory()(ask("a", prompt=3, token_ids=(7, 8, 9))).prompt_token_ids) == [7, 8, 9]
    with pytest.raises(ValueError, match="token_ids of a: 2 of them, but prompt_tokens=3") as caught:
        factory()(ask("a", prompt=3, token_ids=(7, 8)))
    assert not isinstance(caught.value, TooLong)


def test_invented_prompts_differ_in_their_first_block() -> None:
    build = factory(caching=True)
    hashes = [build(ask(f"r{i}", prompt=16)).block_hashes[0] for i in range(4200)]
    assert len(set(hashes)) == len(hashes)


def test_invented_ids_are_in_the_vocabulary_and_end_nothing() -> None:
    build = factory(caching=True)
    build._count = 3900**2 * 7 - 2
    seen = set(itertools.chain.from_iterable(build(ask(f"r{i}", prompt=20)).prompt_token_ids for i in range(4)))
    assert EOS_TOKEN_ID not in seen
    assert max(seen) < VOCAB_SIZE


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
    assert plain.sampling_params is same.sampling_params
    assert hinted.sampling_params is not plain.sampling_params
    assert build(ask("d", max_tokens=5)).max_tokens == 5


def test_memory_for_sampling_parameters_is_bounded() -> None:
    build = factory(max_model_len=20_000)
    for bound in range(1, 9000):
        assert build(ask("a", prompt=1, max_tokens=bound)).max_tokens == bound
    assert len(build._params) <= 4096
