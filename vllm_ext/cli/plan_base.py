"""The server that `vllm-ext plan` starts from: vLLM alone, as the flags describe it, at the trace's own load."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_ext.cli import spec_flags
from vllm_ext.cli.command import UsageError
from vllm_ext.simulation.plan.candidates import upstream
from vllm_ext.simulation.plan.command import VLLM_MEMORY_UTILIZATION
from vllm_ext.simulation.spec import UPSTREAM, SimulationSpec, checked, resolve, with_values
from vllm_ext.simulation.sweep.grid import RATE
from vllm_ext.simulation.workloads.build import build, mean_rate

_AS_RECORDED = {"workload.arrivals": "recorded", RATE: None, "workload.cv": 1.0, "workload.sample": "file-order"}


def server_as_it_is(args: argparse.Namespace) -> tuple[SimulationSpec, float]:
    """Return the server as it is, at the trace's own load, and that load in requests/s.

    Raises:
        ValueError: the flags describe no such server, or no load.
    """
    if args.trace is not None:
        flags = vars(args)
        flags[f"{spec_flags.SPEC}workload.source"] = str(args.trace)
        flags.setdefault(f"{spec_flags.SPEC}workload.arrivals", "recorded")
    spec = spec_flags.base_spec(args)
    checked(with_values(spec, {"engine.system": "fcfs"}))  # options, which vLLM alone has none of
    if args.router and args.replicas == 1:
        raise UsageError(f"--router {args.router}: needs --replicas N above 1")
    spec = with_values(_as_vllm(spec), {"replicas": args.replicas, "router": args.router})
    resolve(spec)  # what vLLM would not start with is refused before anything is run
    arrivals = spec.workload.arrivals
    if arrivals in ("closed-loop", "at-once"):
        raise UsageError(f"--arrivals {arrivals}: a plan varies the load, which these arrivals do not follow")
    given = arrivals == "recorded" or "rate_per_s" in spec.workload.model_fields_set
    if not given and Path(spec.workload.source).is_file():
        try:
            own_rate = _recorded_rate(with_values(spec, _AS_RECORDED))
        except ValueError as error:
            raise UsageError(f"--arrivals {arrivals}: needs --rate: {error}") from error
        return with_values(spec, {RATE: own_rate}), own_rate
    return spec, spec.workload.rate_per_s or _recorded_rate(spec)


def _recorded_rate(spec: SimulationSpec) -> float:
    """Return the mean rate of the recorded arrivals."""
    times = [request.arrival_s for request in build(spec.workload).start()]
    if len(times) < 2 or times[-1] <= times[0]:
        raise UsageError(
            f"--trace {spec.workload.source}: {len(times)} requests with recorded arrivals; a plan needs at least two "
            "at different times, or --rate with --arrivals poisson"
        )
    return mean_rate(times)


def _as_vllm(spec: SimulationSpec) -> SimulationSpec:
    """Return a run of vLLM alone, with its own default of what the simulator's studies have otherwise."""
    system = spec.engine.system if "system" in spec.engine.model_fields_set else upstream(spec)
    if system not in UPSTREAM:
        raise UsageError(
            f"engine.system={system!r}: must be left out: the server as it is is vLLM ({', '.join(UPSTREAM)}); systems "
            "of vllm-ext are what a plan tries"
        )
    policy = UPSTREAM[system] if spec.engine.scheduling_policy == "fcfs" else spec.engine.scheduling_policy
    spec = with_values(spec, {"engine.scheduling_policy": policy})
    values: dict[str, object] = {"engine.system": upstream(spec)}
    if "gpu_memory_utilization" not in spec.hardware.model_fields_set:
        values["hardware.gpu_memory_utilization"] = VLLM_MEMORY_UTILIZATION
    return with_values(spec, values)
