"""What can be changed on a server: its token budget, its seats, a reserve of KV blocks, and who schedules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_ext.simulation.spec import Limits, Resolved, SimulationSpec, checked, with_values
from vllm_ext.simulation.workloads.spec import SloTarget
from vllm_ext.systems.user_policies import split

LEAST_TOKENS, MOST_TOKENS = 128, 8192
"""Bounds of the budgets that are tried, all powers of two between them and the server's own."""
RESERVE = 0.05
_NO_FP8 = ("v100", "v100-16", "cpu")
"""Devices for which vLLM has no attention that reads KV in fp8: it takes compute capability 8.0."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to schedule."""

    name: str
    system: str = ""
    """What the simulator calls it; empty: vLLM alone."""
    options: Mapping[str, Any] | None = None
    """By path within `EngineSpec`."""
    flags: tuple[str, ...] = ()
    needs: str = ""
    """What it needs to behave as simulated."""
    announced: bool = False
    """Whether clients must announce their objectives."""

    def __hash__(self) -> int:
        return hash(self.name)


AS_IT_IS = System(name="vLLM")
_LEARNT = "lengths come from the history of finished requests, learnt during the trace"


def _ours(name: str, needs: str = "") -> System:
    return System(name=name, system=name, flags=("--scheduler-cls", name), needs=needs)


def systems(spec: SimulationSpec) -> tuple[System, ...]:
    """Return what may pay for such a workload, vLLM first.

    Those that follow objectives are tried where requests have some, those that keep conversations where there are some,
    and the user's own policies, which ``policies`` among the engine's options names, in the row of defaults.
    """
    gaps = any(tier.tbt for tier in spec.workload.tiers)
    found = [
        AS_IT_IS,
        _ours("alise", _LEARNT),
        System(name="alise, for the tail", system="alise", options={"options.ordering.gamma": 1.0},
               flags=("--scheduler-cls", "alise", "--ext-optimise", "tail"), needs=_LEARNT),
        _ours("past-future", _LEARNT),
        _ours("alise+past-future", _LEARNT),
    ]  # fmt: skip
    if gaps:
        follows = "its token budget follows the objective for the time between tokens"
        found += [_told(_ours(name, follows), spec) for name in ("sarathi", "alise+sarathi")]
    if has_objectives(spec):  # without any, auto is alise
        found += [_told(system, spec) for system in (_ours("auto", _LEARNT), _ours("accelgen"))]
    if spec.workload.conversations and "kv_tier" in spec.engine.options:
        found += [_ours("pensieve"), _ours("alise+pensieve", _LEARNT)]
    if named := spec.engine.options.get("policies"):
        own = " and ".join(split(text)[1] for text in named)
        system = System(name=own, system="fcfs", options={"options.policies": named},
                        flags=("--policy", ",".join(named)))  # fmt: skip
        found.append(_told(system, spec) if has_objectives(spec) else system)
    return tuple(found)


def has_objectives(spec: SimulationSpec) -> bool:
    """Whether any request has one."""
    return any(tier.ttft or tier.tbt or tier.e2e for tier in spec.workload.tiers)


def _told(system: System, spec: SimulationSpec) -> System:
    """Return a system that knows the requests' objectives: the server has them, or clients announce their own."""
    given = spec.engine.options.get("slo") or {}
    if not spec.workload.announce_slo and not given.keys().isdisjoint(_OBJECTIVES):
        return system
    same = None if spec.workload.announce_slo else _same_for_all(spec)
    if same is None:
        how = "clients announce their objectives (ttft_slo_ms, tbt_slo_ms, jct_slo_ms)"
        return replace(system, announced=True, needs="; ".join(filter(None, (system.needs, how))))
    options = {f"options.slo.{name}_ms": value for name, value in same.items()}
    flags = (word for name, value in same.items() for word in (f"--{name}-slo-ms", f"{value:g}"))
    how = "its objectives are those of the flags"
    return replace(system, options={**(system.options or {}), **options}, flags=(*system.flags, *flags),
                   needs="; ".join(filter(None, (system.needs, how))))  # fmt: skip


_OBJECTIVES = ("ttft_ms", "ttft_bucket_ms", "tbt_ms", "jct_ms", "classes")
"""Options of ``slo`` by which the user has told the server the objectives already."""


def _same_for_all(spec: SimulationSpec) -> dict[str, float] | None:
    """Return the objectives in milliseconds, ``ttft``, ``tbt`` and ``jct``; None if they are not the same for all."""
    tiers = spec.workload.tiers
    targets = dict(zip(("ttft", "tbt", "jct"), (tiers[0].ttft, tiers[0].tbt, tiers[0].e2e), strict=True))
    alike = len({(tier.ttft, tier.tbt, tier.e2e) for tier in tiers}) == 1
    if not alike or any(target and not _is_constant(target) for target in targets.values()):
        return None
    return {name: float(f"{1000 * target.seconds(1, 0.0):.6g}") for name, target in targets.items() if target}


