"""The store: what is added is there, for its owner only, within its bounds; another encoder's rows are left alone."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import numpy as np
import pytest

from tests.support.learned_parts import entry, everything, store
from vllm_ext.prediction.folder import STORE


def test_what_is_added_is_there_after_a_restart_in_order(tmp_path: Path) -> None:
    one = store(tmp_path / "p")
    assert one.add([entry("a b", 7, tag="t", salt=b"s", conversation=b"c", turn=2, prompt_tokens=5)])
    assert one.add([entry("c", 9, aborted=True), entry("\ud800 d", 1, model="\udfff")])
    one.close()
    found = everything(store(tmp_path / "p"))
    assert found.ids.tolist() == [1, 2, 3]
    assert found.tokens.tolist() == [7, 9, 1]
    assert found.aborted.tolist() == [False, True, False]
    assert (found.tags[0], found.salts[0], found.conversations[0]) == ("t", b"s", b"c")
    assert (found.turns[0], found.prompt_tokens[0]) == (2, 5)
    np.testing.assert_allclose(np.linalg.norm(found.vectors.astype(np.float32), axis=1), 1, atol=1e-3)


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        one = store(tmp_path / "new" / "p")
        one.add([entry("a", 1)])
        files = list((tmp_path / "new" / "p").iterdir())
        assert {file.name for file in files} == {STORE, f"{STORE}-wal", f"{STORE}-shm"}
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert stat.S_IMODE((tmp_path / "new" / "p").stat().st_mode) == 0o700
        one.close()
        files[0].parent.joinpath(STORE).chmod(0o644)
        store(tmp_path / "new" / "p")
        assert stat.S_IMODE((tmp_path / "new" / "p" / STORE).stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_the_oldest_go_where_there_are_too_many(tmp_path: Path) -> None:
    one = store(tmp_path, capacity=10)
    for number in range(25):
        one.add([entry(f"w{number}", number + 1)])
    assert everything(one).tokens.tolist() == list(range(16, 26))
    assert one.inserted() == 25
    assert everything(store(tmp_path, capacity=10)).ids.tolist() == list(range(16, 26)), "ids are never given twice"


def test_the_file_stays_within_its_size(tmp_path: Path) -> None:
    one = store(tmp_path, max_mib=1, keep_prompts=True, capacity=10**6)
    for number in range(30):
        one.add([entry(f"w{number}-{i} " + "x" * 2000, i + 1) for i in range(40)])
    one.close()
    assert (tmp_path / STORE).stat().st_size < 1.3 * 2**20
    kept = everything(store(tmp_path, max_mib=1)).ids
    assert kept[-1] == 1200
    assert 100 < len(kept) < 1200


def test_of_one_text_the_newest_32_are_kept_whatever_their_vectors(tmp_path: Path) -> None:
    """A text's vector differs by rounding with its batch; it is told by its hash. Each model and salt has its own."""
    one = store(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(44):
        same = entry("same", number + 1)
        shaken = same.vector + rng.normal(0, 1e-3, same.vector.shape).astype(np.float32)
        one.add([same._replace(vector=shaken / np.linalg.norm(shaken)), same._replace(salt=b"other"), entry("o", 1)])
    found = everything(one)
    mine = [tokens for tokens, salt in zip(found.tokens.tolist(), found.salts, strict=True) if not salt and tokens > 1]
    assert mine == list(range(13, 45))
    assert found.salts.count(b"other") == 32


def test_texts_are_kept_only_where_that_is_asked_for(tmp_path: Path) -> None:
    for keep, expected in ((False, None), (True, "a secret")):
        one = store(tmp_path / str(keep), keep_prompts=keep)
        one.add([entry("a secret", 3)])
        one.close()
        with sqlite3.connect(tmp_path / str(keep) / STORE) as db:
            assert db.execute("SELECT prompt FROM entries").fetchone() == (expected,)
        assert (b"secret" in (tmp_path / str(keep) / STORE).read_bytes()) == keep


def test_rows_of_another_encoder_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(tmp_path, encoder="old").add([entry("a", 1)])
    new = store(tmp_path, encoder="new")
    new.add([entry("a", 2)])
    assert everything(new).tokens.tolist() == [2]
    assert everything(store(tmp_path, encoder="old")).tokens.tolist() == [1]
    assert [file.name for file in tmp_path.iterdir() if "damaged" in file.name] == []
    assert not caplog.records


def test_the_newest_are_found_of_one_encoder(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.add([entry(f"w{number}", number + 1) for number in range(50)])
    assert one.newest(5).tokens.tolist() == [46, 47, 48, 49, 50]
    assert len(one.newest(500)) == 50
    assert len(store(tmp_path, encoder="other").newest(5)) == 0
