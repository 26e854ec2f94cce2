"""Several processes on one store lose nothing, and one that is killed has lost nothing that was committed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from tests.support.learned_parts import entry, everything, store

ROOT = Path(__file__).parents[2]
WRITER = """
import sys
from pathlib import Path
from tests.support.learned_parts import entry, store
folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
one = store(folder, capacity=10**6)
print("open", flush=True)
sys.stdin.readline()
for number in range(first, last):
    if one.add([entry(f"w{number}", number + 1), entry(f"v{number}", number + 1)]):
        print(number, flush=True)
"""


def writer(folder: Path, first: int, last: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(first), str(last)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
    )  # fmt: skip


def test_what_another_process_adds_is_found(tmp_path: Path) -> None:
    one, other = store(tmp_path), store(tmp_path)
    one.add([entry("a", 1)])
    other.add([entry("b", 2)])
    assert [e.tokens.tolist() for e in one.since(1)] == [[2]]
    assert everything(other).tokens.tolist() == [1, 2]


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """They also make the file at once."""
    processes = [writer(tmp_path / "p", 200 * number, 200 * number + 200) for number in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=HANG_S)
        assert process.returncode == 0
    found = everything(store(tmp_path / "p", capacity=10**6))
    assert sorted(found.tokens.tolist()) == sorted(2 * list(range(1, 601)))
    assert not list((tmp_path / "p").glob("*damaged*"))


@pytest.mark.parametrize("after", [1, 20, 90])
def test_killed_while_writing_it_opens_with_everything_committed(
    tmp_path: Path, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    process = writer(tmp_path / "p", 0, 10**6)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    process.stdin.write("go\n")
    process.stdin.flush()
    said = [int(process.stdout.readline()) for _ in range(after)]
    process.send_signal(signal.SIGKILL)
    said += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    process.wait(HANG_S)
    tokens = everything(store(tmp_path / "p", capacity=10**6)).tokens.tolist()
    assert tokens[: 2 * len(said)] == [number + 1 for number in said for _ in range(2)]
    assert len(tokens) % 2 == 0, "each transaction is whole"
    assert not caplog.records
