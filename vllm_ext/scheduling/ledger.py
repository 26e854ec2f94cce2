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
from vllm_ext.scheduling.pace import PaceTracker
from vllm_ext.step_time.runtime import RuntimeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.v1.request import Request

    from vllm_ext.kv.fronts import Front


_NO_DEFAULTS = SloConfig()
_UNKNOWN = Prediction(LengthDistribution.point(1), "prior")


@dataclass(slots=True, eq=False)
class Job:
    """Our side of one request."""

    request: Request
    number: int
    """Order of arrival; ends every tie."""
    arrival_time: float
    hints: RequestHints
    query: LengthQuery = field(init=False)
    prediction: Prediction = _UNKNOWN
    """Made of the prompt: what the estimate follows, and the record keeps."""
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


class Ledger:
    """All jobs by request id; turns them into views."""

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
        self.pace = PaceTracker()
        self.finished_lengths = Window(window)
        """Output lengths of the requests that finished last, whoever they were."""
        self._slo = slo
        self._quantile = quantile
        self._conditional = refresh == "conditional"
        self.runtime = runtime
        self.use_oracle = use_oracle
        self.server = NO_SERVER
        self.client: Callable[[Origin], str] = lambda _: ""
        """Whose a request is."""
        self.jobs: dict[str, Job] = {}
        self.front: Callable[[Request], Front] | None = None
        """Looks up what of a waiting request needs no computing; None where nothing is steered."""
        self.load_s: Callable[[int], float] = lambda _: 0.0
        """Seconds to load the KV of so many tokens from host memory."""
        self.resumed: Callable[[Job, float], None] = lambda *_: None
        """Told that a preempted request waited so many seconds."""
        self._count = 0

    def __getitem__(self, req_id: str) -> Job:
        return self.jobs[req_id]

    def get(self, req_id: str) -> Job | None:
        """Return the job of a request, if it is known."""
        return self.jobs.get(req_id)

    def add(self, request: Request, now: float) -> HintError | None:
        """Open the job of a new request; malformed hints are left out and returned as the error they are."""
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        problem = None
        try:
            hints = from_extra_args(extra_args, request.session_id)
            self._slo.check(hints)
        except HintError as error:
            hints, problem = NO_HINTS, error
        self._count += 1
        job = Job(request, self._count, now, hints)
        job.client = self.client(job.origin)
        job.slo = resolve(hints, request.num_prompt_tokens, self._slo)
        true_length = true_output_tokens(extra_args) if self.use_oracle else None
        if true_length is not None:
            distribution = LengthDistribution.point(max(true_length, 1)).capped(job.query.max_tokens)
            self._follow(job, Prediction(distribution, "oracle"))
        else:
            self._follow(job, self.predictor.predict(job.query))
        self.jobs[request.request_id] = job
        return problem

    def close(self, req_id: str, *, learn: bool) -> Job | None:
        """Forget a finished request; learn its length unless it was cut short from outside."""
        job = self.jobs.pop(req_id, None)
        if job is not None and learn and job.request.num_output_tokens:
            self.predictor.observe(job.query, job.request.num_output_tokens)
            self.finished_lengths.add(job.request.num_output_tokens)
            self.pace.finished(job.request.num_output_tokens, job.request.num_preemptions)
        return job

    def start_wait(self, job: Job, now: float) -> None:
        """Note that the job waits from now on, unless it already does."""
        if job.waiting_since is None:
            job.waiting_since = now

    def first_token(self, job: Job, now: float) -> None:
        """Note that the first token came."""
        job.first_token = now
        if job.slo.ttft_s is not None and now - job.arrival_time > job.slo.ttft_s:
            job.missed = True

    def end_wait(self, job: Job, now: float) -> None:
        """Note that a step was scheduled that computes tokens of the job again."""
        if job.waiting_since is not None:
            waited_s = now - job.waiting_since
            job.waited_s += waited_s
            job.waiting_since = None
            if job.request.num_preemptions:
                self.pace.resumed(waited_s)
                self.resumed(job, waited_s)
            if job.first_token is not None and waited_s > (job.slo.tbt_s or math.inf):
                job.missed = True
            job.output_at_admission = job.request.num_output_tokens

    def outlived(self, job: Job) -> int:
        """Raise the estimate of a job that generated all it was predicted to, and demote it; return by how much.

        Doubled, as published, or as the distribution of its length says, given what was generated (option
        ``prediction.refresh``). ``max_tokens`` caps both; a job at that bound is about to end.

        Source: ALISE, section 3.1: "demote the job [...] if it exceeds its predicted length and doubles the predicted
        length".
        """
        generated: int = job.request.num_output_tokens
        if generated < job.estimate or job.estimate >= job.query.max_tokens:
            return 0
        job.estimate, times = self._beyond(job, job.estimate, generated)
        job.demotions += times
        return times

    def correct(self, rows: Iterable[Sequence[Any]]) -> list[Job]:
        """Take over better predictions, of request id, quantiles in tokens at `length_distribution.LEVELS`, and source.

        One that the job has outlived already is raised as it would have been by now. The record keeps the better one,
        too: it was made of the prompt alone as well.

        Returns:
            Jobs whose prediction was replaced. Not those that are gone, or whose source is preferred to the predictor;
            what is no prediction is passed over.
        """
        corrected = []
        for req_id, quantiles, source in rows:
            job = self.jobs.get(req_id)
            if job is None or not self.predictor.prefers(RETRIEVAL, job.prediction):
                continue
            try:
                distribution = LengthDistribution.through(quantiles)
            except (TypeError, ValueError):
                continue
            prediction = self.predictor.with_hint(job.query, distribution, RETRIEVAL)
            self._follow(job, prediction._replace(source=source) if prediction.source == RETRIEVAL else prediction)
            corrected.append(job)
        return corrected

    def _beyond(self, job: Job, estimate: int, generated: int) -> tuple[int, int]:
        """Return an estimate above ``generated``, or the job's bound, and the number of levels it is worth."""
        times = 0
        if self._conditional:
            estimate, times = max(job.prediction.distribution.quantile(self._quantile, generated), generated + 1), 1
        while estimate <= generated:
            estimate *= 2
            times += 1
        return min(estimate, job.query.max_tokens), times

    def _renew(self, job: Job) -> None:
        """Predict again for a streaming session whose prompt grew or whose bound was moved."""
        job.ask_again()
        self._follow(job, self.predictor.predict(job.query))

    def _follow(self, job: Job, prediction: Prediction) -> None:
        """Estimate the length of a job by this from now on: more than it generated, and at most its bound."""
        job.prediction = prediction
        generated: int = job.request.num_output_tokens
        job.estimate = prediction.distribution.quantile(self._quantile)
        if generated >= job.estimate:
            job.estimate, _ = self._beyond(job, job.estimate, generated)
        job.estimate = max(1, min(job.estimate, job.query.max_tokens))

    def view(self, job: Job) -> RequestView:
        """Return the snapshot of a job."""
        request, runtime = job.request, self.runtime
        if job.query.max_tokens != request.max_tokens or job.query.num_prompt_tokens != request.num_prompt_tokens:
            self._renew(job)
        generated: int = request.num_output_tokens
        tokens: int = request.num_tokens
        computed = min(request.num_computed_tokens, tokens)
        recompute_s = prefill_s = 0.0
        ready = 0
        if computed < tokens - 1:
            there = computed
            if not computed and self.front is not None and job.waiting_since is not None:
                front = self.front(request)
                there = front.tokens
                ready = min(max(front.ready_tokens, job.kept_tokens), tokens - 1)
            base = max(computed, ready)
            prefill_s = runtime.prefill_s(tokens - base, base)
            if ready > there:
                prefill_s += self.load_s(ready - there)
        remaining_s = runtime.decode_s(max(job.estimate - generated, 1), tokens) + prefill_s
        if computed:
            recompute_s = runtime.prefill_s(computed)
        return RequestView(
            request.request_id,
            job.arrival_time,
            job.query.num_prompt_tokens,
            generated,
            computed,
            job.query.max_tokens,
            request.priority,
            job.hints,
            job.estimate,
            job.demotions,
            remaining_s,
            recompute_s,
            job.waiting_since,
            job.waited_s,
            request.num_preemptions,
            generated - job.output_at_admission,
            job.slo,
            job.missed,
            prefill_s,
            runtime.prefill_s(job.query.num_prompt_tokens),
            self.pace.pace,
            job.prediction.distribution,
            self.server,
            ready,
        )
