"""`vllm-ext profile`: measure the runtime model of a model on this hardware and keep it in a file."""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.cli.command import UsageError, guarded
from vllm_ext.step_time import profile_loads
from vllm_ext.step_time.profile_loads import OUTPUT_TOKENS, SHORTEST_PROMPT, Load, longest_prompt

if TYPE_CHECKING:
    from vllm_ext.report.count_progress import CountProgress
    from vllm_ext.step_time.pivot_search import PivotFound
    from vllm_ext.step_time.profile import Profile
    from vllm_ext.step_time.runtime import StepFeatures

_PREFILLS = 4
_ARRIVALS_PER_SEAT = 2
_LEAST_ARRIVALS = 12
_LEAST_REPEATS, _MOST_REPEATS = 3, 15
_REPEAT_FOR_S = 1.0


class _Recorder:
    def __init__(self) -> None:
        self.steps: list[tuple[StepFeatures, float]] = []

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        if duration_s > 0:
            self.steps.append((features, duration_s))


def main(argv: Sequence[str]) -> int:
    """Run the command; vLLM's engine flags are understood as by `vllm serve`."""
    # In one process the recorder can be put next to the scheduler.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog="vllm-ext profile",
        description="Run loads of many shapes through the engine, fit the runtime model to its steps, and store it.",
    )
    parser.add_argument("--out", type=Path, help="File to write; by default one per engine and hardware in the cache.")
    parser.add_argument(
        "--steps", type=Path, metavar="FILE", help="Fit what --ext-step-record wrote; no engine is run."
    )
    parser.add_argument("--rounds", type=int, default=2, help="Times all loads are run.")
    EngineArgs.add_cli_args(parser)
    return guarded(parser, _profile, argv)


def _profile(args: argparse.Namespace) -> int:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from vllm_ext.step_time.fit import fit
    from vllm_ext.step_time.profile import Profile, default_path, engine_key, save
    from vllm_ext.step_time.step_record import Record

    if args.steps is not None:
        record = Record.read(args.steps)
        profile = record.profile()
        path = args.out or default_path(profile.key)
        save(profile, path)
        print(report(profile), objectives_report(profile), *record.notes(), path, sep="\n")
        return 0
    if args.rounds < 1:
        raise UsageError(f"--rounds={args.rounds}: must be at least 1")
    args.scheduler_cls, args.enable_prefix_caching = "fcfs", False
    args.additional_config = without_profile(args.additional_config)
    engine_args = EngineArgs.from_cli_args(args)
    llm = vllm.LLM(**{f.name: getattr(engine_args, f.name) for f in dataclasses.fields(engine_args)})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    key = engine_key(scheduler.vllm_config, current_platform.get_device_name())
    runner = _Runner(llm, llm.llm_engine.model_config.get_vocab_size(), scheduler.max_model_len)
    steps = _measure(runner, scheduler, args.rounds)
    found = _measure_pivot(runner, scheduler)
    result = fit(steps)
    path = args.out or default_path(key)
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    if found is not None:
        pivot = found.pivot
        fields |= {"pivot_tokens": pivot.tokens, "pivot_s": pivot.step_s, "pivot_saturated": found.saturated}
    profile = Profile(**key._asdict(), vllm_version=vllm.__version__, **fields)
    save(profile, path)
    print(report(profile), pivot_report(found), objectives_report(profile), path, sep="\n")
    use = f"vllm serve {key.model} --scheduler-cls alise --ext-profile {path if args.out else 'auto'}"
    print(f"use it, with the same dtype and tensor-parallel size: {use}")
    return 0


def without_profile(additional_config: Any) -> Any:
    """Return a server's additional configuration without what a profile is for: it is not there yet."""
    from vllm_ext.config import KEY

    ours = additional_config.get(KEY) if isinstance(additional_config, dict) else None
    if not isinstance(ours, dict):
        return additional_config
    return {**additional_config, KEY: {name: ours[name] for name in ours if name not in ("slo", "profile")}}


