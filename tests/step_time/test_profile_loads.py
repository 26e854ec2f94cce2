"""The loads of a profile: what they span, and that every one of them fits the engine."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vllm_ext.step_time.profile_loads import Load, plan


def test_the_loads_span_batches_contexts_and_chunks() -> None:
    loads = plan(4096, 256)
    decodes = [load for load in loads if load.kind == "decode"]
    assert {load.batch for load in decodes} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert len({load.prompt_tokens for load in decodes}) == 4
    assert max(load.batch * load.prompt_tokens for load in decodes) <= 1 << 16
    chunks = [load.prompt_tokens for load in loads if load.kind == "prefill"]
    assert (min(chunks), max(chunks)) == (7, 4096 - 25)
    assert all(2 * small <= large < 2 * small + 2 for small, large in pairwise(chunks))
    assert [load.batch for load in loads if load.kind == "mixed"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("max_model_len", [8, 26, 64, 131_072])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 1024])
def test_every_load_fits_the_engine(max_model_len: int, max_num_seqs: int) -> None:
    loads = plan(max_model_len, max_num_seqs)
    assert {load.kind for load in loads} == {"decode", "prefill", "mixed"}
    for load in loads:
        assert 1 <= load.batch <= max_num_seqs
        assert load.kind == "mixed" or 1 <= load.prompt_tokens <= max(1, max_model_len - 25)


def test_one_request_of_any_length_is_run_even_where_it_is_more_than_a_batch_may_have() -> None:
    longest = int(0.8 * (1_000_000 - 25))
    assert Load("decode", 1, longest) in plan(1_000_000, 8)
