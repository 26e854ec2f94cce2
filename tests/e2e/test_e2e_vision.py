"""A vision-language model under our systems: images of several shapes, repeated ones, and prompts without any.

Seats and KV blocks are few, and a step has little more tokens than an image has embeddings. vLLM encodes and keeps as
many embeddings as that, so that it cuts prompts short before their images, or leaves requests waiting that a plan let
in: plans do not count what it encodes. The reference is vLLM's own scheduler with room for everything.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import vision_model
from engines import BASE_ENGINE, Engines, Outcome, arrival
from test_e2e_systems import SLOS, SYSTEMS

from tests.support.extent import with_full

pytestmark = pytest.mark.e2e

NARROW: Mapping[str, Any] = {
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 13,
    "max_num_batched_tokens": vision_model.MOST_EMBEDDINGS,
}
SHAPES = ((96, 96), (64, 96), (96, 90), (96, 40), (20, 30))
"""Of images: height and width."""
COVERING = ("fcfs", "alise", "auto", "accelgen", "past-future")
EVERY = ("fcfs", *SYSTEMS)
FEW_STEPS = 8
"""In which vLLM encodes what others wait for."""


def requests(image_token: int) -> list[dict[str, Any]]:
    """Long ones that fill the engine, then short ones; most show one or two images, and some the same one."""
    dice = random.Random(1)

    def made(name: str, step: int, num_images: int, answer: int) -> dict[str, Any]:
        images = [[*dice.choice(SHAPES), dice.randrange(3)] for _ in range(num_images)]
        prompt = dice.choices(range(32, 127), k=dice.randrange(16, 50))
        for place in sorted(dice.sample(range(len(prompt)), num_images), reverse=True):
            prompt.insert(place, image_token)
        request = arrival(name, step, prompt, answer, osl=answer)
        return {**request, "images": images} if images else request

    longs = [made(f"long-{i}", 0, (1, 2, 0, 1)[i % 4], 60) for i in range(5)]
    shorts = [made(f"short-{i}", 8 + 3 * i, (1, 0, 2)[i % 3], 6) for i in range(12)]
    return longs + shorts


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model.build(llama, tmp_path_factory.mktemp("vision"))


def run(run_engines: Engines, model: Path, *, boot: str = "plain", **engine: Any) -> Outcome:
    arrivals = requests(vision_model.image_token_of(model))
    settings = {**BASE_ENGINE, "max_model_len": 288, "model": str(model), **engine}
    return run_engines([{"name": "vision", "engine": settings, "arrivals": arrivals}], boot=boot)["vision"]


def steering(system: str, **options: Any) -> dict[str, Any]:
    ours = {"slo": SLOS, "prediction": {"sources": ["hint", "history"]}, **options}
    return {**NARROW, "scheduler_cls": system, "additional_config": {"vllm_ext": ours}}


def assert_same(found: Outcome, upstream: Outcome) -> None:
    assert found.tokens == upstream.tokens
    assert found.finish_reasons == upstream.finish_reasons
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)
    assert found.plans["cut"] > 0, "what is encoded in a step was never short"


@pytest.fixture(scope="module")
def upstream(run_engines: Engines, model: Path) -> Outcome:
    return run(run_engines, model)


@pytest.fixture(scope="module")
def narrow(run_engines: Engines, model: Path) -> Outcome:
    """vLLM's own scheduler, with as little of everything as ours have."""
    return run(run_engines, model, **NARROW)


@pytest.fixture(scope="module")
def steered(run_engines: Engines, model: Path) -> Callable[[str], Outcome]:
    """Runs a system, once."""

    @functools.cache
    def outcome(system: str) -> Outcome:
        return run(run_engines, model, **steering(system))

    return outcome


@pytest.mark.parametrize("system", with_full(COVERING, EVERY))
def test_4_answers_about_images_are_upstreams(
    system: str, steered: Callable[[str], Outcome], upstream: Outcome
) -> None:
    assert_same(steered(system), upstream)


@pytest.mark.full
@pytest.mark.parametrize("system", ["alise", "accelgen"])
def test_10_so_they_are_with_async_scheduling(
    system: str, run_engines: Engines, model: Path, upstream: Outcome
) -> None:
    found = run(run_engines, model, boot="async", **steering(system))
    assert found.batch_queue == 2, "async scheduling was not on"
    assert_same(found, upstream)


def test_4_and_where_kv_of_images_comes_back_from_host_memory(
    run_engines: Engines, model: Path, upstream: Outcome
) -> None:
    tier = {"gib": 64 / 1024, "bits": 16, "store": "early"}
    found = run(run_engines, model, **steering("alise", kv_tier=tier, residency={"choose": "swap"}))
    assert found.preemptions > 0
    assert found.host_bytes_loaded > 0
    assert_same(found, upstream)


@pytest.mark.parametrize("system", with_full(COVERING, EVERY))
def test_plans_do_not_name_one_time_and_again_whose_image_cannot_be_encoded(
    system: str, steered: Callable[[str], Outcome]
) -> None:
    assert steered(system).plans["longest"] <= FEW_STEPS


def test_requests_got_in_each_others_way(upstream: Outcome, narrow: Outcome) -> None:
    assert (upstream.preemptions, upstream.plans["cut"]) == (0, 0)
    assert narrow.preemptions > 0
    assert narrow.plans["cut"] > 0
    assert narrow.tokens == upstream.tokens


def test_answers_depend_on_the_images(run_engines: Engines, model: Path) -> None:
    asked = list(range(40, 70))
    image_token = vision_model.image_token_of(model)
    arrivals = [
        {**arrival(str(seed), 0, [*asked, image_token, *asked], 12), "images": [[96, 96, seed]]} for seed in range(4)
    ]
    engine = {**BASE_ENGINE, "max_model_len": 288, "model": str(model)}
    answers = run_engines([{"name": "images", "engine": engine, "arrivals": arrivals}])["images"].tokens
    assert len({tuple(tokens) for tokens in answers.values()}) == len(arrivals)
