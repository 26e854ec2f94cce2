"""What running prompts leave to those who press, where these can't join."""

from __future__ import annotations

from tests.support.steering import Rig

BUDGET = 64


def test_running_prompts_get_the_whole_step_where_nobody_who_presses_can_join() -> None:
    objectives = {"ttft_ms": 4000.0, "jct_ms": 60_000.0}  # nobody leaves for another who has one
    rig = Rig("auto", max_num_seqs=2, num_blocks=200, max_num_batched_tokens=BUDGET, options={"slo": objectives})
    rig.add("decoding", 60, length=200, osl=200)
    rig.step(3, seconds=0.01)
    rig.add("prompt", 400, length=20, osl=20)
    rig.step(seconds=0.01)
    assert rig.running == ["decoding", "prompt"]
    rig.add("pressing", 400, length=4, osl=4)
    done = rig.step(seconds=0.01)
    assert rig.waiting == ["pressing"]
    assert done is not None
    assert done.num_tokens == BUDGET
