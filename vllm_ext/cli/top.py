"""`vllm-ext top URL`: what a running server does, refreshed each second."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_ext.cli.command import Failed, Parser, guarded, need
from vllm_ext.report import common_flags
from vllm_ext.report.scraped import Snapshot, scraped

_GIB = 1 << 30


@dataclass(frozen=True)
class Between:
    """What happened from one moment to the next."""

    before: Snapshot
    now: Snapshot

    def rate(self, name: str, **where: str) -> float:
        """Return how much a counter grew per second."""
        seconds = self.now.at_s - self.before.at_s
        return (self.now.total(name, **where) - self.before.total(name, **where)) / seconds if seconds > 0 else math.nan

    def mean(self, name: str) -> float:
        """Return the mean of what a histogram counted meanwhile; nan of nothing."""
        count, total = (self.rate(f"{name}_{part}") for part in ("count", "sum"))
        return total / count if count > 0 else math.nan


def lines(seen: Between) -> Iterator[tuple[str, str]]:
    """Yield what is shown: a label and its values, only of what the server has."""
    now = seen.now
    if systems := now.by("vllm_ext:system_info", "system"):
        yield "system", ", ".join(systems)
    shown = {
        "running": f"{now.total('vllm:num_requests_running'):.0f}",
        "waiting": f"{now.total('vllm:num_requests_waiting'):.0f}",
        "KV used": _percent(now.total("vllm:kv_cache_usage_perc")),
    }
    yield "requests", "   ".join(f"{name} {value}" for name, value in shown.items())
    if levels := now.by("vllm_ext:num_requests_waiting", "level"):
        yield "waiting by cost", "   ".join(f"{level}: {value:.0f}" for level, value in sorted(levels.items()))
    if not math.isnan(oldest := now.total("vllm_ext:oldest_wait_seconds")):
        share = _percent(now.total("vllm_ext:load_waiting_share"))
        yield "queue", f"oldest waits {oldest:.1f} s   somebody waits {share} of the time"
    yield "served", (f"{seen.rate('vllm:request_success_total'):.1f} requests/s   "
                     f"{seen.rate('vllm:prompt_tokens_total'):.0f} prompt tokens/s   "
                     f"{seen.rate('vllm:generation_tokens_total'):.0f} output tokens/s")  # fmt: skip
    latencies = {
        "TTFT": "vllm:time_to_first_token_seconds", "TBT": "vllm:inter_token_latency_seconds",
        "e2e": "vllm:e2e_request_latency_seconds",
    }  # fmt: skip
    yield "mean latency", "   ".join(f"{label} {_seconds(seen.mean(name))}" for label, name in latencies.items())
    yield from _of_ours(seen)


def _of_ours(seen: Between) -> Iterator[tuple[str, str]]:
    met = seen.now.by("vllm_ext:slo_requests_total", "tier", objective="all", outcome="met")
    every = seen.now.by("vllm_ext:slo_requests_total", "tier", objective="all")
    if every:
        yield (
            "objectives met",
            "   ".join(
                f"{tier or 'no tier'}: {_percent(met.get(tier, 0.0) / count if count else math.nan)} of {count:.0f}"
                for tier, count in sorted(every.items())
            ),
        )
    used = seen.now.by("vllm_ext:kv_tier_used_bytes", "tier")
    capacity = seen.now.by("vllm_ext:kv_tier_capacity_bytes", "tier")
    if used:
        yield "KV tier", "   ".join(f"{tier}: {value / _GIB:.1f} of {capacity.get(tier, math.nan) / _GIB:.1f} GiB"
                                    for tier, value in sorted(used.items()))  # fmt: skip
    reasons = seen.now.by("vllm_ext:preemptions_total", "reason")
    if reasons:
        rates = {reason: seen.rate("vllm_ext:preemptions_total", reason=reason) for reason in sorted(reasons)}
        yield "preemptions/s", "   ".join(f"{reason}: {value:.1f}" for reason, value in rates.items())
    if seen.now.total("vllm_ext:policy_fallbacks_total") > 0:
        failed = seen.now.total("vllm_ext:policy_fallbacks_total")
        yield "policy failed", f"{failed:.0f} steps were first come, first served"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, 2 usage, 3 if the server does not answer at first, 130 after Ctrl-C."""
    return guarded(_parser(), _top, argv)


def _top(args: argparse.Namespace) -> int:
    need("rich")
    url = args.url.rstrip("/")
    try:
        before = scraped(url)
    except (OSError, ValueError) as error:
        raise Failed(f"{url}/metrics: {error}") from error
    if not before.samples:
        raise Failed(f"{url}/metrics: has no metrics")
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    def screen(rows: Iterable[tuple[str, str]], title: str) -> Table:
        table = Table(title=title, show_header=False, title_justify="left", box=None)
        for row in rows:
            table.add_row(*row)
        return table

    console = Console(file=sys.stdout)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        for _ in range(args.times) if args.times else iter(int, 1):
            time.sleep(args.every)
            try:
                now = scraped(url)
            except (OSError, ValueError) as error:  # it may come back
                live.update(screen([("no answer", str(error))], url), refresh=True)
                continue
            live.update(screen(lines(Between(before, now)), url), refresh=True)
            before = now
    return 0


def _parser() -> Parser:
    parser = Parser(prog="vllm-ext top", description="Show what a running server does, refreshed each second.")
    parser.add_argument("url", metavar="URL", help="of the server, such as http://localhost:8000")
    seconds = common_flags.number(lambda value: 0.1 <= value <= 3600, "seconds from 0.1 to 3600")
    parser.add_argument("--every", type=seconds, default=1.0, metavar="S", help="seconds between two (default: 1)")
    parser.add_argument(
        "--times", type=common_flags.at_least(1), metavar="N", help="stop after so many (default: go on)"
    )
    return parser
