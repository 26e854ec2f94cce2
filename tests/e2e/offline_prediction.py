"""Serve prompts offline with a predictor, and print what came of them as JSON.

python offline_prediction.py '{LLM arguments}'

The engine stands still until each of them was predicted.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    engine = llm.llm_engine
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    llm.generate(["wake up"], sampling, use_tqdm=False)

    from vllm_ext.predictor.attach import attached, deliver_offline

    service = attached(engine.output_processor).service
    while not service.ready:
        service.poll()
        time.sleep(0.1)
    before = state_of(engine)["late_predictions"]  # of the first, where the predictor was quicker than its tokens
    engine.sleep(level=0, mode="keep")
    llm.enqueue([f"offline {i}" for i in range(48)], sampling, use_tqdm=False)
    while service.waiting:
        deliver_offline(engine)
        time.sleep(0.01)
    engine.wake_up()
    done = llm.wait_for_completion(use_tqdm=False)
    state = state_of(engine)
    result = {
        "tokens": [len(answer.outputs[0].token_ids) for answer in done],
        "late": state["late_predictions"] - before,
        "sources": [record["prediction_source"] for record in state["records"]],
    }
    print("RESULT " + json.dumps(result))


def state_of(engine: Any) -> dict[str, Any]:
    """What the engine core tells of itself, in this process or another."""
    core = engine.engine_core
    inner = getattr(core, "engine_core", None)
    state: dict[str, Any] = inner.vllm_ext_state(0) if inner is not None else core.call_utility("vllm_ext_state", 0)
    return state


if __name__ == "__main__":
    main()
