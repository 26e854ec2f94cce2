"""Routers of others as the cluster benchmarks state them: what each does where a fleet is even, and where it is not."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from vllm_ext.routing.fleet import Ask, Fleet
from vllm_ext.scheduling.load_report.report import LoadReport, Prices

PRICES = Prices(base_s=0.01, prefill_token_s=1e-4, decode_s=1e-4, context_token_s=1e-7)


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend("benchmarks/cluster")
    return importlib.import_module("rivals")


def fleet_of(*in_flight: int) -> Fleet:
    fleet = Fleet()
    fleet.consist_of("abcdef"[: len(in_flight)])
    for replica, count in zip(fleet.replicas.values(), in_flight, strict=True):
        replica.in_flight = count
    return fleet


def test_two_are_drawn_and_the_emptier_is_taken(rivals: ModuleType) -> None:
    router = rivals.PowerOfTwo()
    chosen = {router.choose(Ask(1), fleet_of(3, 2, 1), 0.0) for _ in range(50)}
    assert chosen == {"b", "c"}, "the fullest is never the emptier of two"
    assert router.choose(Ask(1), fleet_of(9), 0.0) == "a"


@pytest.mark.parametrize(
    ("name", "even", "uneven"),
    [("SGLang's", 64, 65), ("Ray's prefix, 10 apart", 10, 11), ("SGLang's, 16 apart", 16, 17)],
)
def test_affinity_holds_as_long_as_the_fleet_is_even(rivals: ModuleType, name: str, even: int, uneven: int) -> None:
    router = rivals.RIVALS[name]()
    home = router.choose(Ask(100, "s"), fleet_of(0, 0, 0), 0.0)
    assert home == "a"
    assert router.choose(Ask(100, "t"), fleet_of(0, 0, 0), 0.0) == "b", "who has seen least"
    assert router.choose(Ask(200, "s"), fleet_of(even, 0, 0), 0.0) == "a"
    assert {router.choose(Ask(200, "s"), fleet_of(uneven, 0, 0), 0.0) for _ in range(20)} <= {"b", "c"}


def test_for_ray_s_as_it_comes_every_fleet_is_even(rivals: ModuleType) -> None:
    router = rivals.RIVALS["Ray's prefix"]()
    assert router.choose(Ask(100, "s"), fleet_of(0, 0), 0.0) == "a"
    assert router.choose(Ask(200, "s"), fleet_of(1000, 0), 0.0) == "a"


@pytest.mark.parametrize(("name", "share"), [("RayPrefix", 0.1), ("SglangCacheAware", 0.3)])
def test_too_small_a_share_is_no_affinity(rivals: ModuleType, name: str, share: float) -> None:
    for prompt, expected in ((100 / share - 1, "a"), (100 / share + 1, "b")):
        router = getattr(rivals, name)()
        assert router.choose(Ask(100, "s"), fleet_of(0, 0), 0.0) == "a"
        assert router.choose(Ask(int(prompt), "s"), fleet_of(0, 0), 0.0) == expected


def test_weights_are_added_up(rivals: ModuleType) -> None:
    """Half of a prompt is 1.5 points, an empty queue 2, free memory up to 2."""
    fleet, router = fleet_of(0, 0), rivals.LlmD()
    for name, waiting, context in (("a", 4, 0), ("b", 0, 50_000)):
        fleet.heard(name, LoadReport(number=1, running=0, waiting=waiting, seats=8, prefill_tokens=0,
                                     context_tokens=context, pool_tokens=100_000, prices=PRICES), 0.0)  # fmt: skip
    assert router.choose(Ask(100, "s"), fleet, 0.0) == "b", "2 + 1 against 0 + 2"
    router._sent.note("a", Ask(100, "t"))
    assert router.choose(Ask(200, "t"), fleet, 0.0) == "a", "1.5 + 0 + 2 against 2 + 1"


def test_every_rival_serves_a_fleet_of_which_nothing_is_known(rivals: ModuleType) -> None:
    for make in rivals.RIVALS.values():
        assert make().choose(Ask(5, "s"), fleet_of(0, 0), 0.0) in ("a", "b")
