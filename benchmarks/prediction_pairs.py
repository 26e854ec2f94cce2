"""Every predictor, learned from one data set and tested on another. A part of prediction.py."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from prediction_data import TEST_SHARE, Cache, Part, digest

from vllm_ext.observability.results import format_table
from vllm_ext.prediction.evaluation import tables
from vllm_ext.prediction.evaluation.compare import OURS, PRIORS, READING_TEXTS, Comparison, Setting, predictors
from vllm_ext.prediction.evaluation.measures import BIN_TOKENS, MEASURES, NUM_CLASSES, Predicted
from vllm_ext.prediction.evaluation.proxy import PROXIES
from vllm_ext.prediction.evaluation.rows import Examples, not_in
from vllm_ext.prediction.evaluation.tuned import TUNED, Tuned
from vllm_ext.prediction.tuning_options import TuningOptions

Flat = tuple[dict[str, float], dict[str, dict[str, float]]]
"""Our metrics, and those of the baselines by their names."""

COMPARED = (*OURS, *PROXIES, *PRIORS)
KEPT = ("accuracy_200", "accuracy_deciles", "relative_error", "total_error", "tau", "pair_accuracy", "coverage_p90",
        "pinball")  # fmt: skip
"""Measures that go into the result."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What was measured of one pair."""

    train: str
    test: str
    requests: int
    """Tested."""
    removed: int
    """Tested prompts left out because they were learned from."""
    scores: dict[str, dict[str, float]]

    @property
    def key(self) -> str:
        """Name of the pair in results."""
        return f"{self.train}>{self.test}"


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a tuned transformer said of every data set, and what its training took."""

    said: dict[str, Predicted]
    seconds: float
    epochs: int


@dataclass(kw_only=True)
class Measured:
    """All pairs, and the training of what learns from them."""

    pairs: list[Pair] = field(default_factory=list)
    fit_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Data set -> predictor -> seconds."""
    epochs: dict[str, dict[str, int]] = field(default_factory=dict)
    """Data set -> tuned transformer -> epochs run."""


def measure(
    parts: Mapping[str, Part],
    setting: Setting,
    cache: Cache,
    *,
    trained: Sequence[str],
    options: TuningOptions,
    proxies: bool = True,
) -> Measured:
    """Learn from each of ``trained``, predict every data set."""
    found = Measured()
    for name in trained:
        train = parts[name].train
        if train is None:
            continue
        quick = predictors([n for n in COMPARED if n not in READING_TEXTS], setting)
        comparison = Comparison(train=train, predictors=quick)
        comparison.fit(clock=time.perf_counter)
        found.fit_s[name] = {n: comparison.seconds[n] for n in (OURS[0], "decoder") if n in comparison.seconds}
        names = READING_TEXTS if proxies else ()
        tuned = {n: tune(n, parts, name, setting, cache, options) for n in names}
        found.fit_s[name] |= {n: t.seconds for n, t in tuned.items()}
        found.epochs[name] = {n: t.epochs for n, t in tuned.items()}
        for other, part in parts.items():
            said = comparison.predict(part.test) | {n: t.said[other] for n, t in tuned.items()}
            found.pairs.append(_pair(name, other, comparison, said, part.test))
        print(f"learned from {name}, predicted {len(parts)} data sets", file=sys.stderr, flush=True)
    return found


def tune(
    name: str, parts: Mapping[str, Part], train_name: str, setting: Setting, cache: Cache, options: TuningOptions
) -> Said:
    """Fine-tune one of `READING_TEXTS` and let it predict every data set, unless the cache has what it said."""
    train = parts[train_name].train
    if train is None:
        raise ValueError(f"{train_name}: has too few rows to learn from")
    key = {
        "proxy": name,
        "options": asdict(options),
        "seed": setting.seed,
        **({"precision": setting.encoder.precision} if name in TUNED else {}),
        "model": setting.encoder.name.partition(":")[0],
        "window": [setting.encoder.window, setting.encoder.max_tokens],
        "train": digest(train.prompts.texts),
        "lengths": digest([json.dumps(train.lengths.tolist())]),
        "tests": {other: digest(part.test.prompts.texts) for other, part in sorted(parts.items())},
    }

    def make() -> dict[str, Any]:
        predictor = READING_TEXTS[name](setting.encoder, model=setting.model, seed=setting.seed, options=options)
        started = time.perf_counter()
        predictor.fit(train)
        print(f"{name} on {train_name}: {predictor.report}", file=sys.stderr, flush=True)
        epochs = 0 if predictor.report is None else predictor.report.epochs
        arrays: dict[str, Any] = {"took": np.array([time.perf_counter() - started, epochs])}
        for other, part in parts.items():
            said = predictor.predict(part.test.prompts)
            arrays |= {f"{other}.tokens": said.tokens, f"{other}.p90": said.p90}
            if said.classes is not None:
                arrays[f"{other}.classes"] = said.classes
        return arrays

    kept = cache.get(key, make)
    seconds, epochs = kept["took"].tolist()
    said = {
        other: Predicted(kept[f"{other}.tokens"], kept[f"{other}.p90"], kept.get(f"{other}.classes")) for other in parts
    }
    return Said(said=said, seconds=seconds, epochs=int(epochs))


