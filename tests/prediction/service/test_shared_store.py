"""A store whose folder other servers write to as well: nobody's entries are lost, and nothing goes round in circles."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_ext.prediction import store_files
from vllm_ext.prediction.service.shared_store import SharedStore

from .shared_store_parts import known, learn, opened, saved, state


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path / "store")
    learn(first, [1, 2, 3])
    first.save()
    second = opened(tmp_path / "store")
    assert known(second) == [1, 2, 3]
    assert second.store.entries().models == ("m", "m", "m")
    assert second.inserted == 3


def test_nothing_is_written_where_nothing_was_learned(tmp_path: Path) -> None:
    shared = opened(tmp_path / "store")
    shared.save()
    assert not (tmp_path / "store").exists()
    learn(shared, [1])
    shared.save()
    before = state(tmp_path / "store")
    shared.save()
    assert state(tmp_path / "store") == before


def test_two_servers_keep_each_others_entries(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / "store") for _ in range(2))
    learn(a, [1, 2])
    a.save()
    learn(b, [3])
    b.save()
    assert saved(tmp_path / "store") == known(b) == [1, 2, 3]
    learn(a, [4])
    a.save()
    assert saved(tmp_path / "store") == known(a) == [1, 2, 3, 4]
    b.save()
    assert known(b) == [1, 2, 3, 4], "taken over by a save with nothing of its own, too"


def test_servers_that_know_the_same_leave_the_folder_alone(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / "store") for _ in range(2))
    learn(a, [1])
    learn(b, [2])
    for shared in (a, b, a):
        shared.save()
    before = state(tmp_path / "store")
    for _ in range(3):
        for shared in (a, b):
            shared.save()
    assert state(tmp_path / "store") == before
    assert known(a) == known(b) == [1, 2]


def test_the_same_prompt_with_another_length_or_time_is_another_observation(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / "store") for _ in range(2))
    learn(a, [10, 20], vector=0)
    learn(b, [20, 30], vector=0)
    a.save()
    b.save()
    assert saved(tmp_path / "store") == [10, 20, 30], "the one with the same length and time is the same"


@pytest.mark.parametrize("keep_prompts", [True, False])
def test_prompts_are_taken_over_where_they_are_kept(tmp_path: Path, keep_prompts: bool) -> None:
    a = opened(tmp_path / "store", keep_prompts=True)
    b = opened(tmp_path / "store", keep_prompts=keep_prompts)
    learn(a, [1, 2])
    a.save()
    b.save()
    assert known(b) == [1, 2]
    assert b.store.entries().prompts == (("prompt 1", "prompt 2") if keep_prompts else None)


def settled(servers: Sequence[SharedStore], folder: Path, rounds: int = 8) -> int:
    """Save by turns; returns after how many rounds nothing was written any more."""
    for n in range(rounds):
        before = state(folder)
        for shared in servers:
            shared.save()
        if state(folder) == before:
            return n
    return rounds


def test_two_full_stores_do_not_hand_old_entries_back_and_forth(tmp_path: Path) -> None:
    """Each once took over again what it had dropped for its age: new entries went for old ones, at every save."""
    a, b = (opened(tmp_path / "store", capacity=4) for _ in range(2))
    learn(b, [1])
    learn(a, [2, 3, 4])
    a.save()
    b.save()
    learn(a, [9])
    a.save()
    assert settled((a, b), tmp_path / "store") < 3
    assert 9 in known(a)
    assert 9 in known(b)
    learn(a, [10, 11])
    learn(b, [12, 13])
    a.save()
    b.save()
    assert settled((a, b), tmp_path / "store") < 3
    assert known(a) == known(b) == [10, 11, 12, 13]


def test_a_prompt_seen_too_often_goes_round_no_more_than_a_full_store(tmp_path: Path) -> None:
    """Of equal prompts 32 are kept however large the store is: every popular one made two servers save for ever."""
    a, b = (opened(tmp_path / "store") for _ in range(2))
    learn(a, range(1, 33), vector=0)
    a.save()
    b.save()
    learn(a, [50], vector=0)
    a.save()
    assert settled((a, b), tmp_path / "store") < 3
    assert known(a) == known(b) == [*range(2, 33), 50]


def test_insertions_are_counted_beyond_what_a_full_store_holds(tmp_path: Path) -> None:
    shared = opened(tmp_path / "store", capacity=3)
    learn(shared, range(1, 11))
    assert (len(shared.store), shared.inserted) == (3, 10)


def test_the_encoder_of_another_server_is_warned_of_once_and_nothing_of_it_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = opened(tmp_path / "store"), opened(tmp_path / "store", encoder="other")
    for length in (1, 2, 3):
        learn(other, [100 + length])
        other.save()
        learn(ours, [length])
        ours.save()
    assert known(ours) == [1, 2, 3]
    assert known(other) == [101, 102, 103]
    own = [record.message for record in caplog.records if "the encoder other" in record.message]
    assert len(own) == 1
    assert len(caplog.records) == 2, "one of each"
    assert saved(tmp_path / "store") == [1, 2, 3]


@pytest.mark.parametrize("damage", ["CURRENT", "entries.npz", "metadata.json"])
def test_what_another_server_left_damaged_is_reported_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    a, b = (opened(tmp_path / "store") for _ in range(2))
    learn(a, [1])
    learn(b, [2])
    b.save()
    (file,) = (tmp_path / "store").rglob(damage)
    file.write_bytes(b"damaged" + file.read_bytes()[7:])
    a.save()
    (record,) = (record for record in caplog.records if record.name.endswith("shared_store"))
    assert record.levelno == logging.WARNING
    assert "can't be read" in record.message
    assert saved(tmp_path / "store") == [1]
    learn(b, [3])
    b.save()
    assert saved(tmp_path / "store") == [1, 2, 3]


def test_a_damaged_folder_is_repaired_by_a_server_with_nothing_new(tmp_path: Path) -> None:
    shared = opened(tmp_path / "store")
    learn(shared, [1, 2])
    shared.save()
    (tmp_path / "store" / "CURRENT").write_bytes(b"{}")
    shared.save()
    assert saved(tmp_path / "store") == [1, 2]


def test_a_save_that_fails_is_made_up_for_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = opened(tmp_path / "store")
    learn(shared, [1])

    def full_disk(*args: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_files, "save", full_disk)
        with pytest.raises(OSError, match="No space left"):
            shared.save()
    shared.save()
    assert saved(tmp_path / "store") == [1]


def test_a_folder_that_vanished_is_written_again_with_the_next_lesson(tmp_path: Path) -> None:
    shared = opened(tmp_path / "store")
    learn(shared, [1])
    shared.save()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    shared.save()
    learn(shared, [2])
    shared.save()
    assert saved(tmp_path / "store") == [1, 2]
