"""The pool on a Ray cluster: without Ray, and with a real one of this machine."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_ext.cluster import ray_pool
from vllm_ext.cluster.ray_pool import RayPool
from vllm_ext.simulation.sweep import grid
from vllm_ext.simulation.sweep.grid import RATE, SYSTEM, SweepSpec
from vllm_ext.simulation.sweep.pools import InProcessPool
from vllm_ext.simulation.sweep.store import PointStore, versions

SWEEP = SweepSpec(axes={SYSTEM: ("fcfs",), RATE: (1.0, 2.0, 3.0)})


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of the sweep's tests; Ray's workers find them by the environment."""
    folder = Path(__file__).parents[1] / "simulation" / "sweep"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("sweep_fakes")


def ray_processes() -> list[str]:
    children = psutil.Process().children(recursive=True)
    return [child.name() for child in children if child.name() in ("raylet", "gcs_server")]


def test_missing_ray_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"vllm-ext\[ray\]"), RayPool(dict):  # type: ignore[arg-type]
        pytest.fail("a pool without Ray")


def test_pool_without_places_is_refused(fakes: Any) -> None:
    with pytest.raises(ValueError, match="jobs=0"):
        RayPool(fakes.latency, jobs=0)


def test_worker_with_other_versions_runs_nothing(fakes: Any) -> None:
    spec = SWEEP.base
    outcome = ray_pool._run_if_same_versions(fakes.latency, spec, {**versions(), "vllm-ext": "0.0"})
    assert outcome.failed
    assert "WrongVersions" in str(outcome.error)
    assert not ray_pool._run_if_same_versions(fakes.latency, spec, versions()).failed


@pytest.mark.e2e
def test_local_cluster_gives_the_same_as_one_process_and_is_gone_afterwards(tmp_path: Path, fakes: Any) -> None:
    """A worker that is killed fails its own point; the same cluster serves the rest."""
    handler = signal.getsignal(signal.SIGTERM)
    with RayPool(fakes.dies_at_two, jobs=2) as pool, PointStore(tmp_path / "ray") as store:
        assert pool.places == 2
        assert sorted(ray_processes()) == ["gcs_server", "raylet"]
        outcomes = grid.run(SWEEP, store, pool)
    assert ray_processes() == []
    assert signal.getsignal(signal.SIGTERM) == handler
    with InProcessPool(fakes.latency) as alone, PointStore(tmp_path / "one") as store:
        expected = grid.run(SWEEP, store, alone)
    assert outcomes[0::2] == expected[0::2]
    assert outcomes[1].outcome.failed
    assert "WorkerCrashed" in str(outcomes[1].outcome.error)
