"""Joins the service to vLLM's two engines: `AsyncLLM` of the servers, and `LLMEngine` of offline use.

Text and final request id meet in vLLM's output processor, for single requests, for each of n samples, online and
offline. Hints go to the engine core by a utility call, over the socket on which the request went before.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext import systems
from vllm_ext.config import KEY, RETRIEVAL, ExtConfig, parse
from vllm_ext.observability.predictor_metrics import PredictorMetrics
from vllm_ext.observability.records import OWN_ENDS
from vllm_ext.prediction.folder import default_folder
from vllm_ext.prediction.law import LEVELS
from vllm_ext.prediction.prompt_text import PromptText
from vllm_ext.prediction.service.client import LateHint, PredictionService
from vllm_ext.prediction.service.link import Link
from vllm_ext.prediction.service.process import PredictorProcess
from vllm_ext.prediction.service.request_text import RequestTexts
from vllm_ext.prediction.service.said import said, want

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

logger = init_logger("vllm.vllm_ext.predictor")

UTILITY = "vllm_ext_predictions"
_ATTRIBUTE = "_vllm_ext_prediction"
_POLL_S = 0.25
_LONGEST_PLACE = 64
_DEFER_S = 0.1
_Z = (-2.054, -1.2816, -0.6745, 0.0, 0.5244, 0.8416, 1.2816, 1.6449, 2.3263)
"""Standard normal quantiles at `LEVELS`."""


class Attached:
    """What hangs on an output processor: the service, and how a request becomes a text."""

    def __init__(self, service: PredictionService, texts: RequestTexts, model: str) -> None:
        self.service = service
        self._texts = texts
        self._model = model
        self.defer: Deferral | None = None
        """Of a server; offline, all requests come at once and the questions with them."""

    def asked(
        self,
        req_id: str,
        prompt: str | None,
        token_ids: Sequence[int] | None,
        max_tokens: int,
        adapter: str | None,
        tokenizer: Any,
    ) -> None:
        """Ask for the length of a new request.

        Args:
            req_id: Its final id.
            prompt: As text, where it has one.
            token_ids: As tokens, unless it is given as embeddings.
            max_tokens: The client's bound.
            adapter: Name of the LoRA adapter, if one answers.
            tokenizer: Of the served model; None without one.
        """
        text = self._texts.of(prompt, token_ids, said(), tokenizer)
        if text is None:
            return  # embeddings, or tokens without a tokenizer
        ask = partial(self.service.ask, req_id, text, max_tokens, adapter or self._model, len(token_ids or ()))
        if self.defer is None or not self.defer.put(req_id, ask):
            ask()

    def ended(self, state: RequestState, reason: str) -> None:
        """Tell what became of a request."""
        if self.defer is not None:
            self.defer.now(state.request_id)
        tokens = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
        if reason in OWN_ENDS and tokens > 0:
            self.service.finished(state.request_id, tokens)
        else:
            self.service.gone(state.request_id)


class Deferral:
    """Puts questions off a little while the server has seats to spare.

    Then nobody waits, and no order needs a prediction yet; but on a machine with few cores, or cores that share their
    caches, embedding the prompt would slow down its own prefill.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, unfinished: Callable[[], int], seats: int) -> None:
        """Take the event loop and what tells whether seats are to spare.

        Args:
            loop: Of the server.
            unfinished: Returns the number of requests of this front end that have not ended.
            seats: Requests that run at once, divided by the number of front ends.
        """
        self._loop = loop
        self._unfinished = unfinished
        self._seats = seats
        self._put_off: dict[str, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}

    def put(self, req_id: str, ask: Callable[[], None]) -> bool:
        """Put a question off; False if it is to be asked at once."""
        if 2 * self._unfinished() > self._seats:
            return False
        self._put_off[req_id] = (self._loop.call_later(_DEFER_S, self.now, req_id), ask)
        return True

    def now(self, req_id: str) -> None:
        """Ask what was put off of a request, if anything was: its time has come, or the request ended."""
        timer, ask = self._put_off.pop(req_id, (None, None))
        if timer is not None and ask is not None:
            timer.cancel()
            ask()


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
    index = getattr(engine.engine_core, "client_index", 0)
    made = _make(config, engine.vllm_config, index)
    setattr(processor, _ATTRIBUTE, made)
    want()
    return made


def attach_offline(engine: LLMEngine) -> None:
    """Attach the service to an engine without an event loop; it ends with the engine."""
    if not hasattr(engine.output_processor, _ATTRIBUTE) and (made := attach(engine)) is not None:
        weakref.finalize(engine, made.service.close)


