"""Ten thousand hints that mean no good: each is refused by its name or understood, and nobody else notices."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.support.tier_rig import quiet
from vllm_ext import hints
from vllm_ext.hints import HintError, RequestHints

from .keeper_parts import Tier

NUM_HINTS = 10_000
NUM_SERVED = 200


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError


def deep(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


DEEP = deep(5_000)
MAKERS: tuple[Callable[[random.Random], Any], ...] = (
    lambda dice: dice.choice([None, True, False, "", b"", [], {}, (), 0, 0.0, -0.0, 1, -1]),
    lambda dice: dice.choice([math.nan, math.inf, -math.inf, 5e-324, 1e308, 1e-6, 30 * 86400.0, 30 * 86400.1]),
    lambda dice: dice.choice([1, -1]) * dice.randrange(10 ** dice.choice([1, 3, 7, 19, 400, 5000])),
    lambda dice: dice.uniform(-1e7, 1e7),
    lambda dice: "".join(chr(dice.randrange(0x110000)) for _ in range(dice.choice([1, 4, 64, 65, 256, 257]))),
    lambda dice: dice.choice(["a", "tenant", "unnamed-1", "true", "1", "NaN", "\0", "\n", "\ud800", "x" * 100_000]),
    lambda dice: dice.choice([Unspeakable(), deep(3), DEEP, {"osl": {}}, [1], object, 1j]),
)


def drawn(dice: random.Random) -> dict[str, Any]:
    keys = dice.sample([*hints.KEYS, "other"], k=dice.choice([1, 1, 2, 5]))
    return {key: dice.choice(MAKERS)(dice) for key in keys}


def attempt(read: Callable[[], Any]) -> str | None:
    """Return the field that is refused; any other exception goes through."""
    try:
        read()
    except HintError as error:
        return error.field if len(str(error)) < 500 else "too much is shown"
    return None


def test_whatever_is_sent_is_refused_by_its_name_or_understood() -> None:
    dice, refused = random.Random(0), 0
    for _ in range(NUM_HINTS):
        extra, salt = drawn(dice), dice.choice([None, "", "s"])
        session = dice.choice(MAKERS)(dice) if dice.random() < 0.2 else None
        text = dice.choice(MAKERS[-3:-1])(dice)

        def read(extra: Any = extra, session: Any = session, salt: Any = salt) -> None:
            hints.check_lifetime(hints.from_extra_args(extra, session), salt, 60.0)

        field = attempt(read)
        refused += field is not None
        assert field is None or field in (*hints.KEYS, "session_id")
        assert attempt(lambda text=text: hints.from_headers({hints.OSL_HEADER: text})) in (None, hints.OSL_HEADER)  # type: ignore[misc]
        assert attempt(lambda text=text: hints.from_headers({hints.SLO_HEADER: text})) in (None, hints.SLO_HEADER)  # type: ignore[misc]
        field = attempt(lambda extra=extra: hints.from_body_extension(extra.get("other", {"agent_hints": extra})))  # type: ignore[misc]
        assert field is None or field.startswith("nvext")
    assert NUM_HINTS / 2 < refused < NUM_HINTS


def test_the_tier_follows_what_is_allowed_and_loses_nothing() -> None:
    dice = random.Random(1)
    tier = Tier({"ttl_s": 60.0, "salt_share": 0.25}, num_chunks=64)
    told: list[str] = []
    tier.keeper.on_bad_hint = lambda req_id, problem: told.append(problem.field)
    for number in range(NUM_HINTS):
        now = 0.001 * number
        conversation = tier.turn(
            None, f"c{number % 100}", at=now, salt=dice.choice(["", "s", f"{number}"]), **drawn(dice)
        )
        assert conversation.running == 0
        assert conversation.ttl_s <= 60.0
        if number % 1000 == 0:
            tier.check()
    assert set(told) == {"kv_ttl_s"}
    tier.check()


def test_the_scheduler_counts_what_it_ignores_and_serves_everybody() -> None:
    dice = random.Random(2)
    rig = quiet(max_num_seqs=32, token_budget=128, num_blocks=80)
    bad = 0
    for number in range(NUM_SERVED):
        extra, salt = drawn(dice), dice.choice([None, "s"])
        if vllm_refuses(extra):
            continue
        bad += attempt(lambda extra=extra, salt=salt: lawful(extra, salt)) is not None  # type: ignore[misc]
        rig.add([100 + number % 50] * 6, 1, salt=salt, hints=extra)
        if number % 32 == 31:
            rig.settle()
    rig.drain()
    assert {outcome.finish_reason for outcome in rig.loop.outcomes.values()} == {"stop"}
    assert len(rig.loop.outcomes) == len(rig.prompts)
    assert rig.scheduler.observer.counters.bad_hints == bad > NUM_SERVED / 3


def vllm_refuses(extra: dict[str, Any]) -> bool:
    """Whether vLLM takes such arguments for no request at all, as integers of more than 64 bits."""
    try:
        SamplingParams(extra_args=extra)
    except VLLMValidationError:
        return True
    return False


def lawful(extra: dict[str, Any], salt: str | None) -> RequestHints:
    found = hints.from_extra_args(extra)
    hints.check_lifetime(found, salt, 0.0)
    return found
