"""What hosts and tools read of the project: workflows, forms, pre-commit's hooks, the citation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in load(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_the_makefile_has(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [name for step in steps(path) for name in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))]
    assert called
    assert set(called) <= targets


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_supported_pythons_and_named_actions(path: Path) -> None:
    text = path.read_text()
    pythons = re.findall(r"\"(3\.\d+)\"", text)
    assert pythons
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in pythons)
    assert all(
        re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]) for step in steps(path) if "uses" in step
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_may_only_read_unless_it_says_more_and_never_runs_for_ever(path: Path) -> None:
    assert load(path)["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 330 for job in load(path)["jobs"].values())


def test_everything_that_the_host_reads_is_yaml_with_content() -> None:
    files = list((ROOT / ".github").rglob("*.yml"))
    assert {"dependabot", "config"} <= {path.stem for path in files}
    assert [path.name for path in files if not load(path)] == []


def test_updates_are_looked_for_where_the_pins_are() -> None:
    updates = {
        one["package-ecosystem"]: one["directory"] for one in load(ROOT / ".github" / "dependabot.yml")["updates"]
    }
    assert updates.keys() == {"github-actions", "pip"}
    assert list((ROOT / updates["pip"].strip("/")).glob("*.txt"))


def test_every_python_of_the_classifiers_is_allowed() -> None:
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert named
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in named)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_have_what_github_asks_of_them(path: Path) -> None:
    form = load(path)
    assert form["name"]
    assert form["description"]
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    ids = [part["id"] for part in asked]
    assert len(ids) == len(set(ids))
    assert all(part["attributes"]["label"] for part in asked)
    assert all(isinstance(part.get("validations", {}).get("required", False), bool) for part in asked)


def test_a_bug_comes_with_the_doctors_report() -> None:
    body = load(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")["body"]
    (doctor,) = (part for part in body if "doctor --json" in part["attributes"]["label"])
    assert doctor["validations"]["required"]


def test_pre_commits_ruff_is_the_one_of_make_lint() -> None:
    hooks = {repo["repo"].rpartition("/")[2]: repo for repo in load(ROOT / ".pre-commit-config.yaml")["repos"]}
    pin = re.search(r"^ruff==(\S+)", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)
    assert pin is not None
    assert hooks["ruff-pre-commit"]["rev"] == f"v{pin[1]}"


def test_the_citation_has_the_version_and_the_licence() -> None:
    import vllm_ext

    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == vllm_ext.__version__
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "title", "message", "authors"} <= citation.keys()