def _measure(runner: _Runner, scheduler: Any, rounds: int) -> list[tuple[StepFeatures, float]]:
    from vllm_ext.report.count_progress import CountProgress

    loads = profile_loads.plan(scheduler.max_model_len, scheduler.max_num_running_reqs) * rounds
    runner.run(Load("decode", 1, 8))
    recorder = _Recorder()
    scheduler.observer.timer.sink = recorder
    scheduler.observer.timer.measure_every_step()
    with CountProgress(len(loads), label="profile", unit="load") as progress:
        for number, load in enumerate(loads, start=1):
            runner.run(load)
            progress.update(number, f"{len(recorder.steps)} steps")
    return recorder.steps


def _measure_pivot(runner: _Runner, scheduler: Any) -> PivotFound | None:
    """Find the pivot forward size with steps made of fresh prompts only."""
    from vllm_ext.report.count_progress import CountProgress
    from vllm_ext.step_time.pivot_search import most_sizes, search

    seats, longest = scheduler.max_num_running_reqs, longest_prompt(scheduler.max_model_len)
    largest = min(scheduler.max_num_scheduled_tokens, seats * longest)
    recorder = scheduler.observer.timer.sink = _Recorder()
    with CountProgress(most_sizes(largest), label="pivot", unit="step size") as progress:
        return search(_PromptSteps(runner, recorder, seats, longest, progress), largest)


@dataclasses.dataclass
class _PromptSteps:
    """Times steps of prompts alone."""

    runner: _Runner
    recorder: _Recorder
    seats: int
    longest: int
    progress: CountProgress
    count: int = 0

    def __call__(self, tokens: int) -> float | None:
        """Return the median of some repeats, in seconds: 3, and up to 15 where they are short.

        None if the prompts did not fit into one step: the KV cache is too small for them, say.
        """
        from vllm_ext.step_time.pivot_search import prompts_of

        prompts = prompts_of(tokens, self.longest, self.seats)
        durations: list[float] = []
        while len(durations) <= _LEAST_REPEATS or (len(durations) <= _MOST_REPEATS and sum(durations) < _REPEAT_FOR_S):
            self.recorder.steps.clear()
            self.runner.run_prompts(prompts)
            whole = [s for f, s in self.recorder.steps if f.num_prefill_tokens == tokens and not f.num_decodes]
            if not whole:
                return None
            durations.append(whole[0])
        self.count += 1
        self.progress.update(self.count, f"{tokens} tokens")
        return statistics.median(durations[1:])  # the first may hold what is done once per shape, such as a compilation


