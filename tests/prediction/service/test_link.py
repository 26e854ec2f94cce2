"""A front end's end of the socket: never waits, loses nothing it took, and says when the other side is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ext.prediction.service.link import Link, LinkBroken
from vllm_ext.prediction.service.messages import Ask, Failed, Finished, FrameError, Gone, Question, Told, pack

from .parts import FakeWorker

BULK = "x" * 40_000


@pytest.fixture
def worker(short: Path) -> Iterator[FakeWorker]:
    made = FakeWorker(short / "s")
    yield made
    made.close()


@pytest.fixture
def link(short: Path, worker: FakeWorker) -> Iterator[Link]:
    made = Link(short / "s", max_unsent=20)
    assert worker.connection
    yield made
    made.close()


def fill(link: Link) -> list[str]:
    """Send until the socket and the room for what it does not take are full; returns the ids taken."""
    taken = list[str]()
    while link.send(Ask(f"r{len(taken)}", BULK, 1)):
        taken.append(f"r{len(taken)}")
        assert len(taken) < 10_000
    return taken


def drained(link: Link, worker: FakeWorker) -> list[str]:
    """Read and flush by turns until nothing is left; returns the ids that arrived."""
    found = list[str]()
    while True:
        left = link.unsent
        link.flush()
        heard = worker.heard()
        found += [question.req_id for question in heard]
        if not heard and link.unsent in (0, left):
            return found


@pytest.mark.parametrize("name", ["nobody", "n" * 200], ids=["no socket", "a path too long for one"])
def test_no_predictor_is_an_os_error(short: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"No such file|too long"):
        Link(short / name, max_unsent=1)


def test_a_socket_that_nobody_listens_at_is_an_os_error(short: Path) -> None:
    """As the one of a process that was killed."""
    FakeWorker(short / "s").close()
    assert (short / "s").exists()
    with pytest.raises(ConnectionRefusedError):
        Link(short / "s", max_unsent=1)


def test_messages_go_both_ways_in_order(link: Link, worker: FakeWorker) -> None:
    sent: list[Question] = [Ask("a", "hello", 5, "m"), Ask("b", "", 1), Finished("a", 3), Gone("b")]
    for message in sent:
        assert link.send(message)
    assert link.unsent == 0
    assert worker.heard() == sent
    assert link.receive() == []
    told = [Told("a", 7, 9, "retrieval"), Told("b", source="unknown")]
    worker.say(*told)
    assert link.receive() == told
    assert link.receive() == []


def test_an_answer_is_returned_when_its_last_byte_is_there(link: Link, worker: FakeWorker) -> None:
    frame = pack(Told("a", 7, 9, "retrieval"))
    for byte in frame[:-1]:
        worker.connection.sendall(bytes([byte]))
        assert link.receive() == []
    worker.connection.sendall(frame[-1:])
    assert [answer.req_id for answer in link.receive() if isinstance(answer, Told)] == ["a"]


def test_what_a_full_socket_does_not_take_is_kept_up_to_a_bound_and_sent_in_order(
    link: Link, worker: FakeWorker
) -> None:
    taken = fill(link)
    assert link.unsent == 20
    assert not link.send(Gone("refused"))
    assert drained(link, worker) == taken
    assert link.unsent == 0


def test_a_frame_cut_by_a_full_socket_is_continued_where_it_was_cut(link: Link, worker: FakeWorker) -> None:
    link_socket = socket.socket(fileno=link.fileno())
    link_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    link_socket.detach()
    taken = fill(link)
    arrived = list[str]()
    while len(arrived) < len(taken):  # one frame is read over many turns of both sides
        arrived += [question.req_id for question in worker.heard()]
        link.flush()
    assert arrived == taken


def test_room_in_the_socket_is_used_before_a_message_is_refused(link: Link, worker: FakeWorker) -> None:
    """The bound was once compared before anything was flushed: a link that was full once refused until a poll."""
    taken = fill(link)
    heard = [question.req_id for question in worker.heard()]
    assert link.send(Gone("after"))
    assert heard + drained(link, worker) == [*taken, "after"]


def test_what_no_frame_can_hold_is_refused_and_harms_nothing(link: Link, worker: FakeWorker) -> None:
    for text in ("\ud800", "x" * (1 << 20)):
        with pytest.raises(FrameError):
            link.send(Ask("a", text, 1))
    assert link.send(Gone("b"))
    assert worker.heard() == [Gone("b")]


def test_last_words_are_received_before_the_end_is_told(link: Link, worker: FakeWorker) -> None:
    """Why a predictor can't start was once lost: its process ends at once after telling."""
    worker.say(Failed("no faiss"))
    worker.hang_up()
    assert link.receive() == [Failed("no faiss")]
    for _ in range(2):
        with pytest.raises(LinkBroken, match=r"^hung up$"):
            link.receive()


def test_last_words_can_be_received_after_a_message_could_not_be_sent(link: Link, worker: FakeWorker) -> None:
    worker.say(Failed("no faiss"))
    worker.hang_up()
    for _ in range(2):
        with pytest.raises(LinkBroken, match="is gone"):
            link.send(Gone("a"))
    assert link.receive() == [Failed("no faiss")]
    with pytest.raises(LinkBroken):
        link.receive()


def test_unread_messages_make_the_end_a_reset_which_is_an_end_as_well(link: Link, worker: FakeWorker) -> None:
    assert link.send(Gone("a"))
    worker.hang_up()
    with pytest.raises(LinkBroken):
        link.receive()


@pytest.mark.parametrize(
    "garbage", [b"\x05\0\0\0hello", b"HTTP/1.1 400 Bad Request\r\n", b"\0\0\0\0", b"\xff\xff\xff\xff"]
)
def test_garbage_breaks_the_link_after_what_came_before_it(link: Link, worker: FakeWorker, garbage: bytes) -> None:
    worker.say(Told("a", 7, 9, "retrieval"))
    assert link.receive()
    worker.connection.sendall(garbage)
    for _ in range(2):
        with pytest.raises(LinkBroken, match="can't be understood"):
            link.receive()


def test_a_flood_is_received_whole(link: Link, worker: FakeWorker) -> None:
    found, sent = 0, 0
    answer = pack(Failed("x" * 100_000))
    pending = b""
    while sent < 60 or pending:
        if not pending:
            pending, sent = answer, sent + 1
        try:
            pending = pending[worker.connection.send(pending) :]
        except BlockingIOError:
            found += len(link.receive())
    found += len(link.receive())
    assert found == sent
