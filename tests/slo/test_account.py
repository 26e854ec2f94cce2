"""Judging of requests on vLLM's own output processor: times by a clock of our own, outputs as an engine would send."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from vllm_ext.config import parse
from vllm_ext.slo import account as slo_account
from vllm_ext.slo.account import Account, attach

ALL = {"ttft_slo_ms": 1000, "tbt_slo_ms": 100, "jct_slo_ms": 2000}


class Counted:
    """Takes the place of the metrics."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], str, int]] = []

    def tier(self, tag: str | None) -> str:
        return tag or ""

    def count(self, tier: str, outcomes: Mapping[str, str], overall: str, output_tokens: int) -> None:
        self.requests.append((tier, dict(outcomes), overall, output_tokens))


class FrontEnd:
    """An output processor with the accounting on it; requests arrive 0.25 s before they are added."""

    def __init__(self, *, stream_interval: int = 1, **options: Any) -> None:
        self.processor = OutputProcessor(None, log_stats=False, stream_interval=stream_interval)
        self.counted = Counted()
        self.now = 100.0
        account = Account(
            parse({"slo": options}).slo,
            self.counted,  # type: ignore[arg-type]
            clock=lambda: self.now,
            wall=lambda: 5000.25,
        )
        attach(SimpleNamespace(output_processor=self.processor), account)

    def request(self, req_id: str, extra: dict[str, Any] | None, *, n: int, stream: bool) -> EngineCoreRequest:
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(n=n, max_tokens=50, extra_args=extra, output_kind=kind)
        values: dict[str, Any] = dict.fromkeys(f for f in EngineCoreRequest.__struct_fields__)
        defaults = {"priority": 0, "client_index": 0, "current_wave": 0, "resumable": False}
        values.update({name: value for name, value in defaults.items() if name in values})
        values.update(
            request_id=req_id,
            external_req_id=req_id,
            prompt_token_ids=[1, 2, 3],
            sampling_params=params,
            arrival_time=5000.0,
        )
        return EngineCoreRequest(**values)

    def add(self, req_id: str, extra: dict[str, Any] | None = None, *, n: int = 1, stream: bool = True) -> Any:
        """Add a request, or its n samples; returns where its outputs go."""
        request = self.request(req_id, extra, n=n, stream=stream)
        queue = RequestOutputCollector(request.sampling_params.output_kind, req_id)
        if n == 1:
            self.processor.add_request(request, None, None, 0, queue)
            return queue
        parent = ParentRequest(request)
        for index in range(n):
            child_id, params = parent.get_child_info(index)
            child = self.request(child_id, extra, n=1, stream=stream)
            child.sampling_params, child.external_req_id = params, req_id
            self.processor.add_request(child, None, parent, index, queue)
        return queue

    def send(self, after_s: float, req_id: str, tokens: int = 1, finish: FinishReason | None = None) -> None:
        """Let the engine core's output arrive that much later."""
        self.now += after_s
        output = EngineCoreOutput(request_id=req_id, new_token_ids=[7] * tokens, finish_reason=finish)
        self.processor.process_outputs([output])

    def judged(self, req_id: str) -> bool:
        return "make_request_output" in vars(self.processor.request_states[req_id])


def outcomes(ttft: str, tbt: str, jct: str) -> dict[str, str]:
    return {"ttft": ttft, "tbt": tbt, "jct": jct}


def test_a_request_that_meets_everything_is_good() -> None:
    front_end = FrontEnd()
    front_end.add("a", {**ALL, "tag": "shop"})
    front_end.send(0.7, "a")
    front_end.send(0.09, "a", 3)
    front_end.send(0.05, "a", finish=FinishReason.LENGTH)
    assert front_end.counted.requests == [("shop", outcomes("met", "met", "met"), "met", 5)]


