"""The scheduler's side of the connector: vLLM's, with a say in when KV is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_ext.kv.retention import Chain


class TierScheduler(OffloadingConnectorScheduler):
    """vLLM's side, which stores a chunk as soon as it is full, or late: when its request is preempted or ends.

    Late, a chunk is copied once it is known that its blocks are given up: half as many jobs, each of many chunks, and
    none for requests that run through. The price is that the step which preempts waits for the copy, since it may
    write into those blocks.
    """

    def __init__(self, *args: Any, late: bool = False) -> None:
        """Take vLLM's arguments, and whether to store late."""
        super().__init__(*args)
        self._late = late
        self._computed: dict[str, int] = {}
        """By request: tokens whose KV is there when the steps scheduled so far are through."""

    def on_new_request(self, request: Request) -> None:
        """Let the eviction policy know in which order a request's chunks follow each other."""
        super().on_new_request(request)
        status = self._req_status[request.request_id]
        groups = list(zip(self.config.kv_group_configs, status.group_states, strict=True))
        keys = {config.group_idx: state.offload_keys for config, state in groups}
        sizes = {config.group_idx: config.tokens_per_chunk for config, _ in groups}
        status.req_context.set_state(Chain(keys, sizes))

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        if not self._late:
            return super()._build_store_jobs(scheduler_output)
        finished = scheduler_output.finished_req_ids or set()
        given_up = self._given_up(scheduler_output)
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self._computed[req_id] = self._req_status[req_id].req.num_computed_tokens + num_tokens
        for req_id in finished:
            self._computed.pop(req_id, None)
        # A preempted request's own count of computed tokens is 0 by now.
        shown: Any = SimpleNamespace(num_scheduled_tokens=given_up, finished_req_ids=finished)
        jobs = super()._build_store_jobs(shown)
        self._current_batch_jobs_to_flush.update(job_id for job_id, job in jobs.items() if job.req_id in given_up)
        return jobs

    def _given_up(self, scheduler_output: SchedulerOutput) -> dict[str, int]:
        """Return the tokens whose KV is there, of requests that this step preempts and does not resume."""
        found = {}
        preempted = scheduler_output.preempted_req_ids or set()
        for req_id in preempted - scheduler_output.num_scheduled_tokens.keys():
            if (status := self._req_status.get(req_id)) is not None:
                status.update_offload_keys()
                found[req_id] = min(status.req.num_tokens - 1, self._computed.pop(req_id, 0))
        return found

    def reset_cache(self) -> None:
        """Forget what was stored."""
        super().reset_cache()
        self._computed.clear()
