"""Device table: what datasheets promise, and which share of it is reached.

Peaks are the makers' datasheet values (dense, no sparsity). What programs reach of them is kept apart, in the fields
named ``*_efficiency``: defaults for large, well-tuned kernels, to be overridden by `CostSpec` where somebody measured.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

_GIB = 1 << 30
_MIB = 1 << 20
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one small machine without any. Times are seconds, rates are per second."""

    name: str
    source: str
    """Where the peaks come from."""
    peak_flops: _Positive
    """Dense matrix FLOP/s in fp16 or bf16 with fp32 accumulation; fp32 on ``cpu``."""
    memory_bytes: Annotated[int, Field(gt=0)]
    """Device memory the driver offers to programs."""
    memory_bytes_per_s: _Positive
    """Peak memory bandwidth."""
    pcie_bytes_per_s: _Positive
    """Link to the host: what pinned copies reach in one direction while the other is idle."""
    link_bytes_per_s: _Positive
    """Peak bandwidth to the other devices of a tensor-parallel group, in one direction."""
    link_efficiency: _Share = 0.65
    """Share of ``link_bytes_per_s`` an all-reduce reaches. Source: Calculon's A100 system file."""
    link_latency_s: float = 10e-6
    """Fixed time of one all-reduce, however small. Source: Calculon's A100 system file."""
    gemm_efficiency: _Share = 0.7
    """Share of ``peak_flops`` that large matrix products reach inside a model."""
    attention_efficiency: _Share = 0.5
    """Share of ``peak_flops`` that prefill attention reaches."""
    memory_efficiency: _Share = 0.85
    """Share of ``memory_bytes_per_s`` that streaming kernels reach, attention's reads of KV among them."""
    weight_efficiency: _Share = 0.75
    """Share of ``memory_bytes_per_s`` at which matrix products read their weights."""
    unhidden: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of the shorter of compute and weight traffic that the longer one does not hide: the efficiency ramp."""
    tile_tokens: Annotated[int, Field(ge=1)] = 128
    """Largest tile of a matrix product along the tokens; 1: no tile quantisation."""
    layer_gap_s: float = 10e-6
    """Idle time between the kernels of one layer, launched ahead or not: about ten of 1 us."""
    layer_launch_s: float = 120e-6
    """Host's time to launch one layer without CUDA graphs: about twelve PyTorch calls of 10 us, assumed."""
    step_launch_s: float = 100e-6
    """Fixed per step: graph replay or input copies, sampling kernels, the copy of the sampled tokens back."""
    launches_run_ahead: bool = True
    """Whether launches overlap with the device's work, so that the longer of the two counts; otherwise they add up."""
    graph_max_requests: int = 512
    """Largest decode batch a CUDA graph is captured for (vLLM's default); 0: the device has none."""


def _v100(name: str, memory_mib: int) -> Device:
    return Device(
        name=name,
        source="NVIDIA V100 Tensor Core GPU datasheet, SXM2",
        peak_flops=125e12,  # datasheet: 125 TFLOPS deep learning (SXM2; 112 for PCIe)
        memory_bytes=memory_mib * _MIB,  # as nvidia-smi shows it
        memory_bytes_per_s=900e9,  # datasheet: 900 GB/s HBM2
        pcie_bytes_per_s=12e9,  # PCIe 3.0 x16, 15.75 GB/s raw; about 12 in NVIDIA's bandwidthTest
        link_bytes_per_s=150e9,  # datasheet: NVLink 300 GB/s, both directions together
        gemm_efficiency=0.6,  # Markidis et al. 2018, "NVIDIA Tensor Core Programmability": 83 of 125 TFLOPS at best
        attention_efficiency=0.3,  # no FlashAttention-2 for Volta; assumed
        memory_efficiency=0.8,  # assumed; STREAM-like kernels reach up to 0.9
        layer_launch_s=150e-6,  # assumed: older hosts
    )


def _a100(name: str, memory_mib: int, memory_bytes_per_s: float) -> Device:
    return Device(
        name=name,
        source="NVIDIA A100 Tensor Core GPU datasheet, SXM4",
        peak_flops=312e12,  # datasheet: 312 TFLOPS fp16/bf16 tensor, dense
        memory_bytes=memory_mib * _MIB,  # as nvidia-smi shows it
        memory_bytes_per_s=memory_bytes_per_s,
        pcie_bytes_per_s=25e9,  # PCIe 4.0 x16, 31.5 GB/s raw; about 25 in NVIDIA's bandwidthTest
        link_bytes_per_s=300e9,  # datasheet: NVLink 600 GB/s, both directions together
        gemm_efficiency=0.73,  # Vidur's layers, as 0.75 and 0.25 of weight_efficiency and unhidden: layer_times.py
        attention_efficiency=0.55,  # FlashAttention-2 paper: 0.5-0.73 forward
    )


