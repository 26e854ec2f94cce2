"""The predictor's desk under events in any order: each question of a front end that is there is answered once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.service import work
from vllm_ext.prediction.service.messages import Ask, Told
from vllm_ext.prediction.service.work import Desk

from .desk_parts import ANN, BOB
from .fake_predictors import good


class Events(RuleBasedStateMachine):
    """Front ends that ask, end and hang up in any order, while a predictor fails now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(queue_limit=4, batch_size=2, timeout_s=5.0)
        self.now = 0.0
        self.asked: list[tuple[int, str]] = []
        self.owed: Counter[tuple[int, str]] = Counter()
        self.in_flight: list[work.Waiting] = []
        self.finished = 0

    def told(self, answers: Sequence[tuple[int, Told]]) -> None:
        for peer, told in answers:
            self.owed[peer, told.req_id] -= 1
            assert self.owed[peer, told.req_id] >= 0

    @rule(peer=st.sampled_from([ANN, BOB]), seconds=st.sampled_from([0.0, 3.0]))
    def ask(self, peer: int, seconds: float) -> None:
        self.now += seconds
        key = (peer, f"r{len(self.asked)}")
        self.asked.append(key)
        self.owed[key] += 1
        refused = self.desk.ask(peer, Ask(key[1], "hello", 100), self.now)
        if refused is not None:
            self.told([(peer, refused)])

    @rule(number=st.integers(0, 20), tokens=st.sampled_from([0, 1, 50]), aborted=st.booleans())
    def end(self, number: int, tokens: int, aborted: bool) -> None:
        peer, req_id = self.asked[-1 - number] if number < len(self.asked) else (ANN, "stranger")
        if aborted:
            self.desk.gone(peer, req_id)
        else:
            self.desk.finished(peer, req_id, tokens)

    @rule()
    def take_batch(self) -> None:
        if not self.in_flight:
            self.in_flight, too_late = self.desk.next_batch(self.now)
            assert len(self.in_flight) <= 2
            self.told(too_late)

    @rule(found=st.sampled_from(["right", "unknown", "failed"]))
    def answer(self, found: str) -> None:
        batch, self.in_flight = self.in_flight, []
        some: list[Estimate | None] = [good() if found == "right" else None for _ in batch]
        self.told(self.desk.answers(batch, None if found == "failed" else some))

    @rule()
    def learn(self) -> None:
        self.finished += len(self.desk.take_finished())

    @rule(peer=st.sampled_from([ANN, BOB]))
    def hang_up(self, peer: int) -> None:
        self.desk.hung_up(peer)
        waiting = {(w.peer, w.ask.req_id) for w in self.in_flight}
        for key in self.owed:
            if key[0] == peer and key not in waiting:
                self.owed[key] = 0

    def teardown(self) -> None:
        self.answer("right")
        while self.desk.waiting:
            self.take_batch()
            self.answer("right")
        self.learn()
        assert not any(self.owed.values()), "each question has one answer"
        assert self.finished == self.desk.learned <= len(self.asked)


TestEvents = Events.TestCase
