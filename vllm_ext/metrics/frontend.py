"""The front end's half of what can be seen from outside: fetches the scheduler's state beside the serving loop.

The scheduler does no I/O. A task in the API server asks each engine core for its state once per interval through vLLM's
utility calls, feeds the Prometheus metrics, and appends finished requests to the request log in a worker thread.
"""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext.config import KEY, ExtConfig, parse
from vllm_ext.metrics.engine import EngineFeed
from vllm_ext.metrics.request_log import RequestLog
from vllm_ext.metrics.step_record import StepRecord

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger("vllm.vllm_ext.frontend")

UTILITY = "vllm_ext_state"
_ATTRIBUTE = "_vllm_ext_poller"


def ensure_poller(engine: AsyncLLM) -> None:
    """Start fetching the state of ``engine``, once; needs a running event loop and does nothing without one.

    Only the first of several API servers fetches: each number is to be counted once.
    """
    if getattr(engine, _ATTRIBUTE, None) is not None or engine.engine_core.client_index != 0:
        return
    options = (engine.vllm_config.additional_config or {}).get(KEY)
    config = parse(options) if options else None
    if config is None or config.metrics_interval_s == 0:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    poller = Poller(engine, config)
    setattr(engine, _ATTRIBUTE, loop.create_task(poller.run()))


class Poller:
    """Fetches states until its engine is gone."""

    def __init__(self, engine: AsyncLLM, config: ExtConfig) -> None:
        # A strong reference would keep the engine from being collected, and with it its processes.
        self._engine = weakref.ref(engine)
        self._interval_s = config.metrics_interval_s
        self._log = RequestLog(config) if config.request_log else None
        self._steps = StepRecord(Path(config.step_record)) if config.step_record else None
        model_name = engine.vllm_config.model_config.served_model_name
        self._model_name = model_name if isinstance(model_name, str) else model_name[0]
        self._feeds: dict[bytes, EngineFeed] = {}
        self._next_record: dict[bytes, int] = {}
        self._failed = False

    async def run(self) -> None:
        """Fetch once per interval; a failure is logged once and does not end the task, a dead engine does."""
        while True:
            await asyncio.sleep(self._interval_s)
            engine = self._engine()
            if engine is None:
                return
            try:
                await self._fetch(engine)
            except EngineDeadError:
                return
            except Exception:
                if not self._failed:
                    self._failed = True
                    logger.exception("the scheduler's state can't be fetched; vllm_ext:* metrics are not updated")
            del engine

    async def _fetch(self, engine: AsyncLLM) -> None:
        client = engine.engine_core
        for index, identity in enumerate(client.core_engines):
            since = self._next_record.get(identity, 0)
            state = await client._call_utility_async(UTILITY, since, engine=identity)
            self._next_record[identity] = state["next_record"]
            if identity not in self._feeds:
                self._feeds[identity] = EngineFeed(self._model_name, index)
            self._feeds[identity].update(state)
            if self._log is not None and state["records"]:
                lost = await asyncio.to_thread(self._log.append, index, state["records"])
                self._feeds[identity].unwritten(lost)
            if self._steps is not None and (steps := state.get("steps_measured")):
                await asyncio.to_thread(self._steps.append, *steps)