def _hopper(
    name: str, source: str, memory_mib: int, memory_bytes_per_s: float, *, gemm_efficiency: float,
    weight_efficiency: float, unhidden: float, attention_efficiency: float,
) -> Device:  # fmt: skip
    return Device(
        name=name,
        source=source,
        peak_flops=989e12,  # datasheet: 1979 TFLOPS bf16 tensor with sparsity, half of it dense
        memory_bytes=memory_mib * _MIB,  # as nvidia-smi shows it
        memory_bytes_per_s=memory_bytes_per_s,
        pcie_bytes_per_s=50e9,  # PCIe 5.0 x16, 63 GB/s raw; 50 assumed usable
        link_bytes_per_s=450e9,  # datasheet: NVLink 900 GB/s, both directions together
        gemm_efficiency=gemm_efficiency,
        attention_efficiency=attention_efficiency,
        weight_efficiency=weight_efficiency,
        unhidden=unhidden,
        layer_launch_s=100e-6,  # assumed: newer hosts
    )


def _pcie_card(
    name: str, memory_mib: int, memory_bytes_per_s: float, peak_flops: float, gemm_efficiency: float
) -> Device:
    """A card whose only link is PCIe 4.0 x16, to the host and to other cards."""
    return Device(
        name=name,
        source=f"NVIDIA {name.upper()} datasheet",
        peak_flops=peak_flops,
        memory_bytes=memory_mib * _MIB,  # as nvidia-smi shows it, with ECC
        memory_bytes_per_s=memory_bytes_per_s,
        pcie_bytes_per_s=25e9,  # PCIe 4.0 x16, as of the A100
        link_bytes_per_s=31.5e9,  # datasheets: 64 GB/s, both directions together; no NVLink
        link_latency_s=20e-6,  # assumed: through the host bridge
        gemm_efficiency=gemm_efficiency,
    )


_ROWS = (
    _v100("v100", 32_510),
    _v100("v100-16", 16_160),
    Device(
        name="a40",
        source="NVIDIA A40 datasheet",
        peak_flops=149.7e12,  # datasheet: 149.7 TFLOPS fp16/bf16 tensor, dense
        memory_bytes=46_068 * _MIB,  # as nvidia-smi shows it, with ECC
        memory_bytes_per_s=696e9,  # datasheet: 696 GB/s GDDR6
        pcie_bytes_per_s=25e9,  # PCIe 4.0 x16, as of the A100
        link_bytes_per_s=31.5e9,  # PCIe 4.0 x16: NVLink (112.5 GB/s) joins pairs only, and a ring of more crosses PCIe
        link_latency_s=20e-6,  # assumed: through the host bridge
        gemm_efficiency=0.75,  # Vidur's layers, as the two below: layer_times.py
        weight_efficiency=0.78,
        unhidden=0.27,
    ),
    # Datasheets: 125, 121 and 362.05 TFLOPS bf16 tensor, dense; 600, 300 and 864 GB/s GDDR6. The shares are assumed:
    # 150 W and 72 W hold the clocks of A10 and L4 far below boost.
    _pcie_card("a10", 23_028, 600e9, 125e12, 0.55),
    _pcie_card("l4", 23_034, 300e9, 121e12, 0.5),
    _pcie_card("l40s", 46_068, 864e9, 362.05e12, 0.65),
    _a100("a100-40", 40_536, 1555e9),  # datasheet: 1555 GB/s HBM2
    _a100("a100-80", 81_251, 2039e9),  # datasheet: 2039 GB/s HBM2e (SXM4; 1935 for PCIe)
    # Datasheets: 3.35 TB/s HBM3 and 4.8 TB/s HBM3e.
    _hopper(
        "h100",
        "NVIDIA H100 Tensor Core GPU datasheet, SXM5",
        81_559,
        3.35e12,
        gemm_efficiency=0.7,
        weight_efficiency=0.82,
        unhidden=0.2,  # Vidur's layers: layer_times.py
        attention_efficiency=0.5,  # FlashAttention-3 paper: up to 0.75 forward for long sequences
    ),
    _hopper(
        "h200",
        "NVIDIA H200 Tensor Core GPU datasheet, SXM5",
        143_771,
        4.8e12,
        # Steps of an 8B model on one: step_grid.py
        gemm_efficiency=0.79,
        weight_efficiency=0.72,
        unhidden=0.44,
        attention_efficiency=0.56,
    ),
    Device(
        name="b200",
        source="NVIDIA HGX B200 datasheet",
        peak_flops=2.25e15,  # datasheet: 36 PFLOPS bf16 tensor of eight with sparsity, half of it dense
        memory_bytes=183_359 * _MIB,  # as nvidia-smi shows it
        memory_bytes_per_s=8e12,  # datasheet: 8 TB/s HBM3e at most
        pcie_bytes_per_s=50e9,  # PCIe 5.0 x16, as of the H100
        link_bytes_per_s=900e9,  # datasheet: NVLink 1.8 TB/s, both directions together
        gemm_efficiency=0.65,  # assumed: as of the H100
        layer_launch_s=100e-6,  # assumed: newer hosts
    ),
    Device(
        name="mi300x",
        source="AMD Instinct MI300X datasheet",
        peak_flops=1307.4e12,  # datasheet: 1307.4 TFLOPS bf16 matrix, dense
        memory_bytes=196_592 * _MIB,  # as rocm-smi shows it
        memory_bytes_per_s=5.3e12,  # datasheet: 5.3 TB/s HBM3
        pcie_bytes_per_s=50e9,  # PCIe 5.0 x16, as of the H100
        link_bytes_per_s=448e9,  # datasheet: seven Infinity Fabric links of 128 GB/s, both directions together
        gemm_efficiency=0.45,  # assumed: power limits hold the clock far below boost
        attention_efficiency=0.35,  # assumed
        layer_launch_s=100e-6,  # assumed: newer hosts
    ),
    Device(
        name="cpu",
        source="measured with PyTorch and NumPy on 2 cores of an AMD EPYC with AVX-512 (a cloud machine)",
        peak_flops=200e9,  # 2 cores x 32 fp32 FLOP per cycle x 3.1 GHz; sgemm of 2048^3 reached 190
        memory_bytes=16 * _GIB,  # assumed
        memory_bytes_per_s=25e9,  # reading a large array reached 24
        pcie_bytes_per_s=10e9,  # copies within memory: assumed
        link_bytes_per_s=10e9,  # as above
        link_latency_s=50e-6,  # assumed
        gemm_efficiency=0.85,  # linear layers of 1024 x 4096 x 4096 reached 177 GFLOP/s
        attention_efficiency=0.4,  # assumed
        weight_efficiency=0.85,  # a matrix-vector product over 268 MB reached 20.6 GB/s
        tile_tokens=1,
        layer_gap_s=0.0,
        layer_launch_s=300e-6,  # assumed: about thirty framework calls of 10 us
        step_launch_s=1e-3,  # assumed
        launches_run_ahead=False,
        graph_max_requests=0,
    ),
)

