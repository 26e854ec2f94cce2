"""LoRA with a place for one adapter, and three adapters and the base model asked for at once, while blocks are few.

vLLM passes over whoever would need a second adapter; so must plans. The reference is vLLM's own scheduler with room for
everything and a place for each adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lora_adapter
import pytest
from engines import BASE_ENGINE, TIGHT, Engines, Outcome, arrival, long_then_short
from test_e2e_systems import PATIENT, SLOS, SYSTEMS

from tests.support.extent import with_full

pytestmark = pytest.mark.e2e

NUM_ADAPTERS = 3
COVERING = ("alise", "accelgen", "past-future", "auto")
LORA = {"enable_lora": True, "max_lora_rank": lora_adapter.RANK, "max_cpu_loras": NUM_ADAPTERS}


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    """Folders of the adapters, and None for the base model."""
    folder = tmp_path_factory.mktemp("adapters")
    made = [lora_adapter.build(llama, folder / str(seed), seed=seed) for seed in range(NUM_ADAPTERS)]
    return [None, *map(str, made)]


def requests(adapters: list[str | None]) -> list[dict[str, Any]]:
    """Long and short ones, each next one with another adapter; and one question put to each."""
    asked = long_then_short(seed=6, num_long=6, num_short=10, long_tokens=80)
    asked += [arrival(f"same-{i}", 50, list(range(40, 80)), 20, osl=20) for i in range(len(adapters))]
    wanted = [adapters[i % len(adapters)] for i in range(len(asked))]
    return [{**each, "adapter": adapter} for each, adapter in zip(asked, wanted, strict=True)]


def run(run_engines: Engines, model: Path, adapters: list[str | None], **engine: Any) -> Outcome:
    settings = {**BASE_ENGINE, **LORA, "model": str(model), **engine}
    return run_engines([{"name": "lora", "engine": settings, "arrivals": requests(adapters)}])["lora"]


@pytest.fixture(scope="module")
def upstream(run_engines: Engines, llama: Path, adapters: list[str | None]) -> Outcome:
    return run(run_engines, llama, adapters, max_loras=NUM_ADAPTERS)


@pytest.mark.parametrize("system", with_full(COVERING, SYSTEMS))
def test_4_and_10_each_adapter_gives_upstreams_tokens(
    system: str, run_engines: Engines, llama: Path, adapters: list[str | None], upstream: Outcome
) -> None:
    ours = {"slo": SLOS, "prediction": {"sources": ["hint", "history"]}}
    steered = {"scheduler_cls": system, "additional_config": {"vllm_ext": ours}}
    found = run(run_engines, llama, adapters, max_loras=1, **TIGHT, **steered)
    assert found.tokens == upstream.tokens
    assert found.finish_reasons == upstream.finish_reasons
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)
    assert (found.preemptions == 0) == (system in PATIENT)


def test_each_adapter_answers_differently(upstream: Outcome) -> None:
    answers = {tuple(tokens) for name, tokens in upstream.tokens.items() if name.startswith("same")}
    assert len(answers) == NUM_ADAPTERS + 1
