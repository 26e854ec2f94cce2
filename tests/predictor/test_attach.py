"""How the service is joined to vLLM: what is asked and told of a request, and who shares a predictor with whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvloop
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from tests.support.extent import HANG_S
from vllm_ext import envs
from vllm_ext.config import ExtConfig
from vllm_ext.hints import NO_HINTS
from vllm_ext.hooks import registry
from vllm_ext.prediction.predictor import Prompt
from vllm_ext.prediction.text import PromptText
from vllm_ext.predictor import attach, chat_messages
from vllm_ext.predictor.attach import Attached
from vllm_ext.predictor.client import GATHER_S
from vllm_ext.predictor.messages import Answer

from .parts import QUANTILES, FakeProcess, Front, until


class Service:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.asked: dict[str, Prompt] = {}
        self.told: list[tuple[str, int, bool]] = []

    def ask(self, req_id: str, prompt: Prompt) -> None:
        self.asked[req_id] = prompt

    def ended(self, req_id: str, tokens: int, *, aborted: bool = False) -> None:
        self.told.append((req_id, tokens, aborted))


def request(req_id: str = "r", params: Any = None, **changes: Any) -> EngineCoreRequest:
    params = params or SamplingParams(max_tokens=50, detokenize=False)
    fields: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3], "mm_features": None, "arrival_time": 0.0, "lora_request": None,
        "cache_salt": None, "data_parallel_rank": None, "external_req_id": f"external {req_id}",
        "sampling_params": params if isinstance(params, SamplingParams) else None,
        "pooling_params": params if isinstance(params, PoolingParams) else None,
    }  # fmt: skip
    return EngineCoreRequest(request_id=req_id, **{**fields, **changes})


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def processor(service: Service) -> Iterator[OutputProcessor]:
    """vLLM's, with our hooks and a service attached."""
    undo = registry.install("prediction")
    made = OutputProcessor(None, log_stats=False)
    noting: Any = service
    setattr(made, attach._ATTRIBUTE, Attached(noting, PromptText(), "served"))
    yield made
    undo()


def generate(processor: OutputProcessor, req_id: str, tokens: int, reason: FinishReason | None = None) -> None:
    output = EngineCoreOutput(request_id=req_id, new_token_ids=[7] * tokens, finish_reason=reason)
    processor.process_outputs([output])


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_a_request_is_asked_for_with_all_that_is_known_of_it(processor: OutputProcessor, service: Service) -> None:
    hinted = {"conversation_id": "chat 3", "tag": "tutor", "osl": 9, "bench_output_len": 1234}
    params = SamplingParams(max_tokens=50, detokenize=False, extra_args=hinted)
    adapter = LoRARequest("adapter", 1, "/somewhere")
    processor.add_request(request(params=params, cache_salt="tenant", lora_request=adapter), "Name a river.")
    assert service.asked == {
        "r": Prompt("Name a river.", 50, "adapter", 3, conversation="tenant\0chat 3", tag="tutor", salt="tenant")
    }


def test_a_bare_request_is_asked_for_with_what_there_is(processor: OutputProcessor, service: Service) -> None:
    processor.add_request(request(), "Name a river.")
    processor.add_request(request("s", session_id="session"), "And a lake?")
    processor.add_request(request("s", resumable=True), "more input of the same session")
    assert service.asked == {
        "r": Prompt("Name a river.", 50, "served", 3),
        "s": Prompt("And a lake?", 50, "served", 3, conversation="session"),
    }


async def test_a_chat_is_what_its_client_said_and_its_turn_is_known(
    processor: OutputProcessor, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_messages, "_wanted", True)
    chat = [
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": "The Rhine."},
        {"role": "user", "content": "And a lake?"},
    ]
    chat_messages.during(SimpleNamespace(messages=chat))
    processor.add_request(request(), "<rendered>")
    assert service.asked["r"] == Prompt("And a lake?\nName a river.", 50, "served", 3, turn=1)


@pytest.mark.parametrize(
    "odd",
    [{"params": PoolingParams()}, {"prompt_token_ids": None, "prompt_embeds": torch.zeros(3, 4)}, {}],
    ids=["pooling", "embeddings", "no tokenizer"],
)
def test_what_has_no_length_or_no_text_is_not_asked_for(
    processor: OutputProcessor, service: Service, odd: dict[str, Any]
) -> None:
    processor.add_request(request(**odd), None)
    assert service.asked == {}


