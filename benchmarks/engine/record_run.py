"""Record runs of the real engine for `vllm-ext validate`: what its scheduler was told and decided, and every token.

Method: for each system, load and repeat a fresh engine (`AsyncLLM`) in a fresh process, with the flags of `vllm serve`
that stand behind ``--``, serves a workload at its arrival times. Each answer is as long as the workload says, which no
scheduler can see; one that is not fails the run. One request goes before the clock starts; the first ``--warm-up``
after it are recorded, and not judged. Repeats serve the same requests at the same times, so that they differ by the
noise of the machine. Load 1 is ``--rate``; without it, what the first system ends of a backlog is measured first.

Without ``--model`` it is the embedded tiny model, with few seats and KV blocks. Fields of the workload that have no
flag are set with ``--set``. The environment is passed on.

    python benchmarks/engine/record_run.py run.jsonl.gz --systems upstream-fcfs,alise --loads 0.5,0.8 --repeats 2
    python benchmarks/engine/record_run.py run.jsonl.gz --rate 4 --set system_prompt_tokens=64 -- --max-num-seqs 16

Output: the recording, and on stderr a line for each run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_ext import envs, systems, tiny_model
from vllm_ext.cli import spec_flags
from vllm_ext.cli.command import Failed, Parser, UsageError, guarded, split
from vllm_ext.compare.replay import answered, prompt_of, sampling
from vllm_ext.report import common_flags, results
from vllm_ext.report.foreign_cpu import ForeignCpu
from vllm_ext.simulation.measure.latency import RequestTimeline, saturated_tokens_per_s, summarise
from vllm_ext.simulation.recorded import recorder, recording
from vllm_ext.simulation.recorded.recording import ClientRequest, EngineSettings, Header
from vllm_ext.simulation.spec import UPSTREAM, parse
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.requests import SimRequest, Workload
from vllm_ext.simulation.workloads.spec import WorkloadSpec

_WORKLOAD, _CHILD = "workload.", "--child"
_SMALL = (
    "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8 --block-size 32 --num-gpu-blocks-override 64 "
    f"--kv-cache-memory-bytes {2**29}"
).split()
"""Flags for the tiny model; of two, the later counts."""


def main(argv: Sequence[str]) -> int:
    """Record; 0 if all runs are written, 2 if a flag or a file is wrong, 3 if an engine failed, 130 after Ctrl-C."""
    ours, passed = split(argv)
    return guarded(parser(passed), _record, ours)


def _record(args: argparse.Namespace) -> int:
    record(args)
    return 0


def record(args: argparse.Namespace) -> float | None:
    """Record all runs, and return the requests/s of load 1; None where the workload has no rate.

    Raises:
        ValueError: a flag or a file is wrong; no engine was started.
        Failed: an engine did not start, or served what was not asked for; runs before that are written.
    """
    flags_of = {name: _flags(name) for name in args.systems.split(",")}
    spec, rate = _workload(args)
    flags = ["--model", args.model] if args.model else ["--model", str(tiny_model.build()), *_SMALL]
    flags += args.passed
    if rate is None and spec.arrivals in ("poisson", "gamma"):
        first, own = next(iter(flags_of.items()))
        rate = _in_child(first, {"flags": [*flags, *own], "workload": _at_once(spec)})["saturated_per_s"]
        _tell(f"load 1, what {first} ends of a backlog: {rate:.4g} requests/s")
    elif rate is None and args.loads != [1.0]:
        raise UsageError(f"--loads: needs --rate with arrivals={spec.arrivals!r}")
    recording.start(args.recording)
    for repeat, load, (system, own) in itertools.product(range(args.repeats), args.loads, flags_of.items()):
        at_rate = {} if rate is None else {"rate_per_s": load * rate}
        which = {"system": system, "load": load, "repeat": repeat}
        label = f"{system} at load {load:g}, repeat {repeat}"
        found = _in_child(label, {
            "flags": [*flags, *own], "workload": {**spec.model_dump(mode="json"), **at_rate}, "warm_up": args.warm_up,
            "which": which, "model": Path(args.model or "tiny").name, "out": str(args.recording),
        })  # fmt: skip
        _tell(f"{label}: {found['requests']:.0f} requests, mean end-to-end latency {found['e2e_mean_ms']:.0f} ms; "
              f"others kept {found['foreign_cpu_cores']:.2f} cores busy")  # fmt: skip
    return rate


def _flags(system: str) -> list[str]:
    if system in UPSTREAM:
        return ["--scheduling-policy", UPSTREAM[system]]
    systems.resolve(system)
    return ["--scheduler-cls", system]


def _workload(args: argparse.Namespace) -> tuple[WorkloadSpec, float | None]:
    """Return the workload with the requests of the warm-up, and the rate that was asked for.

    Raises:
        ValueError: it can't be read, or has clients who leave.
    """
    given = spec_flags.given(args, _WORKLOAD)
    values = {"over_context": "cut", "num_requests": 180, **given, **spec_flags.set_by(args, given)}
    if values["num_requests"] is not None:
        values["num_requests"] += args.warm_up
    spec = parse(WorkloadSpec, values)
    if spec.abort_share or spec.patience_s is not None:
        raise UsageError("abort_share, patience_s: must be left out; clients wait for their answers here")
    if next(build(spec).start(), None) is None:  # what can't be read is said before an engine is started
        raise UsageError("num_requests, duration_s: no request arrives")
    return spec, values.get("rate_per_s")


def _at_once(spec: WorkloadSpec) -> dict[str, Any]:
    return {**spec.model_dump(mode="json"), "arrivals": "at-once", "rate_per_s": None, "cv": 1.0}


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _in_child(label: str, asked: Mapping[str, Any]) -> dict[str, float]:
    """Serve in a process of its own; nothing of it is left afterwards, nor when this process is told to end.

    Raises:
        Failed: it ended before its time; why stands above.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    child = subprocess.Popen(
        [sys.executable, __file__, _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True, env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ},
    )  # fmt: skip
    try:
        told, _ = child.communicate(json.dumps(asked))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # engine core and workers are of the same session
        child.wait()
        signal.signal(signal.SIGTERM, before)
    if child.returncode:
        raise Failed(f"{label}: the engine ended with status {child.returncode}; see above")
    found: dict[str, float] = json.loads(told)
    return found


