"""Devices: found by name, or described by their numbers."""

from __future__ import annotations

import pytest

from vllm_ext.simulation.cost.devices import DEVICES, find_device

NUMBERS = "memory=48,bandwidth=864,flops=362,link=31.5"


def test_an_unknown_device_lists_the_known_ones_and_the_form_of_numbers() -> None:
    with pytest.raises(ValueError, match=r"device='b201'.*v100, v100-16, a40, .*cpu; or give memory=GiB,bandwidth="):
        find_device("b201")


@pytest.mark.parametrize(
    ("name", "memory_gb", "bandwidth_gb_s", "tflops"),
    [
        ("a10", 24, 600, 125),
        ("l4", 24, 300, 121),
        ("l40s", 48, 864, 362),
        ("b200", 192, 8000, 2250),
        ("mi300x", 206, 5300, 1307),
    ],
)
def test_peaks_are_the_datasheets_and_memory_is_at_most_theirs(
    name: str, memory_gb: float, bandwidth_gb_s: float, tflops: float
) -> None:
    """In 10^9 bytes; AMD's 192 GB are GiB."""
    device = find_device(name)
    assert device.memory_bytes_per_s == bandwidth_gb_s * 1e9
    assert device.peak_flops == pytest.approx(tflops * 1e12, rel=0.001)
    assert 0.93 * memory_gb * 1e9 < device.memory_bytes <= 1.02 * memory_gb * 1e9


def test_four_numbers_describe_a_device_in_the_units_of_the_table() -> None:
    device = find_device(NUMBERS)
    assert device.memory_bytes == 48 * 2**30
    assert (device.memory_bytes_per_s, device.peak_flops, device.link_bytes_per_s) == (864e9, 362e12, 31.5e9)
    assert device.pcie_bytes_per_s == 25e9
    assert (device.name, device.name in DEVICES) == (NUMBERS, False)


def test_the_order_of_numbers_is_free_and_the_host_link_can_be_given() -> None:
    device = find_device("host_link=50, link=1, flops=2, bandwidth=3, memory=4.5")
    assert (device.pcie_bytes_per_s, device.link_bytes_per_s, device.memory_bytes) == (50e9, 1e9, int(4.5 * 2**30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory=48,bandwidth=864", "flops, link missing; must be memory=GiB,bandwidth=GB/s,flops=TFLOP/s,link=GB/s"),
        (f"{NUMBERS},memory=1", "'memory' must be one of memory, bandwidth, flops, link, host_link, each once"),
        (f"{NUMBERS},cores=1", "'cores' must be one of memory, "),
        (f"{NUMBERS},", "'' must be one of memory, "),
        (
            "memory=48e9,bandwidth=864,flops=362,link=31.5",
            "memory=48e9: must be a number of GiB above 0 and below 1000",
        ),
        ("memory=48,bandwidth=nan,flops=362,link=31.5", "bandwidth=nan: must be a number of GB/s above 0"),
        ("memory=48,bandwidth=864,flops=much,link=31.5", "flops=much: must be a number of TFLOP/s above 0"),
        ("memory=48,bandwidth=864,flops=362,link=0", "link=0: must be a number of GB/s above 0"),
    ],
    ids=["missing", "twice", "unknown", "empty", "bytes", "nan", "text", "zero"],
)
def test_numbers_that_make_no_device_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        find_device(text)
    assert str(error.value).startswith(f"device={text!r}: ")
    assert "\n" not in str(error.value)
