"""The predictor's process over many requests: each gets an answer and is learned, and memory does not grow for ever.

No engine: requests go through the front end's client, in bursts as large as a batch, with texts of any length, and end
as an engine's do. Without ``SOAK_REQUESTS`` there are too few to say anything of memory; `make soak` sends 20,000.

What is resident is noted after each burst, and of each tenth of the requests the least counts, which is what was left
when free memory had just been given back. Over the first half the process fills what it may fill: code for each shape
of a batch, memory for the fit of the regression, the index. Over the last half little is left to fill: vectors of texts
that it has not seen, `LearnedPredictor` keeps 16,384, and rows of the index.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.support.extent import HANG_S
from vllm_ext.config import PredictorConfig
from vllm_ext.prediction.predictor import Prompt
from vllm_ext.predictor.client import PredictionClient
from vllm_ext.predictor.messages import Answer
from vllm_ext.predictor.process import PredictorProcess

from .parts import Recorder, until

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "120"))
JUDGES_MEMORY = "SOAK_REQUESTS" in os.environ
SEED = int(os.environ.get("SOAK_SEED", "0"))
MEASURED = 10 if JUDGES_MEMORY else 2
"""Parts of the run whose memory is compared."""
MAX_GROWTH_MIB = 32.0
"""Over the last half."""
CAPACITY = 4_000
"""Requests that the predictor remembers: fewer than there are, so that it forgets as well."""

pytestmark = pytest.mark.timeout(3 * HANG_S + REQUESTS)


class Ending(NamedTuple):
    """A request, and what becomes of it."""

    prompt: Prompt
    tokens: int
    aborted: bool


class Crowd:
    """Clients that ask for anything: short and long, new and again, alone or turn by turn."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._said: list[str] = []
        self._conversations = self._turn = 0

    def burst(self, most: int) -> list[Ending]:
        """Return up to so many requests, which come together; mostly short ones, since long ones only take longer."""
        words = self._dice.choice((3, 3, 3, 6, 6, 12, 18, 60))
        return [self._request(words) for _ in range(min(most, self._dice.randint(1, 16)))]

    def _request(self, words: int) -> Ending:
        dice = self._dice
        self._turn += 1
        if dice.random() < 0.3:
            self._conversations, self._turn = self._conversations + 1, 0
        text, tag = self._text(words), dice.choice(("", "chat", "code"))
        conversation = f"c{self._conversations}"
        prompt = Prompt(text, 512, "m", len(text) // 4, conversation=conversation, turn=self._turn, tag=tag)
        return Ending(prompt, 1 + min(511, len(text) % 97 * (1 + len(tag))), dice.random() < 0.05)

    def _text(self, words: int) -> str:
        if self._said and self._dice.random() < 0.25:
            return self._dice.choice(self._said)
        self._said.append(" ".join(f"{self._dice.getrandbits(24):x}" for _ in range(self._dice.randint(1, words))))
        return self._said[-1]


class Service:
    """A front end's client with the predictor's process that it owns."""

    def __init__(self, folder: Path) -> None:
        config = PredictorConfig(capacity=CAPACITY, timeout_s=float(HANG_S), nice=0)
        path = folder / "p" / "s"
        self.metrics = Recorder()
        metrics: Any = self.metrics
        self.process = PredictorProcess(config, folder / "kept", path)
        self.client = PredictionClient(config, path, self.process, metrics)
        self.answers: list[Answer] = []
        self.asked = 0

    def poll(self) -> bool:
        """Returns whether the predictor is ready."""
        self.answers += self.client.poll()
        return self.client.ready

    def serve(self, requests: list[Ending]) -> None:
        """Ask for all, and end them once they are answered."""
        first, self.asked = self.asked, self.asked + len(requests)
        for number, request in enumerate(requests, first):
            self.client.ask(f"r{number}", request.prompt)
        until(lambda: (self.poll() or True) and not self.client.waiting, "all answers")
        for number, request in enumerate(requests, first):
            self.client.ended(f"r{number}", request.tokens, aborted=request.aborted)

    def settle(self) -> None:
        """Wait until everything that ended is learned."""
        until(lambda: self.poll() and self.learned == self.asked, "all to be learned")

    @property
    def learned(self) -> int:
        status = self.metrics.statuses[-1] if self.metrics.statuses else None
        return 0 if status is None else status.learned

    def rss_mib(self) -> float:
        assert self.process.pid is not None
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20


@pytest.fixture
def service(short: Path) -> Iterator[Service]:
    made = Service(short)
    yield made
    made.process.kill()
    made.client.close()


def test_over_many_requests_all_are_answered_and_learned_and_memory_stays(service: Service) -> None:
    until(service.poll, "the predictor")
    crowd = Crowd(SEED)
    least = [service.rss_mib()]
    for part in range(1, MEASURED + 1):
        found = []
        while (left := REQUESTS * part // MEASURED - service.asked) > 0:
            service.serve(crowd.burst(left))
            found.append(service.rss_mib())
        service.settle()
        least.append(min(found))
        print(f"{service.asked} requests: {least[-1]:.0f} to {max(found):.0f} MiB", flush=True)
    assert service.metrics.counted.keys() <= {"predicted", "unknown"}, "nothing was lost"
    assert sum(service.metrics.counted.values()) == REQUESTS
    assert service.metrics.counted["predicted"] > REQUESTS / 3
    assert service.metrics.drops.total() == 0
    status = service.metrics.statuses[-1]
    assert status is not None
    assert (status.errors, service.metrics.started) == (0, 1)
    assert status.examples > 0 or REQUESTS < 64
    grown = least[-1] - least[MEASURED // 2]
    assert grown < MAX_GROWTH_MIB or not JUDGES_MEMORY, f"{[round(each) for each in least]} MiB"
