"""What the scheduler remembers of each request beyond vLLM's own state, and the views made from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ext.config import RETRIEVAL, SloConfig
from vllm_ext.contract import NO_SERVER, Origin, RequestView
from vllm_ext.contract.length_distribution import LengthDistribution, Prediction
from vllm_ext.contract.objective import NO_SLO, Slo, resolve
from vllm_ext.hints import NO_HINTS, HintError, RequestHints, from_extra_args
from vllm_ext.prediction.history import Window
from vllm_ext.prediction.length import LengthPredictor
from vllm_ext.prediction.oracle import true_output_tokens
from vllm_ext.prediction.query import LengthQuery
from vllm_ext.prediction.source_losses import Answers
from vllm_ext.scheduling.step_stats import StepStatsTracker
from vllm_ext.step_time.runtime import RuntimeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.v1.request import Request

    from vllm_ext.kv.connector.cached_prefixes import CachedPrefix
    from vllm_ext.scheduling.wait_record import WaitRecord

_NO_DEFAULTS = SloConfig()
_UNKNOWN = Prediction(LengthDistribution.point(1), "prior")


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """Our side of one request."""

    request: Request
    number: int
    """Order of arrival; ends every tie."""
    arrival_time: float
    hints: RequestHints
    query: LengthQuery = field(init=False)
    prediction: Prediction = _UNKNOWN
    """Made of the prompt: what the estimate follows, and the record keeps."""
    answers: Answers | None = None
    """What the sources gave for its length, where a late one did."""
    slo: Slo = NO_SLO
    client: str = ""
    """Whose turn it waits for, where clients take turns."""
    missed: bool = False
    """Whether an objective was missed already; gaps between steps are not looked at."""
    estimate: int = 1
    """Current estimate of the total output, in tokens."""
    demotions: int = 0
    waiting_since: float | None = None
    waited_s: float = 0.0
    output_at_admission: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    expected_wait_s: float | None = None
    """Of one preempted where there is a KV tier: how long it was expected to wait."""
    kept_tokens: int = 0
    """Of one preempted: tokens whose KV the tier was to keep."""
    wait: WaitRecord | None = None
    """Why it waited, where somebody wants to know."""

    def __post_init__(self) -> None:
        self.ask_again()

    def ask_again(self) -> None:
        """Renew what lengths are predicted from: a streaming session's prompt grows, and its bound moves."""
        request, hints = self.request, self.hints
        client = self.origin._replace(adapter="")  # whatever it asks, a client is as right as it was
        self.query = LengthQuery(request.num_prompt_tokens, request.max_tokens, hints.osl, hints.tag, client)

    @property
    def origin(self) -> Origin:
        """What tells whose it is."""
        request, hints = self.request, self.hints
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        return Origin(hints.tag or "", request.cache_salt or "", adapter, hints.client_key or "")

    @property
    def ties(self) -> tuple[float, int]:
        """What ends every comparison of ranks."""
        return (self.arrival_time, self.number)


