"""ordering.py: ratios that point the right way, intervals, goals that can be missed, paired requests, and a grid."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

SEEDS = (0, 1, 2)


@pytest.fixture
def scenes() -> ModuleType:
    return importlib.import_module("ordering_scenes")


@pytest.fixture
def report() -> ModuleType:
    return importlib.import_module("ordering_report")


def cells(scenes: ModuleType, factor: dict[int, float], points: float = 0.0) -> dict[object, dict[str, float]]:
    """Tuned vLLM at 100 of everything, and `alise` at 100 / factor of the seed; on time 50 %, and points more."""
    of = {
        system: {m.metric: 100.0 - m.floor for m in scenes.MEASURES} | {"on_time_fraction": 0.5}
        for system in (scenes.TUNED, "alise")
    }
    found: dict[object, dict[str, float]] = {}
    for seed in SEEDS:
        better = {m.metric: (100 * factor[seed] if m.higher else 100 / factor[seed]) - m.floor for m in scenes.MEASURES}
        found["sharegpt", 1.0, scenes.TUNED, seed] = of[scenes.TUNED]
        found["sharegpt", 1.0, "alise", seed] = better | {"on_time_fraction": 0.5 + points / 100}
    return found


def test_above_1_is_better_of_every_measure_and_the_interval_is_that_of_the_logarithms(
    scenes: ModuleType, report: ModuleType
) -> None:
    found = report.compare(cells(scenes, {0: 1.0, 1: 2.0, 2: 4.0}, points=7.0))
    for measure in scenes.MEASURES:
        one = found["sharegpt", 1.0, "alise", measure.name]
        if measure.points:
            assert (one.value, one.low) == pytest.approx((7.0, 7.0))
        else:
            half = 4.302653 * math.log(2) / math.sqrt(3)  # t of 2 degrees of freedom
            assert one.value == pytest.approx(2.0)
            assert one.low == pytest.approx(2.0 * math.exp(-half), rel=1e-5)
            assert one.high == pytest.approx(2.0 * math.exp(half), rel=1e-5)


@pytest.mark.parametrize(("factor", "met"), [(1.71, True), (1.69, False)])
def test_goals_are_held_to_the_issue(scenes: ModuleType, report: ModuleType, factor: float, met: bool) -> None:
    found = report.compare(cells(scenes, dict.fromkeys(SEEDS, factor), points=20.5 if met else 19.5))
    goals = {goal.name: goal for goal in report.claims(found, scenes.SCENES)}
    assert goals["alise, sharegpt at 1: mean e2e, x tuned"].met is met
    assert goals["alise at 1: share on time, points more than tuned"].met is met
    assert "missed by 0.01" in goals["alise, sharegpt at 1: mean e2e, x tuned"].note or met
    slower = report.compare(cells(scenes, dict.fromkeys(SEEDS, 0.5)))
    floors = [goal for goal in report.claims(slower, scenes.SCENES) if "worst cell" in goal.name]
    assert len(floors) == 4
    assert not any(goal.met for goal in floors)


def test_means_over_workloads_are_geometric(scenes: ModuleType, report: ModuleType) -> None:
    found = {
        (workload, 1.0, "alise", "mean e2e"): report.Compared(value=value, low=value, high=value)
        for workload, value in (("a", 0.5), ("b", 8.0))
    }
    assert report.means(found)[1.0, "alise", "mean e2e"] == pytest.approx(2.0)


def test_all_systems_serve_the_same_requests_but_the_other_seeds(scenes: ModuleType) -> None:
    for scene in scenes.SCENES.values():
        specs = {name: scene.spec(Path("data"), name, 3, duration_s=9.0, rate_per_s=1.0) for name in scenes.SYSTEMS}
        said = {"announce", "announce_error"}  # of half of the requests, where somebody else's prediction is told
        served = {name: spec.workload.model_dump_json(exclude=said) for name, spec in specs.items()}
        other = served.pop(scenes.AGAIN)
        assert len(set(served.values())) == 1
        assert other not in served.values()
        assert scene.backlogged(Path("data"), scenes.TUNED, 3, 9.0).max_time_s == 9.0


def test_another_s_prediction_comes_with_the_same_requests(scenes: ModuleType, tmp_path: Path) -> None:
    """Both files have the same lengths in the same order; only what was said of them is another's."""
    predicted = importlib.import_module("ordering_predicted")
    folder = tmp_path / "single_turn"
    folder.mkdir()
    prompts = [("Name", 5), ("Explain", 80), ("Write a story about", 400)]
    rows = [
        {"prompt": f"{prompts[n % 3][0]} thing {n}", "output": "so " * (prompts[n % 3][1] + n % 7)} for n in range(300)
    ]
    path = folder / "made.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own, others = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in predicted.make(path, tmp_path / "made", {})
    )
    assert len(own) == 150
    lengths = [[(row["prompt_tokens"], row["output_tokens"]) for row in each] for each in (own, others)]
    assert lengths[0] == lengths[1]

    def median_error(each: list[dict[str, object]]) -> float:
        errors = [abs(row["output_quantiles"][3] - row["output_tokens"]) / row["output_tokens"] for row in each]  # type: ignore[index, operator]
        return sorted(errors)[len(errors) // 2]

    assert median_error(own) < 0.5 < median_error(others)
    assert sorted(map(str, (r["output_quantiles"] for r in own))) == sorted(
        map(str, (r["output_quantiles"] for r in others))
    )


def test_a_grid_of_made_up_conversations_is_measured_and_written(
    scenes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / scenes.SCENES["sharegpt"].path.removesuffix(".gz")
    file.parent.mkdir()
    turns = [[{"from": "human", "value": "why " * (5 + 7 * i)}, {"from": "gpt", "value": "so " * 40}] for i in range(9)]
    file.write_text("".join(json.dumps({"conversations": one}) + "\n" for one in turns), encoding="utf-8")
    small = scenes.Scene(path=str(file.relative_to(tmp_path)), duration_s=12.0, group="chat")
    monkeypatch.setattr(scenes, "SCENES", {"sharegpt": small})
    ordering = importlib.import_module("ordering")
    monkeypatch.setattr(ordering, "SCENES", {"sharegpt": small})
    out = tmp_path / "ordering.json"
    argv = ["--data", str(tmp_path), "--seeds", "2", "--loads", "1.2", "--systems", "alise", "--jobs", "1"]
    ordering.main([*argv, "--out", str(out)])
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["config"]["saturation_requests_per_s"]["sharegpt"] > 0
    low, high = (result["metrics"][f"sharegpt.1.2.mean e2e.{end}"] for end in ("low", "high"))
    assert low < result["metrics"]["sharegpt.1.2.mean e2e.ratio"] < high
    assert set(result["baselines"]) == {scenes.TUNED, scenes.AGAIN}
    assert "worst cells" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ordering.main([*argv, "--systems", "alise, predicted"])
    assert "--systems=alise, predicted: needs --predicted" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ordering.main([*argv, "--workloads", "nothing"])
    assert "--workloads=nothing: must be among sharegpt" in capsys.readouterr().err
    for wrong in (("--jobs", "0"), ("--seed", "-1"), ("--seeds", "0")):
        with pytest.raises(SystemExit, match="2"):
            ordering.main([*argv, *wrong])
