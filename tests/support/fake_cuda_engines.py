"""Runs engines on the fake CUDA device of `fake_cuda`, one after the other, each in a fork of this process.

    python fake_cuda_engines.py JOBS.json

A job is ``{"runner": "v1" | "v2", "run": run, "result": path, "log": path}``; `engine_script` says what a run is, and
what its result. Importing vLLM takes longer than most runs, and is done once. Exit status 3: an engine failed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import fake_cuda

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
IMPORTED = (
    "fake_cuda_worker",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
)
"""What engines import, before the first fork."""


def serve(job: dict[str, Any]) -> None:
    """Run an engine in this process, and write down what came of it."""
    import engine_script

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = {"v1": "0", "v2": "1"}[job["runner"]]
    job["run"]["engine"]["compilation_config"] = {"custom_ops": ["none"]}
    Path(job["result"]).write_text(json.dumps(engine_script.run(job["run"])))


def in_fork(job: dict[str, Any]) -> bool:
    """Return whether an engine ran to its end in a fork of this process, with its output in a log."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        serve(job)
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does with what nobody catches
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # transformers imports it where it is: a fifth of all time
    fake_cuda.install()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    # Engines collect often: none goes through what was imported. vLLM takes the freeze back when an engine ends.
    gc.freeze()
    gc.unfreeze = lambda: None
    ended = [in_fork(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    return 0 if all(ended) else 3


if __name__ == "__main__":
    sys.exit(main())
