"""One place says which versions of vLLM are supported; hooks, installers and pages name no others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_ext.hooks import registry, versions
from vllm_ext.hooks.patch import Hook
from vllm_ext.simulation.recorded import forced_length, recorder

ROOT = Path(__file__).parents[2]
HOOKS = (*registry.hooks(), forced_length.PATCH, recorder.PATCH)


@pytest.mark.parametrize("hook", HOOKS, ids=[hook.target.partition(":")[2] for hook in HOOKS])
def test_a_hook_is_verified_with_supported_versions_only(hook: Hook) -> None:
    assert [version for version in hook.versions if version not in versions.SUPPORTED] == []


def test_the_last_three_minor_releases_are_supported() -> None:
    newest = Version(versions.SUPPORTED[-1])
    assert tuple(f"{newest.major}.{newest.minor - age}.0" for age in (2, 1, 0)) == versions.SUPPORTED


def test_the_text_names_the_first_and_the_last() -> None:
    assert versions.TEXT == "0.31 to 0.33"


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_an_extra_installs_supported_versions_only(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = project["optional-dependencies"][extra]
    oldest, newest = Version(versions.SUPPORTED[0]), Version(versions.SUPPORTED[-1])
    supported = f">={oldest.major}.{oldest.minor},<{newest.major}.{newest.minor + 1}"
    assert Requirement(requirement).specifier == SpecifierSet(supported) == SpecifierSet(">=0.31,<0.34")


def test_the_readme_names_the_supported_versions() -> None:
    assert f"and vLLM {versions.TEXT}." in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_of_tested_versions_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "results" / "versions.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)) == versions.SUPPORTED