class TrackedRequests:
    """What is remembered of all requests, by id; turns it into views."""

    def __init__(
        self,
        predictor: LengthPredictor,
        runtime: RuntimeModel,
        *,
        use_oracle: bool,
        quantile: float = 0.5,
        refresh: str = "double",
        slo: SloConfig = _NO_DEFAULTS,
        window: int = 1000,
    ) -> None:
        self.predictor = predictor
        self.step_stats = StepStatsTracker()
        self.finished_lengths = Window(window)
        """Output lengths of the requests that finished last, whoever they were."""
        self._slo = slo
        self.bounded: Callable[[Slo], Slo] = lambda slo: slo
        self._quantile = quantile
        self._conditional = refresh == "conditional"
        self.runtime = runtime
        self.use_oracle = use_oracle
        self.server = NO_SERVER
        self.client: Callable[[Origin], str] = lambda _: ""
        """Whose a request is."""
        self.by_id: dict[str, TrackedRequest] = {}
        self.cached_prefix: Callable[[Request], CachedPrefix] | None = None
        """Looks up what of a waiting request needs no computing; None where nothing is steered."""
        self.load_s: Callable[[int], float] = lambda _: 0.0
        """Seconds to load the KV of so many tokens from host memory."""
        self.resumed: Callable[[TrackedRequest, float], None] = lambda *_: None
        """Told that a preempted request waited so many seconds."""
        self.counts_priorities = False
        """Whether requests go by priority before all else."""
        self._count = 0

    def __getitem__(self, req_id: str) -> TrackedRequest:
        return self.by_id[req_id]

    def get(self, req_id: str) -> TrackedRequest | None:
        """Return what is remembered of a request, if it is known."""
        return self.by_id.get(req_id)

    def add(self, request: Request, now: float) -> HintError | None:
        """Remember a new request; malformed hints are left out and returned as the error they are."""
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        problem = None
        try:
            hints = from_extra_args(extra_args, request.session_id)
            self._slo.check(hints)
        except HintError as error:
            hints, problem = NO_HINTS, error
        self._count += 1
        tracked = TrackedRequest(request, self._count, now, hints)
        tracked.client = self.client(tracked.origin)
        tracked.slo = self.bounded(resolve(hints, request.num_prompt_tokens, self._slo))
        true_length = true_output_tokens(extra_args) if self.use_oracle else None
        if true_length is not None:
            distribution = LengthDistribution.point(max(true_length, 1)).capped(tracked.query.max_tokens)
            self.follow(tracked, Prediction(distribution, "oracle"))
        else:
            self.follow(tracked, self.predictor.predict(tracked.query))
        self.by_id[request.request_id] = tracked
        return problem

    def close(self, req_id: str, *, learn: bool) -> TrackedRequest | None:
        """Forget a finished request; learn its length unless it was cut short from outside."""
        tracked = self.by_id.pop(req_id, None)
        if tracked is not None and learn and tracked.request.num_output_tokens:
            self.predictor.observe(tracked.query, tracked.request.num_output_tokens, tracked.answers)
            self.finished_lengths.add(tracked.request.num_output_tokens)
            self.step_stats.finished(tracked.request.num_output_tokens, tracked.request.num_preemptions)
        return tracked

    def start_wait(self, tracked: TrackedRequest, now: float) -> None:
        """Note that a request waits from now on, unless it already does."""
        if tracked.waiting_since is None:
            tracked.waiting_since = now

    def first_token(self, tracked: TrackedRequest, now: float) -> None:
        """Note that the first token came."""
        tracked.first_token = now
        if tracked.slo.ttft_s is not None and now - tracked.arrival_time > tracked.slo.ttft_s:
            tracked.missed = True

    def end_wait(self, tracked: TrackedRequest, now: float) -> None:
        """Note that a step was scheduled that computes tokens of a request again."""
        if tracked.waiting_since is not None:
            waited_s = now - tracked.waiting_since
            tracked.waited_s += waited_s
            tracked.waiting_since = None
            if tracked.request.num_preemptions:
                self.step_stats.resumed(waited_s)
                self.resumed(tracked, waited_s)
            if tracked.first_token is not None and waited_s > (tracked.slo.tbt_s or math.inf):
                tracked.missed = True
            tracked.output_at_admission = tracked.request.num_output_tokens

    def outlived(self, tracked: TrackedRequest) -> int:
        """Raise the estimate of a request that generated all it was predicted to, and demote it; return by how much.

        Doubled, as published, or as the distribution of its length says, given what was generated (option
        ``prediction.refresh``). ``max_tokens`` caps both; a request at that bound is about to end.

        Source: ALISE, section 3.1: "demote the job [...] if it exceeds its predicted length and doubles the predicted
        length".
        """
        generated: int = tracked.request.num_output_tokens
        if generated < tracked.estimate or tracked.estimate >= tracked.query.max_tokens:
            return 0
        tracked.estimate, times = self._beyond(tracked, tracked.estimate, generated)
        tracked.demotions += times
        return times

    def correct(self, rows: Iterable[Sequence[Any]]) -> list[TrackedRequest]:
        """Take over better predictions, of request id, quantiles in tokens at `length_distribution.LEVELS`, and source.

        One that a request has outlived already is raised as it would have been by now. The record keeps the better one,
        too: it was made of the prompt alone as well.

        Returns:
            Jobs whose prediction was replaced. Not those that are gone, or whose source is preferred to the predictor,
            which is judged all the same when they end; what is no prediction is passed over.
        """
        corrected = []
        for req_id, quantiles, source in rows:
            tracked = self.by_id.get(req_id)
            if tracked is None or tracked.prediction.source == "oracle":
                continue
            try:
                distribution = LengthDistribution.through(quantiles)
            except (TypeError, ValueError):
                continue
            if tracked.answers is None:
                tracked.answers = self.predictor.answers_for(tracked.query, RETRIEVAL, distribution)
            if not self.predictor.prefers(RETRIEVAL, tracked.prediction):
                continue
            prediction = self.predictor.with_hint(tracked.query, distribution, RETRIEVAL)
            self.follow(tracked, prediction._replace(source=source) if prediction.source == RETRIEVAL else prediction)
            corrected.append(tracked)
        return corrected

    def _beyond(self, tracked: TrackedRequest, estimate: int, generated: int) -> tuple[int, int]:
        """Return an estimate above ``generated``, or the request's bound, and the number of levels it is worth."""
        times = 0
        if self._conditional:
            estimate, times = max(tracked.prediction.distribution.quantile(self._quantile, generated), generated + 1), 1
        while estimate <= generated:
            estimate *= 2
            times += 1
        return min(estimate, tracked.query.max_tokens), times

    def _renew(self, tracked: TrackedRequest) -> None:
        """Predict again for a streaming session whose prompt grew or whose bound was moved."""
        tracked.ask_again()
        tracked.answers = None
        self.follow(tracked, self.predictor.predict(tracked.query))

    def follow(self, tracked: TrackedRequest, prediction: Prediction) -> None:
        """Estimate the length of a request by this from now on: more than it generated, and at most its bound."""
        tracked.prediction = prediction
        generated: int = tracked.request.num_output_tokens
        tracked.estimate = prediction.distribution.quantile(self._quantile)
        if generated >= tracked.estimate:
            tracked.estimate, _ = self._beyond(tracked, tracked.estimate, generated)
        tracked.estimate = max(1, min(tracked.estimate, tracked.query.max_tokens))

    def view(self, tracked: TrackedRequest) -> RequestView:
        """Return a snapshot of a request."""
        request, runtime = tracked.request, self.runtime
        if (
            tracked.query.max_tokens != request.max_tokens
            or tracked.query.num_prompt_tokens != request.num_prompt_tokens
        ):
            self._renew(tracked)
        generated: int = request.num_output_tokens
        tokens: int = request.num_tokens
        computed = min(request.num_computed_tokens, tokens)
        recompute_s = prefill_s = 0.0
        ready = 0
        if computed < tokens - 1:
            there = computed
            if not computed and self.cached_prefix is not None and tracked.waiting_since is not None:
                prefix = self.cached_prefix(request)
                there = prefix.tokens
                ready = min(max(prefix.ready_tokens, tracked.kept_tokens), tokens - 1)
            base = max(computed, ready)
            prefill_s = runtime.prefill_s(tokens - base, base)
            if ready > there:
                prefill_s += self.load_s(ready - there)
        remaining_s = runtime.decode_s(max(tracked.estimate - generated, 1), tokens) + prefill_s
        if computed:
            recompute_s = runtime.prefill_s(computed)
        return RequestView(
            request.request_id,
            tracked.arrival_time,
            tracked.query.num_prompt_tokens,
            generated,
            computed,
            tracked.query.max_tokens,
            request.priority if self.counts_priorities else 0,
            tracked.hints,
            tracked.estimate,
            tracked.demotions,
            remaining_s,
            recompute_s,
            tracked.waiting_since,
            tracked.waited_s,
            request.num_preemptions,
            generated - tracked.output_at_admission,
            tracked.slo,
            tracked.missed,
            prefill_s,
            runtime.prefill_s(tracked.query.num_prompt_tokens),
            self.step_stats.latest,
            tracked.prediction.distribution,
            self.server,
            ready,
        )
