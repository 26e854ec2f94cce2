"""vLLM's GPU worker on the fake device of `fake_cuda`: all but the memory that it looks for is its own."""

from __future__ import annotations

import torch
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes


class FakeCudaWorker(Worker):
    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        self._init_workspace_and_model_runner()

    def determine_available_memory(self) -> int:
        """Return what the options say, without the dry run that looks at memory."""
        return int(self.cache_config.kv_cache_memory_bytes)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)
