#!/usr/bin/env python3
"""Keep what a run of the tests says of a version of vLLM: how many passed, by area, and what can't be had with it.

The table of versions shows it.

    make test ARGS="-n 2 --dist=loadfile --junitxml=junit.xml"
    python scripts/tested_versions.py junit.xml

Of several reports, a later one replaces what an earlier one says of the same test. It writes
benchmarks/results/tested/VLLM-pyPYTHON-DEVICE.json, of the environment whose Python calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from vllm_ext.hooks import registry
from vllm_ext.report.provenance import RESULTS
from vllm_ext.report.results import Result, Workload, emit, versions

ROOT = Path(__file__).resolve().parent.parent
TESTED = "tested"
"""Folder of results below `RESULTS`."""
AREAS: Mapping[str, str] = {
    **dict.fromkeys(
        ("conformance", "contract", "prediction", "scheduling", "slo", "step_time", "systems"), "scheduling"
    ),
    **dict.fromkeys(("attention", "kernels", "kv", "token_memory"), "KV"),
    **dict.fromkeys(("hooks", "patches", "launch"), "hooks"),
    **dict.fromkeys(("e2e", "admin", "predictor", "cluster", "routing"), "engines and servers"),
}
"""Folder of tests -> area; the rest are the tools."""
REST = "tools"
OUTCOMES = ("passed", "failed", "skipped")


def outcomes(junit: Path) -> dict[tuple[str, str], str]:
    """Return the outcome of each test of a report, by where it is and its name.

    Raises:
        ValueError: the file is no report of pytest, or has no test.
    """
    try:
        cases = list(ElementTree.parse(junit).iter("testcase"))
    except ElementTree.ParseError as error:
        raise ValueError(f"{junit}: must be what pytest --junitxml writes: {error}") from error
    if not cases:
        raise ValueError(f"{junit}: must have tests, has none")
    found = {}
    for case in cases:
        outcome = "skipped" if case.find("skipped") is not None else "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        found[case.get("classname", ""), case.get("name", "")] = outcome
    return found


def counted(found: Mapping[tuple[str, str], str]) -> Counter[tuple[str, str]]:
    """Return how many tests of each area had each outcome."""
    return Counter((_area(place), outcome) for (place, _), outcome in found.items())


def _area(place: str) -> str:
    folder, _, _ = place.partition("tests.")[2].partition(".")
    return AREAS.get(folder, REST)


def result(reports: Sequence[Path], device: str) -> Result:
    """Return the counts as a result, with the features whose hooks don't fit the vLLM installed."""
    found = counted({test: outcome for report in reports for test, outcome in outcomes(report).items()})
    areas = sorted({area for area, _ in found})
    metrics = {f"{area}.{outcome}_tests": float(found[area, outcome]) for area in areas for outcome in OUTCOMES}
    vllm = versions().get("vllm", "none").partition("+")[0]
    return Result(
        name="tested_versions",
        command="python scripts/tested_versions.py junit.xml",
        config={
            "vllm": vllm,
            "python": platform.python_version(),
            "device": device,
            "areas": areas,
            "without": sorted({hook.feature for hook in registry.report() if hook.status != "verified"}),
        },
        seed=0,
        workload=Workload(
            name="tests",
            rows=sum(found.values()),
            sha256=hashlib.sha256(b"".join(one.read_bytes() for one in reports)).hexdigest(),
        ),
        metrics=metrics,
    )


def main(argv: Sequence[str]) -> int:
    """Read the report, write the result."""
    parser = argparse.ArgumentParser(description="Keep how many tests passed with the vLLM that is installed.")
    parser.add_argument("reports", type=Path, nargs="+", metavar="junit.xml", help="what pytest --junitxml wrote")
    parser.add_argument("--device", default="CPU", help="what engines ran on (default: CPU)")
    parser.add_argument("--out", type=Path, help="default: the file of this version in benchmarks/results")
    args = parser.parse_args(argv)
    try:
        made = result(args.reports, args.device)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    minor = ".".join(platform.python_version_tuple()[:2])
    out = args.out or ROOT / RESULTS / TESTED / f"{made.config['vllm']}-py{minor}-{args.device.lower()}.json"
    emit(made, [], out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