def _pair(train: str, test: str, comparison: Comparison, said: Mapping[str, Predicted], tested: Examples) -> Pair:
    """Measure on the tested prompts that were not learned from."""
    kept = not_in(tested.prompts.texts, comparison.train.prompts.texts)
    reduced = {name: s.take(kept) for name, s in said.items()}
    scores = comparison.scores(reduced, tested.take(kept))
    return Pair(train=train, test=test, requests=len(kept), removed=len(tested) - len(kept), scores=scores)


# --- what came of it --------------------------------------------------------------------------------------------------


def groups(pairs: Sequence[Pair], tuned: frozenset[str]) -> dict[str, list[Pair]]:
    """Return pairs by whether train and test are of one data set, and whether defaults were chosen on either."""
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        kind = "in" if pair.train == pair.test else "cross"
        found.setdefault(kind, []).append(pair)
        if not {pair.train, pair.test} & tuned:
            found.setdefault(f"{kind}_untuned", []).append(pair)
    return found


def means(pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """Return every predictor's measures, averaged over pairs with equal weights."""
    names = pairs[0].scores
    return {
        name: {measure: float(np.mean([p.scores[name][measure] for p in pairs])) for measure in MEASURES}
        for name in names
    }


def report(found: Measured, tuned: frozenset[str], chosen: str) -> list[str]:
    """Lay out the means of each group, and tau of every pair."""
    shown = []
    for group, pairs in groups(found.pairs, tuned).items():
        removed = sum(p.removed for p in pairs)
        shown.append(
            f"{group}-distribution, mean of {len(pairs)} pairs, {removed} repeated prompts removed\n"
            + tables.score_table(means(pairs))
        )
    rows = []
    for pair in found.pairs:
        prior, best = best_prior(pair.scores)
        proxy = max((pair.scores[n]["tau"] for n in PROXIES if n in pair.scores), default=None)
        ours = [round(pair.scores[n]["tau"], 3) if n in pair.scores else None for n in (chosen, Tuned.name, "alise")]
        coverage = round(pair.scores[chosen]["coverage_p90"], 3)
        rows.append([pair.train, pair.test, pair.requests, pair.removed, *ours, proxy, best, prior, coverage])
    header = ["learned", "tested", "requests", "removed", f"tau {chosen}", Tuned.name, "alise", "best proxy",
              "best prior", "which", f"P90 cov. {chosen}"]  # fmt: skip
    return [*shown, format_table(header, rows)]


def metrics(found: Measured, tuned: frozenset[str]) -> Flat:
    """Return the measures of every pair and of the means, ours and the others'."""
    by_key = {pair.key: pair.scores for pair in found.pairs}
    by_key |= {f"mean_{group}": means(pairs) for group, pairs in groups(found.pairs, tuned).items()}
    return flat(
        (name, f"pairs.{key}.{tables.key(measure)}", round(values[measure], 4))
        for key, scores in by_key.items()
        for name, values in scores.items()
        for measure in KEPT
    )


def flat(rows: Iterable[tuple[str, str, float]]) -> Flat:
    """Sort rows of a predictor's name, a metric and its value into ours and the others'."""
    ours: dict[str, float] = {}
    others: dict[str, dict[str, float]] = {}
    for name, metric, value in rows:
        if name in OURS:
            ours[f"{name}.{metric}"] = value
        else:
            others.setdefault(name, {})[metric] = value
    return ours, others


def facts(found: Measured, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return what shaped the measurement."""
    return {
        "test_share": TEST_SHARE,
        "bin_tokens": BIN_TOKENS,
        "classes": NUM_CLASSES,
        "tested": {pair.key: pair.requests for pair in found.pairs},
        "removed_as_learned": {pair.key: pair.removed for pair in found.pairs if pair.removed},
        "repeated_in_file": {name: part.data.repeated for name, part in parts.items()},
        "rows_in_file": {name: part.data.rows for name, part in parts.items()},
        "learned": {name: len(part.train) for name, part in parts.items() if part.train is not None},
        "sha256": {name: part.data.sha256 for name, part in parts.items()},
        "fit_s": {name: {n: round(s, 2) for n, s in took.items()} for name, took in found.fit_s.items()},
        "proxy_epochs": found.epochs,
    }


def best_prior(scores: Mapping[str, Mapping[str, float]]) -> tuple[str, float]:
    """Return the prior that ranks best, and its tau."""
    name = max((n for n in PRIORS if n in scores), key=lambda n: scores[n]["tau"])
    return name, scores[name]["tau"]
