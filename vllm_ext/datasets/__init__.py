"""Recorded workloads: prompts and answers, or only their lengths and arrival times, in public formats."""

from vllm_ext.datasets.files import FORMATS, load, load_conversations
from vllm_ext.datasets.rows import Conversations, Dataset, DatasetError, WorkloadRow

__all__ = ["FORMATS", "Conversations", "Dataset", "DatasetError", "WorkloadRow", "load", "load_conversations"]
