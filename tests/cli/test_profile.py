"""`vllm-ext profile`: the loads it runs and the report it prints; vLLM itself is not started."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from vllm_ext.cli.profile import Load, plan, report
from vllm_ext.prediction.fit import RegimeError, TermSupport
from vllm_ext.prediction.profile import Profile
from vllm_ext.prediction.runtime import Coefficients

PROFILE = Profile(
    model="org/model",
    device="Some GPU",
    dtype="bfloat16",
    vllm_version="0.32.0",
    coefficients=Coefficients(1e-3, 2e-5, 3e-5, 4e-8, 5e-10),
    num_steps=1000,
    median_error=0.02,
    p90_error=0.1,
    regimes=(
        RegimeError(name="decode", num_steps=150, median_error=0.01, p90_error=0.05),
        RegimeError(name="mixed", num_steps=50, median_error=0.06, p90_error=0.3),
    ),
    terms=tuple(TermSupport(name=name, num_steps=800, uncertainty=0.01) for name in Coefficients._fields),
)


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


def test_the_report_tells_errors_by_kind_of_step() -> None:
    lines = report(PROFILE).splitlines()
    assert lines[0] == "1000 steps of org/model in bfloat16 on Some GPU"
    told = [line.split() for line in lines[2:5]]
    assert told == [
        ["all", "200", "2.0%", "10.0%"],
        ["decode", "150", "1.0%", "5.0%"],
        ["mixed", "50", "6.0%", "30.0%"],
    ]


def test_the_report_tells_what_the_steps_had_no_data_for() -> None:
    terms = (
        *PROFILE.terms[:3],
        TermSupport(name="context_token_s", num_steps=800, uncertainty=0.4),
        TermSupport(name="pair_s", num_steps=0, uncertainty=1.0),
    )
    lines = report(replace(PROFILE, terms=terms, tensor_parallel_size=4)).splitlines()
    assert lines[0].endswith("tensor-parallel size 4")
    noted = {line.split()[0]: line.partition("%")[2].strip() for line in lines[-5:]}
    assert noted == {
        "base_s": "",
        "decode_s": "",
        "prefill_token_s": "",
        "context_token_s": "too little data",
        "pair_s": "too little data, default kept",
    }
