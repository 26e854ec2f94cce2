"""What happens before the first request: help, refused options, several API servers, vLLM's own benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import ENVIRONMENT, end_group
from servers import MODEL, SMALL_ENGINE, Served, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.server, pytest.mark.timeout(300)]

REFUSED = {
    "unknown-system": (["--scheduler-cls", "alize"], ["alize", "alise", "fcfs"]),
    "oracle": (["--scheduler-cls", "oracle-alise"], ["oracle-alise", "offline"]),
    "value-out-of-range": (["--scheduler-cls", "alise", "--ext-age-limit-s", "-1"], ["age_limit_s", "-1"]),
    "unknown-option": (
        ["--scheduler-cls", "alise", "--additional-config", '{"vllm_ext": {"widnow": 3}}'],
        ["widnow", "prediction"],
    ),
}
"""Arguments of `vllm serve`, and what its message must name: field, value, what is allowed."""

OFFLINE_ENGINE = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=256",
    "--block-size=32",
    "--scheduler-cls=alise",
    "--ext-prediction-sources=hint,history",
    f"--kv-cache-memory-bytes={32 * 2**20}",
)
WIDE_VOCABULARY = ('--hf-overrides={"vocab_size": 10000}', "--load-format=dummy")
"""`vllm bench latency` draws token ids below 10000 whatever the model's vocabulary is."""

BENCHES = {
    "throughput": ["--num-prompts=6", "--random-input-len=24", "--random-output-len=8", "--max-num-seqs=2"],
    "latency": [
        *WIDE_VOCABULARY,
        "--input-len=16",
        "--output-len=4",
        "--batch-size=2",
        "--num-iters-warmup=1",
        "--num-iters=2",
    ],
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that ran to its end."""

    code: int
    output: str


def run_vllm(args: Sequence[str], timeout_s: float = 200) -> Ended:
    """Run the `vllm` installed beside this Python; whatever it started is ended with it."""
    command = [str(Path(sys.executable).with_name("vllm")), *args]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        end_group(process)
    return Ended(code=process.returncode, output=output.decode(errors="replace"))


def run_all(commands: dict[str, Sequence[str]]) -> dict[str, Ended]:
    """Run commands two at a time: most of each is importing vLLM on one core."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(commands, pool.map(run_vllm, commands.values()), strict=True))


@pytest.fixture(scope="module")
def ended(llama: Path) -> dict[str, Ended]:
    commands: dict[str, Sequence[str]] = {"help": ["serve", "--help=vllm-ext"]}
    for case, (args, _) in REFUSED.items():
        commands[case] = ["serve", str(llama), *SMALL_ENGINE, *args]
    for bench, args in BENCHES.items():
        commands[bench] = ["bench", bench, f"--model={llama}", *OFFLINE_ENGINE, *args]
    return run_all(commands)


def test_help_lists_our_flags(ended: dict[str, Ended]) -> None:
    assert ended["help"].code == 0, ended["help"].output
    assert {"--ext-age-limit-s", "--ext-request-log"} <= set(ended["help"].output.replace(",", " ").split())


@pytest.mark.parametrize("case", list(REFUSED))
def test_server_refuses_to_start_and_says_why(ended: dict[str, Ended], case: str) -> None:
    """The front end refuses, before an engine core is started: its errors would be buried in a failed start."""
    result = ended[case]
    assert result.code != 0
    message = " ".join(result.output.split()[-120:])
    assert [word for word in REFUSED[case][1] if word not in message] == [], message
    assert "EngineCore" not in result.output


@pytest.mark.parametrize("bench", list(BENCHES))
def test_vllms_own_benchmark_runs_under_alise(ended: dict[str, Ended], bench: str) -> None:
    assert ended[bench].code == 0, ended[bench].output[-4000:]
    assert "SteeredScheduler" in ended[bench].output


def test_two_api_servers_report_our_metrics_once(llama: Path, tmp_path: Path) -> None:
    """Both front ends fetch the same scheduler's state; neither may add its copy to the other's."""
    args = ["--scheduler-cls", "alise", "--api-server-count", "2", "--ext-metrics-interval-s", "0.2"]
    args += ["--ext-prediction-sources", "hint,history"]
    with Served(llama, args, log_path=tmp_path / "server.log") as server:
        for i in range(12):  # each client connects anew, so that both front ends get some
            answer = server.client().completions.create(model=MODEL, prompt=f"hello {i}", max_tokens=3, temperature=0)
            assert answer.choices[0].finish_reason == "length"
        wait_until(lambda: len(server.our_series()) > 0, "vllm_ext:* in /metrics")
        wait_until(lambda: server.metric("vllm_ext:output_tokens_count") >= 12, "every request in our metrics")
        for _ in range(6):  # whichever front end answers
            ours = server.our_series()
            assert len(ours) == len(set(ours))
            assert not any("pid" in dict(labels) for _, labels in ours)
            assert server.metric("vllm_ext:output_tokens_count") == 12
            assert server.metric("vllm_ext:system_info") == 1
