"""Joins the service to vLLM's two engines: `AsyncLLM` of the servers, and `LLMEngine` of offline use.

Text and final request id meet in vLLM's output processor, for single requests, for each of n samples, online and
offline. Answers go to the engine core by a utility call, over the socket on which the request went before.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext import envs, hints, systems
from vllm_ext.config import KEY, RETRIEVAL, ExtConfig, parse
from vllm_ext.prediction.folder import default_folder
from vllm_ext.prediction.predictor import Prompt
from vllm_ext.prediction.text import PromptText
from vllm_ext.predictor import chat_messages
from vllm_ext.predictor.client import PredictionClient
from vllm_ext.predictor.messages import Answer
from vllm_ext.predictor.metrics import PredictorMetrics
from vllm_ext.predictor.process import PredictorProcess, socket_path
from vllm_ext.scheduling.finished import OWN_ENDS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

logger = init_logger("vllm.vllm_ext.predictor")

UTILITY = "vllm_ext_predictions"
_ATTRIBUTE = "_vllm_ext_prediction"
_POLL_S = 0.25


class Attached:
    """What hangs on an output processor: the service, and how a request becomes a prompt."""

    def __init__(self, service: PredictionClient, texts: PromptText, model: str) -> None:
        self.service = service
        self._texts, self._model = texts, model
        self.sent: Callable[[], None] = lambda: None
        """Called after a question."""

    def asked(
        self, request: EngineCoreRequest, prompt: str | None, tokenizer: Any, hinted: hints.RequestHints, most: int
    ) -> None:
        """Ask for the length of a new request.

        Args:
            request: With its final id.
            prompt: As text, where it has one.
            tokenizer: Of the served model; None without one.
            hinted: Its hints. Of what the client sent along they alone come here: benchmarks hide lengths beside them.
            most: The client's bound on the output, in tokens.
        """
        found = self._texts.read(prompt, request.prompt_token_ids, chat_messages.current(), tokenizer)
        if found is None:
            return  # embeddings, or tokens without a tokenizer
        salt, conversation = request.cache_salt or "", hinted.conversation_id or ""
        asked = Prompt(
            text=found.text,
            max_tokens=most,
            model=self._model if request.lora_request is None else request.lora_request.lora_name,
            prompt_tokens=len(request.prompt_token_ids or ()),
            conversation=f"{salt}\0{conversation}" if salt and conversation else conversation,
            turn=found.turn,
            tag=hinted.tag or "",
            salt=salt,
        )
        self.service.ask(request.request_id, asked)
        self.sent()

    def ended(self, state: RequestState, reason: str) -> None:
        """Tell what became of a request: its length, or a bound of it where it did not end by itself."""
        tokens = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
        self.service.ended(state.request_id, tokens, aborted=reason not in OWN_ENDS)


def attached(output_processor: OutputProcessor) -> Attached | None:
    """Return what was attached to an output processor, if anything was."""
    found: Attached | None = getattr(output_processor, _ATTRIBUTE, None)
    return found or None


def attach(engine: AsyncLLM | LLMEngine) -> Attached | None:
    """Start the service of an engine, once; None where the options leave it out, which is found out once as well."""
    processor = engine.output_processor
    if hasattr(processor, _ATTRIBUTE):
        return attached(processor)
    setattr(processor, _ATTRIBUTE, False)  # also if what follows fails: it would fail with each request
    options = (engine.vllm_config.additional_config or {}).get(KEY)
    config = parse(options) if options else None
    if config is None or RETRIEVAL not in config.prediction.sources or not systems.build(config).use_predictions:
        return None
    made = _make(config, engine.vllm_config, getattr(engine.engine_core, "client_index", 0))
    setattr(processor, _ATTRIBUTE, made)
    chat_messages.want()
    return made


def _make(config: ExtConfig, vllm_config: VllmConfig, client_index: int) -> Attached:
    model, options = vllm_config.model_config, config.predictor
    colocated = envs.colocated_predictor()
    shared = colocated
    if not shared and getattr(vllm_config.parallel_config, "_api_process_count", 1) > 1:
        shared = envs.shared_predictor()
    path = socket_path(shared or secrets.token_hex(8))
    process = None
    if client_index == 0 or not shared or colocated:
        folder = Path(options.folder) if options.folder else default_folder(model.model)
        process = PredictorProcess(options, folder.absolute(), path, shared=bool(colocated))
    served = model.served_model_name
    metrics = PredictorMetrics(served if isinstance(served, str) else served[0])
    service = PredictionClient(options, path, process, metrics)
    service.poll()  # the model is loaded while the server still starts
    return Attached(
        service, PromptText(max_tokens=options.prompt_tokens, system_chars=options.system_chars), model.model
    )


def _row(answer: Answer) -> list[object]:
    """Return what `SteeredScheduler.update_predictions` takes."""
    return [answer.req_id, list(answer.quantiles), answer.source]


# --- the servers' engine ----------------------------------------------------------------------------------------------


def serve(engine: AsyncLLM) -> None:
    """Attach the service to the servers' engine and deliver its answers from the running event loop, if one runs."""
    if getattr(engine, _ATTRIBUTE, None) is not None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    made = attach(engine)
    if made is not None:
        delivery = _Delivery(engine, made.service)
        made.sent = delivery.look_soon
        setattr(engine, _ATTRIBUTE, loop.create_task(delivery.run()))