class _Runner:
    """Runs loads. Each has a random generator of its own, so that a round does not depend on the ones before."""

    def __init__(self, llm: Any, vocab: int, max_model_len: int) -> None:
        self._llm = llm
        self._vocab = vocab
        self._longest = longest_prompt(max_model_len)

    def run(self, load: Load) -> None:
        rng = random.Random(f"{load.kind} {load.batch} {load.prompt_tokens}")
        if load.kind == "mixed":
            self._come_and_go(rng, load.batch)
        elif load.kind == "prefill":
            for _ in range(_PREFILLS):
                self._add(rng, [load.prompt_tokens], 1)
                self._finish()
        else:
            self._add(rng, [load.prompt_tokens] * load.batch, OUTPUT_TOKENS)
            self._finish()

    def run_prompts(self, prompt_tokens: Sequence[int]) -> None:
        """Run prompts of these lengths, all there before the first step, to their first token."""
        self._add(random.Random(f"prompts {list(prompt_tokens)}"), prompt_tokens, 1)
        self._finish()

    def _come_and_go(self, rng: random.Random, batch: int) -> None:
        """Keep ``batch`` requests of random lengths in the engine: a new one comes whenever one has ended."""
        engine = self._llm.llm_engine
        longest = max(SHORTEST_PROMPT, min(self._longest, profile_loads.MAX_BATCH_TOKENS // batch))
        left = max(_LEAST_ARRIVALS, _ARRIVALS_PER_SEAT * batch)
        while left or engine.has_unfinished_requests():
            if left and engine.get_num_unfinished_requests() < batch:
                left -= 1
                tokens = round(SHORTEST_PROMPT * (longest / SHORTEST_PROMPT) ** rng.random())
                self._add(rng, [min(tokens, self._longest)], rng.randint(2, OUTPUT_TOKENS))
            engine.step()

    def _add(self, rng: random.Random, prompt_tokens: Sequence[int], output_tokens: int) -> None:
        import vllm

        prompts = [{"prompt_token_ids": [rng.randrange(10, self._vocab) for _ in range(n)]} for n in prompt_tokens]
        params = vllm.SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        self._llm.enqueue(prompts, params, use_tqdm=False)

    def _finish(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()


def report(profile: Profile) -> str:
    """Return what was measured as text: errors of steps that were not fitted, and what each coefficient rests on."""
    parallel = f", tensor-parallel size {profile.tensor_parallel_size}" if profile.tensor_parallel_size > 1 else ""
    lines = [
        f"{profile.num_steps} steps of {profile.model} in {profile.dtype} on {profile.device}{parallel}",
        f"{'held-out steps':18} {'number':>8} {'median error':>14} {'P90 error':>12}",
    ]
    held_out = sum(regime.num_steps for regime in profile.regimes)
    rows = [("all", held_out, profile.median_error, profile.p90_error)]
    rows += [(regime.name, regime.num_steps, regime.median_error, regime.p90_error) for regime in profile.regimes]
    lines += [f"  {name:16} {number:8} {median:14.1%} {p90:12.1%}" for name, number, median, p90 in rows]
    lines.append(f"{'coefficient':18} {'s per unit':>12} {'fitted steps':>14} {'uncertainty':>12}")
    for term, value in zip(profile.terms, profile.coefficients, strict=True):
        note = "" if term.determined else "  too little data" + (", default kept" if not term.num_steps else "")
        lines.append(f"  {term.name:16} {value:12.2e} {term.num_steps:14} {term.uncertainty:12.1%}{note}")
    return "\n".join(lines)


def objectives_report(profile: Profile) -> str:
    """Return the objectives for gaps between tokens that Sarathi-Serve sets on such a device, section 5.1."""
    from vllm_ext.step_time.runtime import RuntimeModel
    from vllm_ext.systems.sarathi import TbtBudget, decode_steps_ms

    step, strict, relaxed = (decode_steps_ms(times, RuntimeModel(profile.coefficients)) for times in (1, 5, 25))
    return (
        f"gaps between tokens by Sarathi-Serve's rule, times {step:g} ms for {TbtBudget.reference_decodes} decodes of "
        f"{TbtBudget.reference_context} tokens: --tbt-slo-ms {strict:g} (strict, or 5x), --tbt-slo-ms {relaxed:g} "
        "(relaxed, or 25x)"
    )


def pivot_report(found: PivotFound | None) -> str:
    """Return the steps of prompts alone as text, and which of them is the pivot."""
    from vllm_ext.step_time.pivot_search import SHARE

    if found is None:
        return "pivot forward size: not measured, no prompts fill a step by themselves; the coefficients tell it"
    lines = [f"{'step of prompts':18} {'ms':>12} {'tokens/s':>14}"]
    for tokens, step_s in found.times.items():
        mark = "  pivot" if tokens == found.pivot.tokens else ""
        lines.append(f"{tokens:11} tokens {step_s * 1e3:12.2f} {tokens / step_s:14.0f}{mark}")
    smallest, largest = min(found.times), max(found.times)
    if not found.saturated:
        said = f"{largest} tokens, the largest step: throughput still rises there, nothing is known of larger ones"
    elif found.pivot.tokens == smallest:
        said = f"{smallest} tokens, the smallest step measured: larger ones have no more throughput to speak of"
    else:
        said = f"{found.pivot.tokens} tokens, the smallest step with {SHARE:.0%} of the best throughput"
    return "\n".join([*lines, f"pivot forward size: {said}"])
