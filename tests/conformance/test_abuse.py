"""One hostile client beside eight honest ones: what these lose beyond what the same client costs them without tricks.

Bounds are on the mean wait of the honest ones' requests, in steps of a scheduler on a virtual clock. Lengths that are
understated or kept back, and tight TTFT and JCT objectives, are tried in `test_liars`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from tests.support.loads import Loads
from tests.support.steering import Loras, Rig, unwatched
from vllm_ext.contract import Origin
from vllm_ext.simulation.engine.harness import make_request

SYSTEMS = (
    "fcfs", "fcfs-tuned", "alise", "auto", "accelgen", "sarathi", "past-future", "pensieve", "fair", "fair+alise",
)  # fmt: skip
HONEST = tuple(f"honest-{number}" for number in range(8))
STEPS, EVERY, MOST_TIMES = 120, 20, 1.25
HOSTILE_A_STEP = 3

Trick = Callable[[Request, int], None]


def _hint(**hints: Any) -> Trick:
    def play(request: Request, number: int) -> None:
        assert request.sampling_params is not None
        said = {name: value(number) if callable(value) else value for name, value in hints.items()}
        request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), **said}

    return play


def _priority(request: Request, number: int) -> None:
    request.priority = -(10**9) - number


def _salt(request: Request, number: int) -> None:
    request.cache_salt = f"salt-{number}"


def _adapter(request: Request, number: int) -> None:
    request.lora_request = LoRARequest("evil", 2, "somewhere")


TRICKS: dict[str, Trick] = {
    "a priority of its own for each request": _priority,
    "a gap between tokens of a microsecond": _hint(tbt_slo_ms=0.001),
    "a gap between tokens that is just kept": _hint(tbt_slo_ms=25.0),
    "names of hints that do not exist": _hint(ttft_slo=1, oslx=1),
    "a salt of its own for each request": _salt,
    "an adapter that has no place": _adapter,
    "a conversation of its own for each request": _hint(conversation_id=lambda number: f"c{number}"),
}


@functools.cache
def _mean_wait(system: str, trick: Trick | None, *, undecided: bool = False) -> float:
    """Return the mean number of steps from arrival to first token of the honest clients' requests."""
    rig = unwatched(system, max_num_batched_tokens=256, max_model_len=1024)
    rig.scheduler.lora_config = Loras(1)
    loads = Loads(rig, {}) if undecided else None
    asked: dict[str, int] = {}

    def send(name: str, client: str, prompt: int, length: int, number: int) -> None:
        rig.lengths[name] = length
        request = make_request(
            name, prompt, max_tokens=2 * STEPS, arrival_time=rig.clock(), extra_args={"tag": client, "osl": length}
        )
        request.lora_request = LoRARequest("shared", 1, "somewhere") if client == "resident" else None
        if client == "hostile" and trick is not None:
            trick(request, number)
        if client == "hostile" and loads is not None:
            loads.undecided.add(name)
        rig.loop.add(request)
        asked[name] = len(rig.loop.decisions)

    send("resident", "resident", 24, 2 * STEPS, 0)
    for step in range(STEPS):
        for place, client in enumerate(HONEST):
            if step % EVERY == 2 * place:
                send(f"{client}-{step}", client, 24, 12, step)
        for number in range(HOSTILE_A_STEP * step, HOSTILE_A_STEP * (step + 1)):
            send(f"hostile-{number}", "hostile", 40, 20, number)
        rig.loop.step()
        rig.clock.advance(0.02)
    outcomes = rig.loop.outcomes
    waits = [
        (STEPS if outcomes[name].first_token_step is None else outcomes[name].first_token_step) - at
        for name, at in asked.items()
        if name.startswith("honest")
    ]
    return sum(waits) / len(waits)


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS.keys())
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_trick_costs_others_no_more_than_its_client_costs_them_anyway(system: str, trick: Trick) -> None:
    assert _mean_wait(system, trick) <= MOST_TIMES * _mean_wait(system, None) + 1


@pytest.mark.parametrize("system", SYSTEMS)
def test_requests_that_a_connector_never_tells_about_cost_others_little(system: str) -> None:
    """Three come in each step; the connector is asked before a plan is made, and they stand apart."""
    assert _mean_wait(system, None, undecided=True) <= 2 * _mean_wait(system, None) + 1


@pytest.mark.parametrize("system", ["fair", "fair+alise"])
def test_a_tag_of_its_own_for_each_request_gains_nothing_where_clients_have_keys(system: str) -> None:
    """Turns are taken by API key; without keys a tag is all there is, and the server says so when it starts."""
    rig = Rig(system)
    sharing = rig.scheduler.policies.sharing
    assert [sharing.client(Origin(tag=f"tag-{number}", key="key")) for number in range(3)] == ["key"] * 3