def test_ttft_is_counted_from_the_arrival_and_not_from_when_it_was_added() -> None:
    front_end = FrontEnd()
    front_end.add("a", ALL)
    front_end.send(0.76, "a", finish=FinishReason.STOP)
    assert front_end.counted.requests == [("", outcomes("missed", "met", "met"), "missed", 1)]


def test_one_long_gap_misses_tbt_and_the_gap_to_the_last_token_counts() -> None:
    front_end = FrontEnd()
    front_end.add("a", ALL)
    front_end.add("b", ALL)
    for req_id in ("a", "b"):
        front_end.send(0.01, req_id)
    front_end.send(0.105, "a")
    front_end.send(0.0, "a", finish=FinishReason.STOP)
    front_end.send(0.01, "b", finish=FinishReason.STOP)
    assert [request[1]["tbt"] for request in front_end.counted.requests] == ["missed", "missed"]


def test_jct_is_counted_to_the_end() -> None:
    front_end = FrontEnd()
    front_end.add("a", {"jct_slo_ms": 2000})
    front_end.send(0.5, "a")
    front_end.send(1.26, "a", 0, FinishReason.STOP)
    assert front_end.counted.requests == [("", {"jct": "missed"}, "missed", 1)]


def test_an_output_without_tokens_is_no_gap() -> None:
    front_end = FrontEnd()
    front_end.add("a", {"tbt_slo_ms": 100})
    front_end.send(0.5, "a")
    front_end.send(0.06, "a", 0)
    front_end.send(0.06, "a")
    front_end.send(5.0, "a", 0, FinishReason.STOP)
    assert front_end.counted.requests == [("", {"tbt": "missed"}, "missed", 2)]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_only_objectives_that_were_set_are_judged(stream: bool) -> None:
    front_end = FrontEnd()
    front_end.add("a", {"ttft_slo_ms": 10_000}, stream=stream)
    front_end.send(3.0, "a")
    front_end.send(3.0, "a", finish=FinishReason.STOP)
    assert front_end.counted.requests == [("", {"ttft": "met"}, "met", 2)]


def test_of_an_answer_in_one_piece_the_tokens_are_judged_as_they_come() -> None:
    front_end = FrontEnd()
    queue = front_end.add("a", ALL, stream=False)
    front_end.send(0.5, "a")
    assert queue.output is None
    front_end.send(0.2, "a", finish=FinishReason.STOP)
    assert queue.output.finished
    assert front_end.counted.requests == [("", outcomes("met", "missed", "met"), "missed", 2)]


def test_tokens_held_back_count_when_they_are_sent() -> None:
    """With an interval of 3, the client sees the first token, then nothing for 0.12 s: too long, though none was."""
    front_end = FrontEnd(stream_interval=3)
    front_end.add("a", {"tbt_slo_ms": 100})
    tokens: list[int] = []
    front_end.processor.request_states["a"].detokenizer = SimpleNamespace(  # type: ignore[assignment]
        output_token_ids=tokens,
        num_output_tokens=lambda: len(tokens),
        update=lambda new, _: tokens.extend(new),
        get_next_output_text=lambda *_: "",
    )
    for _ in range(4):
        front_end.send(0.04, "a")
    front_end.send(0.04, "a", finish=FinishReason.STOP)
    assert front_end.counted.requests == [("", {"tbt": "missed"}, "missed", 5)]


def test_a_request_of_n_samples_is_met_if_all_are() -> None:
    front_end = FrontEnd()
    for name, slow in (("good", 0.0), ("bad", 0.2)):
        front_end.add(name, {"tbt_slo_ms": 100}, n=2)
        front_end.send(0.01, f"0_{name}", 2)
        front_end.send(0.0, f"1_{name}", 2)
        front_end.send(0.01, f"0_{name}", finish=FinishReason.STOP)
        assert len(front_end.counted.requests) == (name == "bad")
        front_end.send(slow, f"1_{name}", 2, finish=FinishReason.STOP)
    assert front_end.counted.requests == [("", {"tbt": "met"}, "met", 7), ("", {"tbt": "missed"}, "missed", 7)]


