"""What happens before the first request: help, refused options, vLLM's own benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forks import ENVIRONMENT, HANG_S, VLLM, Ended, ForkServer, run
from servers import SMALL_ENGINE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

REFUSED = {
    "unknown-system": (["--scheduler-cls", "alize"], ["alize", "alise", "fcfs"]),
    "oracle": (["--scheduler-cls", "oracle-alise"], ["oracle-alise", "offline"]),
    "value-out-of-range": (
        ["--scheduler-cls", "auto", "--ext-age-limit-s", "-1"],
        ["--ext-age-limit-s -1"],
    ),
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


@pytest.fixture(scope="module")
def ended(forks: ForkServer | None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """What came of all commands."""
    commands: dict[str, Sequence[str]] = {"help": ["serve", "--help=vllm-ext"]}
    for case, (args, _) in REFUSED.items():
        commands[case] = ["serve", str(llama), *SMALL_ENGINE, *args]
    for bench, args in BENCHES.items():
        commands[bench] = ["bench", bench, f"--model={llama}", *OFFLINE_ENGINE, *args]
    folder, vllm = tmp_path_factory.mktemp("startup"), str(Path(sys.executable).with_name("vllm"))
    environment = {**os.environ, **ENVIRONMENT}

    def one(name: str) -> Ended:
        return run(forks, VLLM, [vllm, *commands[name]], environment=environment, log=folder / f"{name}.log")

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(commands, pool.map(one, commands), strict=True))


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
