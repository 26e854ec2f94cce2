"""What `vllm serve` says of options of ours that are not allowed: one line, with the flag, and exit status 2."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from vllm_ext.hooks import registry
from vllm_ext.patches import scheduler_reliances

SYSTEM = ["--scheduler-cls", "alise"]


def options(**values: object) -> list[str]:
    return [*SYSTEM, "--additional-config", json.dumps({"vllm_ext": values})]


BAD = {
    "unknown system": (["--scheduler-cls", "nonsense"], ["--scheduler-cls nonsense: one of fcfs,"]),
    "system that is almost right": (["--scheduler-cls", "alies"], ["--scheduler-cls alies:", "did you mean 'alise'?"]),
    "composition of two orders": (
        ["--scheduler-cls", "alise+accelgen"],
        ["alise+accelgen:", "both set"],
    ),
    "oracle in a server": (["--scheduler-cls", "oracle-alise"], ["--scheduler-cls oracle-alise:", "offline"]),
    "no system": (["--kv-tier-gib", "1"], ["add --scheduler-cls NAME, one of fcfs,"]),
    "two systems": (options(system="fcfs"), ["vllm_ext.system='fcfs': contradicts --scheduler-cls alise"]),
    "bits": ([*SYSTEM, "--kv-tier-bits", "4"], ["--kv-tier-bits 4: must be one of 16, 8"]),
    "gib": ([*SYSTEM, "--kv-tier-gib", "-1"], ["--kv-tier-gib -1.0: must be a number of GiB of at least 0, or auto"]),
    "gib that is not a number": ([*SYSTEM, "--kv-tier-gib", "nan"], ["--kv-tier-gib nan: must be a number of GiB of"]),
    "gib that is a word": ([*SYSTEM, "--kv-tier-gib", "much"], ["--kv-tier-gib much: must be a number of GiB of"]),
    "admin without a tier": ([*SYSTEM, "--kv-tier-admin"], ["--kv-tier-admin: needs kv_tier.gib"]),
    "kernel": (
        [*SYSTEM, "--ext-attention-kernel", "ours"],
        ["--ext-attention-kernel ours: must be one of stock, own, auto"],
    ),
    "TTFT": ([*SYSTEM, "--ttft-slo-ms", "0"], ["--ttft-slo-ms 0.0: must be greater than 0"]),
    "TBT": (
        [*SYSTEM, "--tbt-slo-ms", "0x"],
        ["--tbt-slo-ms 0x: must be a number of milliseconds greater than 0, or a multiple of a decode step such as"],
    ),
    "TBT by a step of unknown time": (
        [*SYSTEM, "--tbt-slo-ms", "5x"],
        ["--tbt-slo-ms 5x: needs measured step times: run `vllm-ext profile` with this server's flags and add"],
    ),
    "TBT of a class by a step of unknown time": (
        options(slo={"classes": {"chat": {"tbt_ms": "25x"}}}),
        ["vllm_ext.slo.classes.chat.tbt_ms='25x': needs measured step times"],
    ),
    "TTFT twice": (
        [*SYSTEM, "--ttft-slo-ms", "5", "--ttft-slo-bucket-ms", "1,2"],
        ["--ttft-slo-bucket-ms 1.0,2.0: must not be given beside ttft_ms"],
    ),
    "shedding without metrics": (
        [*SYSTEM, "--ext-shed", "--ext-metrics-interval-s", "0"],
        ["--ext-shed: needs metrics_interval_s greater than 0"],
    ),
    "sources": (
        [*SYSTEM, "--ext-prediction-sources", "hint,histry"],
        ["must be one of hint, retrieval, history, oracle", "did you mean 'history'?"],
    ),
    "a source twice": (
        [*SYSTEM, "--ext-prediction-sources", "hint,hint"],
        ["--ext-prediction-sources hint,hint: must name each source once"],
    ),
    "threads": (
        [*SYSTEM, "--ext-predictor-threads", "0"],
        ["--ext-predictor-threads 0: must be greater than or equal"],
    ),
    "what to optimise under a system that has no such thing": (
        ["--scheduler-cls", "sarathi", "--ext-optimise", "mean"],
        ["--ext-optimise mean: no parameter of sarathi", "systems that have it: alise"],
    ),
    "American what to optimise": (
        ["--scheduler-cls", "fcfs", "--ext-optimize", "tail"],
        ["--ext-optimise tail: no parameter of fcfs"],
    ),
    "whose turn": (
        ["--scheduler-cls", "fair", "--ext-share-by", "colour"],
        ["--ext-share-by colour:", "tag, salt, adapter, key"],
    ),
    "token memory": ([*SYSTEM, "--ext-token-memory", "-1"], ["--ext-token-memory -1: must be greater than or equal"]),
    "response store": ([*SYSTEM, "--ext-response-store", "-1"], ["--ext-response-store -1: must be greater than or"]),
    "modules": ([*SYSTEM, "--ext-modules", "a/b.py"], ["must be a dotted Python module name"]),
    "module that is not there": ([*SYSTEM, "--ext-modules", "no_such_module"], ["a module that can be imported"]),
    "policy file": (["--ext-policy", "nowhere.py:Mine"], ["--ext-policy nowhere.py:Mine:", "a file that can be read"]),
    "unknown option": (options(kv_teir={}), ["vllm_ext.kv_teir={}: unknown option", "did you mean 'kv_tier'?"]),
    "key that is near to ours": (
        ["--additional-config", '{"vllm-ext": {"system": "alise"}}'],
        ["vllm-ext={'system': 'alise'}: unknown key", "did you mean 'vllm_ext'?"],
    ),
    "option of a wrong type": (options(kv_tier=3), ["vllm_ext.kv_tier=3: must be an object"]),
    "another connector": (
        [
            *SYSTEM,
            "--kv-tier-gib",
            "1",
            "--kv-transfer-config",
            '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}',
        ],
        ["--kv-tier-gib 1.0: not beside --kv-transfer-config"],
    ),
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """The parser of an engine, with our flags."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    registry.install("base")
    made: argparse.ArgumentParser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    return made


@pytest.mark.parametrize(("arguments", "said"), BAD.values(), ids=BAD)
def test_bad_option_is_one_line_and_exit_status_2(
    parser: argparse.ArgumentParser, arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm serve: ")
    assert [part for part in said if part not in line] == []
    assert len(line) < 700


@pytest.mark.parametrize("num_changed", [1, 3])
def test_a_vllm_that_was_not_verified_is_one_line(
    parser: argparse.ArgumentParser,
    num_changed: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hooks = scheduler_reliances.HOOKS
    changed = tuple(dataclasses.replace(hook, verified={"0.0.1": "0" * 16}) for hook in hooks[:num_changed])
    monkeypatch.setattr(scheduler_reliances, "HOOKS", (*changed, *hooks[num_changed:]))
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(SYSTEM)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm serve: {hooks[0].target} is not the verified one")
    assert "install a verified version of vLLM (0.0.1), or leave out --scheduler-cls" in line
    assert line.endswith("(2 more: `vllm-ext doctor`)") == (num_changed > 1)


def test_good_options_pass(parser: argparse.ArgumentParser) -> None:
    found = parser.parse_args([*SYSTEM, "--ext-optimize", "tail", "--kv-tier-gib", "1", "--kv-tier-bits", "8"])
    assert (found.ext_optimise, found.kv_tier_bits) == (1.0, 8)
    assert "ext_optimise" not in parser.parse_args([]), "help shows no default of its own"
