"""Serve prompts offline with a predictor, and print what came of them as JSON.

python offline_prediction.py '{LLM arguments}'
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    llm.generate(["wake up"], sampling, use_tqdm=False)

    from vllm_ext.predictor.attach import attached

    service = attached(llm.llm_engine.output_processor).service
    while not service.ready:
        service.poll()
        time.sleep(0.1)
    done = llm.generate([f"offline {i}" for i in range(48)], sampling, use_tqdm=False)
    core = llm.llm_engine.engine_core
    inner = getattr(core, "engine_core", None)
    state = inner.vllm_ext_state(0) if inner is not None else core.call_utility("vllm_ext_state", 0)
    result = {
        "tokens": [len(answer.outputs[0].token_ids) for answer in done],
        "late": state["late_predictions"],
        "sources": [record["prediction_source"] for record in state["records"]],
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
