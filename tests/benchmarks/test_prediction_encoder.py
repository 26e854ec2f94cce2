"""The benchmark of the prompt encoder: its estimates worked by hand, and a run over made-up data."""

from __future__ import annotations

import gzip
import json
from importlib import import_module as script
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_ext.prediction.encoder import Encoder

pytestmark = pytest.mark.usefixtures("encoder_settings")


def rows(groups_and_turns: list[tuple[int, int]]) -> list[Any]:
    return [script("prediction_ranking").Row(prompt="", output="", group=g, turn=t) for g, t in groups_and_turns]


def test_estimate_is_the_weighted_mean_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = script("prediction_ranking")
    monkeypatch.setattr(ranking, "NEIGHBOURS", 2)
    vectors = np.array([[1, 0], [0.6, 0.8], [0.8, 0.6]], dtype=np.float32)
    found = ranking.estimates(vectors, np.array([100, 10, 20]), rows([(0, 0), (1, 0), (2, 0)]))
    # Similarities 0.6 and 0.8 of the first row, 0.6 and 0.96 of the second, 0.8 and 0.96 of the third.
    expected = [(0.6 * 10 + 0.8 * 20) / 1.4, (0.6 * 100 + 0.96 * 20) / 1.56, (0.8 * 100 + 0.96 * 10) / 1.76]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_later_turns_of_a_conversation_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = script("prediction_ranking")
    monkeypatch.setattr(ranking, "NEIGHBOURS", 1)
    vectors = np.array([[1, 0], [1, 0], [0.6, 0.8]], dtype=np.float32)
    found = ranking.estimates(vectors, np.array([5, 6, 7]), rows([(0, 1), (0, 3), (1, 1)]))
    assert found[:2].tolist() == [7, 5]


def test_chats_hold_what_was_said_up_to_the_question(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2
    write(tmp_path / "chats", [{"id": "1", "conversations": said}])
    first, second = script("prediction_ranking").chats(tmp_path, "chats", 1, 0)
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert [m["content"] for m in second.messages][1:] == ["a", "b", "a"]
    assert (first.group, first.turn, second.turn, second.output) == (0, 1, 3, "b")
    assert script("prediction_ranking").rendered(second).endswith("<|im_start|>assistant\n")


def test_prompts_are_distinct_and_keep_their_first_answer(tmp_path: Path) -> None:
    write(
        tmp_path / "rows",
        [{"prompt": "a", "output": "1"}, {"prompt": "a", "output": "2"}, {"prompt": "b", "output": " "}],
    )
    (row,) = script("prediction_ranking").single_turn(tmp_path, "rows", {}, 9, 0)
    assert (row.prompt, row.output) == ("a", "1")


def test_words_of_the_speed_measurement_are_one_token_each() -> None:
    encoder = Encoder(max_tokens=8)
    assert {encoder.count_tokens(word) for word in script("prediction_encoder")._VOCABULARY} == {1}


def test_speed_is_measured_for_every_combination() -> None:
    found = script("prediction_encoder").measure_speed((1,), (8, 16), (1, 2), repeats=1, seed=0)
    assert [(c.threads, c.tokens, c.batch) for c in found] == [(1, 8, 1), (1, 8, 2), (1, 16, 1), (1, 16, 2)]
    assert all(0 < s.wall_s < float("inf") and 0 < s.cpu_s < float("inf") for s in found.values())


def test_run_reports_windows_and_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["apple", "river", "stone", "music"]
    single = [{"prompt": f"{words[i % 4]} {i} " * 40, "output": "word " * (i % 4 + 1)} for i in range(40)]
    write(tmp_path / "single_turn" / "wildchat_first1445", single)
    questions = [{"q": f"question {i}", "answers": ["word " * i]} for i in range(1, 5)]
    write(tmp_path / "long_docs" / "squality", [{"id": "1", "text": "long " * 300, "questions": questions}])
    said = [{"from": "human", "value": "apple"}, {"from": "gpt", "value": "word " * 3}] * 2
    said += [{"from": "human", "value": "river"}, {"from": "gpt", "value": "word " * 9}] * 2
    write(tmp_path / "multi_turn" / "sharegpt", [{"id": str(i), "conversations": said} for i in range(4)])

    script("prediction_encoder").main(["--quick", "--only", "ranking", "--data", str(tmp_path)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    metrics = result["metrics"]
    assert metrics["wildchat_64tok_head_longer_rows"] == 40
    assert metrics["wildchat_64tok_tail_all_tau"] > 0.5
    assert "squality_64tok_head_longer_tau" not in metrics  # too few rows to say anything
    assert {"sharegpt_chat_default_tau", "sharegpt_chat_rendered_tau"} <= metrics.keys()
    assert [goal["metric"] for goal in result["goals"]] == ["default_window_tau_loss", "chat_text_tau_gain"]


def test_missing_data_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script("prediction_encoder").main(["--quick", "--data", str(tmp_path / "none")])
    assert "--data none: no folder with single_turn/ in it" in capsys.readouterr().err


def write(path: Path, entries: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path.with_name(f"{path.name}.jsonl.gz"), "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)