DEVICES: dict[str, Device] = {device.name: device for device in _ROWS}
"""The table, by name."""


_HOST_LINK = 25.0
"""GB/s of a device given by numbers, unless told: PCIe 4.0 x16."""
_UNITS = {
    "memory": ("memory_bytes", "GiB", float(_GIB)),
    "bandwidth": ("memory_bytes_per_s", "GB/s", 1e9),
    "flops": ("peak_flops", "TFLOP/s", 1e12),
    "link": ("link_bytes_per_s", "GB/s", 1e9),
    "host_link": ("pcie_bytes_per_s", "GB/s", 1e9),
}
"""Numbers that describe a device: the field each sets, its unit, and what one of it is."""
_LARGEST = 100_000.0
"""Above this a number of `_UNITS` was given in bytes, or in FLOP/s."""
_FORM = "memory=GiB,bandwidth=GB/s,flops=TFLOP/s,link=GB/s[,host_link=GB/s]"


def find_device(name: str) -> Device:
    """Return a device of the table, or one that is described by its numbers.

    Args:
        name: Of the table; or ``memory=GiB,bandwidth=GB/s,flops=TFLOP/s,link=GB/s``, as the table's documentation has
            them, optionally with ``host_link=GB/s``.

    Raises:
        ValueError: there is none of this name; the message lists those there are. Or a number is missing, not known or
            out of its range.
    """
    if "=" in name:
        return _by_numbers(name)
    try:
        return DEVICES[name]
    except KeyError:
        known = ", ".join(DEVICES)
        raise ValueError(f"device={name!r}: not in the device table; known: {known}; or give {_FORM}") from None


def _by_numbers(text: str) -> Device:
    """Return a device with these peaks, of which the default shares are reached."""
    numbers = {"host_link": _HOST_LINK}
    given: set[str] = set()
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _UNITS or key in given:
            raise ValueError(f"device={text!r}: {key!r} must be one of {', '.join(_UNITS)}, each once")
        given.add(key)
        numbers[key] = _number(text, key, value)
    if missing := [key for key in _UNITS if key not in numbers]:
        raise ValueError(f"device={text!r}: {', '.join(missing)} missing; must be {_FORM}")
    peaks = {field: numbers[key] * unit for key, (field, _, unit) in _UNITS.items()}
    return Device(
        name=text,
        source="given by its numbers",
        peak_flops=peaks["peak_flops"],
        memory_bytes=int(peaks["memory_bytes"]),
        memory_bytes_per_s=peaks["memory_bytes_per_s"],
        pcie_bytes_per_s=peaks["pcie_bytes_per_s"],
        link_bytes_per_s=peaks["link_bytes_per_s"],
    )


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < _LARGEST:
        allowed = f"must be a number of {_UNITS[key][1]} above 0 and below {_LARGEST:.0f}"
        raise ValueError(f"device={text!r}: {key}={value}: {allowed}")
    return number
