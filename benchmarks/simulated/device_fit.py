"""Constants of a device, fitted to times that were measured. A part of the benchmarks of the cost model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from scipy.optimize import minimize

from vllm_ext.simulation.cost.devices import Device


def fitted(device: Device, constants: Sequence[str], errors: Callable[[Device], Sequence[float]]) -> Device:
    """Return the device with those constants, shares, with which the mean error is least.

    Args:
        device: Where to start.
        constants: Names of its fields.
        errors: Of a device, by what was measured.
    """

    def changed(values: Sequence[float]) -> Device:
        return replace(device, **dict(zip(constants, map(float, values), strict=True)))

    def error(values: Sequence[float]) -> float:
        return fmean(errors(changed(values))) if all(0 < value <= 1 for value in values) else math.inf

    start = [getattr(device, name) for name in constants]
    return changed(minimize(error, start, method="Nelder-Mead", options={"maxiter": 3000}).x)
