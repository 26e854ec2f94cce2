"""`vllm-ext profile`: measure the run-time model of a model on this hardware and keep it in a file."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext.prediction.runtime import StepFeatures

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PROMPT_SHARES = (0.02, 0.1, 0.4, 0.8)
_OUTPUT_TOKENS = 24
_MAX_BATCH_TOKENS = 1 << 16


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
        description="Run batches of many shapes through the engine, fit the run-time model to its steps, and store it.",
    )
    parser.add_argument("--out", type=Path, help="File to write; by default one per model and hardware in the cache.")
    parser.add_argument("--rounds", type=int, default=2, help="Times the grid of shapes is run.")
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(list(argv))
    if importlib.util.find_spec("scipy") is None:
        parser.error("scipy is needed for the fit: pip install 'vllm-ext[bench]'")
    if args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: must be at least 1")
    args.scheduler_cls = "fcfs"
    args.enable_prefix_caching = False
    return _profile(EngineArgs.from_cli_args(args), args.rounds, args.out)


def _profile(engine_args: Any, rounds: int, out: Path | None) -> int:
    import dataclasses

    import vllm
    from vllm.platforms import current_platform

    from vllm_ext.prediction.fit import fit
    from vllm_ext.prediction.profile import Profile, default_path, hardware_name, save

    llm = vllm.LLM(**{f.name: getattr(engine_args, f.name) for f in dataclasses.fields(engine_args)})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    shapes = _shapes(scheduler.max_model_len, scheduler.max_num_running_reqs)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    _run(llm, 1, 8, vocab)
    recorder = _Recorder()
    scheduler.observer.timer.sink = recorder
    scheduler.observer.timer.measure_every_step()
    for round_number in range(rounds):
        for batch, prompt_tokens in shapes:
            print(f"round {round_number + 1}: {batch} x {prompt_tokens} tokens", file=sys.stderr)
            _run(llm, batch, prompt_tokens, vocab)
    result = fit(recorder.steps)
    model, device = scheduler.vllm_config.model_config.model, hardware_name(current_platform.get_device_name())
    path = out or default_path(model, device)
    profile = Profile(model=model, device=device, vllm_version=vllm.__version__, **dataclasses.asdict(result))
    save(profile, path)
    print(
        f"{path}: {profile.num_steps} steps on {device}; held-out error {profile.median_error:.1%} median, "
        f"{profile.p90_error:.1%} P90\nuse it: vllm serve {model} --scheduler-cls alise --ext-profile "
        f"{path if out else 'auto'}"
    )
    return 0


def _shapes(max_model_len: int, max_num_seqs: int) -> list[tuple[int, int]]:
    """Return (requests, prompt tokens) pairs that span batch size and context length."""
    lengths = sorted({max(4, int(share * (max_model_len - _OUTPUT_TOKENS - 1))) for share in _PROMPT_SHARES})
    return [
        (batch, length)
        for batch in _BATCHES
        for length in lengths
        if batch <= max_num_seqs and batch * length <= _MAX_BATCH_TOKENS
    ]


def _run(llm: Any, batch: int, prompt_tokens: int, vocab: int) -> None:
    import vllm

    rng = random.Random(batch * 100_003 + prompt_tokens)
    prompts = [{"prompt_token_ids": [rng.randrange(10, vocab) for _ in range(prompt_tokens)]} for _ in range(batch)]
    params = vllm.SamplingParams(max_tokens=_OUTPUT_TOKENS, ignore_eos=True, temperature=0.0, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
