"""Sends requests to a running server with the client of `vllm bench serve`, and reads what it kept."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from vllm_ext.compare.observed import Observed
from vllm_ext.simulation.recorded import forced_length
from vllm_ext.simulation.workloads.requests import SimRequest

_LEAST_ID, _IDS = 10, 240
"""Ids of prompts that nobody wrote; every vocabulary has them."""


def prompt_of(request: SimRequest) -> str | list[int]:
    """Return the prompt that was recorded; else ids that share with other requests what the recorded ones share."""
    if request.prompt is not None:
        return request.prompt
    if request.token_ids is not None:
        written = request.recorded_ids
        return [-1 - one if one < 0 else one if written else _LEAST_ID + one % _IDS for one in request.token_ids]
    made = np.random.default_rng(list(request.req_id.encode()))
    found: list[int] = made.integers(_LEAST_ID, _LEAST_ID + _IDS, request.prompt_tokens).tolist()
    return found


def answered(token_ids: Sequence[int]) -> list[int]:
    """Return what a server answered as ids for the history of a next prompt, which `prompt_of` leaves as they were."""
    return [-1 - one for one in token_ids]


def cache_salt(run: str, request: SimRequest) -> str:
    """Return what keeps the KV of a run, and of a tenant, from being found by another's."""
    return f"{run} {request.tenant}"


def sampling(request: SimRequest) -> Any:
    """Return `SamplingParams` for an engine in this process, which end an output at its hidden length."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    length = forced_length.extra_args(min(request.output_tokens, request.max_tokens))
    return SamplingParams(
        temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA, extra_args={**(request.extra_args or {}), **length},
    )  # fmt: skip


def sent(url: str, model: str, requests: Sequence[SimRequest], *, forced: bool, log: TextIO) -> dict[str, Any]:
    """Send requests at their times; return what `vllm bench serve` would write. Conversations: see `talk`.

    Args:
        url: ``http://host:port``.
        model: The name under which it is served.
        requests: By arrival.
        forced: End outputs at their recorded lengths, of which no scheduler is told; the server must have been started
            for that. Otherwise the model ends them, or ``max_tokens`` does.
        log: Gets what the client prints.
    """
    from vllm.benchmarks import serve as client
    from vllm.benchmarks.datasets import SampleRequest

    run = new_run()
    samples = [
        SampleRequest(
            prompt=prompt_of(one), prompt_len=one.prompt_tokens, expected_output_len=one.max_tokens,
            request_id=one.req_id, timestamp=one.arrival_s, request_overrides=body_of(one, run, forced),
        )
        for one in requests
    ]  # fmt: skip
    given: dict[str, Any] = {
        "task_type": client.TaskType.GENERATION, "endpoint_type": "vllm", "base_url": url, "model_id": model,
        "api_url": f"{url}/v1/completions", "model_name": model, "tokenizer": None, "input_requests": samples,
        "logprobs": None, "request_rate": float("inf"), "burstiness": 1.0, "disable_tqdm": True,
        "num_warmups": 0, "profile": False, "selected_percentile_metrics": ["ttft", "tpot", "itl", "e2el"],
        "selected_percentiles": [50.0, 90.0, 99.0], "ignore_eos": forced, "goodput_config_dict": {},
        "max_concurrency": None, "lora_modules": None, "extra_headers": None, "extra_body": {"temperature": 0.0},
        "ready_check_timeout_sec": 0, "self_timed": True,
    }  # fmt: skip
    known = inspect.signature(client.benchmark).parameters
    with contextlib.redirect_stdout(log):
        found: dict[str, Any] = asyncio.run(client.benchmark(**{name: given[name] for name in given if name in known}))
    return found


def new_run() -> str:
    """Return a name that no other run has, on a server that may have served many."""
    return uuid.uuid4().hex


def body_of(request: SimRequest, run: str, forced: bool) -> dict[str, Any]:
    """Return what a request says beside prompt and ``max_tokens``; see `sent`."""
    told = dict(request.extra_args or {})
    if forced:
        told |= forced_length.extra_args(min(request.output_tokens, request.max_tokens))
    body = {"priority": request.priority, "vllm_xargs": told, "cache_salt": cache_salt(run, request)}
    return {name: value for name, value in body.items() if value}


def observed(found: Mapping[str, Any], requests: Sequence[SimRequest]) -> Observed:
    """Return a run of which `sent` tells, with the requests' own objectives.

    Args:
        found: The run; what it does not tell of a request has failed.
        requests: Of conversations `all_requests`: which were sent, and when, the run tells.
    """
    known = {req_id: at for at, req_id in enumerate(found.get("req_ids", [one.req_id for one in requests]))}
    at = [known.get(one.req_id) for one in requests]

    def column(name: str, missing: Any, default: Sequence[Any] = ()) -> list[Any]:
        values = found.get(name, default)
        return [missing if row is None else values[row] for row in at]

    nothing = [0.0] * len(known)
    late = np.asarray(column("queue_times", 0.0, nothing), float)  # the client's own delay, which a user would see too
    failed = np.asarray([bool(error) for error in column("errors", "never sent")])
    between = column("itls", [])
    first, gaps = np.asarray(column("ttfts", np.nan), float), np.asarray([max(each, default=0.0) for each in between])
    last = np.asarray(column("latencies", np.nan, first + [sum(each) for each in between]), float)
    ttft, e2e = (np.where(failed, np.nan, seconds + late) for seconds in (first, last))
    arrivals = column("arrivals", np.nan, [one.arrival_s for one in requests])
    return Observed(
        arrival_s=np.asarray(arrivals, float),
        ttft_s=ttft,
        e2e_s=e2e,
        longest_gap_s=gaps,
        output_tokens=np.maximum(np.asarray(column("output_lens", 0), float), 1.0),
        prompt_tokens=np.asarray(column("input_lens", 0), float),
        on_time=np.asarray([_on_time(*row) for row in zip(requests, ttft, e2e, gaps, strict=True)]),
    )


def _on_time(request: SimRequest, ttft_s: float, e2e_s: float, gap_s: float) -> float:
    """Whether all objectives of a request were met; nan without any. A request that failed met none."""
    pairs = ((request.slo.ttft_s, ttft_s), (request.slo.tbt_s, gap_s), (request.slo.e2e_s, e2e_s))
    judged = [found <= target for target, found in pairs if target is not None]
    return float(all(judged)) if judged else np.nan
