"""The predictor that comes with the package and its folder: restarts, other servers, the decoder beside the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ext.prediction import store_files
from vllm_ext.prediction.folder import DECODER, STORE
from vllm_ext.prediction.selection import LENGTH_FEATURE
from vllm_ext.prediction.service.predictor import FinishedPrompt, RetrievalPredictor

from .retrieval_parts import TOPICS, NoRefresh, finish, lengths, prompt, retrieval, write_decoder

Make = Callable[..., RetrievalPredictor]


def test_what_was_learned_survives_a_restart(make: Make) -> None:
    first = make()
    finish(first, ("tea", 10), ("taxes", 20))
    before = first.predict([prompt("tea with milk"), prompt("taxes")])
    first.save()
    second = make()
    assert second.status()["entries"] == 2
    assert lengths(second.predict([prompt("tea with milk"), prompt("taxes")])) == lengths(before)


def test_what_another_server_learned_is_found_after_a_save(make: Make) -> None:
    ours, other = make(), make()
    finish(other, ("tea", 10))
    other.save()
    assert ours.predict([prompt("tea")]) == [None]
    ours.save()
    assert lengths(ours.predict([prompt("tea")])) == [(10, 10, "retrieval")]


def test_lengths_of_prompts_are_kept_also_by_a_server_that_takes_them_over(make: Make, tmp_path: Path) -> None:
    other, ours = make(), make()
    asked = prompt("tea", prompt_tokens=77)
    other.predict([asked])
    other.learn([FinishedPrompt(asked, 10, 1.0)])
    other.save()
    ours.save()
    finish(ours, ("taxes", 20))
    ours.save()
    entries, _ = store_files.read(tmp_path / STORE)
    assert sorted(zip(entries.lengths.tolist(), entries.prompt_tokens.tolist(), strict=True)) == [(10, 77), (20, 0)]


@pytest.mark.parametrize("keep_prompts", [True, False])
def test_prompts_are_written_only_if_they_are_to_be_kept(make: Make, tmp_path: Path, keep_prompts: bool) -> None:
    predictor = make(keep_prompts=keep_prompts)
    finish(predictor, ("tea with a secret", 10))
    predictor.save()
    written = b"".join(path.read_bytes() for path in (tmp_path / STORE).rglob("*") if path.is_file())
    assert (b"a secret" in written) == keep_prompts


def test_a_store_of_another_encoder_is_set_aside(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(first := make(encoder="other"), ("tea", 10))
    first.save()
    predictor = make()
    assert predictor.predict([prompt("tea")]) == [None]
    assert (tmp_path / f"{STORE}.damaged-1").is_dir()
    finish(predictor, ("tea", 20))
    predictor.save()
    assert lengths(make().predict([prompt("tea")])) == [(20, 20, "retrieval")]
    assert len(caplog.records) == 1


def test_the_store_keeps_to_its_capacity_and_trainings_go_on_all_the_same(
    make: Make,
) -> None:
    """A full store does not grow; by its size, no training was ever due again."""
    predictor = make(capacity=3)
    finish(predictor, *((f"tea {i}", 10 + 100 * i) for i in range(8)))
    predictor.save()
    assert predictor.status()["entries"] == 3
    assert NoRefresh.made.calls == [(8, 0)]


@pytest.mark.usefixtures("make")
def test_equal_histories_give_equal_predictions_and_files(tmp_path: Path) -> None:
    results, files = list[object](), list[object]()
    for name in ("a", "b"):
        predictor = RetrievalPredictor(retrieval(seed=5, capacity=40), tmp_path / name)
        for i in range(60):
            finish(predictor, (f"{TOPICS[i % 4]} {i % 13}", 10 + i * 37 % 101))
        results.append(lengths(predictor.predict([prompt(f"{topic} {n}") for topic in TOPICS for n in range(20)])))
        predictor.save()
        (entries,) = (tmp_path / name / STORE).rglob("entries.npz")
        files.append(entries.read_bytes())
    assert results[0] == results[1]
    assert files[0] == files[1]


def test_it_is_asked_and_told_at_the_same_time(make: Make) -> None:
    predictor = make()
    finish(predictor, ("tea", 10))
    errors = list[BaseException]()

    def learn() -> None:
        try:
            for i in range(150):
                predictor.learn([FinishedPrompt(prompt("tea"), 10, float(i))])
                if i % 50 == 0:
                    predictor.save()
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=learn)
    thread.start()
    while thread.is_alive():
        assert lengths(predictor.predict([prompt("tea"), prompt("trains")])) == [(10, 10, "retrieval"), None]
    thread.join()
    assert not errors


# --- the decoder ------------------------------------------------------------------------------------------------------


def test_a_decoder_answers_where_no_prompt_is_similar(make: Make, tmp_path: Path) -> None:
    write_decoder(tmp_path, 50)
    predictor = make()
    assert predictor.status() == {"entries": 0, "decoder_examples": 50}
    finish(predictor, ("tea", 10))
    asked = [prompt("tea"), prompt("taxes"), prompt("taxes", 60)]
    assert lengths(predictor.predict(asked)) == [(10, 10, "retrieval"), (50, 100, "decoder"), (50, 60, "decoder")]


def test_a_decoder_that_wants_the_prompts_length_gets_it(make: Make, tmp_path: Path) -> None:
    write_decoder(tmp_path, 50, features=(LENGTH_FEATURE,))
    asked = [prompt("tea", 10_000, prompt_tokens=count) for count in (10, 40, 0)]
    short, long, unknown = make().predict(asked)
    assert short is not None
    assert long is not None
    assert unknown is not None
    assert short.tokens < long.tokens
    assert unknown.tokens == 50, "as of the usual prompt"


def test_the_strategy_is_the_configured_one(make: Make, tmp_path: Path) -> None:
    write_decoder(tmp_path, 50)
    predictor = make(strategy="shrunk")
    finish(predictor, ("tea", 10))
    (estimate,) = predictor.predict([prompt("tea")])
    assert estimate is not None
    assert estimate.source == "blend"


def test_a_new_decoder_is_picked_up_when_its_training_ended(make: Make, tmp_path: Path) -> None:
    predictor = make(seed=3)
    refresh = NoRefresh.made
    assert (refresh.folder, refresh.seed) == (tmp_path, 3)
    finish(predictor, ("tea", 10))
    predictor.save()
    write_decoder(tmp_path, 50, num_examples=40)
    predictor.save()
    assert predictor.predict([prompt("taxes")]) == [None], "not before the training says that it is written"
    refresh.done = True
    predictor.save()
    assert lengths(predictor.predict([prompt("taxes")])) == [(50, 100, "decoder")]
    assert refresh.calls == [(1, 0), (1, 0), (1, 40)]
    predictor.close()
    assert refresh.calls[-1] == "stop"


def test_a_decoder_in_use_outlives_one_that_is_damaged(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_decoder(tmp_path, 50)
    predictor = make()
    (tmp_path / DECODER).write_bytes(b"damaged")
    NoRefresh.made.done = True
    predictor.save()
    assert lengths(predictor.predict([prompt("taxes")])) == [(50, 100, "decoder")]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_decoder_of_another_encoder_is_not_used(make: Make, tmp_path: Path) -> None:
    write_decoder(tmp_path, 50, encoder="other")
    assert make().predict([prompt("tea")]) == [None]


def test_without_refreshing_nothing_is_trained(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(NoRefresh, "made", raising=False)
    predictor = make(refresh_decoder=False)
    finish(predictor, ("tea", 10))
    predictor.save()
    predictor.close()
    assert not hasattr(NoRefresh, "made")


def test_a_save_that_fails_trains_nothing_from_what_is_not_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = make()
    finish(predictor, ("tea", 10))

    def full_disk(*args: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_files, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        predictor.save()
    assert NoRefresh.made.calls == []
