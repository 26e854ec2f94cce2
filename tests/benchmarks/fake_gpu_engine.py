"""An engine without a model, whose steps take what a roofline says, by a clock that only steps move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

BLOCK = 32


def h100_step_s(decodes: int, context_tokens: int, prompt_tokens: int) -> float:
    """Return an estimate of a step of Llama-3.1-8B: memory or arithmetic, whichever takes longer, and launches."""
    memory_s = (16e9 + 131_072 * context_tokens) / 2.6e12
    flops_s = 16e9 * (decodes + prompt_tokens) / 6e14 + prompt_tokens**2 / 2 * 4 * 32 * 4096 / 4e14
    return max(memory_s, flops_s) + 1.5e-3


class FakeScheduler:
    """First come, first served, with chunked prefill; decodes go before prompts.

    Args:
        seats: Requests that may run at once.
        kv_tokens: What the device holds.
        budget: Tokens of a step.
        filled: The KV of prompts is there, as a connector has it.
    """

    def __init__(self, seats: int, kv_tokens: int, budget: int, *, filled: bool) -> None:
        self.max_num_scheduled_tokens, self.max_model_len, self.block_size = budget, 16_896, BLOCK
        self.max_num_active_reqs = seats
        pool = SimpleNamespace(num_gpu_blocks=kv_tokens // BLOCK)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.connector = SimpleNamespace(
            get_num_new_matched_tokens=lambda request, _: (request.num_tokens - 1 if filled else 0, False)
        )
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.refused = 0
        """Steps within which nobody new is let in, as if the KV were short."""

    def schedule(self, _throttled: bool = False) -> Any:
        """Plan a step: tokens by request."""
        left, tokens = self.max_num_scheduled_tokens, {}
        while self.waiting and not self.refused and len(self.running) < self.max_num_active_reqs:
            one = self.waiting[0]
            if left - sum(max(1, other.num_tokens - other.computed) for other in self.running) < 1:
                break
            one.computed = self.connector.get_num_new_matched_tokens(one, 0)[0]
            self.running.append(self.waiting.pop(0))
        self.refused = max(0, self.refused - 1)
        for one in self.running:
            if part := min(left, max(1, one.num_tokens - one.computed)):
                tokens[one.req_id], left = part, left - part
        return SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))


class FakeEngine:
    """What the benchmarks use of `gpu_engine.Engine`; it plans a step before the one under way ends, or not."""

    cudagraph_mode = "FULL_DECODE_ONLY"
    compilation_mode = "NONE"
    start_s = 30.0

    def __init__(
        self, *, seats: int = 272, kv_tokens: int = 400_000, budget: int = 8192, in_flight: int = 0, filled: bool = True
    ) -> None:
        self.scheduler, self.in_flight = FakeScheduler(seats, kv_tokens, budget, filled=filled), in_flight
        self.seen: dict[str, Any] = {}
        self.steps: list[tuple[int, int]] = []
        """Decodes and prompt tokens of all that ended."""
        self._planned: list[Any] = []
        self._clock_s = 0.0

    def now(self) -> float:
        """Return the clock."""
        return self._clock_s

    def prompt(self, _number: int, tokens: int) -> range:
        """Return token ids."""
        return range(tokens)

    def add(self, prompt: Sequence[int], output: int, **_: Any) -> str:
        """Let a request wait."""
        req_id = f"r{len(self.seen)}"
        request = SimpleNamespace(req_id=req_id, num_tokens=len(prompt), computed=0, left=output)
        self.seen[req_id] = SimpleNamespace(token_times_s=[], ended=False, aborted=False)
        self.scheduler.waiting.append(request)
        return req_id

    def step(self) -> None:
        """Plan a step, and end the oldest that is under way."""
        plan = self.scheduler.schedule(False)
        requests = {one.req_id: one for one in self.scheduler.running}
        work = [(requests[req_id], tokens) for req_id, tokens in plan.num_scheduled_tokens.items()]
        decoding = [one.computed >= one.num_tokens - 1 and tokens == 1 for one, tokens in work]
        for one, tokens in work:
            one.computed += tokens
            if one.computed >= one.num_tokens:  # the token that comes of it is part of the next step
                one.num_tokens, one.left = one.computed + 1, one.left - 1
        done = [one for one, _ in work if not one.left]
        self.scheduler.running = [one for one in self.scheduler.running if one.left]
        if work:
            self._planned.append((work, decoding, done, [one.computed for one, _ in work]))
        if len(self._planned) > self.in_flight or (self._planned and not work):
            self._end(*self._planned.pop(0))

    def abort(self, req_ids: Iterable[str]) -> None:
        """End requests."""
        ids = set(req_ids)
        scheduler = self.scheduler
        scheduler.running, scheduler.waiting = (
            [one for one in queue if one.req_id not in ids] for queue in (scheduler.running, scheduler.waiting)
        )
        for req_id in ids:
            self.seen[req_id].aborted = not self.seen[req_id].ended

    def abort_all(self) -> None:
        """End all."""
        self.abort([req_id for req_id, seen in self.seen.items() if not seen.ended])

    @property
    def is_busy(self) -> bool:
        """Whether requests are left."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def close(self) -> None:
        """Do nothing."""

    def _end(self, work: list[Any], decoding: list[bool], done: list[Any], computed: list[int]) -> None:
        decodes = sum(decoding)
        prompt_tokens = sum(tokens for (_, tokens), is_decode in zip(work, decoding, strict=True) if not is_decode)
        held = sum(context for context, is_decode in zip(computed, decoding, strict=True) if is_decode)
        self._clock_s += h100_step_s(decodes, held, prompt_tokens)
        self.steps.append((decodes, prompt_tokens))
        for (one, _), is_decode in zip(work, decoding, strict=True):
            if is_decode or one.num_tokens > one.computed:
                self.seen[one.req_id].token_times_s.append(self._clock_s)
        for one in done:
            self.seen[one.req_id].ended = True
