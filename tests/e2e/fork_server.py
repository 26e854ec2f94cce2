"""A process that has imported vLLM and forks for each command that it is asked to run.

    python -u fork_server.py FD

Importing vLLM takes longer than most of what these tests do with it. Each message on the socket ``FD`` is a job
``{"entry": "module:function", "argv", "environment"}``. Two open files come with it: one for the command's output, and
a pipe on which the process id of its fork is told, and its exit code once it has ended. The process ends with its peer.

In a fork the command runs as in a process of its own: the entry point that its console script calls, with its arguments
and environment, in a new session, until its threads and exit handlers are done. Only the imports were done before.
vLLM's engine cores, their coordinator and parallel workers are forks too, as vLLM starts them on a GPU; on the CPU it
spawns them, and each imports vLLM again. Nothing that keeps state may run before the fork: there is one thread, without
plugins.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import pkgutil
import select
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

WANTED = (
    "compressed_tensors.compressors",
    "vllm.entrypoints.cli.benchmark.latency",
    "vllm.entrypoints.cli.benchmark.throughput",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.opt",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""What servers and benchmarks import besides vLLM's command line."""


def load() -> None:
    """Import what commands need.

    Raises:
        RuntimeError: That started threads or loaded plugins, which no fork would have or could load again.
    """
    import vllm.entrypoints.cli
    import vllm.plugins

    commands = [f"vllm.entrypoints.cli.{module.name}" for module in pkgutil.iter_modules(vllm.entrypoints.cli.__path__)]
    for module in (*commands, *WANTED):
        importlib.import_module(module)
    _prepare()
    if vllm.plugins.plugins_loaded or threading.active_count() > 1:
        raise RuntimeError(f"importing vLLM loaded plugins or left threads: {threading.enumerate()}")
    gc.collect()
    # No fork's collections go through what was imported, or copy its pages. vLLM takes such a freeze back when an
    # engine ends, and collects all.
    gc.freeze()
    gc.unfreeze = lambda: None


def _prepare() -> None:
    """Do once what every engine would do again, with the same outcome.

    That is to read our hooks, to choose the CPU's kernels, and to compile what finds n-gram drafts; for one thread,
    since a fork has no others.
    """
    from vllm.platforms import current_platform

    from vllm_ext.hooks import registry

    registry.report()
    current_platform.register_triton_kernel_overrides()  # fails on what the modules below hold
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)

    import numba
    import numpy as np
    from vllm.v1.spec_decode import ngram_proposer

    ngram_proposer.batch_propose_numba = numba.njit(ngram_proposer.batch_propose_numba.py_func)
    counts, tokens = np.zeros(1, np.int32), np.zeros((1, 8), np.int32)
    drafts = np.zeros((1, 3), np.int32)
    ngram_proposer.batch_propose_numba([0], counts, tokens, 1, 3, 8, 3, drafts, counts.copy())


def wait_for_job(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each job; returns the job in its fork, and nothing in this process once the peer has gone."""
    running: dict[int, tuple[int, int]] = {}  # by the file that tells of its end: process id, pipe for its exit code
    while True:
        ready, _, _ = select.select([control, *running], [], [])
        for file in ready:
            if file in running:
                pid, answer = running.pop(file)
                os.close(file)
                _tell(answer, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(answer)
        if control not in ready:
            continue
        message, files, _, _ = socket.recv_fds(control, 2**20, 2)
        if not message:
            return None
        output, answer = files
        pid = os.fork()
        if not pid:
            for file in (*running, *(pipe for _, pipe in running.values()), answer, control.fileno()):
                os.close(file)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            job: dict[str, Any] = json.loads(message)
            return job
        os.close(output)
        running[os.pidfd_open(pid)] = pid, answer
        _tell(answer, pid)


def _tell(answer: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(answer, f"{number}\n".encode())


def tidy() -> None:
    """Remove what a worker's processes share: it goes with objects that a process leaves behind when it just exits."""
    if name := os.environ.get("VLLM_DIST_IDENT"):
        for path in (*Path("/dev/shm").glob(f"{name}-*"), Path(tempfile.gettempdir(), name)):
            path.unlink(missing_ok=True)


def run(job: dict[str, Any]) -> int:
    """Run a command in this process, which is a fork; returns its exit code."""
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    multiprocessing.util.register_after_fork(
        tidy, lambda last: multiprocessing.util.Finalize(None, last, exitpriority=0)
    )
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = job["argv"]
    entry, _, function = job["entry"].partition(":")
    try:
        result = getattr(importlib.import_module(entry), function)()
    except SystemExit as stop:
        result = stop.code
    except BaseException:  # noqa: BLE001 - as the interpreter does with what nobody catches
        traceback.print_exc()
        return 1
    if isinstance(result, str):
        print(result, file=sys.stderr)
        return 1
    return int(result or 0)


def main() -> None:
    codes: list[int] = []

    @atexit.register  # the first, so that it comes after all others
    def leave() -> None:
        """Leave out the teardown of the modules, which complains of what the freeze keeps alive."""
        tidy()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0] if codes else 0)

    load()
    job = wait_for_job(socket.socket(fileno=int(sys.argv[1])))
    if job is not None:
        codes.append(run(job))


if __name__ == "__main__":
    main()
