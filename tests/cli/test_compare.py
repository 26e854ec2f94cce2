"""`vllm-ext compare`, with servers that exist on paper."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.paper_servers import Paper
from vllm_ext.cli import compare

FAST = ["--dataset", "fixed:20:8", "--requests", "60", "--loads", "0.9", "--precision", "2"]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Paper:
    made = Paper(noise=0.002)
    monkeypatch.setattr(compare, "_backend", lambda *_: made)
    return made


def run(tmp_path: Path, *flags: str) -> int:
    return compare.main(["model", "--cells", str(tmp_path / "cells"), *FAST, *flags])


def test_a_faster_server_is_named_with_its_flags(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.slower["alise"] = 0.7
    out, html = tmp_path / "compare.json", tmp_path / "compare.html"
    assert run(tmp_path, "--out", str(out), "--html", str(html), "--", "--max-model-len", "2048") == 0
    said = capsys.readouterr().err.splitlines()
    line = next(one for one in said if one.startswith("alise at 0.9"))
    assert "better, times: mean e2e " in line
    assert "  set these flags: --scheduler-cls alise" in said
    result = json.loads(out.read_text())
    assert result["config"]["servers"]["upstream, again"] == []
    assert result["config"]["flags_of_all"] == ["--max-model-len", "2048"]
    assert result["command"].endswith("-- --max-model-len 2048")
    page = html.read_text(encoding="utf-8")
    assert page.count("<svg") == 6
    assert "KV in use" in page
    assert "Not drawn" not in page
    assert "alise at 0.9" in page
    verdicts = {one["measure"]: one["kind"] for one in result["config"]["verdicts"]}
    assert verdicts["mean e2e"] == "better"
    assert result["baselines"]["upstream"]["load_0.9.mean e2e"] > result["metrics"]["load_0.9.mean e2e"]


def test_what_a_server_without_metrics_did_is_drawn_as_its_client_saw_it(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "a") == 1
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["0.9", "upstream", "2", "0", "3"] in [row[:5] for row in rows], "preemptions follow repeats and failures"
    backend.has_metrics, html = False, tmp_path / "compare.html"
    assert run(tmp_path / "b", "--html", str(html)) == 1
    assert "Not drawn" not in (page := html.read_text(encoding="utf-8"))
    assert "running" in page
    assert "KV in use" not in page


def test_where_hardly_anybody_waits_it_is_said(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "a") == 1
    assert "hardly a queue" not in capsys.readouterr().err, "somebody waits in every second moment"
    backend.waiting = [0, 0]
    assert run(tmp_path / "b") == 1
    assert "somebody waits 0% of the time: there is hardly a queue to order" in capsys.readouterr().err


def test_classes_of_service_are_judged_apart(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = [{"name": "patient", "e2e": {"base_s": 1e6}}, {"name": "hurried", "e2e": {"base_s": 1e-6}}]
    html = tmp_path / "compare.html"
    assert run(tmp_path, "--set", f"workload.tiers={json.dumps(tiers)}", "--html", str(html)) == 1
    page = html.read_text(encoding="utf-8")
    (table,) = re.findall(r"share that met all of its objectives, by class.*?</table>", page, re.DOTALL)
    cells = re.findall(r"<td[^>]*>\s*([^<]*?)\s*</td>", table)
    assert cells[:4] == ["0.9", "upstream", "0", "1"]


def test_a_slower_one_is_not_recommended_and_who_pays_is_said(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.slower["alise"] = 1.3
    assert run(tmp_path) == 1
    said = capsys.readouterr().err
    assert "worse, times: mean e2e " in said
    assert "set these flags" not in said


def test_a_server_that_is_faster_as_it_refuses_requests_is_not_better(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.slower["alise"] = 0.5
    backend.refuses["alise"] = 2
    assert run(tmp_path) == 1
    said = capsys.readouterr().err
    assert "60 requests failed, more than on the baseline; of the others: better, times: mean e2e" in said
    assert "set these flags" not in said
    backend.refuses |= {"upstream": 2, "upstream, again": 2}
    assert run(tmp_path / "both") == 0, "who is refused by all is left out of all"
    backend.refuses = {"alise": 1}
    assert run(tmp_path / "all") == 3
    assert re.search(r"alise at 0.9 \(.* requests/s\): it answered no request", capsys.readouterr().err)


def test_equal_ones_differ_by_nothing_that_is_seen(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 1
    assert "no difference seen" in capsys.readouterr().err


def test_a_server_that_fails_is_told_and_the_status_says_incomplete(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.dies.add("sarathi")
    assert run(tmp_path, "--systems", "upstream,alise,sarathi") == 3
    said = capsys.readouterr().err
    assert "sarathi failed: it ended" in said
    assert "alise at 0.9" in said


def test_a_baseline_that_fails_ends_it_in_a_line(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.dies.add("upstream")
    assert run(tmp_path) == 3
    assert capsys.readouterr().err.startswith("vllm-ext compare: the baseline failed: it ended")


def test_an_interruption_reports_what_there_is(
    backend: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = backend.served

    def interrupted(*_: object) -> None:
        if len(served) > 7:
            raise KeyboardInterrupt

    monkeypatch.setattr("vllm_ext.compare.rounds._precise", lambda *_: interrupted() or False)
    assert run(tmp_path) == 3
    said = capsys.readouterr().err
    assert "stopped: interrupted" in said
    assert "alise at 0.9" in said


def test_runs_of_another_trace_or_version_are_not_taken_for_ones_own(
    backend: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl"

    def compared(tokens: int) -> int:
        before = len(backend.starts)
        trace.write_text(
            "".join(f'{{"prompt_tokens": 9, "output_tokens": {tokens}, "timestamp": {n}}}\n' for n in range(99))
        )
        assert run(tmp_path, "--trace", str(trace)) == 1
        return len(backend.starts) - before

    assert compared(4) > 0
    assert compared(4) == 0
    assert compared(5) > 0
    monkeypatch.setattr(compare.results, "versions", lambda: {"vllm": "another"})
    assert compared(5) > 0


def test_runs_that_servers_may_have_made_with_other_flags_are_told(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = ["--url", "A=http://one", "--url", "B=http://two", "--cells", str(tmp_path / "cells"), *FAST]
    assert compare.main(servers) == 1
    assert "earlier command" not in capsys.readouterr().err
    assert compare.main(servers) == 1
    assert "6 of 6 runs are of an earlier command: if a server was restarted since" in capsys.readouterr().err


def test_objectives_are_judged_where_there_are_some(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.slower["alise"] = 0.5
    assert run(tmp_path, "--slo", "e2e=0.3") == 0
    assert "on time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--systems", "upstream"], "--systems, --server: must name at least two servers, the baseline first"),
        (["--systems", "upstream,alis"], "vllm_ext.system='alis': one of fcfs"),
        (["--systems", "upstream,alise,alise"], "alise: must be a name of one server only"),
        (["--server", "upstream=--max-num-seqs 4"], "upstream: must be a name of one server only"),
        (["--server", "upstream, again=--seed 1"], "upstream, again: must be a name of one server only"),
        (["--server", "a/b=--seed 1"], "a/b: must be a name of one server only, without /"),
        (["--server", "x=--a 'b"], "x=--a 'b: No closing quotation"),
        (["--url", "A=http://127.0.0.1:1"], "--url: servers that run have their flags"),
        (["--server", "x"], "x: must be NAME=VALUE"),
        (["--loads", "0"], "0: must be numbers above 0"),
        (["--precision", "x"], "x: must be a number above 0"),
        (["--set", "a"], "--set a: must be PATH=JSON"),
        (["--set", "engine.seed=1"], "--set engine.seed: must begin with one of workload., hardware., cost."),
        (["--set", "workload.num_requests=5", "--set", "workload.num_requests=6"], "is set by another flag already"),
        (["--dataset", "nothing.jsonl"], "nothing.jsonl"),
    ],
)
def test_what_is_wrong_is_named_in_a_line(
    backend: Paper, tmp_path: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run(tmp_path, *flags)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0
    assert status == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert backend.starts == []


def test_tenants_who_pay_are_named_if_they_send_enough(
    backend: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everybody waits longer, so that each tenant with twenty requests does; who sends less is not looked at."""
    backend.slower["alise"] = 1.5
    log = tmp_path / "requests.jsonl"
    names = ["a" * 32, "b" * 32]
    log.write_text("".join(
        json.dumps({"arrival_unix_s": float(at), "prompt_tokens": 9, "output_tokens": 4, "conversation_id": None,
                    "salt_tag": "c" * 32 if at % 30 == 0 else names[at % 2]}) + "\n"
        for at in range(240)
    ))  # fmt: skip
    assert run(tmp_path, "--trace", str(log)) == 1
    said = capsys.readouterr().err
    assert "who pays: tenant aaaaaaaaaaaa: mean end-to-end latency" in said
    assert "tenant bbbbbbbbbbbb:" in said
    assert "tenant cccc" not in said
