"""What is shown of a duel."""

from __future__ import annotations

import numpy as np

from vllm_ext.compare.duel import BURSTS, Duel
from vllm_ext.compare.observed import Observed
from vllm_ext.simulation.workloads.build import build

COUNT = 40


def served(e2e_s: object) -> Observed:
    latencies = np.broadcast_to(np.asarray(e2e_s, float), COUNT)
    return Observed(
        arrival_s=np.arange(COUNT), ttft_s=latencies / 4, e2e_s=latencies, longest_gap_s=latencies / 8,
        output_tokens=np.arange(10.0, 10.0 + COUNT), prompt_tokens=np.arange(100.0, 100.0 + COUNT),
        on_time=np.full(COUNT, np.nan),
    )  # fmt: skip


def test_both_stand_side_by_side_with_how_many_times_better_the_second_is() -> None:
    rows = {row[0]: row[1:] for row in Duel("alise", served(1.0), served(2.0)).table().rows}
    assert rows["mean e2e (s)"] == [2.0, 1.0, "2.00 (2.00..2.00)"]
    assert rows["P90 TTFT (s)"] == [0.5, 0.25, "2.00 (2.00..2.00)"]


def test_who_pays_is_named_and_so_is_nobody() -> None:
    slow_long = np.where(np.arange(COUNT) < 30, 1.0, 3.0)
    *_, paying = Duel("alise", served(slow_long), served(2.0)).words()
    assert "outputs of 41 to 49 tokens: mean end-to-end latency 1.50 times as long" in paying
    *_, paying = Duel("alise", served(1.0), served(2.0)).words()
    assert paying == "Who pays with alise: nobody by more than 5 %"


def test_the_clock_and_the_load_are_named() -> None:
    what, *_ = Duel("alise", served(1.0), served(2.0)).words()
    assert what.startswith(f"The same {COUNT} requests in bursts on both, 25 a second")
    assert "opt-13b on an a100-40" in what
    assert len(list(build(BURSTS).start())) == BURSTS.num_requests
