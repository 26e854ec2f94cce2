"""README.md is short, and shows what the files in benchmarks/results say."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import headlines  # noqa: E402
import overview_picture  # noqa: E402
import readme_results  # noqa: E402
import result_file  # noqa: E402
import result_tables  # noqa: E402

from vllm_ext.hooks import registry  # noqa: E402
from vllm_ext.report import kept_result, provenance  # noqa: E402

PAGES = readme_results.pages(ROOT)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the results and the README, to be damaged; it is no git checkout."""
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def change(checkout: Path, name: str, part: str, key: str, value: Any) -> None:
    path = checkout / "benchmarks" / "results" / name
    data = json.loads(path.read_text())
    assert key in data[part]
    if value is None:
        del data[part][key]
    else:
        data[part][key] = value
    path.write_text(json.dumps(data))


def test_the_readme_has_at_most_110_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def versions(*features: str) -> set[str]:
    """The versions of vLLM that all hooks of the features are verified with; what is overridden may differ by them."""
    verified = [
        {version.removesuffix(".0") for version in hook.versions}
        for hook in registry.hooks()
        if hook.feature in features and hook.versions and not hook.why.startswith("is overridden")
    ]
    return set.intersection(*verified)


def test_supported_features_are_those_whose_hooks_are_verified() -> None:
    usual = ("flags", "scheduling", "hints", "objectives", "metrics and prediction", "prediction")
    tier, disk, gaps = "KV tier", "KV tier on disk", ("gaps in kept KV", "gaps in kept KV in one step")
    columns = [versions(*usual), versions(tier), versions(tier, disk), versions(*gaps)]
    expected = {version: ["yes" if version in column else "no" for column in columns] for version in versions(*usual)}
    section = (ROOT / "README.md").read_text().split("## Supported")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    assert {version: cells for version, *cells, _tested in rows[2:]} == expected


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_a_page_shows_what_the_results_say(page: Path) -> None:
    """If not: python scripts/readme_results.py."""
    text = page.read_text()
    assert readme_results.rewritten(ROOT, page) == text


def test_the_picture_is_of_the_result() -> None:
    """If not: python scripts/overview_picture.py."""
    assert overview_picture.says(ROOT / overview_picture.PICTURE) == overview_picture.made_of(
        overview_picture.shares(ROOT)
    )


def test_a_value_that_changes_makes_the_picture_stale(checkout: Path) -> None:
    change(checkout, "tuning.json", "metrics", "sharegpt, opt-13b, a100-40 at 0.9.e2e_mean_ms", 11135.0)
    drawn = overview_picture.says(ROOT / overview_picture.PICTURE)
    assert drawn != overview_picture.made_of(overview_picture.shares(checkout))


def test_a_picture_says_what_it_was_made_of(tmp_path: Path) -> None:
    shown = {server: [[0.9, 1.0], [0.8, 1.1], [0.7, 1.2]] for server in overview_picture.shares(ROOT)}
    overview_picture.draw(shown, tmp_path / "a.svg")
    assert overview_picture.says(tmp_path / "a.svg") == overview_picture.made_of(shown)


def test_a_value_that_changes_makes_the_readme_stale(checkout: Path) -> None:
    change(checkout, "compare_memory.json", "metrics", "load_2.preemptions", 31.0)
    made = readme_results.rewritten(checkout, checkout / "README.md")
    assert "**31** (`past-future`)" in made
    assert made != (checkout / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "part", "key"),
    [
        ("compare_memory.json", "metrics", "load_2.preemptions"),
        ("compare_memory.json", "config", "requests_per_run"),
        ("repro/accelgen-fig11.json", "config", "seeds"),
    ],
)
def test_an_absent_metric_is_named_with_its_file(checkout: Path, name: str, part: str, key: str) -> None:
    change(checkout, name, part, key, None)
    with pytest.raises(result_file.Unshown, match=rf"benchmarks/results/{name} has no .*'{key}'"):
        readme_results.rewritten(checkout, checkout / "README.md")


def test_an_absent_file_is_named(checkout: Path) -> None:
    (checkout / "benchmarks" / "results" / "compare_memory.json").unlink()
    with pytest.raises(result_file.Unshown, match=r"benchmarks/results/compare_memory.json can't be read"):
        readme_results.rewritten(checkout, checkout / "README.md")


def test_a_run_whose_noise_is_as_large_is_no_headline(checkout: Path) -> None:
    path = checkout / "benchmarks" / "results" / "compare_memory.json"
    data = json.loads(path.read_text())
    data["baselines"]["upstream, again"]["load_2.preemptions"] = 300.0
    path.write_text(json.dumps(data))
    with pytest.raises(result_file.Unshown, match=r"ranks nothing: the effect is 41.5, and its A/A pair differs by 92"):
        headlines.preemptions(checkout)


@pytest.mark.parametrize("make", headlines.HEADLINES, ids=lambda make: make.__name__)
def test_no_headline_comes_from_a_run_that_ranks_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of the table was compared with an A/A pair."""
    compared: list[tuple[float, float]] = []
    monkeypatch.setattr(
        result_file.Result, "check_ranks", lambda result, effect, noise: compared.append((effect, noise))
    )
    make(ROOT)
    assert len(compared) == 1
    assert compared[0][0] > compared[0][1] >= 0


def test_an_order_that_seeds_alone_explain_is_not_shown(checkout: Path) -> None:
    path = checkout / "benchmarks" / "results" / "tuning.json"
    data = json.loads(path.read_text())
    again = data["baselines"]["vLLM, other seeds"]
    data["baselines"]["vLLM, other seeds"] = {key: 2 * value for key, value in again.items()}
    path.write_text(json.dumps(data))
    with pytest.raises(result_file.Unshown, match="ranks nothing"):
        headlines.order(checkout)


def test_the_gain_of_a_tuned_server_is_what_the_result_says(checkout: Path) -> None:
    """Half of vLLM's latency in every cell, beside vLLM with the same flags."""
    path = checkout / "benchmarks" / "results" / "tuning.json"
    data = json.loads(path.read_text())
    data["metrics"] = {key: value / 2 for key, value in data["baselines"]["vLLM"].items()}
    data["baselines"]["vLLM, flags of ours tuned"] = {
        key: value / 1.6 for key, value in data["baselines"]["vLLM"].items()
    }
    path.write_text(json.dumps(data))
    found = headlines.order(checkout)
    assert found.ours.startswith("**0.50 / 0.50** times vLLM's")
    assert found.baseline.endswith("0.62 / 0.62 (vLLM, the flags found for ours)")
    assert "P99 0.50 / 0.50 times" in found.note


