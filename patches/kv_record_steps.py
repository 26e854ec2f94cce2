"""Lets a worker move KV between blocks and records before a step writes anything.

Upstream symbol: ``Worker.execute_model``, through which both model runners, and the CPU's too, get their steps. Seams
tried: a KV connector is told of a step's preemptions before anything is written, but there is none without host memory,
and steps that compute nothing don't reach attention backends. Breaks without: what is evicted on the device is dropped,
or goes to host memory. Can go: when a connector can be had without a transfer, or a worker extension is told of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.hooks.patch import Patch
from vllm_ext.kv.int8.step import step_of
from vllm_ext.kv.int8.worker import executing


def _execute_model(original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_ext.attention.records import has_records

    if not has_records(self.vllm_config):  # the hook stays in a process, and the next engine in it may have none
        return original(self, scheduler_output, *args, **kwargs)
    with executing(self.model_runner, step_of(scheduler_output)):
        return original(self, scheduler_output, *args, **kwargs)


HOOKS = (
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.execute_model",
        feature="KV in 8 bits on the device",
        why="gets a step before anything of it is computed or written",
        breaks_without="what is evicted on the device is dropped, or goes to host memory",
        remove_when="a worker extension is told of steps",
        leave_out="kv_tier.device_int8_share",
        optional=True,
        only=("0.32.0",),
        replacement=_execute_model,
    ),
)
