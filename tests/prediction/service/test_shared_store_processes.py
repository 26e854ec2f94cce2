"""The store that servers share, with servers that are processes: they save at once, and are killed while they do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.extent import HANG_S

from .parts import DIM, until
from .shared_store_parts import known, learn, opened, saved, state

SERVER = """
import sys
import numpy as np
from pathlib import Path
from vllm_ext.prediction import store_files
from vllm_ext.prediction.service.shared_store import SharedStore

folder, dim, number, rounds, rows = Path(sys.argv[1]), *map(int, sys.argv[2:])
shared = SharedStore(store_files.load(folder, dim, encoder="enc"), folder, max_bytes=1 << 24)
rng = np.random.default_rng(number)
for n in range(rounds):
    vectors = rng.standard_normal((rows, dim))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    shared.add(vectors, np.full(rows, 100 * number + n), ["m"] * rows, np.full(rows, 1.0))
    shared.save()
"""


def serve(folder: Path, number: int, *, rounds: int, rows: int) -> subprocess.Popen[bytes]:
    """Start a server that learns so many entries in each of so many rounds, and saves each time."""
    return subprocess.Popen([sys.executable, "-c", SERVER, str(folder), *map(str, (DIM, number, rounds, rows))])


def test_servers_that_save_at_the_same_time_lose_nothing_even_if_they_end_with_it(tmp_path: Path) -> None:
    """Two that stopped together once read the old state both, and the second wrote over what the first had added."""
    servers = [serve(tmp_path / "store", number, rounds=8, rows=1) for number in (1, 2, 3)]
    for server in servers:
        assert server.wait(HANG_S) == 0
    assert saved(tmp_path / "store") == [100 * number + n for number in (1, 2, 3) for n in range(8)]


def differs(folder: Path, begin: bytes) -> bool:
    return state(folder) != begin


def test_killed_while_it_saves_a_server_leaves_a_state_that_others_read_and_add_to(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    survivor = opened(folder)
    learn(survivor, [1])
    survivor.save()
    for number in (1, 2):
        process = serve(folder, number, rounds=1000, rows=200)
        until(partial(differs, folder, state(folder)), "a first save")
        time.sleep(0.05 + 0.013 * number)
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_S)
        learn(survivor, [10 + number])
        survivor.save()
    lengths = saved(folder)
    assert [length for length in lengths if length < 100] == [1, 11, 12]
    for first_of_a_server in (100, 200):
        assert lengths.count(first_of_a_server) == 200, "each of its saves is there whole"
    assert (len(lengths) - 3) % 200 == 0
    assert known(opened(folder)) == lengths
    assert not list(tmp_path.glob("*.damaged-*"))