def test_what_fails_beside_a_request_does_not_fail_it(
    processor: OutputProcessor, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.ask = service.ended = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    processor.add_request(request(), "Name a river.")
    generate(processor, "r", 2)
    assert processor.abort_requests(["r"], internal=True) == ["r"]
    assert not processor.request_states


# --- how it ended -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "aborted"),
    [
        (FinishReason.STOP, False), (FinishReason.LENGTH, False), (FinishReason.REPETITION, False),
        (FinishReason.ABORT, True), (FinishReason.ERROR, True),
    ],
)  # fmt: skip
def test_the_end_of_a_request_is_told_with_its_length(
    processor: OutputProcessor, service: Service, reason: FinishReason, aborted: bool
) -> None:
    processor.add_request(request(), "Name a river.")
    generate(processor, "r", 4)
    assert service.told == []
    generate(processor, "r", 1, reason)
    assert service.told == [("r", 5, aborted)]


@pytest.mark.parametrize("internal", [True, False])
def test_a_request_that_its_client_gives_up_is_told_with_its_length_so_far(
    processor: OutputProcessor, service: Service, internal: bool
) -> None:
    """Clients give up what is long, so that a predictor that never hears of them takes everything for short."""
    for req_id in ("r", "s"):
        processor.add_request(request(req_id), "Name a river.")
        generate(processor, req_id, 3)
    ids = (each for each in ["r" if internal else "external r", "nobody's"])  # whatever can be gone through once
    assert processor.abort_requests(ids, internal=internal) == ["r"]
    assert service.told == [("r", 3, True)]
    assert processor.abort_requests(["r"], internal=True) == []
    assert service.told == [("r", 3, True)]


@pytest.mark.parametrize("by", ["parent", "external id"])
def test_each_sample_of_a_request_that_is_given_up_is_told_once(
    processor: OutputProcessor, service: Service, by: str
) -> None:
    whole = request(params=SamplingParams(n=3, max_tokens=50, detokenize=False))
    parent = ParentRequest(whole)
    for index in range(3):
        req_id, params = parent.get_child_info(index)
        processor.add_request(request(req_id, params, external_req_id=whole.external_req_id), "A river.", parent, index)
    ids = list(parent.child_requests)
    for length, req_id in enumerate(ids):
        if length:
            generate(processor, req_id, length)
    if by == "parent":
        processor.abort_requests(["r"], internal=True)
    else:
        processor.abort_requests([str(whole.external_req_id)], internal=False)
    assert sorted(service.told) == sorted((req_id, length, True) for length, req_id in enumerate(ids))


# --- who shares a predictor -------------------------------------------------------------------------------------------


class Processes:
    """Stands for `PredictorProcess`, and notes where they would listen."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.shared: list[bool] = []

    def __call__(self, _config: Any, _folder: Path, path: Path, *, shared: bool) -> FakeProcess:
        self.paths.append(path)
        self.shared.append(shared)
        return FakeProcess()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(attach, "PredictorProcess", made)
    monkeypatch.delenv(envs.PREDICTOR, raising=False)
    monkeypatch.delenv(envs.COLOCATED_PREDICTOR, raising=False)
    return made


def path_of(servers: int = 1, index: int = 0) -> Path:
    """Where an API server's service looks for its predictor."""
    model = SimpleNamespace(model="m", served_model_name="m")
    vllm_config: Any = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(_api_process_count=servers))
    made = attach._make(ExtConfig(system="alise"), vllm_config, index)
    made.service.close()
    return made.service._path


