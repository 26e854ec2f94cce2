"""Why a request waited, on vLLM's own span of it: from trace headers to an exporter in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import _TRACER_PROVIDER_SET_ONCE
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor

from vllm_ext.hooks import registry
from vllm_ext.launch import features
from vllm_ext.patches import request_span
from vllm_ext.scheduling.wait_reasons import TRACE_HEADER

TOLD = {
    "wait_s": 4.1, "steps": 61, "queued": 9, "ahead": None, "passed_by": 5, "refused": {"blocks": 38, "seats": 3},
    "reason": "blocks", "reason_share": 0.623, "preempted": {},
}  # fmt: skip
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the spans of this test; the process' own tracer comes back afterwards."""
    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(_TRACER_PROVIDER_SET_ONCE, "_done", True)
    return found


@pytest.fixture
def installed() -> Iterator[None]:
    undo = registry.install("tracing")
    yield
    undo()


def traced(headers: dict[str, str] | None) -> EngineCoreOutput:
    """Finish a request as vLLM does; return the last output, which the client's answer was made of."""
    output = EngineCoreOutput(request_id="r", new_token_ids=[1], trace_headers=headers)
    stats = SimpleNamespace(
        arrival_time=1.0, scheduled_ts=2.0, queued_ts=1.5, first_token_ts=3.0, last_token_ts=4.0,
        first_token_latency=2.0, num_generation_tokens=7,
    )  # fmt: skip
    state: Any = SimpleNamespace(
        stats=stats, prompt_token_ids=[1, 2, 3], prompt_embeds=None, external_req_id="theirs", top_p=None,
        max_tokens_param=9, temperature=None, n=None,
    )  # fmt: skip
    OutputProcessor(None, log_stats=True, tracing_enabled=True).do_tracing(
        output,
        state,
        SimpleNamespace(iteration_timestamp=5.0),  # type: ignore[arg-type]
    )
    return output


def with_wait(**headers: str) -> dict[str, str]:
    return {**headers, TRACE_HEADER: json.dumps(TOLD)}


def test_the_span_of_a_request_says_why_it_waited(exporter: InMemorySpanExporter, installed: None) -> None:
    output = traced(with_wait(**PARENT))
    (span,) = exporter.get_finished_spans()
    assert span.name == "llm_request"
    assert span.attributes is not None
    ours = {name: value for name, value in span.attributes.items() if name.startswith("vllm_ext.")}
    assert ours == {
        "vllm_ext.wait.wait_s": 4.1, "vllm_ext.wait.steps": 61, "vllm_ext.wait.queued": 9,
        "vllm_ext.wait.passed_by": 5, "vllm_ext.wait.refused.blocks": 38, "vllm_ext.wait.refused.seats": 3,
        "vllm_ext.wait.reason": "blocks", "vllm_ext.wait.reason_share": 0.623,
    }  # fmt: skip
    assert span.attributes["gen_ai.request.id"] == "theirs", "vLLM's own attributes are there too"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN_ID
    assert output.trace_headers == PARENT


def test_without_a_parent_vllm_finds_no_headers(exporter: InMemorySpanExporter, installed: None) -> None:
    assert traced(with_wait()).trace_headers is None
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_two_requests_do_not_mix_and_one_of_which_nothing_is_known_has_no_attributes(
    exporter: InMemorySpanExporter, installed: None
) -> None:
    for headers in (with_wait(), {TRACE_HEADER: json.dumps({"steps": 2})}, PARENT, None):
        traced(headers)
    spans = exporter.get_finished_spans()
    steps = [(span.attributes or {}).get("vllm_ext.wait.steps") for span in spans]
    assert steps == [61, 2, None, None]
    assert "vllm_ext.wait.reason" not in (spans[1].attributes or {})


def test_what_fails_in_here_costs_no_request_and_not_vllm_s_span(
    exporter: InMemorySpanExporter, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no tracer today")

    monkeypatch.setattr(request_span, "_hear_of_spans", broken)
    traced(with_wait())
    traced({TRACE_HEADER: "no JSON"})
    assert len(exporter.get_finished_spans()) == 2


def test_it_is_installed_only_where_there_are_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(registry, "install", found.append)
    for endpoint in (None, "http://collector"):
        features.explain_waits(SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint)))
    assert found == ["tracing"]


def test_an_unknown_vllm_costs_the_attributes_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(features, "_not_verified", lambda groups: "changed upstream")
    monkeypatch.setattr(registry, "install", pytest.fail)
    warned: list[str] = []
    monkeypatch.setattr(features.logger, "warning", lambda message, *args: warned.append(message % args))
    features.explain_waits(SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint="x")))
    assert warned == ["traces of requests lack the reason for a wait: changed upstream"]