def test_an_aborted_request_has_its_own_outcome() -> None:
    front_end = FrontEnd()
    front_end.add("a", ALL)
    front_end.send(0.1, "a", 2)
    front_end.processor.abort_requests(["a"], internal=True)
    aborted = outcomes("aborted", "aborted", "aborted")
    assert front_end.counted.requests == [("", aborted, "aborted", 2)]


@pytest.mark.parametrize("aborted", ["b", "1_b"], ids=["request", "sample"])
def test_a_request_one_sample_of_which_is_aborted_is_aborted(aborted: str) -> None:
    front_end = FrontEnd()
    front_end.add("b", {"jct_slo_ms": 2000}, n=2)
    front_end.send(0.1, "0_b", 1, FinishReason.STOP)
    front_end.processor.abort_requests([aborted], internal=True)
    assert front_end.counted.requests == [("", {"jct": "aborted"}, "aborted", 1)]


def test_a_request_that_failed_missed_everything() -> None:
    front_end = FrontEnd()
    front_end.add("a", ALL)
    front_end.send(0.01, "a", 0, FinishReason.ERROR)
    assert front_end.counted.requests == [("", outcomes("missed", "missed", "missed"), "missed", 0)]


def test_a_request_without_objectives_is_left_as_upstream_has_it() -> None:
    front_end = FrontEnd(classes={"gold": {"tbt_ms": 100}})
    for req_id, extra in {"none": None, "foreign": {"x": 1}, "tag": {"tag": "shop"}, "osl": {"osl": 3}}.items():
        front_end.add(req_id, extra)
        assert not front_end.judged(req_id)
        front_end.send(0.1, req_id, finish=FinishReason.STOP)
    assert front_end.counted.requests == []


def test_defaults_and_classes_give_objectives_to_requests_that_bring_none() -> None:
    front_end = FrontEnd(jct_ms=1000, classes={"gold": {"jct_ms": 100}})
    for req_id, extra in {"plain": None, "gold": {"tag": "gold"}}.items():
        front_end.add(req_id, extra)
        front_end.send(0.0, req_id, finish=FinishReason.STOP)
    assert [(tier, overall) for tier, _, overall, _ in front_end.counted.requests] == [("", "met"), ("gold", "missed")]


def test_a_report_alone_is_not_counted() -> None:
    front_end = FrontEnd()
    front_end.add("a", {"slo_report": True})
    assert front_end.judged("a")
    front_end.send(0.1, "a", finish=FinishReason.STOP)
    assert front_end.counted.requests == []


def test_an_ended_request_holds_nothing_of_ours() -> None:
    front_end = FrontEnd()
    front_end.add("a", ALL)
    state = front_end.processor.request_states["a"]
    front_end.send(0.1, "a", finish=FinishReason.STOP)
    assert "make_request_output" not in vars(state)


def test_what_fails_in_the_accounting_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(slo_account.guarded, "_logged", False)
    monkeypatch.setattr(slo_account.guarded._logger, "exception", lambda text, *_: logged.append(text))
    front_end = FrontEnd()

    def broken(*_: Any) -> None:
        raise RuntimeError("no more metrics")

    front_end.counted.count = broken  # type: ignore[method-assign]
    for req_id in ("a", "b"):
        queue = front_end.add(req_id, ALL)
        front_end.send(0.1, req_id, finish=FinishReason.STOP)
        assert queue.output.finished
    front_end.add("malformed", {"ttft_slo_ms": "soon"})  # the front end refuses these before; here it got through
    front_end.send(0.1, "malformed", finish=FinishReason.STOP)
    assert len(logged) == 1


def test_the_clocks_are_by_default_those_of_vllm_s_arrival_times() -> None:
    account = Account(parse({}).slo, Counted())  # type: ignore[arg-type]
    assert (account._clock, account._wall) == (time.monotonic, time.time)
