"""The worker's side of loads within a step: layer by layer, each layer's attention waits for its own only.

vLLM's model runners start the step's loads before the forward if some of them are for the step itself, and attention
asks the connector before it reads a layer's KV (Pensieve, section 4.3.3). That is not taken on trust: a layer that did
not ask may have read KV too early, so that the step's loads count as failed, and those of later steps are waited for
before the forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec

    from vllm_ext.kv.host.copies import LayerCopies

logger = init_logger("vllm.vllm_ext.kv")


class LayerwiseWorker(OffloadingConnectorWorker):
    """vLLM's, which also loads within the step.

    Workers that have no ``load_by_layer`` load as between steps, and are waited for before the forward.

    Attributes:
        trusts_attention: Whether each layer's attention asks before it reads; else loads are waited for before.
    """

    def __init__(self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self.trusts_attention = True
        self._tensor_of: dict[str, int] = {}
        """By layer; if it is empty, each layer waits for all tensors."""
        self._step: LayerCopies | None = None
        self._asked: set[int] = set()
        self._jobs: Mapping[int, TransferJob] = {}
        """The step's loads."""
        self._later: OffloadingConnectorMetadata | None = None
        self._doubtful: set[int] = set()

    def _init_worker(self, kv_caches: CanonicalKVCaches) -> None:
        super()._init_worker(kv_caches)
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) == len(kv_caches.group_data_refs) == 1:
            names, refs = groups[0].layer_names, kv_caches.group_data_refs[0]
            if len(names) == len(refs):
                self._tensor_of = {name: ref.tensor_idx for name, ref in zip(names, refs, strict=True)}

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Submit loads; called before the forward if some are for this step, and then the others wait for its end."""
        in_step: frozenset[int] = getattr(metadata, "in_step", frozenset())
        if not in_step:
            super().start_kv_transfers(metadata)
            return
        later = {job_id: job for job_id, job in metadata.load_jobs.items() if job_id not in in_step}
        self._later = OffloadingConnectorMetadata(load_jobs=later, store_jobs={})
        self._begin({job_id: metadata.load_jobs[job_id] for job_id in sorted(in_step)})

    def wait_for_layer(self, name: str) -> None:
        """Return when the step's loads have brought a layer's KV, or will not bring it."""
        if (step := self._step) is None:
            return
        tensor = self._tensor_of.get(name)
        step.wait(tensor)
        if tensor is not None:
            self._asked.add(tensor)
        elif not self._tensor_of:
            self._asked.update(step.tensors)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's, once the step's own loads are through: they are reported with its output, and to no request."""
        self._end()
        sending, receiving = super().get_finished(finished_req_ids)
        jobs, self._jobs = self._jobs, {}
        return sending, receiving - {job.req_id for job in jobs.values()}

    def take_doubtful(self) -> set[int]:
        """Return blocks that attention may have read too early, each once; call it after `get_finished`."""
        blocks, self._doubtful = self._doubtful, set()
        return blocks

    def _begin(self, jobs: Mapping[int, TransferJob]) -> None:
        if self.worker is None:
            raise RuntimeError("a step began before the worker was given the KV caches")
        self._jobs = jobs
        self._load_jobs.update((job_id, job.req_id) for job_id, job in jobs.items())
        if (load_by_layer := getattr(self.worker, "load_by_layer", None)) is not None:
            self._asked = set()
            self._step = load_by_layer(jobs)
        else:
            for job_id, job in jobs.items():
                self.worker.submit_load(job_id, job.src_spec, job.dst_spec)
        if self._step is None or not self.trusts_attention:
            self.worker.wait(set(jobs))

    def _end(self) -> None:
        if self._jobs and self.worker is not None:
            self.worker.wait(set(self._jobs))
        step, self._step = self._step, None
        if step is not None and self.trusts_attention and not self._asked.issuperset(step.tensors):
            self.trusts_attention = False
            self._doubtful.update(*(job.dst_spec.block_ids.tolist() for job in self._jobs.values()))
            logger.warning(
                "%d of %d layers did not wait for their KV; what was loaded for this step is computed again, and from "
                "now on loads are waited for before the forward",
                len(set(step.tensors) - self._asked), len(step.tensors),
            )  # fmt: skip
        later, self._later = self._later, None
        if later is not None:
            super().start_kv_transfers(later)
