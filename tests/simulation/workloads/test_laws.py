"""What holds of every workload, whatever its description."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.simulation.requests import SimRequest

from .parts import serve, workload

KINDS = st.sampled_from(
    [{}, {"arrivals": "gamma", "cv": 2.0}, {"arrivals": "at-once"}]
    + [{"arrivals": "closed-loop", "clients": clients} for clients in (1, 2, 5)]
)
FIELDS = st.fixed_dictionaries(
    {
        "source": st.sampled_from(["pensieve-sharegpt", "alpaca-like", "fixed:10:20"]),
        "num_requests": st.integers(0, 12),
        "think_s": st.sampled_from([0.0, 0.5, 60.0]),
        "system_prompt_tokens": st.integers(0, 32),
        "over_context": st.sampled_from(["drop", "cut"]),
        "seed": st.integers(0, 50),
    },
    optional={"max_model_len": st.integers(64, 2048), "duration_s": st.sampled_from([5.0, 40.0])},
)


@settings(max_examples=150)
@given(fields=FIELDS, kind=KINDS, latency_s=st.sampled_from([0.25, 1.0, 4.0]))
def test_laws_of_every_workload(fields: dict[str, Any], kind: dict[str, Any], latency_s: float) -> None:
    load = workload(**fields, **kind)
    next(load.start(), None)  # a run that is broken off leaves nothing behind
    served = serve(load, latency_s)
    assert served == serve(load, latency_s)
    sessions: dict[str, list[SimRequest]] = {}
    for request in served:
        sessions.setdefault(request.req_id.split(".")[0], []).append(request)
    assert len({r.req_id for r in served}) == len(served)
    assert len(sessions) == fields["num_requests"] or (
        len(sessions) < fields["num_requests"] and "duration_s" in fields
    )
    if kind.get("clients") is not None:
        assert all(
            sum(s.arrival_s <= r.arrival_s < s.arrival_s + latency_s for s in served) <= kind["clients"] for r in served
        )
    firsts = [turns[0].token_ids[0] for turns in sessions.values() if turns[0].token_ids]
    assert len(set(firsts)) == len(firsts) or fields["system_prompt_tokens"]
    for turns in sessions.values():
        for number, r in enumerate(turns):
            assert r.arrival_s < fields.get("duration_s", float("inf"))
            assert min(r.prompt_tokens, r.output_tokens, r.max_tokens) >= 1
            assert r.prompt_tokens + min(r.output_tokens, r.max_tokens) <= fields.get("max_model_len", float("inf"))
            assert len(r.token_ids or ()) in (0, r.prompt_tokens)
            if number:
                before = turns[number - 1]
                assert r.arrival_s >= before.arrival_s + latency_s
                assert r.session_id == before.session_id is not None
                if fields["over_context"] == "drop":
                    assert list(r.token_ids or ())[: before.prompt_tokens] == list(before.token_ids or ())
