"""The refresh of a decoder: a process whose exit status says what became of the file."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.extent import FULL, HANG_S
from vllm_ext.prediction import decoder_file, refresh, store_files
from vllm_ext.prediction.decoder import LONGEST_TOKENS
from vllm_ext.prediction.folder import DECODER, STORE, load_decoder
from vllm_ext.prediction.refresh import NoDecoderError, train_from, widths
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.vector_store import VectorStore

from .store_parts import random_units

DIM = 8
SMALL = ("--hidden", "32", "--epochs", "8")


def learnable(count: int, *, seed: int = 0) -> Entries:
    """Entries whose lengths follow the first coordinate of the embedding."""
    vectors = random_units(count, DIM, seed)
    return Entries.checked(DIM, vectors, np.rint(np.exp(4 + 2 * vectors[:, 0])).astype(np.int64))


def noise(count: int) -> Entries:
    return Entries.checked(DIM, random_units(count, DIM), np.random.default_rng(1).integers(5, 500, count))


def write_store(folder: Path, entries: Entries) -> None:
    store = VectorStore(DIM, encoder="enc")
    store.add(entries.vectors, entries.lengths)
    store_files.save(store, folder / STORE)


AT_OUR_PRIORITY = """
import os, runpy
os.nice = lambda step: step
runpy.run_module("vllm_ext.prediction.refresh", run_name="__main__", alter_sys=True)
"""


def process(folder: Path, *options: str) -> tuple[int, str, str]:
    """Exit status, output and errors of ``python -m``; at idle priority it would wait for all that the machine does."""
    command = [sys.executable, "-c", AT_OUR_PRIORITY, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    return done.returncode, done.stdout, done.stderr


def run(folder: Path, *options: str) -> tuple[int, str, str]:
    """As `process`, but in this process, which has imported all, unless everything is to be tried."""
    if FULL:
        return process(folder, *options)
    told, complaints = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(complaints):
        patch.setattr(refresh.os, "nice", lambda step: step)
        patch.setattr(refresh, "_ONE_THREAD", ())
        try:
            status = refresh.main([str(folder), *options])
        except SystemExit as end:  # wrong options
            status = int(str(end.code))
    return status, told.getvalue(), complaints.getvalue()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_refresh_writes_a_decoder_that_the_service_can_use_and_repeats_its_bytes(tmp_path: Path) -> None:
    write_store(tmp_path, learnable(400))
    store_before = files(tmp_path / STORE)
    made = []
    for _ in range(2):
        assert process(tmp_path, "--seed", "7", *SMALL) == (0, "", "")
        made.append((tmp_path / DECODER).read_bytes())
    assert made[0] == made[1]
    decoder = load_decoder(tmp_path, "enc")
    assert decoder is not None
    assert (decoder.spec.hidden, decoder.spec.num_examples, decoder.spec.encoder) == ((32,), 400, "enc")
    assert decoder.spec.skill > 0.2
    assert files(tmp_path / STORE) == store_before
    assert sorted(path.name for path in tmp_path.iterdir()) == [DECODER, STORE]


def test_it_learns_from_the_newest(tmp_path: Path) -> None:
    old, new = noise(300), learnable(300)
    store = VectorStore(DIM, encoder="enc")
    for part in (old, new):
        store.add(part.vectors, part.lengths)
    store_files.save(store, tmp_path / STORE)
    assert run(tmp_path, "--max-examples", "300", *SMALL)[0] == 0
    decoder = load_decoder(tmp_path, "enc")
    assert decoder is not None
    assert decoder.spec.num_examples == 300
    wanted, _ = train_from(new, "enc", seed=0, hidden=(32,), epochs=8)
    assert (decoder.spec.min_tokens, decoder.spec.max_tokens) == (wanted.spec.min_tokens, wanted.spec.max_tokens)
    assert decoder.spec.skill == pytest.approx(wanted.spec.skill)


@pytest.mark.parametrize(
    ("entries", "message"),
    [(None, "no store yet"), (learnable(19), "19 entries of 19 different prompts: a decoder needs 20")],
    ids=["no store", "too few"],
)
def test_too_little_to_learn_from_is_status_3(tmp_path: Path, entries: Entries | None, message: str) -> None:
    if entries is not None:
        write_store(tmp_path, entries)
    (tmp_path / DECODER).write_bytes(b"what was there")
    before = files(tmp_path)
    status, _, complaint = run(tmp_path, *SMALL)
    assert status == 3
    (line,) = complaint.splitlines()
    assert message in line
    assert files(tmp_path) == before


def test_no_better_than_a_constant_is_status_3_and_the_old_decoder_stays(tmp_path: Path) -> None:
    vectors = random_units(60, DIM)
    write_store(tmp_path, Entries.checked(DIM, vectors, [7] * 60))
    (tmp_path / DECODER).write_bytes(b"what was there")
    before = files(tmp_path)
    status, _, complaint = run(tmp_path, *SMALL)
    assert status == 3
    (line,) = complaint.splitlines()
    assert "no better than a constant" in line
    assert "skill 0.000" in line
    assert files(tmp_path) == before


def test_a_damaged_store_is_status_2_and_left_alone(tmp_path: Path) -> None:
    write_store(tmp_path, learnable(40))
    (entries,) = tmp_path.rglob("entries.npz")
    entries.write_bytes(entries.read_bytes()[:-9])
    before = files(tmp_path)
    status, _, complaint = run(tmp_path, *SMALL)
    assert status == 2
    (line,) = complaint.splitlines()
    assert str(entries) in line
    assert "damaged" in line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hidden", "0"), "'0': must be whole numbers"),
        (("--hidden", "a,b"), "'a,b': must be whole numbers"),
        (("--max-examples", "3"), "max_examples=3: must be at least 20"),
        (("--epochs", "0"), "epochs=0"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_wrong_options_are_status_2(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    write_store(tmp_path, learnable(40))
    status, _, complaint = run(tmp_path, *options)
    assert status == 2
    assert message in complaint
    assert "Traceback" not in complaint
    assert not (tmp_path / DECODER).exists()


def test_it_steps_back_behind_everybody_and_takes_one_thread(tmp_path: Path) -> None:
    write_store(tmp_path, learnable(40))
    code = (
        "import os, sys\n"
        "steps, real = [], os.nice\n"
        "os.nice = lambda step: (steps.append(step), real(step))[1]\n"
        "from vllm_ext.prediction import refresh\n"
        "assert not any(name in sys.modules for name in ('numpy', 'torch')), 'threads are chosen before the import'\n"
        "status = refresh.main(sys.argv[1:])\n"
        "import torch\n"
        "print(status, *steps, *(os.environ[name] for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS')))\n"
        "print('faiss' in sys.modules, torch.get_num_threads())\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *SMALL],
        capture_output=True, text=True, timeout=HANG_S, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["0 19 1 1", "False 1"]


def test_what_a_killed_refresh_left_goes_when_it_is_old(tmp_path: Path) -> None:
    write_store(tmp_path, learnable(100))
    old, young = (tmp_path / f".{DECODER}.{name}.tmp" for name in ("1.aa", "2.bb"))
    for path in (old, young):
        path.write_bytes(b"half")
    long_ago = time.time() - 2 * 3600
    os.utime(old, (long_ago, long_ago))
    assert run(tmp_path, *SMALL)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, DECODER, STORE]


# --- train_from -------------------------------------------------------------------------------------------------------


def test_one_absurd_length_does_not_keep_a_decoder_from_being_trained() -> None:
    entries = learnable(100)
    lengths = entries.lengths.copy()
    lengths[3] = LONGEST_TOKENS
    decoder, _ = train_from(Entries.checked(DIM, entries.vectors, lengths), "enc", seed=0, hidden=(32,), epochs=8)
    assert decoder.spec.max_tokens == pytest.approx(LONGEST_TOKENS, rel=1e-6)


def test_prompts_that_judge_are_found_by_their_embeddings() -> None:
    vectors = random_units(200, DIM, seed=1)
    lengths = np.where(vectors[:, 0] > 0, 400, 20)
    entries = Entries.checked(DIM, vectors, lengths, ["m"] * 200)
    judged = frozenset(vector.tobytes() for vector in vectors[:60])
    _, report = refresh.train_from(entries, "enc", seed=0, judged=judged, epochs=8)
    assert report.num_validation == 60
    strangers = frozenset(vector.tobytes() for vector in random_units(60, DIM, seed=2))
    _, report = refresh.train_from(entries, "enc", seed=0, judged=strangers, epochs=8)
    assert report.num_validation == 30, "none of them is left: a random share"


def test_different_prompts_count_not_entries() -> None:
    one = learnable(10)
    many = Entries.checked(DIM, np.repeat(one.vectors, 10, axis=0), np.repeat(one.lengths, 10))
    with pytest.raises(NoDecoderError, match="100 entries of 10 different prompts"):
        train_from(many, "enc", seed=0)


def test_progress_is_told() -> None:
    seen: list[Any] = []
    _, report = train_from(learnable(60), "enc", seed=0, hidden=(8,), epochs=3, on_epoch=seen.append)
    assert [epoch.number for epoch in seen] == list(range(1, report.epochs + 1))


def test_the_widths_of_hidden_layers_are_read() -> None:
    assert widths("512,256") == (512, 256)
    assert widths("8") == (8,)


def test_a_decoder_that_can_not_be_written_is_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as root may write anywhere; its priority and environment are left as they are."""
    write_store(tmp_path, learnable(60))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decoder_file, "save", full)
    monkeypatch.setattr(refresh.os, "nice", lambda step: step)
    monkeypatch.setattr(refresh, "_ONE_THREAD", ())
    assert refresh.main([str(tmp_path), "--hidden", "8", "--epochs", "3"]) == 2
    assert capsys.readouterr().err == "decoder not refreshed: [Errno 28] No space left on device\n"
    assert not (tmp_path / DECODER).exists()
