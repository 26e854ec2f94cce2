"""Better scheduling and memory for stock vLLM."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext.simulation.simulated import simulate

__all__ = ["__version__", "simulate"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "simulate":  # vLLM imports this package in every process; few simulate
        from vllm_ext.simulation.simulated import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