def _child() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes where its log goes
    os.environ |= {envs.BENCH_FORCED_LENGTH: "1", envs.BENCH_STEP_RECORD: "1"}
    print(json.dumps(asyncio.run(_run(json.load(sys.stdin)))), file=answers, flush=True)
    os._exit(0)  # `AsyncLLM.__del__` complains where the interpreter is half gone


async def _run(asked: Mapping[str, Any]) -> dict[str, float]:
    """Start an engine, serve, write the recording where one is asked for, and return what was measured."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    flags = make_arg_parser(FlexibleArgumentParser(usage="see vllm serve --help")).parse_args(asked["flags"])
    args = AsyncEngineArgs.from_cli_args(flags)
    engine = AsyncLLM.from_engine_args(args, usage_context=UsageContext.OPENAI_API_SERVER)
    try:
        spec = WorkloadSpec.model_validate(asked["workload"])
        workload = build(spec, max_model_len=engine.model_config.max_model_len)
        start_s, rows, cores = await serve(engine, workload)
        rows = rows[asked.get("warm_up", 0) :]
        of_each = ("req_id", "arrival_s", "token_times_s")
        lines = [RequestTimeline(**{name: row[name] for name in of_each}) for row in rows]
        if "out" not in asked:
            count = len(lines) if spec.rate_counts == "requests" else spec.num_requests or 0
            tokens = sum(len(line.token_times_s) for line in lines)
            return {"saturated_per_s": saturated_tokens_per_s(lines) * count / tokens}
        facts = {**summarise(lines), "foreign_cpu_cores": cores}
        _write(asked, await recorder.fetch(engine), start_s, rows, facts)
        return facts
    finally:
        engine.shutdown()


def _write(
    asked: Mapping[str, Any], kept: Mapping[str, Any], start_s: float, rows: Sequence[Mapping[str, Any]],
    facts: Mapping[str, float],
) -> None:  # fmt: skip
    versions = {name: value for name, value in results.versions().items() if name != "commit"}
    header = Header(
        **asked["which"], model=asked["model"], versions=versions, settings=EngineSettings(**kept["settings"]),
        client_start_s=start_s, facts={"machine": results.machine(), **facts},
    )  # fmt: skip
    requests = [ClientRequest(**asked["which"], source_id="", **row) for row in rows]
    recording.append(Path(asked["out"]), header, kept["lines"], requests, dropped=kept["dropped"])


async def serve(engine: Any, workload: Workload) -> tuple[float, list[dict[str, Any]], float]:
    """Serve a workload, clients of conversations wait, think and ask again.

    Returns:
        When it began by the monotonic clock, what was seen of each request by arrival, and the cores that others kept
        busy meanwhile.

    Raises:
        RuntimeError: an answer has not the length that the workload says.
    """
    requests = [*workload.start()]
    alone = replace(requests[0], req_id="first", arrival_s=0.0, token_ids=None, prompt=None, session_id=None)
    await _answer(engine, alone, time.monotonic())
    others, start_s, rows = ForeignCpu(), time.monotonic(), []

    async def client(request: SimRequest | None) -> None:
        while request is not None:
            row, output_ids = await _answer(engine, request, start_s)
            rows.append(row)
            request = next(iter(workload.after(request, row["token_times_s"][-1], answered(output_ids))), None)

    async with asyncio.TaskGroup() as clients:
        for request in requests:
            clients.create_task(client(request))
    return start_s, sorted(rows, key=lambda row: (row["arrival_s"], row["req_id"])), others.cores()


async def _answer(engine: Any, request: SimRequest, start_s: float) -> tuple[dict[str, Any], list[int]]:
    prompt, length = prompt_of(request), min(request.output_tokens, request.max_tokens)
    await asyncio.sleep(start_s + request.arrival_s - time.monotonic())
    sent_s = time.monotonic() - start_s
    times_s: list[float] = []
    output_ids: list[int] = []
    prompt_tokens = request.prompt_tokens
    async for output in engine.generate(
        {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt, sampling(request), request.req_id,
        priority=request.priority, session_id=request.session_id,
    ):  # fmt: skip
        output_ids += output.outputs[0].token_ids
        times_s += [round(time.monotonic() - start_s, 6)] * len(output.outputs[0].token_ids)
        prompt_tokens = len(output.prompt_token_ids)
    if len(output_ids) != length:
        raise RuntimeError(f"{request.req_id}: {len(output_ids)} tokens came, and {length} were to come")
    row = {
        "req_id": request.req_id, "arrival_s": request.arrival_s, "sent_s": round(sent_s, 6),
        "prompt_tokens": prompt_tokens, "output_tokens": length, "token_times_s": times_s,
    }  # fmt: skip
    return row, output_ids


def _loads(text: str) -> list[float]:
    return [common_flags.number(lambda load: 0 < load < math.inf, "a number above 0")(part) for part in text.split(",")]


def parser(passed: Sequence[str]) -> Parser:
    """Return the parser of all but the flags of `vllm serve`, which are passed on."""
    found = Parser(prog="record_run.py", description=(__doc__ or "").splitlines()[0])
    found.set_defaults(passed=[*passed])
    found.add_argument("recording", type=common_flags.output_file(".jsonl", ".jsonl.gz"), metavar="RECORDING",
                       help="file to write, .jsonl or .jsonl.gz; what was there is gone")  # fmt: skip
    found.add_argument("--model", help="what `vllm serve` serves (default: the embedded tiny model)")
    found.add_argument("--systems", default="upstream-fcfs", metavar="A,B",
                       help="upstream-fcfs or upstream-priority for vLLM alone, or what --scheduler-cls takes "
                       "(default: %(default)s)")  # fmt: skip
    found.add_argument("--loads", type=_loads, default=[1.0], metavar="X,Y",
                       help="multiples of --rate, else of what the first system carries (default: 1)")  # fmt: skip
    found.add_argument("--repeats", type=common_flags.at_least(1), default=1, metavar="N",
                       help="runs of the same requests (default: 1)")  # fmt: skip
    found.add_argument("--warm-up", type=common_flags.at_least(0), default=20, metavar="N",
                       help="requests before those that are judged (default: 20)")  # fmt: skip
    spec_flags.add_flags(found, WorkloadSpec, _WORKLOAD, "requests")
    spec_flags.add_set(found, "system_prompt_tokens=64")
    return found


if __name__ == "__main__":
    if sys.argv[1:] == [_CHILD]:
        _child()
    else:
        sys.exit(main(sys.argv[1:]))
