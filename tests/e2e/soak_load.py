"""A mixed load on a server, for as long as one likes, which keeps count of what became of every request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import bad_hints
import httpx
import openai

MAX_TURNS = 6
_WORDS = tuple(f"word{number}" for number in range(200))


class MixedLoad:
    """Conversations, streams, chats, objectives, clients that leave, hints that make no sense.

    Attributes:
        did: How many requests there were of each kind.
        answered: Ids of the requests that were answered in full.
        lost: What went wrong, a line each: an error, or an answer of another length than was asked for.
    """

    def __init__(self, client: openai.AsyncOpenAI, base_url: str, model: str, *, seed: int, max_tokens: int) -> None:
        """Remember what to do; nothing is sent yet."""
        self._client, self._base_url, self._model = client, base_url, model
        self._dice = random.Random(seed)
        self._max_tokens = max_tokens
        self._next = 0
        self.did: Counter[str] = Counter()
        self.answered: set[str] = set()
        self.lost: list[str] = []

    async def run(self, num_clients: int, goes_on: Callable[[], bool]) -> None:
        """Let so many clients send one request after the other for as long as ``goes_on``; returns when all ended."""
        await asyncio.gather(*(self._one_client(goes_on) for _ in range(num_clients)))

    async def _one_client(self, goes_on: Callable[[], bool]) -> None:
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "conversation": self._conversation,
            "stream": self._stream,
            "chat": self._chat,
            "leaves": self._leaves,
            "malformed": self._malformed,
        }
        while goes_on():
            kind = self._dice.choice(list(kinds))
            try:
                await kinds[kind]()
            except (openai.OpenAIError, httpx.HTTPError, AssertionError) as error:
                self.lost.append(f"{kind}: {type(error).__name__}: {error}")
            self.did[kind] += 1

    def _request(self, max_tokens: int | None = None) -> dict[str, Any]:
        """Return what all requests have, some of them with hints; its id is ``soak-N``."""
        self._next += 1
        hints: dict[str, Any] = {"osl": self._dice.randrange(1, 200)} if self._dice.random() < 0.5 else {}
        if self._dice.random() < 0.3:
            hints |= {"ttft_slo_ms": self._dice.choice((50, 500, 5000)), "tbt_slo_ms": self._dice.choice((20, 200))}
        return {
            "model": self._model,
            "max_tokens": max_tokens or self._dice.choice((1, 8, 40, self._max_tokens)),
            "temperature": 0,
            "extra_headers": {"X-Request-Id": f"soak-{self._next}"},
            "extra_body": {"ignore_eos": True, "vllm_xargs": hints},
        }

    def _said(self, most: int) -> str:
        return " ".join(self._dice.choices(_WORDS, k=self._dice.randrange(1, most)))

    def _done(self, request: dict[str, Any], num_tokens: int | None) -> None:
        assert num_tokens == request["max_tokens"], f"{num_tokens} of {request['max_tokens']} tokens"
        self.answered.add(request["extra_headers"]["X-Request-Id"])

    async def _conversation(self) -> None:
        text = self._said(20)
        for _ in range(self._dice.randrange(1, MAX_TURNS)):
            request = self._request(max_tokens=16)
            answer = await self._client.completions.create(prompt=text, **request)
            self._done(request, answer.usage and answer.usage.completion_tokens)
            text = f"{text}{answer.choices[0].text} {self._said(5)}"[-600:]

    async def _stream(self) -> None:
        request = self._request()
        chunks = await self._client.completions.create(
            prompt=self._said(40), stream=True, stream_options={"include_usage": True}, **request
        )
        last = [chunk async for chunk in chunks][-1]
        self._done(request, last.usage and last.usage.completion_tokens)

    async def _chat(self) -> None:
        request = self._request()
        messages: list[Any] = [{"role": "user", "content": self._said(40)}]
        answer = await self._client.chat.completions.create(messages=messages, **request)
        self._done(request, answer.usage and answer.usage.completion_tokens)

    async def _leaves(self) -> None:
        request = self._request(max_tokens=self._max_tokens)
        chunks = await self._client.completions.create(prompt=self._said(40), stream=True, **request)
        for _ in range(self._dice.randrange(3)):
            await anext(aiter(chunks))
        await chunks.close()

    async def _malformed(self) -> None:
        ((path, body, headers),) = bad_hints.requests(self._dice.randrange(2**32), 1, self._model)
        async with httpx.AsyncClient(base_url=self._base_url, timeout=None) as client:
            answer = await client.post(path, content=body, headers=headers)
        assert answer.status_code in (200, 400), f"{answer.status_code} to {body!r} {headers}"