class _Delivery:
    """Takes answers from the service to the engine core, from the front end's event loop."""

    def __init__(self, engine: AsyncLLM, service: PredictionClient) -> None:
        self._engine = weakref.ref(engine)
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None
        self._due = 0.0
        """Of the next look, in the loop's time: uvloop's handle of one that is near does not tell."""
        self._calls: set[asyncio.Task[None]] = set()
        self._failed = False

    async def run(self) -> None:
        """Poll from time to time, for the process's sake."""
        try:
            while self._engine() is not None:
                self._look()
                await asyncio.sleep(_POLL_S)
        finally:
            self._service.close()

    def look_soon(self) -> None:
        """Poll when the service wants it for its questions' sake."""
        rest_s = self._service.rest_s()
        due = self._loop.time() + rest_s
        if self._next is not None and due < self._due:
            self._next.cancel()
            self._next = None
        if self._next is None and rest_s < _POLL_S:
            self._next, self._due = self._loop.call_later(rest_s, self._look), due

    def _look(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if answers := self._service.poll():
            call = self._loop.create_task(self._deliver(answers))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        self.look_soon()

    async def _deliver(self, answers: Sequence[Answer]) -> None:
        engine = self._engine()
        if engine is None:
            return
        client = engine.engine_core
        try:
            for identity, rows in _by_engine(client, answers).items():
                await client._call_utility_async(UTILITY, rows, engine=identity)
        except EngineDeadError:
            return
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("predictions can't be sent to the scheduler, which uses its other sources")


def _by_engine(client: Any, answers: Sequence[Answer]) -> dict[bytes, list[list[object]]]:
    """Return rows for each engine core; an answer goes to the core that has the request, or to all if nobody knows."""
    at: Mapping[str, bytes] = getattr(client, "reqs_in_flight", {})
    found: dict[bytes, list[list[object]]] = {}
    for answer in answers:
        known = at.get(answer.req_id)
        for identity in client.core_engines if known is None else (known,):
            found.setdefault(identity, []).append(_row(answer))
    return found


# --- offline use ------------------------------------------------------------------------------------------------------


def attach_offline(engine: LLMEngine) -> None:
    """Attach the service to an engine without an event loop; it ends with the engine."""
    if not hasattr(engine.output_processor, _ATTRIBUTE) and (made := attach(engine)) is not None:
        weakref.finalize(engine, made.service.close)


def deliver_offline(engine: LLMEngine) -> None:
    """Send the answers that have come since the last step; called after each."""
    made = attached(engine.output_processor)
    if made is None or not (answers := made.service.poll()):
        return
    rows = [_row(answer) for answer in answers]
    client: Any = engine.engine_core
    core = getattr(client, "engine_core", None)
    if core is not None:  # in this process
        getattr(core, UTILITY)(rows)
    else:
        client.call_utility(UTILITY, rows)