def test_api_servers_of_one_server_share_the_predictor_of_the_first(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.PREDICTOR, "before")  # so that it is restored
    envs.share_predictor()
    paths = {path_of(servers=3, index=index) for index in range(3)}
    assert set(processes.paths) == paths
    assert len(processes.paths) == len(paths) == 1


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_with_the_same_folder_and_parent_do_not_share_a_predictor(
    processes: Processes, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers with a common folder of temporary files, where process ids are the same as well."""
    monkeypatch.setenv(envs.PREDICTOR, "of another server, whose environment was inherited")
    paths = []
    for _ in range(2):
        envs.share_predictor()
        paths.append(path_of(servers))
    assert len(set(paths)) == 2
    assert processes.paths == paths


def test_an_api_server_whose_parent_named_no_predictor_has_its_own(processes: Processes) -> None:
    assert len({path_of(servers=2, index=1) for _ in range(2)}) == 2
    assert len(processes.paths) == 2


# --- delivery ---------------------------------------------------------------------------------------------------------


class Engine:
    """As much of `AsyncLLM` as answers pass."""

    def __init__(self) -> None:
        self.engine_core = self
        self.core_engines = [b"one", b"other"]
        self.reqs_in_flight = {"a": b"one"}
        self.rows: list[tuple[bytes, list[Any]]] = []

    async def _call_utility_async(self, name: str, rows: list[Any], engine: bytes) -> None:
        assert name == attach.UTILITY
        self.rows += [(engine, row) for row in rows]


async def _until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not reached():
            await asyncio.sleep(0.002)


async def test_answers_go_to_the_engine_that_has_the_request_when_they_come(
    connected: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Engine()
    delivery = attach._Delivery(engine, connected.service)
    monkeypatch.setattr(attach, "_POLL_S", HANG_S)  # it looks because something is owed
    running = asyncio.create_task(delivery.run())
    made = Attached(connected.service, PromptText(), "m")
    made.sent = delivery.look_soon
    for req_id in "ab":
        made.asked(request(req_id), "hello", None, NO_HINTS, 50)
    connected.clock.now += GATHER_S
    await _until(lambda: connected.there.asked == ["a", "b"])
    connected.there.say(Answer("b", QUANTILES, "blend"))
    await _until(lambda: engine.rows)
    connected.there.say(Answer("a", QUANTILES, "blend"))
    await _until(lambda: len(engine.rows) == 3)
    row = [[*QUANTILES], "blend"]
    assert sorted(engine.rows) == [(b"one", ["a", *row]), (b"one", ["b", *row]), (b"other", ["b", *row])]
    running.cancel()
    await asyncio.wait([running])
    assert connected.process.calls[-1] == "close"


def test_looks_that_are_due_at_once_are_taken_on_vllms_own_event_loop(connected: Front) -> None:
    """uvloop's handle of a call within half a millisecond does not say when it is due."""
    delays = iter([0.0004, 0.0003, 0.0001, 0.0002, 0.0])
    looks: list[float] = []

    async def look() -> None:
        delivery = attach._Delivery(Engine(), connected.service)  # type: ignore[arg-type]
        delivery._service = SimpleNamespace(  # type: ignore[assignment]
            rest_s=lambda: next(delays, HANG_S), poll=lambda: looks.append(0.0)
        )
        for _ in range(4):
            delivery.look_soon()
        await _until(lambda: len(looks) >= 2)

    uvloop.run(look())
    assert len(looks) == 2


def test_offline_answers_go_by_either_way_to_the_engine_core(connected: Front) -> None:
    rows: list[Any] = []
    cores = [
        SimpleNamespace(engine_core=SimpleNamespace(**{attach.UTILITY: rows.extend})),
        SimpleNamespace(call_utility=lambda name, found: rows.extend(found if name == attach.UTILITY else ())),
    ]
    for number, core in enumerate(cores):
        made = Attached(connected.service, PromptText(), "m")
        processor = SimpleNamespace(**{attach._ATTRIBUTE: made})
        connected.ask(f"r{number}")
        connected.there.say(Answer(f"r{number}", QUANTILES, "blend"))
        until(lambda: connected.readable, "the answer")
        engine: Any = SimpleNamespace(output_processor=processor, engine_core=core)
        attach.deliver_offline(engine)
    assert rows == [[f"r{number}", [*QUANTILES], "blend"] for number in range(2)]


def test_nothing_of_the_service_is_pickled() -> None:
    folder = Path(attach.__file__).parent
    sources = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    assert len(sources) > 5
    assert [name for name, text in sources.items() if "pickle" in text or "pyobj" in text] == []


def test_engines_of_one_machine_share_the_predictor_that_is_named_and_each_may_start_it(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.COLOCATED_PREDICTOR, "a1b2")
    assert path_of() == path_of() == path_of(2, 1)
    assert len(processes.paths) == 3
    assert len({*processes.paths}) == 1
    assert processes.shared == [True, True, True]
    monkeypatch.setenv(envs.COLOCATED_PREDICTOR, "../elsewhere")
    with pytest.raises(ValueError, match="must be up to 64 letters and digits"):
        path_of()
