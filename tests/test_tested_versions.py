"""What is kept of a run of the tests: outcomes by area, of a report that is one."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import tested_versions

from tests.support.upstream import INSTALLED, WITHOUT
from vllm_ext.patches import output_handler

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.kv.test_tier" name="a"/>
<testcase classname="tests.kv.disk.test_files" name="b"><skipped/></testcase>
<testcase classname="tests.e2e.test_serve" name="c"><failure/></testcase>
<testcase classname="tests.e2e.test_serve" name="d"><error/></testcase>
<testcase classname="tests.systems.test_alise.TestOrder" name="e"/>
<testcase classname="tests.test_config" name="f"/>
</testsuite></testsuites>"""


def test_outcomes_are_counted_by_area(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    assert tested_versions.counted(tested_versions.outcomes(tmp_path / "junit.xml")) == {
        ("KV", "passed"): 1,
        ("KV", "skipped"): 1,
        ("engines and servers", "failed"): 2,
        ("scheduling", "passed"): 1,
        ("tools", "passed"): 1,
    }


def test_a_later_report_replaces_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "first.xml").write_text(REPORT)
    cases = '<testcase classname="tests.e2e.test_serve" name="c"/><testcase classname="tests.kv.test_new" name="g"/>'
    (tmp_path / "again.xml").write_text(f"<testsuites>{cases}</testsuites>")
    made = tested_versions.result([tmp_path / "first.xml", tmp_path / "again.xml"], "CPU")
    assert made.metrics["engines and servers.passed_tests"] == 1
    assert made.metrics["engines and servers.failed_tests"] == 1
    assert made.workload.rows == 7


@pytest.mark.parametrize("text", ["no report", "<testsuites/>"])
def test_a_file_that_tells_nothing_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "junit.xml").write_text(text)
    assert tested_versions.main([str(tmp_path / "junit.xml")]) == 2
    assert "junit.xml: must " in capsys.readouterr().err


def test_a_result_names_version_python_and_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    assert tested_versions.main([str(tmp_path / "junit.xml"), "--out", str(tmp_path / "out.json")]) == 0
    capsys.readouterr()
    made = json.loads((tmp_path / "out.json").read_text())
    assert made["config"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert made["config"]["device"] == "CPU"
    assert made["metrics"]["engines and servers.failed_tests"] == 2
    assert made["workload"]["rows"] == 6


def test_a_result_names_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    assert tested_versions.result([tmp_path / "junit.xml"], "CPU").config["without"] == sorted(WITHOUT[INSTALLED])
    monkeypatch.setattr(output_handler, "HOOKS", [dataclasses.replace(output_handler.HOOKS[0], verified={"0.0.1": ""})])
    without = tested_versions.result([tmp_path / "junit.xml"], "CPU").config["without"]
    assert without == sorted({*WITHOUT[INSTALLED], output_handler.HOOKS[0].feature})


def test_every_folder_of_tests_with_an_area_exists() -> None:
    folders = {path.name for path in (Path(__file__).parent).iterdir() if path.is_dir()}
    assert tested_versions.AREAS.keys() <= folders
