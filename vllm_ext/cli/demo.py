"""`vllm-ext demo`: serve a small model with a stock `vllm serve`, send it a few dozen requests, show what happened."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from vllm_ext.cli.command import FAILED, Parser, UsageError, guarded, need
from vllm_ext.demo.server import ServerError, ServerProcess
from vllm_ext.report import common_flags

if TYPE_CHECKING:  # imported where they are used: the openai client takes a second to load
    from vllm_ext.demo.client import Answer
    from vllm_ext.demo.report import Record
    from vllm_ext.demo.workload import DemoRequest

SERVED_NAME = "demo"
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 32
"""Tokens; vLLM's CPU attention takes multiples of 32 only."""
NUM_BLOCKS = 40
"""A pool barely larger than the longest sequence, so that requests compete for it."""
KV_CACHE_BYTES = 2**30
"""Room for that pool. Without a size vLLM asks for most of the memory, and does not start where that is used."""
MAX_NUM_SEQS = 4
RECORDS_WAIT_S = 5.0
"""The front end fetches records from time to time: how long to wait for the last ones."""


def main(argv: Sequence[str]) -> int:
    """Run the demo; 0 if every request finished, 3 if not, 128 + signal if it was interrupted."""
    return guarded(_parser(), _demo, argv, failures=(ServerError, ValueError, OSError))


def _demo(args: argparse.Namespace) -> int:
    need("vllm")
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return _serve(args)
    except Interrupted as interruption:
        print("interrupted; the server is stopped", file=sys.stderr)
        return 128 + interruption.number
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Interrupted(SystemExit):
    """A signal asked the demo to end. Of all exceptions, asyncio lets only KeyboardInterrupt and SystemExit through."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _serve(args: argparse.Namespace) -> int:
    from vllm_ext.demo.workload import make_workload

    requests = make_workload(args.requests, args.seed)
    if args.duel and (args.model or not args.scheduler_cls):
        raise UsageError("--duel: needs --scheduler-cls, and the embedded model")
    if not args.model:
        from vllm_ext.tiny_model import build

        args.model = str(build())
        _say(f"model: {args.model}")
    folder = Path(tempfile.mkdtemp(prefix="vllm-ext-demo-"))
    if args.duel:
        from vllm_ext.compare.duel import duel

        found = duel(args.model, args.scheduler_cls, folder, _say)
        print("", found.table(), "", *found.words(), "", sep="\n", flush=True)
    request_log = folder / "requests.jsonl"
    server = ServerProcess(
        args.model, server_args(args.scheduler_cls, request_log), log_path=folder / "server.log", port=args.port,
        on_progress=_progress,
    )  # fmt: skip
    _say(f"starting: {shlex.join(server.command)}")
    _say(f"server log: {server.log_path}")
    start = time.monotonic()
    with server:
        _say(f"healthy after {time.monotonic() - start:.0f} s at {server.base_url}")
        all_finished = _ask_and_report(server, requests, request_log if args.scheduler_cls else None)
        if all_finished and args.keep_serving:
            return _keep_serving(server)
        return 0 if all_finished else FAILED


def server_args(scheduler_cls: str, request_log: Path) -> list[str]:
    """Return the arguments of `vllm serve` for the demo; without a scheduler it is plain vLLM."""
    args = (
        f"--served-model-name {SERVED_NAME} --dtype float32 --enforce-eager --max-model-len {MAX_MODEL_LEN} "
        f"--max-num-seqs {MAX_NUM_SEQS} --block-size {BLOCK_SIZE} --num-gpu-blocks-override {NUM_BLOCKS} "
        f"--kv-cache-memory-bytes {KV_CACHE_BYTES}"
    ).split()
    ours = ["--scheduler-cls", scheduler_cls, "--ext-request-log", str(request_log), "--ext-metrics-interval-s", "0.25"]
    return args + (ours if scheduler_cls else [])


def _ask_and_report(server: ServerProcess, requests: Sequence[DemoRequest], request_log: Path | None) -> bool:
    """Send the requests and print the report on stdout; return whether all of them finished."""
    from vllm_ext.demo import report
    from vllm_ext.demo.client import send_all

    _say(f"sending {len(requests)} requests; {MAX_NUM_SEQS} run at a time, the others queue")
    start = time.monotonic()
    answers = send_all(requests, base_url=server.base_url, model=SERVED_NAME)
    wall_s = time.monotonic() - start
    records = _records(request_log, answers) if request_log is not None else {}
    print(report.table(answers, records), "", report.summary(answers, records, wall_s), sep="\n")
    failures = [answer for answer in answers if answer.error is not None]
    if server.is_running():
        print("", *report.chosen_metrics(server.get("/metrics")), sep="\n")
    if failures or not server.is_running():
        _say(f"the end of {server.log_path}:\n{server.log_tail()}")
        for answer in failures:  # last, where whoever reads the end of a log looks
            print(f"request {answer.request.number} failed: {answer.error}")
        return False
    sys.stdout.flush()
    return True


def _records(request_log: Path, answers: Sequence[Answer]) -> Mapping[int, Record]:
    """Return the records of the answered requests, waiting a moment for those that are still on their way."""
    from vllm_ext.demo import report

    expected = sum(answer.error is None for answer in answers)
    deadline = time.monotonic() + RECORDS_WAIT_S
    while True:
        records = report.match(answers, report.read_records(request_log))
        if len(records) >= expected:
            return records
        if time.monotonic() >= deadline:
            _say(f"{request_log} holds {len(records)} of {expected} requests; the others show as -")
            return records
        time.sleep(0.1)


def _keep_serving(server: ServerProcess) -> int:
    request = {"model": SERVED_NAME, "prompt": "The harbour wakes", "max_tokens": 32, "vllm_xargs": {"osl": 32}}
    options = f"-H 'Content-Type: application/json' -d '{json.dumps(request)}'"
    _say(f"\nstill serving; try\n  curl {server.base_url}/v1/completions {options}")
    _say(f"  curl {server.base_url}/metrics\nCtrl-C to stop")
    try:
        while server.is_running():
            time.sleep(0.5)
    except Interrupted as interruption:
        if interruption.number != signal.SIGINT:
            raise
        return 0  # the way this mode is meant to end
    raise ServerError(f"the server is gone; the end of {server.log_path}:\n{server.log_tail()}")


def _progress(waited_s: float) -> None:
    if sys.stderr.isatty():
        print(f"\rwaiting for the server: {waited_s:.0f} s ", end="", file=sys.stderr, flush=True)
    elif round(waited_s) % 10 == 0:
        _say(f"waiting for the server: {waited_s:.0f} s")


def _say(text: str) -> None:
    lead = "\r" if sys.stderr.isatty() else ""  # over the line of the progress
    print(lead + text, file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(
        prog="vllm-ext demo",
        description="Serve a small model, send it a few dozen requests in bursts, and print what happened to each.",
    )
    parser.add_argument("--model", help="model directory or name (default: the embedded tiny model, built on the spot)")
    parser.add_argument(
        "--scheduler-cls", default="alise", metavar="NAME",
        help="scheduling system; '' is plain vLLM (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=36, metavar="N", help="how many to send (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of the server; 0 takes a free one (default)")
    parser.add_argument("--duel", action="store_true", help="first serve the same bursts with stock vLLM and with the "
                        "system, by a clock that is the same on every machine")  # fmt: skip
    parser.add_argument("--keep-serving", action="store_true", help="leave the server up until Ctrl-C")
    common_flags.add(parser, seed="seed of the requests (default: 0)")
    return parser
