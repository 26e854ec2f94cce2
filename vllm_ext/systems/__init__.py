"""What can be served: one file for each paper, with its policies and the rows that are made of them."""

from vllm_ext.systems.compose import build, known, register, resolve, table
from vllm_ext.systems.sarathi import in_milliseconds
from vllm_ext.systems.system import Policies, System

__all__ = ["Policies", "System", "build", "in_milliseconds", "known", "register", "resolve", "table"]
