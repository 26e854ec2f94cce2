"""Cohort: each step shows vLLM's scheduler only the requests for which something happens.

A request that decodes changes by one token in each step, and vLLM's scheduler takes most of its time for finding that
out. Here it is hidden while nothing else can happen to it: `CohortRequest` counts its tokens by the steps of the
engine. What is shown is scheduled by vLLM, unchanged, with the tokens and seats that the hidden leave; a hidden request
whose last KV block is full gets the next one from vLLM's own `allocate_slots`, in the order in which vLLM would have
asked. A step in which nobody is shown, and nobody could join, isn't given to vLLM at all.

A KV connector may copy what fills a block, and follows who gets one: with a connector, both are shown in that step. It
plans its copies in each step, also in those that aren't given to vLLM; whom it is told of says `cohort_copies`.

Every decision, and every number that a policy reads, is what it is without: `tests/simulation/engine/test_cohort.py`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_ext.kv.partial_prefix.layout import layouts_of
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.engine.cohort_copies import HiddenCopies
from vllm_ext.simulation.engine.cohort_request import CohortRequest, Ticks
from vllm_ext.simulation.engine.cohort_step import Launch, QuietOutput, limits_less, merged, most_blocks, together
from vllm_ext.simulation.engine.token_runner import FILLER_TOKEN_ID, TokenRunner
from vllm_ext.simulation.measure.run_data import Decision

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_WORTH_HIDING = 2
"""Steps that a request must stay hidden for."""


class Cohort(AsyncScheduler):
    """vLLM's scheduler, told only of requests for which something happens.

    It stands below a scheduler that steers (`with_cohort`), and hides nobody until `attend` says how long outputs are.

    Attributes:
        tokens_hidden: Tokens so far that vLLM's scheduler did not count.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments."""
        super().__init__(*args, **kwargs)
        self._ticks = Ticks(self._show)
        self._hidden: dict[str, CohortRequest] = {}
        self._offsets = 0
        self._shown: list[CohortRequest] = []
        self._quiet: dict[str, int] | None = None
        self._due: defaultdict[int, list[CohortRequest]] = defaultdict(list)
        self._filling: defaultdict[int, list[CohortRequest]] = defaultdict(list)
        self._out_of_sight = 0
        self.tokens_hidden = 0
        self.running: list[CohortRequest]
        self.finished_req_ids: set[str]
        self.reset_preempted_req_ids: set[str]
        self._everybody = self.running
        self._copies: HiddenCopies | None = None
        self._lengths: Mapping[str, int] | None = None
        self._told: Callable[[str, int, int], None] = lambda *_: None

    def attend(self, lengths: Mapping[str, int], told: Callable[[str, int, int], None]) -> None:
        """Hide requests from here on, if this engine is one in which that changes nothing.

        Args:
            lengths: True output length by request id.
            told: Called with a request's id, and the first step and the one after the last whose output it got a token
                of while it was hidden; steps are counted as their outputs are processed.
        """
        config, connector = self.vllm_config, self.connector
        plain = (
            (connector is None or isinstance(connector, OffloadingConnector))
            and self.ec_connector is None
            and config.lora_config is None
            and config.speculative_config is None
            and not self.scheduler_config.long_prefill_token_threshold
            and not self.use_v2_model_runner
            and len(self.kv_cache_config.kv_cache_groups) == 1
        )
        if plain:
            self._lengths, self._told = lengths, told
            self._copies = None if connector is None else HiddenCopies(connector)

    @property
    def num_hidden(self) -> int:
        """Requests that are hidden now."""
        return len(self._hidden)

    # --- steps ------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As vLLM's; the output's ``num_scheduled_tokens`` names the hidden last."""
        step = self._ticks.scheduled
        self._show_due(step)
        filling = [request for request in self._filling.pop(step, ()) if request.hidden and request.fills_at == step]
        if self._copies is not None:  # the connector follows who gets a block
            for request in filling:
                self._show(request)
        if self._hidden and (
            throttle_prefills
            or self._pause_state != PauseState.UNPAUSED
            or self.max_num_scheduled_tokens < len(self.running)
        ):
            self.show_all()
        looks = self._looks_at_queue()
        quiet = bool(self._hidden) and not looks and len(self._hidden) == len(self.running)
        shown = [] if quiet and not filling else self._choose(step, looks)
        if quiet and not shown:
            return self._quiet_step(step)
        return self._step_of(step, shown, throttle_prefills)

    def _looks_at_queue(self) -> bool:
        """Whether vLLM would look at who waits."""
        if len(self.running) + self.num_waiting_for_streaming_input >= self.max_num_active_reqs:
            return False
        return bool(self.kv_holding_waiting) or bool(self.waiting)

    def _choose(self, step: int, looks: bool) -> list[Request]:
        """Return who is shown, in their order; the hidden who need a block, and stand before them, have it."""
        shown, filling = self._split(step)
        if looks and not shown and self._hidden:  # vLLM asks whether anybody runs
            self._show(self.running[-1])
            shown, filling = self._split(step)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        budget, size = self.max_num_scheduled_tokens, self.block_size
        needed = len(filling) + sum([most_blocks(request, budget, size) for request in shown])
        if needed > free and self._hidden:
            for request in filling:
                self._show(request)
            self._show_tail(needed - free)
            shown, filling = self._split(step)
        for request in filling:
            self._fill(request)
        return shown

    def _split(self, step: int) -> tuple[list[Request], list[CohortRequest]]:
        """Return who is shown, and the hidden who need a block before vLLM gives one to any of those.

        Whoever stands behind a prompt is shown: tokens for it are given first.
        """
        shown: list[Request] = []
        filling: list[CohortRequest] = []
        behind_prompt = takes_block = False
        for request in self.running:
            if request.hidden:
                if not behind_prompt:
                    if request.fills_at != step:
                        continue
                    if not takes_block:
                        filling.append(request)
                        continue
                self._show(request)
            elif request.is_prefill_chunk:
                behind_prompt = True
            takes_block = takes_block or not self._steps_to_fill(request.num_computed_tokens)
            shown.append(request)
        return shown, filling

    def _show_tail(self, blocks: int) -> None:
        """Show as many of the last as vLLM could preempt for so many blocks."""
        # With a connector blocks may come back too late, and whoever stands behind has to wait for them.
        if self._copies is not None or self.scheduler_config.policy != "fcfs":  # else the victims are the last
            self.show_all()
            return
        held = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        for request in reversed(self.running):
            if blocks <= 0:
                return
            blocks -= sum(block.ref_cnt == 1 for block in held[request.request_id])
            self._show(request)

    def _fill(self, request: CohortRequest) -> None:
        """Give a hidden request its next KV block if it needs one, and let vLLM cache those that are full."""
        self._catch_up(request)
        if self.kv_cache_manager.allocate_slots(request, 1) is None:
            raise RuntimeError(f"{request.request_id}: no KV block is left, although some were counted")
        request.fills_at += 1 + self._steps_to_fill(request.num_computed_tokens + 1)
        self._filling[request.fills_at].append(request)

    def _steps_to_fill(self, computed: int) -> int:
        """Return how many steps from now a request with so many tokens needs a block, or fills one that can be cached.

        vLLM caches a block when it knows the tokens: in the step that computes the last of them, or in the next one
        where that token is still under way then.
        """
        steps: int = -computed % self.block_size
        return steps if self.scheduler_config.async_scheduling or not steps else steps - 1

    def _quiet_step(self, step: int) -> Any:
        self.current_step += 1
        self.prefill_capacity_bound = self.get_request_counts()[1] > len(self.deferred_waiting)
        finished, preempted = self.finished_req_ids, self.reset_preempted_req_ids
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        output = QuietOutput(self._hidden_tokens(), finished, preempted)
        if self.connector is not None:
            self._everybody = self.running
            output.kv_connector_metadata = self._build_kv_connector_meta(self.connector, output)
        self.sched_step_seq += self.defer_block_free
        self._ticks.scheduled += 1
        output.launch = self._launch(step, {})
        return output

    def _step_of(self, step: int, shown: list[Request], throttle_prefills: bool) -> SchedulerOutput:
        """Let vLLM schedule a step of those who are shown, with the tokens and seats that the others leave."""
        hidden = len(self._hidden)
        self.prev_step_scheduled_req_ids.update(r.request_id for r in self._shown if r.status == RequestStatus.RUNNING)
        everybody = self._everybody = self.running
        if not hidden:
            output = super().schedule(throttle_prefills)
        else:
            self.running = shown.copy()
            self._out_of_sight = hidden
            try:
                with limits_less(self, hidden):
                    output = super().schedule(throttle_prefills)
            finally:
                self._out_of_sight = 0
                self.running = merged(everybody, shown, self.running)
            if not output.num_scheduled_tokens:  # vLLM counts steps with tokens
                self.sched_step_seq += self.defer_block_free
        self._ticks.scheduled += 1
        tokens = output.num_scheduled_tokens
        launch = self._launch(step, tokens)
        if hidden:
            output.num_scheduled_tokens = tokens | self._hidden_tokens()
            output.total_num_scheduled_tokens += hidden
        setattr(output, "launch", launch)  # noqa: B010 - not an attribute of vLLM's class
        return output

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
        build = functools.partial(super()._build_kv_connector_meta, connector, scheduler_output)
        if self._copies is None:
            return build()
        return self._copies.build(scheduler_output, self._everybody, self._hidden, build)

    def _launch(self, step: int, shown: Mapping[str, int]) -> Launch:
        hidden = len(self._hidden)
        self.tokens_hidden += hidden
        return Launch(step, shown, list(self.running), hidden, self._offsets + hidden * self._ticks.scheduled)

    def _hidden_tokens(self) -> dict[str, int]:
        if self._quiet is None:
            self._quiet = dict.fromkeys(self._hidden, 1)
        return self._quiet

    def execute(self, output: Any, runner: TokenRunner) -> tuple[ModelRunnerOutput, StepShape]:
        """Run a step that was just scheduled: the tokens of those who were shown, and the shape of the whole step."""
        launch: Launch = output.launch
        model_output, shape = runner.execute(launch.shown, self.requests, layouts_of(output))
        return model_output, launch.shape(shape) if launch.hidden else shape

    def update_from_output(self, scheduler_output: Any, model_runner_output: ModelRunnerOutput) -> Any:
        """Let vLLM process the tokens of those who are shown now; the others' are counted."""
        launch: Launch = scheduler_output.launch
        tokens = {req_id: count for req_id, count in launch.shown.items() if req_id not in self._hidden}
        late = {request.request_id for request in self._shown if request.was_hidden_in(launch.step)}
        if late:
            tokens, model_runner_output = together(launch, tokens, late, model_runner_output)
        outputs: Any = {}
        quiet = isinstance(scheduler_output, QuietOutput) and model_runner_output.kv_connector_output is None
        if tokens or not quiet:
            whole = scheduler_output.num_scheduled_tokens
            scheduler_output.num_scheduled_tokens = tokens
            try:
                outputs = super().update_from_output(scheduler_output, model_runner_output)
            finally:
                scheduler_output.num_scheduled_tokens = whole
        elif self.defer_block_free:
            self.processed_step_seq += 1
            self._drain_deferred_frees()
        ticks = self._ticks
        ticks.processed += 1
        if self._shown:
            self._shown = [request for request in self._shown if request.shown_at > ticks.processed]
        if self._lengths is not None:
            places, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
            for req_id in tokens:
                request = self.requests.get(req_id)
                if request is not None and request.status == RequestStatus.RUNNING and sampled[places[req_id]]:
                    self._hide_if_steady(request)
        return outputs

    def decision(self, output: Any) -> Decision:
        """Return what the step just scheduled decided, as if nobody were hidden."""
        launch: Launch = output.launch
        return launch.decision(output, self._hidden)

    # --- who is hidden ----------------------------------------------------------------------------------------------

    def _hide_if_steady(self, request: CohortRequest) -> None:
        """Hide a request that got a token just now, if each of the next steps can only bring one more."""
        ticks = self._ticks
        under_way = ticks.scheduled - ticks.processed
        if not (
            request.num_in_flight_tokens == request.num_output_placeholders == under_way
            and request.num_output_tokens
            and not request.is_prefill_chunk
            and not request.num_stale_output_tokens
            and not request.spec_token_ids
            and not request.use_structured_output
            and request.next_decode_eligible_step <= self.current_step + 1
            and not request.hidden
        ):
            return
        assert self._lengths is not None
        longest = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        left = min(self._lengths[request.request_id], longest) - request.num_output_tokens
        last = ticks.scheduled + left - under_way - 1  # the step of its last token
        if last < ticks.scheduled + _WORTH_HIDING:
            return
        request.fills_at = ticks.scheduled + self._steps_to_fill(request.num_computed_tokens)
        if self._copies is not None and request.fills_at == ticks.scheduled:
            return
        request.shows_at = last
        request.hide()
        self._offsets += request.offset
        self._hidden[request.request_id] = request
        self._quiet = None
        self._due[last].append(request)
        self._filling[request.fills_at].append(request)

    def _show(self, request: CohortRequest) -> None:
        """Show a request to vLLM again, as it would be if it had never been hidden."""
        if not request.hidden:
            return
        self._catch_up(request)
        self._offsets -= request.offset
        request.unhide()
        request.last_sched_seq = self.sched_step_seq
        del self._hidden[request.request_id]
        self._quiet = None
        self._shown.append(request)
        if self._copies is not None:
            self._copies.shown(request)

    def _catch_up(self, request: CohortRequest) -> None:
        since = request.counted_to
        if request.catch_up(FILLER_TOKEN_ID):
            self._told(request.request_id, since, request.counted_to)

    def _show_due(self, step: int) -> None:
        for request in self._due.pop(step, ()):
            if request.hidden and request.shows_at == step:
                self._show(request)

    def show_all(self) -> None:
        """Show whoever is hidden, with all tokens they got by now."""
        for request in list(self._hidden.values()):
            self._show(request)

    # --- vLLM's own -------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """As vLLM's.

        Raises:
            TypeError: the request is not one that can be hidden.
        """
        if not isinstance(request, CohortRequest):
            raise TypeError(f"{request.request_id}: is a {type(request).__name__}, must be a CohortRequest")
        request.join(self._ticks)
        super().add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """As vLLM's."""
        if request_ids is None:
            self.show_all()
        else:
            request_ids = (request_ids,) if isinstance(request_ids, str) else set(request_ids)
            for req_id in request_ids:
                if req_id in self._hidden:
                    self._show(self._hidden[req_id])
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        return finished

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._show(request)
        super()._preempt_request(request, *args, **kwargs)

    def get_request_counts(self) -> tuple[int, int]:
        """As vLLM's, whoever is out of its sight."""
        running, waiting = super().get_request_counts()
        return running + self._out_of_sight, waiting


@functools.cache
def with_cohort(scheduler_cls: type[AsyncScheduler]) -> type[AsyncScheduler]:
    """Return a class that schedules as ``scheduler_cls`` does, above a `Cohort`."""
    if scheduler_cls is AsyncScheduler:
        return Cohort
    return type(f"Cohort{scheduler_cls.__name__}", (scheduler_cls, Cohort), {})
