"""The hooks of objectives: whom they touch, and the answer of vLLM's own server to a request that is shed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, SamplingParams

from vllm_ext.config import ConfigError, ExtConfig, SloConfig, to_dict
from vllm_ext.hooks import registry
from vllm_ext.hooks.patch import Patch, resolve_owner
from vllm_ext.launch import features
from vllm_ext.patches import slo_accounting, slo_shedding
from vllm_ext.slo.shedding import ATTRIBUTE, Refusal, Shedder

REFUSED = Refusal(forecast_s=5.1, objective_s=3.0, retry_after_s=3)


class Engine(SimpleNamespace):
    """What the accounting uses of vLLM's engines; unlike its base, it can be referred to weakly."""


def engine_of(config: ExtConfig | None, *, server: bool = True) -> Engine:
    options = {} if config is None else {"vllm_ext": to_dict(config)}
    core = SimpleNamespace(_call_utility_async=None) if server else SimpleNamespace()
    return Engine(
        vllm_config=SimpleNamespace(
            additional_config=options, model_config=SimpleNamespace(served_model_name=["hooked", "alias"])
        ),
        output_processor=Processor(),
        engine_core=core,
    )


class Processor:
    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.request_states[request.request_id] = None


def is_noticed(engine: Any) -> bool:
    return "add_request" in vars(engine.output_processor)


def made(config: ExtConfig | None, *, server: bool = True) -> Any:
    engine = engine_of(config, server=server)
    slo_accounting._init(lambda self: None, engine)
    return engine


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Nothing that a test installs stays."""
    hooks = [hook for hook in slo_shedding.HOOKS if isinstance(hook, Patch)]
    places = [hook.target for hook in hooks] + [place for hook in hooks for place in hook.also_rebind]
    before = {place: vars(owner)[name] for place in places for owner, name in [resolve_owner(place)]}
    yield
    for place, stored in before.items():
        owner, name = resolve_owner(place)
        setattr(owner, name, stored)


def is_shedding_installed() -> bool:
    return hasattr(OpenAIServingCompletion._log_inputs, "_vllm_ext_patch")


def test_an_engine_without_our_options_is_left_alone() -> None:
    engine = made(None)
    assert not is_noticed(engine)
    assert not hasattr(engine, ATTRIBUTE)


def test_an_engine_with_our_options_shows_its_requests_to_the_accounting_and_installs_nothing_more() -> None:
    engine = made(ExtConfig())
    assert is_noticed(engine)
    assert not hasattr(engine, ATTRIBUTE)
    assert not is_shedding_installed()


def test_shedding_is_installed_where_it_was_chosen() -> None:
    engine = made(ExtConfig(slo=SloConfig(shed=True)))
    assert isinstance(getattr(engine, ATTRIBUTE), Shedder)
    assert is_shedding_installed()


def test_nothing_is_shed_without_a_server() -> None:
    engine = made(ExtConfig(slo=SloConfig(shed=True)), server=False)
    assert is_noticed(engine)
    assert not hasattr(engine, ATTRIBUTE)


def test_shedding_without_readings_of_the_queue_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slo\.shed"):
        ExtConfig(slo=SloConfig(shed=True), metrics_interval_s=0)


def test_every_process_that_validates_hints_notices_objectives() -> None:
    assert "hints" in features.needed_groups(ExtConfig(), "LLM_CLASS")
    assert all(hook in registry.group("hints") for hook in slo_accounting.HOOKS)


class Decides:
    """A shedder that turns away everybody, and remembers whom."""

    def __init__(self, refused: Refusal | None = REFUSED) -> None:
        self.refused = refused
        self.seen: list[tuple[Any, int, int]] = []

    def refusal(self, extra: Any, num_prompt_tokens: int, num_sequences: int) -> Refusal | None:
        self.seen.append((extra, num_prompt_tokens, num_sequences))
        return self.refused


def handler(shedder: Decides | None, kind: type = OpenAIServingCompletion) -> Any:
    """vLLM's handler, without an engine."""
    found: Any = kind.__new__(kind)
    found.engine_client = SimpleNamespace(**({} if shedder is None else {ATTRIBUTE: shedder}))
    found.request_logger = None
    found.model_config = SimpleNamespace(is_encoder_decoder=False)
    return found


PROMPT = {"type": "token", "prompt_token_ids": [1, 2, 3]}


@pytest.mark.parametrize("kind", [OpenAIServingCompletion, OpenAIServingChat])
def test_the_handler_asks_with_the_rendered_prompt_and_the_hints(kind: type) -> None:
    registry.install("shed")
    shedder = Decides(None)
    handler(shedder, kind)._log_inputs("r", PROMPT, SamplingParams(n=2, extra_args={"osl": 3}), None)
    assert shedder.seen == [({"osl": 3}, 3, 2)]


@pytest.mark.parametrize("params", [None, PoolingParams(), BeamSearchParams(beam_width=2, max_tokens=3)], ids=repr)
def test_what_generates_no_stream_of_tokens_is_not_judged(params: Any) -> None:
    registry.install("shed")
    shedder = Decides()
    handler(shedder)._log_inputs("r", PROMPT, params, None)
    assert shedder.seen == []


def test_a_turn_of_a_conversation_that_was_accepted_is_not_refused() -> None:
    """The Responses API logs each turn's prompt, when its stream has long begun."""
    registry.install("shed")
    shedder = Decides()
    handler(shedder, OpenAIServingResponses)._log_inputs("r_1", PROMPT, SamplingParams(), None)
    assert shedder.seen == []


def test_without_a_shedder_the_hook_does_nothing() -> None:
    registry.install("shed")
    handler(None)._log_inputs("r", PROMPT, SamplingParams(), None)


async def test_a_refusal_is_a_503_with_retry_after_and_other_errors_are_as_they_were() -> None:
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.exceptions import QueueOverflowError

    registry.install("shed")
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)

    @app.get("/shed")
    async def shed() -> None:
        handler(Decides())._log_inputs("r", PROMPT, SamplingParams(), None)

    @app.get("/full")
    async def full() -> None:
        raise QueueOverflowError()

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        refused, other = await client.get("/shed"), await client.get("/full")
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "3")
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == (503, "Service Unavailable")
    assert "expected after 5.1 s" in error["message"]
    assert (other.status_code, other.headers.get("Retry-After")) == (503, None)