def test_objectives_are_shown_only_with_an_interval_over_seeds(checkout: Path) -> None:
    path = checkout / "benchmarks" / "results" / "repro" / "accelgen-fig11.json"
    data = json.loads(path.read_text())
    for claim in data["claims"]:
        claim.pop("interval", None)
    path.write_text(json.dumps(data))
    with pytest.raises(result_file.Unshown, match=r"has no claim .*ours / vLLM 0\.32 tuned.* of several seeds"):
        headlines.objectives(checkout)


def test_a_command_of_two_lines_is_shown_once() -> None:
    block = readme_results.readme_block(ROOT)
    assert block.count("comparisons.py memory") == 1


KEPT = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
KEPT = [path for path in KEPT if not {kept_result.FULL, "device"} & {*path.parts}]
"""Those of the check of a GPU have a form of their own (docs/gpu.md)."""


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_a_commit_repeats_each_kept_result(path: Path) -> None:
    assert provenance.misnamed(json.loads(path.read_text()), ROOT) is None


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_git_keeps_no_details_of_a_result(path: Path) -> None:
    """Else: write it with --out, or copy it with `kept_result.write`."""
    text = path.read_text()
    assert kept_result.kept(json.loads(text)) == text
    assert "details" not in json.loads(text)


def test_a_command_is_shown_without_what_belongs_to_the_machine_that_ran_it(checkout: Path) -> None:
    ran = "python benchmarks/x.py --dataset ../data/a.jsonl.gz --keep cells --quick --out results/x.json"
    path = checkout / "benchmarks" / "results" / "x.json"
    path.write_text(json.dumps({"command": ran}))
    assert result_file.Result(checkout, "x.json").command == "python benchmarks/x.py --dataset a.jsonl.gz --quick"


@pytest.mark.parametrize(
    "text", ["[]", '{"command": "a \'"}', '{"claims": null}', '{"metrics": {"a": NaN}}', '{"goals": []}']
)
def test_what_is_no_result_is_named(checkout: Path, text: str) -> None:
    (checkout / "benchmarks" / "results" / "x.json").write_text(text)
    with pytest.raises(result_file.Unshown, match=r"^benchmarks/results/x.json can't be read: "):
        result_file.Result(checkout, "x.json")


@pytest.mark.parametrize("name", result_tables.TABLES)
def test_every_table_is_on_a_page_and_has_a_header(name: str) -> None:
    assert any(f"<!-- table: {name} -->" in page.read_text() for page in PAGES)
    lines = result_tables.TABLES[name](ROOT).splitlines()
    assert len(lines) > 3
    assert {line.count(" |") for line in lines[2:]} == {lines[0].count(" |")}


def test_a_readme_without_the_block_is_refused(checkout: Path) -> None:
    (checkout / "README.md").write_text("# Nothing\n")
    with pytest.raises(result_file.Unshown, match=r"README.md has blocks \[\], not one of results"):
        readme_results.rewritten(checkout, checkout / "README.md")


def test_an_unknown_table_is_refused_with_the_known_ones(checkout: Path) -> None:
    page = checkout / "docs" / "results" / "new.md"
    page.parent.mkdir(parents=True)
    page.write_text("<!-- table: speed -->\n<!-- table: end -->\n")
    with pytest.raises(result_file.Unshown, match=r"docs/results/new.md: there is no table 'speed', only objectives, "):
        readme_results.rewritten(checkout, page)


def test_goals_that_were_missed_are_always_shown(checkout: Path) -> None:
    """All of a few goals; of many, those that were missed."""
    page = checkout / "docs" / "results" / "new.md"
    few = readme_results.measured_block(checkout, "compare_memory.json", page)
    many = readme_results.measured_block(checkout, "step_overhead.json", page)
    assert (few.count("| met |"), few.count("**missed**")) == (1, 1)
    claims = json.loads((checkout / "benchmarks" / "results" / "step_overhead.json").read_text())["claims"]
    missed = sum(not claim["met"] for claim in claims)
    assert 0 < missed < len(claims)
    assert (many.count("| met |"), many.count("**missed**")) == (0, missed)


def test_check_writes_nothing_and_fails_on_a_stale_page(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(checkout, "compare_memory.json", "metrics", "load_2.preemptions", 31.0)
    before = (checkout / "README.md").read_text()
    monkeypatch.setattr(readme_results, "ROOT", checkout)
    monkeypatch.setattr(sys, "argv", ["readme_results.py", "--check"])
    assert readme_results.main() == 1
    assert "out of date: README.md" in capsys.readouterr().err
    assert (checkout / "README.md").read_text() == before
    monkeypatch.setattr(sys, "argv", ["readme_results.py"])
    assert readme_results.main() == 0
    monkeypatch.setattr(sys, "argv", ["readme_results.py", "--check"])
    assert readme_results.main() == 0
