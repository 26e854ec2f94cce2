"""Conversations with a running server: whoever has an answer thinks, and sends the next turn behind all that was said.

The requests are those of the client of `vllm bench serve`, which reads the stream and takes the times. It drops the ids
of the tokens that come, of which the next prompt is made, so the session in its hands keeps what passes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllm_ext.compare.replay import answered, body_of, new_run, prompt_of
from vllm_ext.simulation.workloads.requests import SimRequest, Workload

_NO_IDS = "the answer has no token ids, of which the next turn would be made; vLLM sends them from 0.10.2 on"


def conversed(url: str, model: str, workload: Workload, *, forced: bool) -> dict[str, Any]:
    """Serve a workload to its end; return what `replay.observed` reads.

    Args:
        url: ``http://host:port``.
        model: The name under which it is served.
        workload: Whose clients come back.
        forced: See `replay.sent`.
    """
    return asyncio.run(_Clients(url, model, workload, forced).all())


class _Clients:
    def __init__(self, url: str, model: str, workload: Workload, forced: bool) -> None:
        self._url, self._model, self._workload, self._forced = url, model, workload, forced
        self._run = new_run()
        self._served: list[tuple[SimRequest, float, Any]] = []
        """What was sent, how late, and what `vllm bench serve` notes of it."""

    async def all(self) -> dict[str, Any]:
        """Let every client talk to its end."""
        import aiohttp
        from vllm.benchmarks.lib.endpoint_request_func import AIOHTTP_TIMEOUT

        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        async with aiohttp.ClientSession(connector=connector, timeout=AIOHTTP_TIMEOUT, trust_env=True) as session:
            self._start_s = time.perf_counter()
            await asyncio.gather(*(self._talk(session, opening) for opening in self._workload.start()))
        rows = self._served
        return {
            "req_ids": [one.req_id for one, *_ in rows],
            "arrivals": [one.arrival_s for one, *_ in rows],
            "ttfts": [got.ttft for *_, got in rows],
            "latencies": [got.latency for *_, got in rows],
            "itls": [got.itl for *_, got in rows],
            "output_lens": [got.output_tokens for *_, got in rows],
            "input_lens": [got.prompt_len for *_, got in rows],
            "queue_times": [late_s for _, late_s, _ in rows],
            "errors": [got.error for *_, got in rows],
        }

    async def _talk(self, session: Any, opening: SimRequest) -> None:
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

        request: SimRequest | None = opening
        while request is not None:
            asked = RequestFuncInput(
                prompt=prompt_of(request), api_url=f"{self._url}/v1/completions", prompt_len=request.prompt_tokens,
                output_len=request.max_tokens, model=self._model, model_name=self._model, request_id=request.req_id,
                ignore_eos=self._forced,
                extra_body={"temperature": 0.0, "return_token_ids": True, **body_of(request, self._run, self._forced)},
            )  # fmt: skip
            await asyncio.sleep(request.arrival_s - self._now_s())
            late_s = max(self._now_s() - request.arrival_s, 0.0)
            kept = _Kept(session)
            got = await async_request_openai_completions(asked, session=kept)
            ids = kept.token_ids() if got.success else []
            if got.success and not ids:
                got.error = _NO_IDS
            self._served.append((request, late_s, got))
            request = next(iter(self._workload.after(request, self._now_s(), answered(ids))), None)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


class _Kept:
    """A session of aiohttp, as far as that client uses it, that keeps what a server sends."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._chunks: list[bytes] = []

    @contextlib.asynccontextmanager
    async def post(self, **asked: Any) -> AsyncIterator[Any]:
        """Ask, and keep what comes."""
        async with self._session.post(**asked) as answer:
            content = SimpleNamespace(iter_any=lambda: self._passed(answer.content))
            yield SimpleNamespace(status=answer.status, reason=answer.reason, content=content)

    async def _passed(self, content: Any) -> AsyncIterator[bytes]:
        async for chunk in content.iter_any():
            self._chunks.append(chunk)
            yield chunk

    def token_ids(self) -> list[int]:
        """Return the ids of all tokens that came."""
        lines = b"".join(self._chunks).decode(errors="replace").splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = itertools.chain.from_iterable(event.get("choices", ()) for event in events)
        return [token for choice in choices for token in choice.get("token_ids") or ()]