def _make(config: ExtConfig, vllm_config: VllmConfig, client_index: int) -> Attached:
    model = vllm_config.model_config
    predictor = config.predictor
    folder = Path(predictor.folder) if predictor.folder else default_folder(model.model)
    socket = _socket_path(getattr(vllm_config.parallel_config, "_api_process_count", 1), owner=client_index == 0)
    process = PredictorProcess(predictor, folder.absolute(), socket) if client_index == 0 else None
    served = model.served_model_name
    metrics = PredictorMetrics(served if isinstance(served, str) else served[0])
    texts = RequestTexts(PromptText(max_tokens=predictor.prompt_tokens, system_chars=predictor.system_chars))
    service = PredictionService(predictor, socket, process, metrics)
    service.poll()  # the model is loaded while the server still starts
    return Attached(service, texts, model.model)


def _socket_path(num_servers: int, *, owner: bool) -> Path:
    """Where the predictor listens: in a folder that only this user can enter.

    Several API servers find it by their common parent process.
    """
    # A socket's path is short by nature: 107 bytes.
    place = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) < _LONGEST_PLACE else "/tmp"
    if num_servers <= 1:
        folder = Path(tempfile.mkdtemp(prefix="vllm-ext-", dir=place))
    else:
        folder = Path(place) / f"vllm-ext-{os.getuid()}-{os.getppid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to somebody else; set TMPDIR to a folder of your own")
        folder.chmod(0o700)
    if owner:
        weakref.finalize(_FOLDERS, shutil.rmtree, folder, ignore_errors=True)
    return folder / "predictor"


class _Folders:
    """Lives as long as this process."""


_FOLDERS = _Folders()


# --- the servers' engine ----------------------------------------------------------------------------------------------


def serve(engine: AsyncLLM) -> None:
    """Attach the service to the servers' engine and deliver its hints from the running event loop, if one runs yet."""
    if getattr(engine, _ATTRIBUTE, None) is not None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    made = attach(engine)
    if made is None:
        return
    config = engine.vllm_config
    seats = config.scheduler_config.max_num_seqs // max(getattr(config.parallel_config, "_api_process_count", 1), 1)
    made.defer = Deferral(loop, engine.output_processor.get_num_unfinished_requests, seats)
    setattr(engine, _ATTRIBUTE, loop.create_task(_Delivery(engine, made.service).run()))


class _Delivery:
    """Takes hints from the service to the engine core, from the front end's event loop."""

    def __init__(self, engine: AsyncLLM, service: PredictionService) -> None:
        self._engine = weakref.ref(engine)
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._watched: Link | None = None
        self._descriptor = -1
        self._calls: set[asyncio.Task[None]] = set()
        self._failed = False

    async def run(self) -> None:
        """Poll from time to time, for the process's sake; answers are taken when they come."""
        try:
            while self._engine() is not None:
                self._poll()
                await asyncio.sleep(_POLL_S)
        finally:
            self._watch(None)
            self._service.close()

    def _poll(self) -> None:
        hints = self._service.poll()
        self._watch(self._service.link)
        if hints:
            call = self._loop.create_task(self._deliver(hints))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def _watch(self, link: Link | None) -> None:
        if link is self._watched:
            return
        if self._descriptor >= 0:  # a link that broke is closed, but its number is still watched
            self._loop.remove_reader(self._descriptor)
        self._watched = link
        self._descriptor = -1 if link is None else link.fileno()
        if link is not None:
            self._loop.add_reader(self._descriptor, self._poll)

    async def _deliver(self, hints: Sequence[LateHint]) -> None:
        engine = self._engine()
        if engine is None:
            return
        client = engine.engine_core
        try:
            for identity, rows in _by_engine(client, hints).items():
                await client._call_utility_async(UTILITY, rows, engine=identity)
        except EngineDeadError:
            return
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("predictions can't be sent to the scheduler; it goes by its other sources")


def _by_engine(client: Any, hints: Sequence[LateHint]) -> dict[bytes, list[list[object]]]:
    """Return rows for each engine core; a hint goes to the core that has the request, or to all if nobody knows."""
    at: Mapping[str, bytes] = getattr(client, "reqs_in_flight", {})
    found: dict[bytes, list[list[object]]] = {}
    for hint in hints:
        known = at.get(hint.req_id)
        for identity in client.core_engines if known is None else (known,):
            found.setdefault(identity, []).append(_row(hint))
    return found


def _row(hint: LateHint) -> list[object]:
    """Return what `SteeredScheduler.update_predictions` takes."""
    spread = math.log(hint.p90 / hint.tokens) / _Z[LEVELS.index(0.9)]
    return [hint.req_id, [max(1, round(hint.tokens * math.exp(spread * z))) for z in _Z], hint.source]


# --- offline use ------------------------------------------------------------------------------------------------------


def deliver_offline(engine: LLMEngine) -> None:
    """Send the hints that have come since the last step; called after each."""
    made = attached(engine.output_processor)
    if made is None or not (hints := made.service.poll()):
        return
    rows = [_row(hint) for hint in hints]
    client: Any = engine.engine_core
    core = getattr(client, "engine_core", None)
    if core is not None:  # in this process
        getattr(core, UTILITY)(rows)
    else:
        client.call_utility(UTILITY, rows)
