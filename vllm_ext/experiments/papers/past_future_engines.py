"""Past-Future, Figures 1 and 9: memory by scheduler and lengths, and engines on other devices."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from vllm_ext.experiments.experiment import Findings, Variant, flat, line_plot
from vllm_ext.experiments.papers import past_future as base
from vllm_ext.experiments.papers import past_future_load as load
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim
from vllm_ext.report.table import Table
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.workloads.spec import SloTarget, TierSpec

NOT_SIMULATED = {
    "Figures 2, 5 and 6": "drawings of the scheduler; the arithmetic of 5 and 6 is in its tests",
    "Figure 3 c, d, e": "in-house traces, which nobody else has",
    "Table 2": "a model of steps has no images",
    "Section 4, overhead below 1 %": "the scheduler's own time is the clock's, which no simulation keeps",
}

# --- Figure 1 ---------------------------------------------------------------------------------------------------------

USED, FUTURE, EVICTED = "kv_used_fraction", "future_kv_fraction", "evicted_percent"


@base.PAPER.figure(
    "past-future-fig1",
    "Figure 1",
    "Memory in use, memory required in the future, and evictions, by scheduler and lengths",
    (
        *base.DIFFERENCES,
        "The runs are those of past-future-table1, which has what the figure does not print. Judged is section 1: "
        "conservative leaves memory empty, aggressive promises more than there is, past-future comes near to it.",
    ),
)
def fig1(runner: Runner) -> Findings:
    """Does a scheduler leave memory empty, or promise more than there is?

    Method: the runs of Table 1; means over the steps after which somebody still waits.
    """
    table = base.table1(runner)
    rows = (base.JUDGED, base.OURS, base.aggressive(0.95), base.conservative(1.0), base.VLLM)
    found = {
        (data, c.name): {
            name: table.metrics[f"{c.name}: {data}.{name}"] if "past-future" in c.system
            else table.baselines[c.name][f"{data}.{name}"]
            for name in (USED, FUTURE, EVICTED)
        }
        for data in base.PUBLISHED
        for c in rows
    }  # fmt: skip

    def of(c: Variant, metric: str) -> list[float]:
        return [found[data, c.name][metric] for data in base.PUBLISHED]

    published, ours, aggressive, conservative, _ = rows
    empty = [other / own for other, own in zip(of(conservative, USED), of(published, USED), strict=True)]
    return Findings(
        tables=[Table(("lengths", "scheduler", "memory in use", "required in the future", "evicted %"),
                      [(*key, *one.values()) for key, one in found.items()])],
        claims=[
            PaperClaim(name="required in the future, past-future, share of the memory, largest of the lengths",
                       kind="tendency", op="<=", goal=1.0, value=max(of(published, FUTURE)),
                       ours=max(of(ours, FUTURE)), headline=True),
            PaperClaim(name="required in the future, aggressive, share of the memory, largest of the lengths",
                       kind="tendency", goal=1.0, value=max(of(aggressive, FUTURE)), headline=True),
            PaperClaim(name="memory in use, conservative / past-future, largest of the lengths",
                       kind="tendency", op="<=", goal=1.0, value=max(empty), headline=True),
        ],
        **flat(found, "{}.".format, own={c.name: f"{c.name}: " for c in rows if "past-future" in c.system}),
        config=table.config,
        workload=table.workload,
    )  # fmt: skip


# --- Figure 9 ---------------------------------------------------------------------------------------------------------

LENGTHS, MOST_OUTPUT = "sharegpt-vllm", 2048
CONTEXT = 2 * MOST_OUTPUT
"""The longest prompt of the data set, and an answer."""
DURATION_S, QUICK_S = 240.0, 20.0
H800, RTX_4090 = "h100", "memory=23.99,bandwidth=1008,flops=165.2,link=31.5"
"""The H100 but for its NVLink; GeForce RTX 4090 by its datasheet: fp16 with fp32 accumulation, PCIe 4.0 x16."""


class Platform(NamedTuple):
    """A model on devices, and how many clients there are."""

    model: str
    device: str
    clients: tuple[int, ...]


PLATFORMS = {
    "7B, A100": Platform("llama-2-7b", "a100-80", (100, 300, 600)),
    "7B, H800": Platform("llama-2-7b", H800, (100, 300, 600)),
    "7B, 4090": Platform("llama-2-7b", RTX_4090, (10, 50, 100)),
    "13B, A100": Platform("llama-2-13b", "a100-80", (50, 150, 300)),
    "13B, H800": Platform("llama-2-13b", H800, (50, 150, 300)),
    "70B, 4 A100": Platform("llama-2-70b", "a100-80", (300, 1000)),
    "70B, 4 H800": Platform("llama-2-70b", H800, (300, 1000)),
}
QUICK_PLATFORMS, QUICK_CLIENTS = ("7B, 4090",), (10, 100)
TOTAL, COMPETITIVE = "throughput_tokens_per_s", 0.9
"""The text: superior goodput, and competitive throughput; the share of the best that is called so is ours."""
ENGINES = (load.PUBLISHED, load.AGGRESSIVE, load.CONSERVATIVE)
"""LightLLM; vLLM of 2023; TGI, DeepSpeed-MII and TensorRT-LLM."""
TODAY = (base.OURS, base.VLLM, base.VLLM_TUNED)


@base.PAPER.figure(
    "past-future-fig9",
    "Figure 9",
    "Throughput and goodput on ShareGPT's lengths by engine and hardware",
    (
        *base.DIFFERENCES,
        "Engines are their schedulers in vLLM 0.32's loop: past-future for LightLLM, aggressive at 99 % for vLLM of "
        "2023, conservative for TGI, DeepSpeed-MII and TensorRT-LLM. Their kernels of 2023 are not simulated.",
        "Two devices are missing in the device table: for the H800 there is the H100, whose NVLink is twice as fast "
        "(which the 70B model alone feels), and the RTX 4090 is given by its datasheet's numbers.",
        "Pools are what the memory of each device leaves, in place of the artifact's. Lengths are log-normal with the "
        "means of vLLM's paper; cells are config.duration_s long, in which a client sends some ten requests.",
        "Who has no token after 8 s (70B: 10 s) is dropped, as in past-future-fig7. Goodput is tokens per second of "
        "requests in time; the paper's is throughput while 99 % of the requests are. It prints no numbers.",
    ),
)
def fig9(runner: Runner) -> Findings:
    """Does the order of the schedulers hold on other devices, and on lengths of chats?

    Method: closed loop as in Figure 7, outputs of at most 2048 tokens; the same clients with every scheduler.
    """
    platforms = {name: PLATFORMS[name] for name in (QUICK_PLATFORMS if runner.quick else PLATFORMS)}
    duration_s = QUICK_S if runner.quick else DURATION_S
    specs = {
        (name, clients, c.name): _spec(c, at, clients, duration_s, runner.seed)
        for name, at in platforms.items()
        for clients in (QUICK_CLIENTS if runner.quick else at.clients)
        for c in (*ENGINES, *TODAY)
    }
    metrics = runner.metrics(specs)
    found = {
        key: {TOTAL: one[TOTAL], load.GOODPUT: one.get(load.GOODPUT, 0.0),
              "evicted_percent": base.evicted_percent(one), "mean_running_requests": one["mean_running_requests"]}
        for key, one in metrics.items()
    }  # fmt: skip
    crowded = {name: max(clients for at, clients, _ in specs if at == name) for name in platforms}

    def over_best(own: Variant, others: tuple[Variant, ...], metric: str) -> dict[str, float]:
        """A figure with the most clients over the best of others, by platform."""
        return {
            name: found[name, clients, own.name][metric]
            / max(1e-9, *(found[name, clients, other.name][metric] for other in others))
            for name, clients in crowded.items()
        }

    return Findings(
        tables=[Table(("platform", "clients", "scheduler", "tokens/s", "good tokens/s", "evicted %", "running"),
                      [(*key, *one.values()) for key, one in found.items()])],
        claims=[
            PaperClaim(
                name=f"{what} with the most clients, past-future / best of the others, least of the platforms",
                kind="tendency",
                goal=goal,
                value=min((ratios := over_best(ENGINES[0], ENGINES[1:], metric)).values()),
                ours=min(over_best(base.OURS, ENGINES[1:], metric).values()),
                tuned=min(over_best(base.OURS, (base.VLLM_TUNED,), metric).values()),
                headline=True,
                facts=", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()),
            )
            for metric, what, goal in ((load.GOODPUT, "goodput", 1.0), (TOTAL, "throughput", COMPETITIVE))
        ],
        **flat(found, "{}.clients_{}.".format, own={ENGINES[0].name: ""}),
        config={"duration_s": duration_s, "devices": {name: at.device for name, at in platforms.items()}},
        plots=[
            line_plot(f"-{name.lower().replace(', ', '-').replace(' ', '-')}",
                      {c.name: [(clients, one[load.GOODPUT]) for (at, clients, row), one in found.items()
                                if (at, row) == (name, c.name)] for c in (*ENGINES, *TODAY)},
                      xlabel="clients", ylabel="goodput (output tokens/s)", title=f"{name}, ShareGPT's lengths")
            for name in platforms
        ],
        workload=[next(iter(specs.values())).workload],
    )  # fmt: skip


def _spec(variant: Variant, at: Platform, clients: int, duration_s: float, seed: int) -> SimulationSpec:
    panel = load.PANELS[at.model]
    sla = TierSpec(name="sla", ttft=SloTarget(base_s=panel.ttft_s), tbt=SloTarget(base_s=panel.gap_s))
    own = replace(
        variant,
        engine={"num_blocks": None, "max_model_len": CONTEXT, **variant.engine},
        hardware={"device": at.device, **variant.hardware},
    )
    return base.spec(
        own,
        at.model,
        {"source": LENGTHS, "max_tokens": MOST_OUTPUT, "arrivals": "closed-loop", "clients": clients,
         "duration_s": duration_s, "patience_s": panel.drop_s, "tiers": (sla,), "seed": seed},
        seats=max(at.clients),
        step_tokens=load.STEP_TOKENS,
        devices=panel.devices,
        max_time_s=duration_s,
    )  # fmt: skip
