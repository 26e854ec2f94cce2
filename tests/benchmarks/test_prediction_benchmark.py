"""The comparison of length predictors: pairs, goals, parts that are measured again, and what predictions are worth."""

from __future__ import annotations

import gzip
import inspect
import json
from dataclasses import replace
from importlib import import_module as script
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.extent import quick
from vllm_ext.prediction.evaluation.measures import Predicted
from vllm_ext.prediction.evaluation.rows import DataSet, Examples, LocalTokenizer, Prompts

WORDS = LocalTokenizer("words", lambda text: len(text.split()))


pytestmark = pytest.mark.usefixtures("encoder_settings")


def part(name: str, count: int, seed: int = 0) -> Any:
    """A made-up data set of the benchmark, with embeddings that tell its kinds apart."""
    data = script("prediction_data").made_up("recipes", count, WORDS, seed)
    kind = [("Name", "Give", "Plan").index(text.split()[0]) for text in data.examples.prompts.texts]
    noise = 0.1 * np.random.default_rng(seed).standard_normal((count, 4))
    vectors = np.eye(4)[kind] + noise
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    examples = Examples(prompts=replace(data.examples.prompts, vectors=unit), lengths=data.examples.lengths)
    half = np.arange(count // 2)
    return script("prediction_data").Part(
        name=name, data=data, train=examples.take(half), test=examples.take(half + count // 2)
    )


def measured(taus: dict[str, dict[str, float]], coverage: dict[str, float] | None = None) -> Any:
    """A result with taus of pairs by predictor; the first is ours."""
    made = script("prediction_results").Measured()
    ours: dict[str, float] = {}
    others: dict[str, dict[str, float]] = {}
    for number, (name, by_pair) in enumerate(taus.items()):
        for pair, tau in by_pair.items():
            if number:
                others.setdefault(name, {})[f"pairs.{pair}.tau"] = tau
            else:
                ours[f"{name}.pairs.{pair}.tau"] = tau
                ours[f"{name}.pairs.{pair}.coverage_p90_fraction"] = (coverage or {}).get(pair, 0.9)
    made.replace("pairs", (ours, others), "command", {})
    return made


# --- data -------------------------------------------------------------------------------------------------------------


def test_small_sets_are_only_tested_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = script("prediction_data")
    rows = [{"prompt": f"p {i}", "output": "a " * (i % 9 + 1)} for i in range(30)]
    path = tmp_path / "single_turn" / "gsm8k.jsonl.gz"
    path.parent.mkdir()
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    encoder = SimpleNamespace(
        name="e@1:head-8",
        precision="float32",
        dim=2,
        count_tokens=WORDS.count,
        encode=lambda t: np.ones((len(t), 2), np.float32),
    )
    small = data.load("gsm8k", tmp_path, encoder, data.Cache(None), max_rows=500, seed=0)
    assert small.train is None
    assert len(small.test) == 30
    monkeypatch.setattr(data, "LEAST_TO_LEARN", 20)
    large = data.load("gsm8k", tmp_path, encoder, data.Cache(None), max_rows=500, seed=0)
    assert (len(large.train), len(large.test)) == (21, 9)
    assert not set(large.train.prompts.texts) & set(large.test.prompts.texts)


def test_cache_makes_once_and_tells_keys_apart(tmp_path: Path) -> None:
    made: list[int] = []

    def make(number: int) -> dict[str, np.ndarray]:
        made.append(number)
        return {"a": np.array([number])}

    cache = script("prediction_data").Cache(tmp_path)
    found = [cache.get({"n": n}, lambda n=n: make(n))["a"].tolist() for n in (1, 2, 1)]
    assert found == [[1], [2], [1]]
    assert made == [1, 2]


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_pairs_are_measured_without_what_was_learned() -> None:
    pairs = script("prediction_pairs")
    one, other = part("alpaca", 120), part("gsm8k", 120, seed=1)
    known = one.train.take(np.arange(7))  # seven prompts that were learned are asked again
    mixed = Prompts(
        texts=known.prompts.texts + other.test.prompts.texts,
        tokens=np.concatenate((known.prompts.tokens, other.test.prompts.tokens)),
        vectors=np.concatenate((known.prompts.vectors, other.test.prompts.vectors)),
    )
    lengths = np.concatenate((known.lengths, other.test.lengths))
    other = replace(other, test=Examples(prompts=mixed, lengths=lengths))
    encoder: Any = SimpleNamespace(dim=4, name="e@1", window="head", max_tokens=8)
    setting = pairs.Setting(encoder=encoder)
    options = pairs.TuningOptions()
    found = pairs.measure(
        {"alpaca": one, "gsm8k": other},
        setting,
        script("prediction_data").Cache(None),
        trained=["alpaca"],
        options=options,
        proxies=False,
    )
    assert [(p.key, p.requests, p.removed) for p in found.pairs] == [("alpaca>alpaca", 60, 0), ("alpaca>gsm8k", 60, 7)]
    assert found.pairs[0].scores["shrunk"]["tau"] > found.pairs[0].scores["history"]["tau"] == 0
    groups = pairs.groups(found.pairs, frozenset({"alpaca"}))
    assert {name: len(group) for name, group in groups.items()} == {"in": 1, "cross": 1}
    ours, others = pairs.metrics(found, frozenset())
    assert "shrunk.pairs.mean_in_untuned.tau" in ours
    assert "pairs.alpaca>gsm8k.pinball_nats" in others["history"]
    facts = pairs.facts(found, {"alpaca": one, "gsm8k": other})
    assert facts["removed_as_learned"] == {"alpaca>gsm8k": 7}
    assert "alpaca" in pairs.report(found, frozenset(), "shrunk")[-1]


def test_a_proxy_is_tuned_once_and_its_words_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = script("prediction_pairs")
    fitted: list[int] = []

    class Fake:
        report = SimpleNamespace(seconds=2.5, epochs=3, validation_losses=(1.0, 0.5))

        def __init__(self, *args: object, **kwargs: object) -> None: ...

        def fit(self, train: Examples) -> None:
            fitted.append(len(train))

        def predict(self, prompts: Prompts) -> Predicted:
            tokens = np.arange(1, len(prompts) + 1)
            return Predicted(tokens, tokens + 1, tokens % 10)

    monkeypatch.setattr(pairs, "READING_TEXTS", {"fake": Fake})
    parts = {"alpaca": part("alpaca", 60)}
    encoder: Any = SimpleNamespace(dim=4, name="e@1", window="head", max_tokens=8)
    cache = script("prediction_data").Cache(tmp_path)
    asked = ("fake", parts, "alpaca", pairs.Setting(encoder=encoder), cache, pairs.TuningOptions())
    first, again = pairs.tune(*asked), pairs.tune(*asked)
    assert fitted == [30]
    assert (again.seconds, again.epochs) == (first.seconds, 3)
    assert first.seconds > 0
    for found in (first, again):
        assert found.said["alpaca"].p90.tolist() == list(range(2, 32))
        assert found.said["alpaca"].classes.tolist() == [n % 10 for n in range(1, 31)]


# --- the result -------------------------------------------------------------------------------------------------------


def test_a_part_replaces_what_it_said_before_and_nothing_else() -> None:
    made = script("prediction_results").Measured()
    made.replace("pairs", ({"a.pairs.x.tau": 0.1}, {"p": {"pairs.x.tau": 0.2}}), "first", {"n": 1})
    made.replace("latency", ({"ours.latency.k_ms": 5.0}, {"p": {"latency.k_ms": 7.0}}), "second", {})
    made.replace("pairs", ({"a.pairs.y.tau": 0.3}, {"q": {"pairs.y.tau": 0.4}}), "third", {"n": 2})
    assert made.metrics == {"ours.latency.k_ms": 5.0, "a.pairs.y.tau": 0.3}
    assert made.baselines == {"p": {"latency.k_ms": 7.0}, "q": {"pairs.y.tau": 0.4}}
    assert made.facts == {"pairs": {"command": "third", "n": 2}, "latency": {"command": "second"}}
    assert made.find("pairs", lambda key: True) == {"a": {"y.tau": 0.3}, "q": {"y.tau": 0.4}}


@pytest.mark.parametrize("content", ["{", '{"name": "other"}'], ids=["no JSON", "another benchmark"])
def test_update_of_what_is_no_result_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "result.json"
    path.write_text(content, encoding="utf-8")
    assert script("prediction").main(["--update", str(path), "--only", "latency"]) == 2
    assert "prediction.py: --update result.json" in capsys.readouterr().err


def test_missing_data_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("prediction").main(["--data", str(tmp_path), "--quick", "--only", "pairs"]) == 2
    assert "alpaca.jsonl.gz: cannot be read" in capsys.readouterr().err


def test_goals_name_the_pairs_that_a_prior_ranks_better() -> None:
    results = script("prediction_results")
    taus = {"shrunk": {"a>a": 0.5, "a>b": 0.1}, "history": {"a>a": 0.0, "a>b": 0.0},
            "prompt-length": {"a>a": 0.2, "a>b": 0.3}}  # fmt: skip
    by_metric = {goal.metric: goal for goal in results.goals(measured(taus), "shrunk")}
    ranking = by_metric["pairs where shrunk beats every prior in tau"]
    assert (ranking.value, ranking.goal, ranking.met) == (1, 2, False)
    assert "a>b 0.10 to prompt-length's 0.30" in ranking.note
    assert "a>a" not in ranking.note


def test_coverage_is_judged_by_its_extremes_on_pairs_of_each_kind() -> None:
    results = script("prediction_results")
    taus = {"shrunk": dict.fromkeys(("a>a", "b>b", "a>b", "b>a"), 0.5), "history": dict.fromkeys(("a>a", "b>b"), 0.0)}
    taus["history"] |= {"a>b": 0.0, "b>a": 0.0}
    found = measured(taus, {"a>a": 0.88, "b>b": 0.96, "a>b": 0.4, "b>a": 0.93})
    goals = {goal.metric: goal for goal in results.goals(found, "shrunk") if "coverage" in goal.metric}
    assert {metric: (goal.value, goal.met) for metric, goal in goals.items()} == {
        "coverage_p90 of shrunk in-distribution, least": (0.88, True),
        "coverage_p90 of shrunk in-distribution, most": (0.96, False),
        "coverage_p90 of shrunk cross-distribution, least": (0.4, False),
        "coverage_p90 of shrunk cross-distribution, most": (0.93, True),
    }
    assert goals["coverage_p90 of shrunk cross-distribution, least"].note.startswith("a>b;")


def test_latency_is_judged_by_the_least_ratio() -> None:
    results, latency = script("prediction_results"), script("prediction_latency")
    made = results.Measured()
    ours = {f"{latency.HALF}.latency.{k}": v for k, v in (("a", 10.0), ("b", 20.0))}
    ours |= {f"{latency.WHOLE}.latency.{k}": v for k, v in (("a", 15.0), ("b", 50.0))}
    proxies = (latency.SAME, latency.SAME_PRECISION, latency.LARGER)
    others = {name: {"latency.a": 30.0, "latency.b": 50.0} for name in proxies}
    made.replace("latency", (ours, others), "command", {})
    goals = results.goals(made, "shrunk")
    assert [(goal.value, goal.met) for goal in goals] == [(2.5, True)] * 3 + [(1.0, False)] * 3


def test_tuned_encoders_are_judged_against_the_better_proxy() -> None:
    results = script("prediction_results")
    taus = {name: {"a>a": tau} for name, tau in (("shrunk", 0.3), ("tuned", 0.5), ("tuned-whole", 0.7),
            ("proxy-classifier", 0.4), ("proxy-regressor", 0.6), ("history", 0.0))}  # fmt: skip
    made = measured(taus)
    for name, by_pair in taus.items():
        mean = {"pairs.mean_in.tau": by_pair["a>a"]}
        if name in ("shrunk", "tuned", "tuned-whole"):
            mean["pairs.a>a.coverage_p90_fraction"] = 0.9
            made.metrics |= {f"{name}.{key}": value for key, value in mean.items()}
        else:
            made.baselines[name] = made.baselines.get(name, {}) | mean
    goals = {goal.metric: goal for goal in results.goals(made, "shrunk")}
    half, whole = (goals[f"tau in-distribution, {name} less the best proxy"] for name in ("tuned", "tuned-whole"))
    assert (half.value, half.met, whole.value, whole.met) == (-0.1, False, 0.1, True)
    assert "proxy-regressor 0.600" in half.note


# --- worth ------------------------------------------------------------------------------------------------------------


def test_true_lengths_are_worth_more_than_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = script("prediction_worth")
    monkeypatch.setattr(worth, "LIMIT_MS", 120.0)
    rng = np.random.default_rng(0)
    lengths = rng.choice([8, 600], size=50, p=[0.8, 0.2])
    prompts = Prompts(
        texts=("p",) * 50, tokens=np.full(50, 400, dtype=np.int64), vectors=np.zeros((50, 0), dtype=np.float32)
    )
    test = Examples(prompts=prompts, lengths=lengths)
    said = {"true": lengths, "reversed": 700 - lengths}
    found = worth.serve("a>b", test, said, {"true": 1.0, "reversed": -1.0}, requests=120, seed=0)
    assert found.gain("true") > found.gain("reversed")
    assert found.by_predictor["true"] == pytest.approx(found.oracle_ms, rel=0.1)
    ours, others = worth.metrics([found])
    assert ours == {}
    assert others["fcfs"] == {f"worth.a>b.{worth.NORMALISED}": round(found.fcfs_ms, 2)}
    assert "a>b" in worth.table([found])


# --- the curve --------------------------------------------------------------------------------------------------------


def test_streams_are_cold_for_every_set_and_warm_for_a_pair() -> None:
    curve = script("prediction_curve")
    parts = {"recipes": part("recipes", 40), "tickets": part("tickets", 40, seed=1)}
    streams = curve.streams(parts, None, SimpleNamespace(), script("prediction_data").Cache(None), quick=True, seed=0)
    assert [s.name for s in streams] == ["cold>recipes", "cold>tickets", "recipes>tickets"]
    assert [len(s.requests) for s in streams] == [40, 40, 40]
    assert sorted(streams[0].requests.lengths) == sorted(
        [*parts["recipes"].train.lengths, *parts["recipes"].test.lengths]
    )
    assert streams[2].warm is not None
    curves = curve.measure([streams[0]], 0)
    ours, others = curve.metrics(curves)
    assert "shrunk.curve.cold>recipes.after_0.tau" in ours
    assert "curve.cold>recipes.after_0.tau" in others["history"]


# --- the whole --------------------------------------------------------------------------------------------------------


def limit(monkeypatch: pytest.MonkeyPatch, module: Any, **limits: Any) -> None:
    """Have a module's ``measure`` use these arguments."""
    measure = module.measure

    def limited(*args: Any, **options: Any) -> Any:
        given = inspect.signature(measure).bind(*args, **options)
        given.arguments.update(limits)
        return measure(*given.args, **given.kwargs)

    monkeypatch.setattr(module, "measure", limited)


def test_quick_run_without_data_measures_every_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction, latency = script("prediction"), script("prediction_latency")
    monkeypatch.setattr(prediction, "QUICK_ROWS", 30)
    monkeypatch.setattr(latency, "larger_proxy", lambda encoder, seed: lambda texts: None)  # seconds of random weights
    worth = script("prediction_worth")
    monkeypatch.setattr(worth, "_TRIALS", 2)
    limit(monkeypatch, worth, requests=quick(12, full=60))
    limit(monkeypatch, latency, batches=quick((1, 2), full=(1, 16)))
    out = tmp_path / "result.json"
    assert prediction.main(["--quick", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert set(result["config"]["parts"]) == {"pairs", "curve", "latency", "worth"}
    assert "proxy-classifier" in result["baselines"]
    assert all(goal["met"] or goal["note"] for goal in result["goals"])
    before = result["metrics"]
    assert prediction.main(["--quick", "--only", "latency", "--update", str(out)]) == 0
    after = json.loads(out.read_text(encoding="utf-8"))
    assert after["metrics"].keys() == before.keys()
    kept = {key for key in before if ".latency." not in key}
    assert {key: after["metrics"][key] for key in kept} == {key: before[key] for key in kept}


def test_made_up_sets_say_what_they_are() -> None:
    made: DataSet = script("prediction_data").made_up("tickets", 30, WORDS, 0)
    again: DataSet = script("prediction_data").made_up("tickets", 30, WORDS, 0)
    assert (made.name, made.sha256) == ("made up: tickets", again.sha256)
    assert made.examples.lengths.tolist() == again.examples.lengths.tolist()
    long = [n for t, n in zip(made.examples.prompts.texts, made.examples.lengths, strict=True) if "guide" in t]
    short = [n for t, n in zip(made.examples.prompts.texts, made.examples.lengths, strict=True) if "bug" in t]
    assert min(long) > max(short)