def _is_constant(target: SloTarget) -> bool:
    return target.low == target.high and not target.per_prompt_token_s and not target.bucket_s


CHANGED = ("scheduler", "tokens", "seats", "reserve", "kv-dtype")
"""What candidates may change, by the names that ``--keep`` takes."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A server: a system, and what else differs from the server as it is."""

    system: System = AS_IT_IS
    tokens: int | None = None
    """Token budget; None: as it is."""
    seats: int | None = None
    """Requests that may run; None: as it is."""
    reserve: float | None = None
    """Share of the KV blocks that is kept free at admission; None: as it is."""
    fp8_kv: bool = False
    """KV in 8 bits, which changes the model's answers a little."""

    @property
    def name(self) -> str:
        """For tables."""
        changed = {"tokens": self.tokens, "seats": self.seats}
        parts = [f"{value} {what}" for what, value in changed.items() if value is not None]
        parts += [f"{100 * self.reserve:g} % reserve"] if self.reserve is not None else []
        parts += ["fp8 KV"] if self.fp8_kv else []
        return ", ".join([self.system.name, *parts]) if parts or self.system is not AS_IT_IS else "vLLM as it is"

    @property
    def settings(self) -> dict[str, int | float]:
        """What it sets of vLLM's own, by the names that the simulator and, with dashes, the flags have."""
        found = {"max_num_batched_tokens": self.tokens, "max_num_seqs": self.seats, "watermark": self.reserve}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def changed(self) -> set[str]:
        """What it changes, of `CHANGED`: of two that serve alike, the one that changes less is better."""
        given = (self.system is not AS_IT_IS, self.tokens, self.seats, self.reserve, self.fp8_kv)
        return {what for what, value in zip(CHANGED, given, strict=True) if value not in (None, False)}

    def flags(self) -> list[str]:
        """Return the flags of ``vllm serve`` that make the server one."""
        given = [(f"--{name.replace('_', '-')}", f"{value:g}") for name, value in self.settings.items()]
        given += [("--kv-cache-dtype", "fp8")] if self.fp8_kv else []
        return [*self.system.flags, *(word for pair in given for word in pair)]

    def on(self, base: SimulationSpec) -> SimulationSpec:
        """Return a run with it.

        Raises:
            ConfigError: the system refuses an option of the run.
        """
        options = {name: copy.deepcopy(value) for name, value in base.engine.options.items() if name != "policies"}
        system = self.system.system or upstream(base)
        changes: dict[str, Any] = {"engine.system": system, "engine.options": options}
        own = self.system.options or {}
        changes |= {f"engine.{name}": value for name, value in {**self.settings, **own}.items()}
        changes |= {"hardware.kv_dtype_bytes": 1} if self.fp8_kv else {}
        changes |= {"workload.announce_slo": True} if self.system.announced else {}
        return checked(with_values(base, changes))


DEFAULT = Candidate()


def upstream(spec: SimulationSpec) -> str:
    """Return what the simulator calls vLLM alone with a run's scheduling policy."""
    return f"upstream-{spec.engine.scheduling_policy}"


def budgets(limits: Limits) -> list[int]:
    """Return the token budgets to try beside the server's own, smallest first."""
    own = limits.max_num_batched_tokens
    found = []
    tokens = LEAST_TOKENS
    while tokens <= max(MOST_TOKENS, own):
        if tokens != own:
            found.append(tokens)
        tokens *= 2
    return found


def with_budget(candidate: Candidate, tokens: int, resolved: Resolved) -> Candidate:
    """Return a candidate with a token budget; vLLM asks that it be no smaller than the seats, so these may fall."""
    given = resolved.spec.engine.max_num_seqs
    seats = tokens if given is not None and given > tokens else candidate.seats
    return replace(candidate, tokens=tokens, seats=seats)


def nearby(candidate: Candidate, resolved: Resolved) -> Iterator[Candidate]:
    """Yield a candidate's neighbours: half and twice its budget, half its seats, and with a reserve."""
    tokens = candidate.tokens or resolved.limits.max_num_batched_tokens
    for other in (tokens // 2, tokens * 2):
        if other != resolved.limits.max_num_batched_tokens and other >= LEAST_TOKENS:
            yield with_budget(candidate, other, resolved)
    seats = candidate.seats or min(resolved.limits.max_num_seqs, tokens)
    if seats > 1:
        yield replace(candidate, seats=seats // 2)
    if candidate.reserve is None and candidate.system is AS_IT_IS:
        yield replace(candidate, reserve=RESERVE)


def with_fp8_kv(candidate: Candidate, base: SimulationSpec) -> list[Candidate]:
    """Return a candidate with KV in 8 bits, in a list that is empty where that makes no room, or a tier refuses it."""
    hardware, engine = base.hardware, base.engine
    fits = hardware.kv_dtype_bytes > 1 and engine.num_blocks is None and "kv_tier" not in engine.options
    return [replace(candidate, fp8_kv=True)] if fits and hardware.device not in _NO_FP8 else []


def unique(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates without repetitions, in their order."""
    return list(dict.fromkeys(candidates))
