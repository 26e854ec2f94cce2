"""A save that is killed, that fails, or that meets readers and other savers: the old or the new state, whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.extent import HANG_S
from vllm_ext.prediction import store_generation
from vllm_ext.prediction.store_files import read, save
from vllm_ext.prediction.vector_store import VectorStore

from . import store_parts
from .store_parts import contents, load_enc, make_store

# Saves `new` over `old`, or where nothing is, and is killed at the n-th thing it asks of the file system; the parent
# checks what is left.
KILLED_SAVE = """
import os, signal, sys
from pathlib import Path
from store_parts import contents, load_enc, make_store
from vllm_ext.prediction.store_files import save
import numpy, zipfile, hashlib, json, secrets, shutil, fcntl  # no imports while calls are counted

folder, first = Path(sys.argv[1]), sys.argv[2] == "first"
old, new = make_store(0 if first else 5, keep_prompts=True), make_store(8, seed=1, keep_prompts=True)
states, point = [], 0

def before():
    if first:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        save(old, folder)

while True:
    before()
    child = os.fork()
    if not child:
        left, me, kill = point, os.getpid(), signal.SIGKILL
        def hook(event, args):
            global left
            if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")) and event != "os.kill":
                left -= 1
                if left < 0:
                    os.kill(me, kill)
        real_sync = os.fsync
        os.fsync = lambda handle: (hook("os.fsync", ()), real_sync(handle))
        sys.addaudithook(hook)
        try:
            save(new, folder)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    found = contents(load_enc(folder))
    states.append("old" if found == contents(old) else "new" if found == contents(new) else "BROKEN")
    if status == 0:
        break
    point += 1
save(new, folder)
print(*states)
print(len(list(folder.iterdir())))
"""


def run_code(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run in a fresh process that can import the helpers."""
    preamble = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('store_parts', {store_parts.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['store_parts'] = module\n"
        "spec.loader.exec_module(module)\n"
    )
    return subprocess.Popen([sys.executable, "-c", preamble + code, *arguments], stdout=subprocess.PIPE, text=True)


def test_a_save_killed_at_any_step_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    output, _ = run_code(KILLED_SAVE, str(tmp_path / "store"), "another").communicate(timeout=HANG_S)
    states, files = output.splitlines()
    steps = states.split()
    switch = steps.index("new")
    assert len(steps) > 15, "the hook must see the steps of a save"
    assert steps == ["old"] * switch + ["new"] * (len(steps) - switch)
    assert 5 < switch < len(steps) - 1, "kills must fall on both sides of the switch"
    assert files == "3", "what killed saves left must be gone after the next save"
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_first_save_killed_at_any_step_leaves_nothing_or_the_new_state(tmp_path: Path) -> None:
    """Between its last file and CURRENT, what is there is whole and can't be read: it is set aside, not lost."""
    output, _ = run_code(KILLED_SAVE, str(tmp_path / "store"), "first").communicate(timeout=HANG_S)
    states, files = output.splitlines()
    steps = states.split()
    switch = steps.index("new")
    assert steps == ["old"] * switch + ["new"] * (len(steps) - switch)
    assert 5 < switch < len(steps) - 1
    assert files == "3"
    aside = list(tmp_path.glob("store.damaged-*"))
    assert 0 < len(aside) < switch
    assert all(len(list(folder.glob("gen-*/metadata.json"))) == 1 for folder in aside)


SAVING_FOREVER = """
from pathlib import Path
from store_parts import make_store
from vllm_ext.prediction.store_files import save
stores = [make_store(3000), make_store(4000, seed=1)]
print("ready", flush=True)
while True:
    for store in stores:
        save(store, Path(sys.argv[1]))
"""


def test_a_save_killed_at_any_time_leaves_a_whole_state(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    states = [contents(make_store(3000)), contents(make_store(4000, seed=1))]
    for delay_s in (0.05, 0.061, 0.073):
        process = run_code(SAVING_FOREVER, str(folder))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while not (folder / "CURRENT").exists():
            time.sleep(0.001)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=HANG_S)
        assert contents(load_enc(folder)) in states
    save(make_store(2), folder)
    assert len(list(folder.iterdir())) == 3


def test_a_save_that_fails_leaves_the_state_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_store(4), tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((np, "savez"), (store_generation.os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full_disk)
            with pytest.raises(OSError, match="No space left"):
                save(make_store(9), tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert len(load_enc(tmp_path)) == 4


def test_readers_and_savers_at_the_same_time_see_whole_states(tmp_path: Path) -> None:
    stores = [make_store(40), make_store(60, seed=1)]
    sizes = {len(store) for store in stores}
    save(stores[0], tmp_path)
    errors = list[str]()

    def save_often(store: VectorStore) -> None:
        for _ in range(6):
            save(store, tmp_path)

    savers = [threading.Thread(target=save_often, args=(store,)) for store in stores]
    for thread in savers:
        thread.start()
    while any(thread.is_alive() for thread in savers):
        entries, _ = read(tmp_path)
        if len(entries) not in sizes:
            errors.append(f"{len(entries)} entries")
    for thread in savers:
        thread.join()
    assert not errors
    assert len(list(tmp_path.iterdir())) == 3
