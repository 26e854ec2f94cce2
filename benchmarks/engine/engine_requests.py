"""The requests of `engine_compare.py`, and the specification of each cell for `engine_cell.py`.

A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engine_prepared
import engine_rows as rows
import engine_slo as slo
import engine_workload as workload

from vllm_ext import datasets
from vllm_ext.simulation.recorded import forced_length
from vllm_ext.simulation.workloads import arrivals, synthetic

WARMUP_REQUESTS = 3
MEASURED = "measured"
"""The last phase of every cell."""


class Cells:
    """What each cell serves: the same requests at the same times for every system of a repeat."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        """Draw the requests of all repeats.

        Raises:
            ValueError: the workload has too few rows, or can't be read.
        """
        self._args = args
        self._model = model
        self._before = WARMUP_REQUESTS + args.history_requests
        self.dataset = load(args)
        self.limits = workload.Limits(
            length_scale=args.length_scale,
            max_prompt_tokens=args.max_model_len - args.max_output_tokens,
            max_output_tokens=args.max_output_tokens,
        )
        draws = [self._draw(args.seed + repeat) for repeat in range(1 if args.same_requests else args.repeats)]
        self._drawn = draws * args.repeats if args.same_requests else draws
        self.calibration: slo.Calibration | None = args.calibration
        """What an idle server does, as soon as it is known."""
        rounds = 1 if args.quick else 2
        self.step_times = engine_prepared.StepTimes(args.profile, model, rows.engine_args(args), rounds=rounds)
        self._learned = engine_prepared.Learned(model, args.warm_requests, args.seed)

    @property
    def have_objectives(self) -> bool:
        """Whether clients tell objectives."""
        return self._args.workload in rows.WITH_OBJECTIVES

    @property
    def to_calibrate(self) -> bool:
        """Whether an idle server must be measured before objectives can be told."""
        return self.have_objectives and self.calibration is None

    def at_once(self, system: str) -> dict[str, Any]:
        """Return a cell whose requests come all at once, after those that calibrate, where that is to be done."""
        args = self._args
        spec = self._spec(system, 0, [0.0] * args.num_requests)
        if self.to_calibrate:
            spec["phases"][1:1] = slo.phases(
                vocab_size=self._vocab_size(),
                max_prompt_tokens=self.limits.max_prompt_tokens,
                seats=min(args.max_num_seqs, (args.num_gpu_blocks - 1) * args.block_size // slo.FULL_TOKENS),
                seed=args.seed,
            )
        return spec

    @contextmanager
    def cell(self, system: str, repeat: int, rate_per_s: float) -> Iterator[dict[str, Any]]:
        """Yield a cell with Poisson arrivals; the predictor it may have has a folder of its own inside the context."""
        args = self._args
        seed = args.seed + (0 if args.same_requests else repeat)
        times = arrivals.poisson(rate_per_s=rate_per_s, count=args.num_requests, seed=seed)
        spec = self._spec(system, repeat, [float(t) for t in times])
        *_, state = (None,) if system in rows.UPSTREAM else rows.split(system)
        if state is None:
            yield spec
            return
        spec["phases"][0]["wait_for_predictor"] = True
        if state == rows.WARM:
            self._learned.prepare(self.dataset.rows, self._drawn, self.limits)
        with self._learned.folder(state) as folder:
            spec["engine_args"]["additional_config"]["vllm_ext"]["predictor"]["folder"] = str(folder)
            yield spec

    def facts(self) -> dict[str, Any]:
        """Return what shaped the requests, for the configuration of a result."""
        args = self._args
        found: dict[str, Any] = {
            "workload": args.workload,
            "limits": asdict(self.limits),
            "lengths": [workload.describe(drawn[self._before :]) for drawn in self._drawn],
            "dataset_format": self.dataset.format,
            "dataset_where": args.dataset_where,
            "dataset_skipped": self.dataset.skipped,
            "profile": self.step_times.facts(),
        }
        if self.calibration is not None:
            found["calibration"] = asdict(self.calibration)
            found["slo_scale"] = args.slo_scale
            found["tiers"] = {name: asdict(tier) for name, tier in slo.TIERS[args.workload].items()}
        return found

    def _draw(self, seed: int) -> list[workload.BenchRequest]:
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity(logging.ERROR)  # texts longer than the model's context are cut afterwards
        args = self._args
        tokenizer: Any = AutoTokenizer.from_pretrained(self._model)
        return workload.draw(
            self.dataset.rows,
            tokenizer,
            self.limits,
            vocab_size=self._vocab_size(),
            count=self._before + args.num_requests,
            seed=seed,
        )

    def _vocab_size(self) -> int:
        from transformers import AutoConfig

        found: int = AutoConfig.from_pretrained(self._model).vocab_size
        return found

    def _spec(self, system: str, repeat: int, times: Sequence[float]) -> dict[str, Any]:
        args, drawn = self._args, self._drawn[repeat]
        own = rows.system_args(system, args)
        if rows.starts_from_profile(system) and (profile := self.step_times.path()) is not None:
            own["additional_config"]["vllm_ext"]["profile"] = str(profile)
        sendable = self._sendable(system, drawn, [0.0] * self._before + list(times), args.seed + repeat)
        return {
            "engine_args": {"model": str(self._model), **rows.engine_args(args), **own},
            "record_steps": args.record is not None,
            "phases": [
                {"name": "warmup", "requests": sendable[:WARMUP_REQUESTS], "one_by_one": True},
                {"name": "history", "requests": sendable[WARMUP_REQUESTS : self._before]},
                {"name": MEASURED, "requests": sendable[self._before :]},
            ],
        }

    def _sendable(
        self, system: str, requests: Sequence[workload.BenchRequest], times: Sequence[float], seed: int
    ) -> list[dict[str, Any]]:
        args = self._args
        hints: list[dict[str, float]] = [{} for _ in requests]
        if self.calibration is not None:
            seed = args.seed if args.same_requests else seed
            hints = slo.objectives(requests, args.workload, self.calibration, scale=args.slo_scale, seed=seed)
        return [
            {
                "source_id": request.source_id,
                "prompt": request.prompt,
                "prompt_token_ids": request.prompt_token_ids,
                "output_tokens": request.output_tokens,
                "max_tokens": args.max_output_tokens,
                "extra_args": {**forced_length.extra_args(request.output_tokens), **own},
                "priority": _priority(args.priority_by, system, request, own),
                "arrival_s": time,
                "hints": own,
            }
            for request, time, own in zip(requests, times, hints, strict=True)
        ]


def _priority(by: str, system: str, request: workload.BenchRequest, hints: Mapping[str, float]) -> int:
    """Return the priority that a client gives its request.

    That by objectives is told to upstream alone: our systems follow the objectives themselves, and would put a client's
    priority before all else.
    """
    if by == "prompt-length":
        return len(request.prompt_token_ids)
    if by == "ttft-slo" and system == rows.PRIORITY:
        return round(hints.get("ttft_slo_ms", 0.0))
    return 0


def load(args: argparse.Namespace) -> datasets.Dataset:
    """Read or make the rows that requests are drawn from."""
    needed = WARMUP_REQUESTS + args.history_requests + args.num_requests
    spare = needed // 4 + 16  # short made-up prompts come out alike now and then, and each is used once
    if args.workload in rows.WITH_OBJECTIVES:
        return slo.dataset(args.workload, needed + spare, args.seed)
    if args.dataset is None:
        return synthetic.generate(args.synthetic, rows=needed + spare, seed=args.seed)
    where = {}
    for condition in args.dataset_where:
        name, _, values = condition.partition("=")
        where[name] = frozenset(values.split(","))
    return datasets.load(args.dataset, args.dataset_format, where)
