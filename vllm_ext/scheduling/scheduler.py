"""SteeredScheduler: the only class that touches vLLM's scheduler."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.version import __version__ as vllm_version

from vllm_ext.config import KEY, parse
from vllm_ext.contract import NO_PLAN, Ordering, Rank, RequestView, StepPlan, check_rank
from vllm_ext.hooks import registry
from vllm_ext.kv.connector.cached_prefixes import CachedPrefixes
from vllm_ext.kv.connector.recovery import (
    discard_failed_loads,
    discard_loads,
    forget_blocks,
    overlook_discarded,
)
from vllm_ext.kv.int8.geometry import ArenaGeometry
from vllm_ext.kv.int8.holding import RecordHolding
from vllm_ext.kv.int8.manager import with_record_manager
from vllm_ext.kv.partial_prefix.crossing import GapCrossing, can_cross
from vllm_ext.kv.partial_prefix.manager import with_gap_manager
from vllm_ext.prediction.length import LengthPredictor
from vllm_ext.scheduling.aged_turns import AgedTurns
from vllm_ext.scheduling.apply_plan import applied, stalled
from vllm_ext.scheduling.engine_state import adapter_places
from vllm_ext.scheduling.kv_swapper import KvSwapper
from vllm_ext.scheduling.load_report.reporter import LoadReporter
from vllm_ext.scheduling.observer import Observer
from vllm_ext.scheduling.planner import Planner
from vllm_ext.scheduling.running_order import RunningOrder
from vllm_ext.scheduling.shadow.shadow import shadow_beside
from vllm_ext.scheduling.shares import Shares
from vllm_ext.scheduling.state import queue_state
from vllm_ext.scheduling.step import LOOK_AHEAD
from vllm_ext.scheduling.switch import PolicySwitch
from vllm_ext.scheduling.tracked_requests import TrackedRequest, TrackedRequests
from vllm_ext.scheduling.waiting_table import WaitingTable
from vllm_ext.step_time.profile import engine_key, load_runtime_model
from vllm_ext.step_time.samples import StepSamples
from vllm_ext.systems import build, in_milliseconds
from vllm_ext.systems.needs import can_predict_from_prompts, switched_off
from vllm_ext.systems.upstream import BY_ARRIVAL, Arrival

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_ext.kv.conversations.admin import TierAdmin
    from vllm_ext.kv.int8.place import DevicePlace
    from vllm_ext.kv.int8.records import Records
    from vllm_ext.kv.partial_prefix.search import GapSearch

logger = init_logger("vllm.vllm_ext.scheduler")

MEMORY, RESET, LOAD = "memory", "reset", "load"
"""Why a request is preempted: vLLM is short of blocks; its cache was reset; its KV did not come."""
_LAST_WORD = "_reserve_prefill_lookahead"
"""Of vLLM's methods the one that has the last word about the size of a chunk."""
_UNRANKED = Rank((float("inf"),))
"""Place of a request whose policy failed: last, until its rank is asked for again."""


