"""`vllm-ext profile`: measure the runtime model of a model on this hardware and keep it in a file."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm_ext.prediction.profile import Profile
    from vllm_ext.prediction.runtime import StepFeatures

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PROMPT_SHARES = (0.02, 0.1, 0.4, 0.8)
_OUTPUT_TOKENS = 24
_MAX_BATCH_TOKENS = 1 << 16
_SHORTEST_PROMPT = 4
_PREFILLS = 4
_ARRIVALS_PER_SEAT = 2
_LEAST_ARRIVALS = 12


class Load(NamedTuple):
    """One thing to run: what kind of steps it is for, requests at a time, and tokens of a prompt (0: of any length)."""

    kind: str
    """``decode``: equal requests, together. ``prefill``: prompts one by one. ``mixed``: requests that come and go."""
    batch: int
    prompt_tokens: int


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
    parser.add_argument("--rounds", type=int, default=2, help="Times all loads are run.")
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(list(argv))
    if args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: must be at least 1")
    args.scheduler_cls = "fcfs"
    args.enable_prefix_caching = False
    try:
        return _profile(EngineArgs.from_cli_args(args), args.rounds, args.out)
    except (_Unfit, OSError) as error:
        print(f"vllm-ext profile: {error}", file=sys.stderr)
        return 2


class _Unfit(Exception):
    """The steps that were measured make no model."""


def _profile(engine_args: Any, rounds: int, out: Path | None) -> int:
    import dataclasses

    import vllm
    from vllm.platforms import current_platform

    from vllm_ext.prediction.fit import fit
    from vllm_ext.prediction.profile import Profile, default_path, engine_key, save

    llm = vllm.LLM(**{f.name: getattr(engine_args, f.name) for f in dataclasses.fields(engine_args)})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    key = engine_key(scheduler.vllm_config, current_platform.get_device_name())
    steps = _measure(llm, scheduler, rounds)
    try:
        result = fit(steps)
    except ValueError as error:
        raise _Unfit(str(error)) from error
    path = out or default_path(*key)
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    profile = Profile(**key._asdict(), vllm_version=vllm.__version__, **fields)
    save(profile, path)
    print(report(profile))
    use = f"vllm serve {key.model} --scheduler-cls alise --ext-profile {path if out else 'auto'}"
    print(f"{path}\nuse it, with the same dtype and tensor-parallel size: {use}")
    return 0


def _measure(llm: Any, scheduler: Any, rounds: int) -> list[tuple[StepFeatures, float]]:
    from vllm_ext.observability.count_progress import CountProgress

    loads = plan(scheduler.max_model_len, scheduler.max_num_running_reqs) * rounds
    vocab = llm.llm_engine.model_config.get_vocab_size()
    runner = _Runner(llm, vocab, scheduler.max_model_len)
    runner.run(Load("decode", 1, 8))
    recorder = _Recorder()
    scheduler.observer.timer.sink = recorder
    scheduler.observer.timer.measure_every_step()
    with CountProgress(len(loads), label="profile", unit="load") as progress:
        for number, load in enumerate(loads, start=1):
            runner.run(load)
            progress.update(number, f"{len(recorder.steps)} steps")
    return recorder.steps


def plan(max_model_len: int, max_num_seqs: int) -> list[Load]:
    """Return the loads of one round: what spans the batch size, the context, the chunk, and the three kinds of steps.

    Args:
        max_model_len: Longest sequence of the engine, in tokens.
        max_num_seqs: Most requests of a step.
    """
    longest = max(1, max_model_len - _OUTPUT_TOKENS - 1)
    lengths = sorted({min(longest, max(_SHORTEST_PROMPT, int(share * longest))) for share in _PROMPT_SHARES})
    batches = [batch for batch in _BATCHES if batch <= max_num_seqs] or [1]
    decodes = [Load("decode", b, n) for b in batches for n in lengths if b == 1 or b * n <= _MAX_BATCH_TOKENS]
    prompts = [longest >> halvings for halvings in range(longest.bit_length())]
    prefills = [Load("prefill", 1, n) for n in reversed(prompts) if n >= min(_SHORTEST_PROMPT, longest)]
    return [*decodes, *prefills, *(Load("mixed", batch, 0) for batch in batches)]


class _Runner:
    """Runs loads. Each has a random generator of its own, so that a round does not depend on the ones before."""

    def __init__(self, llm: Any, vocab: int, max_model_len: int) -> None:
        self._llm = llm
        self._vocab = vocab
        self._longest = max(1, max_model_len - _OUTPUT_TOKENS - 1)

    def run(self, load: Load) -> None:
        rng = random.Random(f"{load.kind} {load.batch} {load.prompt_tokens}")
        if load.kind == "mixed":
            self._come_and_go(rng, load.batch)
        elif load.kind == "prefill":
            for _ in range(_PREFILLS):
                self._add(rng, [load.prompt_tokens], 1)
                self._finish()
        else:
            self._add(rng, [load.prompt_tokens] * load.batch, _OUTPUT_TOKENS)
            self._finish()

    def _come_and_go(self, rng: random.Random, batch: int) -> None:
        """Keep ``batch`` requests of random lengths in the engine: a new one comes whenever one has ended."""
        engine = self._llm.llm_engine
        longest = max(_SHORTEST_PROMPT, min(self._longest, _MAX_BATCH_TOKENS // batch))
        left = max(_LEAST_ARRIVALS, _ARRIVALS_PER_SEAT * batch)
        while left or engine.has_unfinished_requests():
            if left and engine.get_num_unfinished_requests() < batch:
                left -= 1
                tokens = round(_SHORTEST_PROMPT * (longest / _SHORTEST_PROMPT) ** rng.random())
                self._add(rng, [min(tokens, self._longest)], rng.randint(2, _OUTPUT_TOKENS))
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
