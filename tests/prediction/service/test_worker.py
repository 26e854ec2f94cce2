"""The predictor's process with a fake predictor: each question is answered once, whatever the predictor does."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from functools import partial

from tests.extent import HANG_S
from vllm_ext.prediction.service.messages import Finished, Gone, Status, Told, pack

from .fake_predictors import ODD
from .parts import until
from .worker_parts import FrontEnd, WorkerProcess

Start = Callable[..., WorkerProcess]


def factory(name: str) -> str:
    return f"fake_predictors:{name}"


def test_questions_are_answered_and_what_finished_is_learned_and_saved(start: Start) -> None:
    worker = start()
    front = worker.connect().ready()
    front.ask("a", "first", max_tokens=50, model="lora", prompt_tokens=33)
    front.ask("b", "unknown")
    assert front.answer_to("a") == Told("a", 7, 9, "retrieval")
    assert front.answer_to("b") == Told("b", source="unknown")
    front.send(Finished("a", 12))
    front.send(Gone("b"))
    until(lambda: worker.noted("learned"), "what finished to be learned")
    assert worker.noted("learned") == [[["first", 50, "lora", 33, 12]]]
    until(lambda: front.status and front.status.entries == 1, "a status")
    assert front.status is not None
    assert (front.status.learned, front.status.judged, front.status.answered) == (1, 1, 2)
    assert (front.status.coverage, front.status.waiting, front.status.errors) == (0.0, 0, 0)
    worker.end_input()
    assert worker.ended() == 0
    assert worker.noted("saved") == [1]
    assert not worker.socket.exists()


def test_each_question_is_answered_once_whatever_is_predicted(start: Start) -> None:
    worker = start(batch_size=1)
    front = worker.connect().ready()
    texts = ["hello", "raise", "unknown", *ODD, "slow", "hello"]
    for i, text in enumerate(texts):
        front.ask(f"r{i}", text)
    until(lambda: len(front.told) == len(texts), "all answers")
    until(lambda: front.status and front.status.answered == len(texts), "a status after them")
    expected = {"hello": "retrieval", "slow": "retrieval", "unknown": "unknown"}
    assert [(told.req_id, told.source) for told in front.told] == [
        (f"r{i}", expected.get(text, "error")) for i, text in enumerate(texts)
    ]
    assert front.status is not None
    assert front.status.errors == len(ODD) + 1
    assert worker.log.count("Traceback") == 1
    assert worker.log.count("counted from now on, not logged") == 1


def test_questions_that_come_at_once_are_predicted_in_batches(start: Start) -> None:
    worker = start(batch_size=4)
    front = worker.connect().ready()
    for i in range(20):
        front.ask(f"r{i}", "slow" if i == 0 else "hello")
    until(lambda: len(front.told) == 20, "all answers")
    sizes = list(map(len, worker.noted("asked")))
    assert max(sizes) == 4, "while the first one is predicted, the others come"
    assert sum(sizes) == 20


def test_what_waits_for_too_long_expires_and_what_finds_no_room_is_refused(start: Start) -> None:
    worker = start(batch_size=1, queue_limit=2, timeout_s=0.05)
    front = worker.connect().ready()
    front.ask("slow", "slow")
    until(lambda: worker.noted("asked"), "the slow one to be at work")
    for i in range(4):
        front.ask(f"r{i}")
    until(lambda: len(front.told) == 5, "all answers")
    assert [(told.req_id, told.source) for told in front.told] == [
        ("r2", "overload"), ("r3", "overload"), ("slow", "retrieval"), ("r0", "expired"), ("r1", "expired"),
    ]  # fmt: skip
    front.ask("later")
    assert front.answer_to("later").source == "retrieval"


def test_a_request_that_ends_before_its_turn_is_not_predicted(start: Start) -> None:
    worker = start(batch_size=1)
    front = worker.connect().ready()
    front.ask("slow", "slow")
    front.ask("a", "of a")
    front.ask("b", "of b")
    front.send(Gone("a"))
    assert front.answer_to("b").source == "retrieval"
    assert front.answer_to("a").source == "ended"
    assert worker.noted("asked") == [["slow"], ["of b"]]


def test_what_is_asked_while_the_model_is_loaded_waits_for_it(start: Start) -> None:
    worker = start(factory=factory("SlowStart"))
    front = worker.connect()
    front.ask("a")
    assert front.listen() == []
    (worker.folder / "kept" / "go").parent.mkdir(exist_ok=True)
    (worker.folder / "kept" / "go").touch()
    assert front.answer_to("a").source == "retrieval"


# --- front ends -------------------------------------------------------------------------------------------------------


def answered(front: FrontEnd, count: int) -> bool:
    return len(front.told) == count


def knows(front: FrontEnd, entries: int) -> bool:
    return front.status is not None and front.status.entries == entries


def test_front_ends_share_one_predictor_and_each_hears_its_own_answers(start: Start) -> None:
    worker = start(batch_size=2)
    fronts = [worker.connect().ready() for _ in range(3)]
    for i in range(5):
        for number, front in enumerate(fronts):
            front.ask(f"r{i}", f"{number}-{i}", model=f"m{number}")
    for front in fronts:
        until(partial(answered, front, 5), "all answers")
        assert [told.req_id for told in front.told] == [f"r{i}" for i in range(5)]
        front.send(Finished("r0", 3))
    until(lambda: sum(map(len, worker.noted("learned"))) == 3, "what each of them learned")
    assert sorted(itertools.chain(*worker.noted("learned"))) == [[f"{n}-0", 100, f"m{n}", 0, 3] for n in range(3)]
    for front in fronts:
        until(partial(knows, front, 3), "what all learned")


def test_a_front_end_that_hangs_up_takes_its_questions_along(start: Start) -> None:
    worker = start(batch_size=1)
    leaving, staying = worker.connect().ready(), worker.connect().ready()
    leaving.ask("slow", "slow")
    until(lambda: worker.noted("asked"), "the slow one to be at work")
    for i in range(3):
        leaving.ask(f"l{i}", "of the one that left")
        staying.ask(f"s{i}", "of the one that stays")
    leaving.link.close()
    until(lambda: len(staying.told) == 3, "its answers")
    assert [*itertools.chain(*worker.noted("asked"))] == ["slow", *["of the one that stays"] * 3]
    again = worker.connect().ready()
    again.ask("l0", "again")
    assert again.answer_to("l0").source == "retrieval"
    assert "Traceback" not in worker.log
    assert "not understood" not in worker.log, "to hang up is nothing to report"


GARBAGE = {
    "a length of 4 GiB": b"\xff\xff\xff\xff",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "no MessagePack": b"\x03\0\0\0abc",
    "an empty frame": b"\0\0\0\0",
    "broken UTF-8": b"\x08\0\0\0\x92\xa4gone\xa1\xff",
    "an answer": pack(Told("a", 1, 2, "retrieval")),
}


def test_who_sends_garbage_is_hung_up_on_and_nobody_else(start: Start) -> None:
    worker = start()
    front = worker.connect().ready()
    for what, garbage in GARBAGE.items():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(HANG_S)
            stranger.connect(str(worker.socket))
            stranger.sendall(garbage)
            while stranger.recv(1 << 16):
                pass  # what it is told of the status before it is hung up on
        front.ask(what)
        assert front.answer_to(what).source == "retrieval"
    assert worker.log.count("not understood any more") == len(GARBAGE)
    assert "Traceback" not in worker.log


def test_half_a_frame_is_no_reason_to_wait_for_others(start: Start) -> None:
    worker = start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        front = worker.connect().ready()
        stranger.connect(str(worker.socket))
        stranger.sendall(b"\x10\0\0\0abc")
        front.ask("a")
        assert front.answer_to("a").source == "retrieval"


def test_a_front_end_that_does_not_read_is_sent_answers_but_no_pile_of_statuses(start: Start) -> None:
    """An offline engine between two batches reads nothing for hours."""
    worker = start(patch="worker._STATUS_S = 0.0005")
    idle, front = worker.connect(), worker.connect().ready()
    until(lambda: len(front.listen()) > 800, "statuses that fill a socket")
    for i in range(100):
        idle.ask(f"r{i}")
    until(lambda: front.status and front.status.answered == 100, "the answers")
    until(lambda: len(front.listen()) > 1600, "more statuses")
    until(lambda: len(idle.told) == 100, "its answers, when it reads again")
    assert [told.req_id for told in idle.told] == [f"r{i}" for i in range(100)]
    assert sum(isinstance(answer, Status) for answer in idle.answers) < 800