class SteeredScheduler(AsyncScheduler):
    """vLLM's scheduler, steered by the policies of a system.

    Before each step the policies decide completely; then the plan is applied by moving knobs vLLM has anyway (order of
    ``waiting`` and ``running``, preemption, budget), and vLLM's own ``schedule`` runs, neither copied nor cut. A
    policy that raises costs its step the plan: the step is first come, first served, counted, and logged once. A plan
    that lets nothing run although something could costs the next step its plan, so that it can't stall the server.

    Attributes:
        clock: Returns the time in seconds; replaced by simulations and tests.
        crossing: Computes across gaps in kept KV; None where lookups end at the first one.
        gaps: Its lookups; likewise.
        holding: Keeps KV on the device in 8 bits; None without an arena.
        records: Where it is kept; likewise.
        place: What that costs; likewise.
    """

    policy: SchedulingPolicy
    crossing: GapCrossing | None = None
    gaps: GapSearch | None = None
    holding: RecordHolding | None = None
    records: Records | None = None
    place: DevicePlace | None = None
    _preempt_reason: str = MEMORY
    _chunk_cap: int | None = None

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments.

        Raises:
            UpstreamMissing, UpstreamChanged: this vLLM's scheduler is not one that was verified.
            ConfigError: the options under ``additional_config["vllm_ext"]`` are not valid.
            ValueError: the system can't work with this model.
        """
        crosses, geometry = can_cross(vllm_config, kv_cache_config), ArenaGeometry.of(kv_cache_config)
        if geometry is not None:
            kv_cache_config = with_record_manager(kv_cache_config)
        elif crosses:
            kv_cache_config = with_gap_manager(kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self._keep_kv(crosses, geometry)
        registry.verify("scheduler")  # also where a class name brought us here and no front end checked
        registry.install("engine-core")
        config = parse((self.vllm_config.additional_config or {}).get(KEY) or {})
        self.config = config
        self.policies = build(config)
        self.clock: Callable[[], float] = time.monotonic
        key = engine_key(self.vllm_config, current_platform.get_device_name())
        runtime = load_runtime_model(config.profile, key)
        predictor = LengthPredictor.from_config(config.prediction)
        self.tracked = TrackedRequests(
            predictor,
            runtime,
            use_oracle=self.policies.system.oracle or "oracle" in config.prediction.sources,
            quantile=config.prediction.quantile,
            refresh=config.prediction.refresh,
            slo=in_milliseconds(config.slo, lambda: runtime),  # where no front end did
            window=self.policies.history or config.prediction.window,
        )
        self.switch = PolicySwitch(self, config.slo, self._reordered)
        self.tracked.bounded = self.switch.bounded
        samples = None if config.step_record is None else StepSamples(key, vllm_version)
        self.observer = Observer.from_config(
            config, self.tracked, samples, block_tokens=self.hash_block_size,
            traces=self.vllm_config.observability_config.otlp_traces_endpoint is not None,
        )  # fmt: skip
        self._now = self.clock()
        self._steers = not self.policies.is_upstream
        self._failing = self._stalled = self._failure_logged = False
        self.tier = getattr(self.connector, "tier", None)
        self.tier_account = getattr(self.connector, "account", None)
        self.prefixes = CachedPrefixes(self, host=self.tier, gaps=self.gaps, partials=self.records)
        self.load_reporter = LoadReporter(self, self.tracked, lambda: self.clock())  # noqa: PLW0108 - as above
        self.swapper: KvSwapper | None = None
        self._join_tier()
        manager = self.kv_cache_manager
        share = max(self.policies.residency.device_reserve, self.policies.admission.device_reserve)
        reserved = int(share * manager.block_pool.num_gpu_blocks)
        manager.watermark_blocks = max(manager.watermark_blocks, reserved)
        self.scheduler_reserve_full_isl &= not self.policies.budget.starts_partly
        if self._steers:
            self._steer()
        if self.policies.shadow is not None:
            self.observer.shadow = shadow_beside(self, self.policies.shadow)
        self._log_start(profiled=runtime.given is not None)

    def _log_start(self, *, profiled: bool) -> None:
        """Say which system is active, and what of it is off."""
        logger.info("vllm-ext is active: %s", self.policies.describe())
        off = switched_off(
            self.policies.all,
            self.config,
            predicts=self.policies.use_predictions and not self.tracked.use_oracle,
            predictor_installed=can_predict_from_prompts(self.config.predictor.encoder),
            profiled=profiled,
            has_connector=self.connector is not None,
        )
        if off:
            logger.info("vllm-ext, not switched on: %s", "; ".join(off))

    def _keep_kv(self, crosses: bool, geometry: ArenaGeometry | None) -> None:
        """Have KV on the device kept as the engine was told; vLLM's lookups are ours only where more is kept."""
        if crosses:
            clock = lambda: self.clock()  # noqa: E731, PLW0108 - simulations replace it
            self.crossing = GapCrossing(self, clock=clock, told=self._mind_chunks)
            self.gaps = self.crossing.search
        if geometry is not None:
            self.holding = RecordHolding(self, geometry, self.gaps)
            self.records, self.place = self.holding.records, self.holding.place
        if self.crossing is not None or self.holding is not None:
            setattr(self, "_get_local_prefix_cache_hit", self._kept_hit)  # noqa: B010 - mypy: a method

    def _join_tier(self) -> None:
        # The runtime model may be replaced, and simulations replace the clock.
        if self.gaps is not None:
            self.gaps.compute_s = lambda *tokens: self.tracked.runtime.prefill_s(*tokens)  # noqa: PLW0108
        if self.tier is None:
            return
        self.tier.use(lambda: self.clock(), lambda *tokens: self.tracked.runtime.prefill_s(*tokens))  # noqa: PLW0108
        self.tier.report_bad_hints(self.observer.bad_hint)
        self.tier.load_in_steps(lambda: self.tracked.step_stats.latest.step_s, lambda: self.get_request_counts()[0])
        if self.gaps is not None:
            self.tier.cross_gaps(self.gaps)
        self.swapper = KvSwapper(
            self,
            self.tier,
            self.policies.residency,
            tracked=self.tracked,
            prefixes=self.prefixes,
            observer=self.observer,
            clock=lambda: self._now,
        )
        self.tracked.load_s, self.tracked.resumed = self.swapper.load_s, self.swapper.resumed

    def _steer(self) -> None:
        self._by_priority = self.tracked.counts_priorities = self.policy is SchedulingPolicy.PRIORITY
        self.policy = SchedulingPolicy.FCFS  # out of memory the last one of `running` leaves, which is in our order
        ordering = self.policies.ordering
        self._orders_by_arrival = isinstance(ordering, Arrival)
        self._running_alike = self._orders_by_arrival and type(ordering).running_rank is Ordering.running_rank
        self.tracked.cached_prefix = self.prefixes.of
        shares = None
        if self.policies.sharing.divides:
            of = lambda request: self.tracked[request.request_id].client  # noqa: E731
            shares = Shares(self.policies.sharing, of, self._policy_failed, lambda r: self.prefixes.of(r).ready_tokens)
            self.tracked.client = shares.name
        turns = AgedTurns.of(ordering.age_limit, self._placed)
        self.ranked = self.waiting = WaitingTable(self._rank, self._ties, ordering.ageing, shares, turns)
        self.running_order = RunningOrder(
            self,
            self._running_rank,
            free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks,
            objective=lambda request: self.tracked[request.request_id].slo.tbt_s,
            stall_free=self.policies.budget.stall_free,
        )
        self.planner = Planner(
            self,
            self.policies.system.name,
            ordering=ordering,
            admission=self.policies.admission,
            gates=self.policies.gates,
            budget=self.policies.budget,
            tracked=self.tracked,
            queue=self.ranked,
            order=self.running_order,
            prefixes=self.prefixes,
            rng=np.random.default_rng(self.config.seed),
        )
        if self.swapper is not None:
            self.planner.swapper = self.swapper
            self.swapper.queue, self.swapper.order = self.ranked, self.running_order
            self.swapper.rank = lambda view: self._placed(self.policies.ordering.rank(view, self._now), view.priority)
        if self.observer.reasons is not None:
            self.observer.reasons.looks = self.planner.looks

    # --- steps ------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan, apply the plan, and let vLLM schedule the step."""
        now = self._now = self.clock()
        # While paused, a preempted request would be stranded in the queue.
        if not self._steers or self._pause_state != PauseState.UNPAUSED:
            output = super().schedule(throttle_prefills)
        else:
            plan = self._plan(now)
            if plan is NO_PLAN:
                output = super().schedule(throttle_prefills)
                self.ranked.end_step()
            else:
                with applied(self, self.ranked, plan, self._preempt_by_policy, throttled=throttle_prefills):
                    output = super().schedule(throttle_prefills or not plan.split.prefill)
                if not output.num_scheduled_tokens and stalled(self, self.ranked, plan):
                    self._stalled = True
                    self.observer.counters.stalls += 1
        anybody_waits = len(self.waiting) > 0
        if self.crossing is not None:
            self.crossing.step(output)
        if self.holding is not None:
            self.holding.step(output)
        if self.tier_account is not None:
            self.tier_account.scheduled(output.total_num_scheduled_tokens, now)
        self.observer.scheduled(output, self.running, now)
        self.observer.load.stepped(now, waiting=anybody_waits, kv_used=self.kv_cache_manager.usage)
        return output

    def _plan(self, now: float) -> StepPlan:
        started, plan = time.perf_counter(), NO_PLAN
        try:
            places = adapter_places(self) if self.lora_config else None
            self.ranked.begin_step(now, places)
            if places is not None and self.observer.reasons is not None:
                self.observer.reasons.places(places)
            num_waiting = len(self.ranked)
            self.running_order.update(now)
            if not (self._stalled or self.switch.by_arrival):
                plan = self.planner.plan(now, num_waiting)
                self.observer.refused(self.planner.why)
        except Exception:  # noqa: BLE001 - whatever a policy raises costs its step the plan, not the server its life
            self._policy_failed()
        if self._failing or self.switch.by_arrival:
            self._failing = False
            plan, self.planner.why = NO_PLAN, {}
            self.ranked.by_arrival = True
            self.running.sort(key=self._ties)
        self._stalled = False
        self.running_order.spare_batch()
        self.observer.planned(time.perf_counter() - started)
        return plan

    def _reordered(self) -> None:
        """Have everybody ranked again, by the system or by arrival."""
        if self._steers:
            self.ranked.prices_changed()
            self.running_order.rerank_all()

    def _policy_failed(self) -> None:
        """Count a policy's exception and make the step at hand, or the next one, first come, first served."""
        self._failing = True
        if self._steers:
            self.planner.memo.clear()
        self.observer.counters.fallbacks += 1
        if not self._failure_logged:
            self._failure_logged = True
            logger.exception(
                "a policy of %s failed; steps in which that happens are scheduled first come, first served "
                "(counted in vllm_ext:policy_fallbacks_total, not logged again)",
                self.policies.system.name,
            )

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Let vLLM process a step's output, and learn from the step."""
        now = self._now = self.clock()
        self.observer.finished_step(scheduler_output, now)
        if self.tier is not None:
            overlook_discarded(self, self.tier, model_runner_output.kv_connector_output)
            discard_failed_loads(
                self,
                self.tier,
                model_runner_output,
                lambda request: self.preempt_now(request, LOAD, drop_output=True),
            )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.observer.processed(self.running, now)
        self.load_reporter.stepped(goes_on=self.has_requests())
        if self.tier_account is not None:
            self.tier_account.finished(scheduler_output.total_num_scheduled_tokens, self.has_requests, now)
        return outputs

    # --- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Predict a new request's length and queue it; an update of a streaming session goes straight to vLLM."""
        self._now = self.clock()
        if request.request_id not in self.requests:
            problem = self.tracked.add(request, self._now)
            if problem is not None:
                self.observer.bad_hint(request.request_id, problem)
            self.tracked.start_wait(self.tracked[request.request_id], self._now)
            if self.observer.shadow is not None:
                self.observer.shadow.arrived(request, self.tracked[request.request_id])
            if request.status == RequestStatus.WAITING:  # else it waits for its grammar, and holds nobody up
                self.observer.waits.entered(request.request_id, request.num_prompt_tokens)
        queued = len(self.waiting)
        super().add_request(request)
        self.load_reporter.came()
        if self.observer.reasons is not None:
            self.observer.came(request, queued, self._ahead_of(request, queued))
        if self._steers and self.tier is not None:  # which did not know the request when its rank was asked for
            self.ranked.rerank(request)

    def update_predictions(self, rows: Sequence[Sequence[Any]]) -> int:
        """Take over predictions that a predictor made beside the engine, where they are preferred to what is known.

        Args:
            rows: Of request id, quantiles of its output length (tokens, at `LEVELS`), and who said so.

        Returns:
            How many were taken over. Requests that ended meanwhile are passed over, as is what is no prediction.
        """
        corrected = self.tracked.correct(rows)
        if self.observer.shadow is not None:
            for tracked in corrected:
                self.observer.shadow.corrected(tracked)
        if self._steers:
            for tracked in corrected:
                self.ranked.rerank(tracked.request)
                self.running_order.rerank(tracked.request)
        self.observer.counters.late_predictions += len(corrected)
        return len(corrected)

    def _preempt_by_policy(self, request: Request) -> None:
        self.preempt_now(request, "policy", drop_output=self.requires_kv_delivery)

    def preempt_now(self, request: Request, reason: str, *, drop_output: bool) -> None:
        """Preempt a running request, between two of vLLM's steps.

        Args:
            request: Whose.
            reason: What it is counted under.
            drop_output: Whether to drop tokens under way for it, and not to deliver them.
        """
        self.running.remove(request)
        self._preempt_reason = reason
        try:
            self._preempt_request(request, self._now, drop_stale_output=drop_output)
        finally:
            self._preempt_reason = MEMORY
        # The V1 runner must not take a request that resumes in the next step for one that kept running.
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        super()._update_waiting_for_remote_kv(request)
        if self.observer.shadow is not None:
            self.observer.shadow.loaded(request.request_id)
        if not request.num_computed_tokens:
            # Its load failed and it gave back its blocks; vLLM would go on to keep others free for it.
            self._inflight_prefills.discard(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self.swapper is not None and self._preempt_reason not in (RESET, LOAD):
            try:
                self.swapper.preempting(request)
            except Exception:  # noqa: BLE001 - see _plan; undecided, the tier goes its own way
                self._policy_failed()
        if self._steers:
            self.running_order.forget(request)
        self.observer.preempted(request.request_id, self._preempt_reason)
        if self.holding is not None and self._preempt_reason not in (RESET, LOAD):
            self.holding.leaves(request)
        super()._preempt_request(request, *args, **kwargs)
        if (tracked := self.tracked.get(request.request_id)) is not None:
            self.tracked.start_wait(tracked, self._now)
            self.observer.waits.entered(request.request_id, request.num_tokens)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset vLLM's prefix cache; requests it preempts for that count under the reason ``reset``.

        Raises:
            RuntimeError: blocks are held although nobody runs, by steps under way or by a session that waits for its
                client; nothing is found in the cache any more, nor in the tier if that was to be reset.
        """
        self._now, self._preempt_reason = self.clock(), RESET
        if reset_running_requests and self.tier is not None:
            discard_loads(self, self.tier)
        try:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        except RuntimeError:
            forget_blocks(self)
            if reset_connector:
                self.reset_connector_cache()
            raise
        finally:
            self._preempt_reason = MEMORY
            if self.records is not None:
                self.records.forget_all()
            if self.tier is not None:
                self.tier.forget_device()

    # vLLM takes `Scheduler` itself where scheduling is not asynchronous: nothing is scheduled then of a request in a
    # batch in flight, of which there are several with pipeline parallelism, before its token has come.

    @functools.cached_property
    def _upstream(self) -> Any:
        return AsyncScheduler if self.scheduler_config.async_scheduling else Scheduler

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        self._upstream._update_after_schedule(self, scheduler_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        found: tuple[list[int], bool] = self._upstream._update_request_with_output(
            self, request, new_token_ids, is_stale
        )
        return found

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Finish requests from outside, at the time it happens and not at that of the last step."""
        self._now = self.clock()
        return super().finish_requests(*args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.records is not None:
            self.records.forget(request.request_id)
        if self.crossing is not None:
            self.crossing.ends(request)
        self.load_reporter.leaves(request)
        result = super()._free_request(request, *args, **kwargs)
        if self._steers:
            self.running_order.forget(request)
            self.ranked.finished(request)
        self.prefixes.forget(request.request_id)
        self.observer.closed(request, self._now)
        return result

    # --- kept KV ----------------------------------------------------------------------------------------------------

    def _kept_hit(self, request: Request, *limit: int | None) -> tuple[KVCacheBlocks, int, int, bool]:
        """Stand for vLLM's look-up of a prefix, and find what is kept behind it as well."""
        blocks, num_tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limit)
        if self.gaps is not None and limit in ((), (None,)):  # from 0.33 on; what is behind it is wanted computed
            num_tokens = self.gaps.kept_tokens(request, num_tokens)
        if self.holding is not None:
            blocks, num_tokens = self.holding.hit(request, blocks, num_tokens)
        return blocks, num_tokens, boundary, diverged

    def cap_chunks(self, tokens: int | None) -> None:
        """Give no running prompt more than so many tokens in the next steps; None: there is no bound."""
        if tokens != self._chunk_cap:
            self._chunk_cap = tokens
            self._mind_chunks()

    def _mind_chunks(self) -> None:
        """Have the last word about the size of chunks only while that matters: vLLM asks for each of each step."""
        if self._chunk_cap is not None or (self.crossing is not None and self.crossing.anybody):
            setattr(self, _LAST_WORD, self._chunk)
        else:
            self.__dict__.pop(_LAST_WORD, None)

    def _chunk(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # With Mamba layers vLLM has aligned the chunk to blocks already.
        cap = None if self.need_mamba_block_aligned_split else self._chunk_cap
        if cap is not None and request in self._inflight_prefills:
            num_new_tokens = min(num_new_tokens, cap)
        tokens = int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))
        if self.crossing is None or not self.crossing.anybody:
            return tokens
        return self.crossing.chunk(request, num_computed_tokens, tokens)

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _ties(self, request: Request) -> tuple[float, int]:
        return self.tracked[request.request_id].ties

    def _rank(self, request: Request) -> Rank:
        tracked = self.tracked[request.request_id]
        self.tracked.start_wait(tracked, self._now)
        rank = self._ask_rank(tracked, self.policies.ordering.rank, by_arrival=self._orders_by_arrival)
        return self._placed(rank, request.priority)

    def _running_rank(self, request: Request) -> tuple[tuple[float, ...], Rank]:
        tracked = self.tracked[request.request_id]
        rank = self._ask_rank(tracked, self.policies.ordering.running_rank, by_arrival=self._running_alike)
        rank = self._placed(rank, request.priority)
        return (*rank.key, *tracked.ties), rank

    def _placed(self, rank: Rank, priority: int) -> Rank:
        """Return a rank as it counts: under ``--scheduling-policy priority`` that goes before all else, as in vLLM."""
        return rank._replace(key=(priority, *rank.key)) if self._by_priority else rank

    def _ahead_of(self, request: Request, queued: int) -> int | None:
        if self._steers:
            return self.ranked.ahead_of(request, LOOK_AHEAD)
        return queued if self.policy is SchedulingPolicy.FCFS else None

    def _ask_rank(
        self, tracked: TrackedRequest, ask: Callable[[RequestView, float], Rank], *, by_arrival: bool
    ) -> Rank:
        self.observer.counters.demotions += self.tracked.outlived(tracked)
        if by_arrival or self.switch.by_arrival:  # the same for every request: no view is needed to know it
            return BY_ARRIVAL
        try:
            rank = ask(self.tracked.view(tracked), self._now)
            check_rank(rank)
            return rank
        except Exception:  # noqa: BLE001 - see _plan
            self._policy_failed()
        return _UNRANKED

    # --- seen from outside ------------------------------------------------------------------------------------------

    def vllm_ext_state(self, since: int = 0) -> dict[str, Any]:
        """Return the state for metrics, with the records of requests finished from number ``since`` on."""
        state = self.observer.state(since)
        queue, why = (self.ranked, self.planner.why) if self._steers else (None, {})
        state |= queue_state(self, queue, self.tracked, self.clock(), why)
        state["switch"] = self.switch.state()
        state["load_report"] = self.load_reporter.state()
        state |= {"system": self.policies.system.name, "policies": self.policies.describe()}
        if self.tier_account is not None:
            state["kv_tier"] = self.tier_account.state()
        if self.gaps is not None:
            state["kv_gaps"] = self.gaps.counts.state()
        if self.records is not None:
            state["kv_device"] = self.records.state()
        return state

    @functools.cached_property
    def tier_admin(self) -> TierAdmin:
        """Answers to an administrator of the KV tier.

        Raises:
            ValueError: there is no tier.
        """
        from vllm_ext.kv.conversations.admin import TierAdmin

        if self.tier_account is None:
            raise ValueError("kv_tier.gib=0: there is no KV tier")
        return TierAdmin(self.tier_account)
