"""What a server says at its start of what is off, system by system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from tests.support.steering import Rig
from vllm_ext import systems
from vllm_ext.config import AXES, parse
from vllm_ext.contract import Need
from vllm_ext.scheduling import scheduler
from vllm_ext.systems.needs import can_predict_from_prompts, switched_off
from vllm_ext.systems.upstream import Arrival

LENGTHS = "output lengths are predicted from hint, history only, not from prompts: pip install 'vllm-ext[prediction]'"
RECOMPUTED = "preempted KV is recomputed: add --kv-tier-gib N"
ON_DEVICE = "conversations are kept on the device only: add --kv-tier-gib N"
BOTH = "preempted KV is recomputed and conversations are kept on the device only: add --kv-tier-gib N"
PROFILE = "step times are learned online: run `vllm-ext profile`, then add --ext-profile auto"
OBJECTIVES = "requests have only the objectives that clients send: add --ttft-slo-ms and --tbt-slo-ms"


def off(system: str, options: dict[str, Any] | None = None, **there: bool) -> tuple[str, ...]:
    """What is off in a system of which nothing was switched on but what is named."""
    asked = {"prediction": {"sources": ["hint", "retrieval", "history"]}}
    config = parse({"system": system, "allow_oracle": system.startswith("oracle"), **asked, **(options or {})})
    built = systems.build(config)
    facts = {"predictor_installed": False, "profiled": False, "has_connector": False, **there}
    predicts = built.use_predictions and not built.system.oracle
    return switched_off([getattr(built, axis) for axis in AXES], config, predicts=predicts, **facts)


@pytest.mark.parametrize(
    ("system", "says"),
    [
        ("fcfs", ()),
        ("alise", (LENGTHS, RECOMPUTED)),
        ("oracle-alise", (RECOMPUTED,)),
        ("sarathi", (PROFILE,)),
        ("sarathi-static", (PROFILE,)),
        ("accelgen", (LENGTHS, PROFILE, OBJECTIVES)),
        ("past-future", ()),
        ("pensieve", (ON_DEVICE,)),
        ("auto", (LENGTHS, RECOMPUTED, PROFILE, OBJECTIVES)),
        ("fastserve", (RECOMPUTED,)),
        ("orca", ()),
        ("vllm-2023", ()),
        ("alise+pensieve", (LENGTHS, BOTH)),
        ("alise+sarathi", (LENGTHS, RECOMPUTED, PROFILE)),
    ],
)
def test_each_system_names_what_its_policies_would_use(system: str, says: tuple[str, ...]) -> None:
    assert off(system) == says


@pytest.mark.parametrize("by", ["tag", "salt"])
def test_it_says_that_fairness_by_what_clients_choose_is_none(by: str) -> None:
    chosen = {"tag": "their tags", "salt": "their cache_salt"}[by]
    says = (f"fairness towards clients that invent {chosen}: add --ext-share-by key",)
    assert off("fair", {"sharing": {"by": by}}) == says
    assert off("fair") == off("fair", {"sharing": {"by": "adapter"}}) == ()


@pytest.mark.parametrize("system", systems.known(unserved=True))
def test_nothing_is_off_where_everything_is_switched_on(system: str) -> None:
    slo = {"slo": {"ttft_ms": 500}}
    assert off(system, slo, predictor_installed=True, profiled=True, has_connector=True) == ()


@pytest.mark.parametrize("sources", [["history"], []])
def test_an_encoder_that_nobody_asked_for_is_not_missed(sources: list[str]) -> None:
    options = {"prediction": {"sources": sources}}
    assert off("alise", options, has_connector=True) == ()
    asked = off("alise", {**options, "predictor": {"threads": 2}}, has_connector=True)
    assert asked == ("nobody asks the predictor that was configured: add retrieval to --ext-prediction-sources",)


def test_predictor_of_the_users_own_needs_no_packages_of_ours() -> None:
    assert off("alise", {"predictor": {"factory": "mine:make"}}, has_connector=True) == ()


def test_profile_that_was_asked_for_and_not_found_has_only_to_be_measured() -> None:
    assert off("sarathi", {"profile": "auto"}) == ("step times are learned online: run `vllm-ext profile`",)


def test_system_that_never_swaps_needs_no_tier() -> None:
    assert off("alise", {"residency": {"choose": "recompute"}}, predictor_installed=True) == ()


@pytest.mark.parametrize("slo", [{"tbt_ms": 50}, {"classes": {"chat": {"ttft_ms": 300}}}], ids=["default", "class"])
def test_objectives_of_any_kind_are_objectives(slo: dict[str, Any]) -> None:
    assert OBJECTIVES not in off("accelgen", {"slo": slo})


def test_encoder_of_ones_own_does_not_need_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"sentence_transformers"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in found else None)
    can_predict_from_prompts.cache_clear()
    assert [can_predict_from_prompts(encoder) for encoder in (None, "folder")] == [False, True]
    can_predict_from_prompts.cache_clear()


@pytest.mark.parametrize(("system", "says"), [("sarathi", [PROFILE]), ("fcfs", [])], ids=["sarathi", "fcfs"])
def test_scheduler_logs_it_beside_what_is_active(system: str, says: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(scheduler.logger, "info", lambda text, *values: lines.append(text % values))
    Rig(system)
    assert lines[0].startswith(f"vllm-ext is active: {system}: ordering=")
    assert lines[1:] == [f"vllm-ext, not switched on: {text}" for text in says]


def test_a_policy_of_somebody_elses_gets_its_line() -> None:
    """What a system needs is declared by its classes: no list of ours names them."""

    @dataclass(frozen=True, kw_only=True)
    class TheirOrder(Arrival):
        needs: ClassVar[frozenset[Need]] = frozenset({Need.OBJECTIVES, Need.TIER_FOR_CONVERSATIONS})

    facts = {"predicts": False, "predictor_installed": True, "profiled": True, "has_connector": False}
    assert switched_off([TheirOrder()], parse({"system": "fcfs"}), **facts) == (ON_DEVICE, OBJECTIVES)
