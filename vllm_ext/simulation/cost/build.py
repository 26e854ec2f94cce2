"""From specifications to cost model and host link."""

from __future__ import annotations

from pathlib import Path

from vllm_ext.simulation.cost.constant import Constant
from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.cost.link import TransferLink
from vllm_ext.simulation.cost.roofline import Roofline
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.step_shape import CostModel


def build(hardware: HardwareSpec, cost: CostSpec) -> CostModel:
    """Return the cost model that is asked for.

    Raises:
        OSError: a file that is named can't be read.
        ValueError: it is damaged, or the model can't be split over the devices.
    """
    if cost.kind == "constant":
        return Constant(step_s=cost.step_s, host_step_s=cost.host_step_s)
    if cost.file is not None:
        return Fitted.load(Path(cost.file), cost.host_step_s)
    return Roofline(
        hardware.resolve_model(),
        cost.apply(hardware.resolve_device()),
        hardware.tensor_parallel,
        kv_dtype_bytes=hardware.kv_dtype_bytes,
        host_base_s=cost.host_base_s,
        host_per_request_s=cost.host_per_request_s,
    )


def build_link(hardware: HardwareSpec, cost: CostSpec) -> TransferLink:
    """Return the link between each device and the host, idle at time 0.

    Every device of a tensor-parallel group has its own and moves its share: submit the bytes of one device, those of
    `ModelShape.kv_bytes_per_token` with ``tensor_parallel``.
    """
    device = cost.apply(hardware.resolve_device())
    return TransferLink(device.pcie_bytes_per_s, cost.pcie_contention_loss, cost.copy_overhead_s)
