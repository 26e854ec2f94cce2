"""Asks the policies about one step: how many tokens, who joins and leaves, whose KV is copied ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ext.contract import NO_PLAN, RequestView, Room, Server, StepPlan, Victim
from vllm_ext.scheduling.demand import Fronts, Prices
from vllm_ext.scheduling.engine_state import EngineState, largest_chunk, loaded, loading
from vllm_ext.scheduling.step import EngineStep, pool_of
from vllm_ext.step_time.runtime import StepFeatures

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from vllm_ext.contract import Admission, Budget, GatePolicy
    from vllm_ext.scheduling.kv_swapper import KvSwapper
    from vllm_ext.scheduling.ledger import Ledger
    from vllm_ext.scheduling.ranked_queue import RankedQueue
    from vllm_ext.scheduling.running_order import RunningOrder

_LOOKED_AFTER_STEPS = 64
_TYPICAL_TOKENS = 512
"""Length of the sequences of a full batch, where it only matters of which order its step is."""
_CHANGED = 1.25
"""Times by which the price of a step must have changed since ranks were made of it."""


class Planner:
    """Makes the plan of each step, budget first, then admission, which gets what the budget leaves.

    Attributes:
        memo: What policies noted for later steps.
        why: Why those who were looked at in the last step do not run, by request id.
        swapper: Where there is a KV tier: whose KV is copied ahead, and what preemptions cost.
    """

    def __init__(
        self,
        engine: EngineState,
        system: str,
        *,
        admission: Admission,
        gates: Sequence[GatePolicy],
        budget: Budget,
        ledger: Ledger,
        queue: RankedQueue,
        order: RunningOrder,
        fronts: Fronts,
        rng: np.random.Generator,
    ) -> None:
        """Take vLLM's scheduler, the system's name and policies, and what is known beside vLLM.

        Raises:
            ValueError: the system can't work with this engine.
        """
        if engine.scheduler_config.policy != "fcfs":
            raise ValueError(
                f"scheduling_policy={engine.scheduler_config.policy!r}: {system} chooses order and victims itself and "
                "honours priority; leave --scheduling-policy out"
            )
        if admission.preempts and not fronts.probe.full_attention:
            raise ValueError(
                f"{system} with preemption counts KV blocks, which is exact for full attention only; this model has "
                "sliding-window, Mamba or hybrid KV: add --no-ext-preemption"
            )
        self._engine, self._ledger = engine, ledger
        self._admission, self._gates, self._budget = admission, gates, budget
        self._queue, self._order, self._fronts, self._rng = queue, order, fronts, rng
        self.memo: dict[str, Any] = {}
        self.why: dict[str, str] = {}
        self.swapper: KvSwapper | None = None
        self._free_to_vllm = admission.is_vllms and not gates and queue.shares is None
        self._asks_always = not budget.is_vllms
        self._priced_at = self._step_price()
        self._measure_server()

    def plan(self, now: float) -> StepPlan:
        """Return the plan for a step at clock time ``now`` (s).

        Raises:
            Exception: whatever a policy raises; nothing has been changed then.
        """
        self._follow_prices()
        if not self._asks_always and not len(self._engine.waiting):
            self.why = {}
            return NO_PLAN
        with self._fronts.unchanged():
            return self._plan(now)

    def _plan(self, now: float) -> StepPlan:
        engine = self._engine
        pool = pool_of(engine)
        step = EngineStep(
            engine,
            now,
            pool=pool,
            ledger=self._ledger,
            queue=self._queue,
            order=self._order,
            rng=self._rng,
            memo=self.memo,
            victim=self._victim,
        )
        split = self._budget.split(step)
        plan = StepPlan(split=split)
        self.why = {}
        if not step.num_waiting:
            return plan
        step.split_by(split)
        room = self._room(step)
        if not self._free_to_vllm or split.apart:
            room.gates = tuple(policy.gate(step) for policy in self._gates)
            self._admission.select(step, room)
            plan = StepPlan(split=split, admit=tuple(room.admit), preempt=tuple(room.preempt))
            self.why = room.why or self._head_lacks(room)
        if self.swapper is not None:
            self.swapper.look_ahead(step, room)
        return plan

    def _head_lacks(self, room: Room) -> dict[str, str]:
        """Return what the head of the queue waits for where nobody needed to be looked at."""
        lacks = room.lacks
        if room.admit or lacks is None:
            return {}
        return {head.request_id: lacks for head in self._queue.best(1)}

    def _room(self, step: EngineStep) -> Room:
        engine = self._engine
        prices = Prices(engine, self._fronts, step.pool)
        under_way = loading(engine)
        # As upstream has it, a load between steps takes its seat when its KV has come.
        seated = step.num_running + len(engine.kv_holding_waiting) - len(under_way) + len(loaded(engine))
        return Room(
            seats=engine.max_num_active_reqs - seated,
            tokens=step.free_tokens,
            chunk=largest_chunk(engine),
            blocks=step.pool.unused - engine.kv_cache_manager.watermark_blocks,
            idle=not step.num_running and not under_way,
            price=prices.price,
            taken=prices.joins,
        )

    def _victim(self, request: RequestView, blocks: int) -> Victim:
        if self.swapper is not None:
            victim = self.swapper.priced(request, blocks)
        else:
            victim = Victim(request, (), blocks, request.recompute_s, request.recompute_s)
        place = self._engine.place
        return victim if place is None else place.priced(victim)

    def _follow_prices(self) -> None:
        """Ask for all ranks again once steps have turned out to take much longer than thought, or less."""
        if self._engine.current_step % _LOOKED_AFTER_STEPS:
            return
        price = self._step_price()
        for now, then in zip(price, self._priced_at, strict=True):
            if not then / _CHANGED <= now <= then * _CHANGED:
                self._priced_at = price
                self._measure_server()
                self._queue.rerank_all()
                self._order.rerank_all()
                return

    def _measure_server(self) -> None:
        """Tell the ledger what requests take their share of: seats, KV, and steps of a batch that fills both."""
        pool, runtime = pool_of(self._engine), self._ledger.runtime
        kv_tokens = max(1, pool.total * pool.block_size)
        decodes = max(1, min(self._engine.max_num_active_reqs, kv_tokens // _TYPICAL_TOKENS))
        step_s = runtime.step_time_s(StepFeatures(decodes, 0, min(kv_tokens, decodes * _TYPICAL_TOKENS)))
        token_s = runtime.prefill_s(_TYPICAL_TOKENS) / _TYPICAL_TOKENS
        self._ledger.server = Server(self._engine.max_num_active_reqs, kv_tokens, token_s / max(step_s, 1e-9))

    def _step_price(self) -> tuple[float, float]:
        runtime = self._ledger.runtime
        return runtime.decode_s(100, 1000), runtime.prefill_s(1000)
