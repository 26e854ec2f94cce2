"""C++ compiled on the machine that runs it, and kept on disk: seconds once, instead of in every process.

A wheel cannot know the vector instructions of the machine, and g++ is there wherever vLLM compiles for the CPU. A file
in the cache folder holds one shared object followed by its SHA-256, which the dynamic linker ignores; all that the
machine code depends on is hashed into the file's name, so that a home directory may be shared by different machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vllm_ext import envs

logger = logging.getLogger(__name__)

COMPILER = "g++"
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-std=c++17")
REMEDY = "install it (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
_DIGEST_BYTES = 32
_SHOWN_CHARS = 4000


class CompilerMissing(RuntimeError):
    """There is no g++, or none that runs."""


class CompileError(RuntimeError):
    """g++ refused the source; holds its messages."""


def brief(error: CompilerMissing | CompileError) -> str:
    """Return an error in one line: what failed, and the first line of g++ that names an error."""
    first, *others = str(error).splitlines()
    named = next((line for line in (first, *others) if "error:" in line), first)
    return first if named is first else f"{first.partition('; ')[0]}; {named}"


def load(source: Path, *, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile ``source`` unless that was done before, and load it; calls of its functions release the GIL.

    Processes that need the same file at once wait for the one that compiles it. A kept file that is damaged, belongs to
    another user or does not load is set aside and made again. Without a folder to write to it is compiled each time.

    Args:
        source: One C++17 file. What it includes is the compiler's own, or a ``.h`` beside it: all of those are hashed.
        flags: Further flags of g++, such as ``-fopenmp``.

    Raises:
        CompilerMissing: g++ is needed and not there; says how to install it.
        CompileError: g++ refused the source, or made what cannot be loaded.
    """
    name = f"{source.stem}-{fingerprint(source, flags=flags)}"
    with _folder() as folder, locked(folder / f"{name}.lock"):
        path = folder / f"{name}.so"
        if (kept := _open_kept(path)) is not None:
            return kept
        _compile(source, flags, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise CompileError(f"{source.name}: {COMPILER} made a file that cannot be loaded: {error}") from error


def fingerprint(source: Path, *, flags: tuple[str, ...] = ()) -> str:
    """Return 24 hexadecimal digits made of all that the machine code depends on.

    Those are the source, the headers beside it, the flags, the compiler and this machine.

    Raises:
        CompilerMissing: g++ is not there.
    """
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    made_of = (texts, FLAGS, flags, compiler_version(), machine())
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]


@functools.cache
def compiler_version() -> str:
    """Return the first line of ``g++ --version``.

    Raises:
        CompilerMissing: It is not on the path, or does not run.
    """
    if shutil.which(COMPILER) is None:
        raise CompilerMissing(f"{COMPILER} was not found on the path; {REMEDY}")
    try:
        done = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerMissing(f"{COMPILER} does not run: {error}; {REMEDY}") from error
    return done.stdout.partition("\n")[0]


@functools.cache
def machine() -> str:
    """Return the model of this machine's CPU and its instructions, which ``-march=native`` depends on."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "CPU part", "Features")
    found = [platform.machine()]
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        found += [line for line in first.splitlines() if line.partition(":")[0].strip() in wanted]
    return "\n".join(found)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Give the folder of compiled code, or one that lasts until the code is loaded where none can be kept."""
    if (lasting := _lasting_folder()) is not None:
        yield lasting
        return
    with tempfile.TemporaryDirectory(prefix="vllm-ext-native-") as temporary:
        yield Path(temporary)


def _lasting_folder() -> Path | None:
    try:
        folder = envs.cache_dir() / "native"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        logger.warning("compiled code is not kept for other processes: %s", error)
        return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds this file, which is made, and hold it meanwhile.

    Raises:
        OSError: it can't be made.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_kept(path: Path) -> ctypes.CDLL | None:
    """Load a file that an earlier process compiled; None if there is none, or none to be trusted."""
    try:
        about, content = path.stat(), path.read_bytes()
    except OSError:
        return None
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    reason = "is damaged, or another user's"
    if about.st_uid == os.geteuid() and hashlib.sha256(body).digest() == digest:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            reason = f"does not load ({error})"
    aside = path.with_suffix(".bad")
    logger.warning("%s %s: set aside as %s and compiled again", path, reason, aside.name)
    path.replace(aside)
    return None


def _compile(source: Path, flags: tuple[str, ...], path: Path) -> None:
    """Compile into ``path``, which either gets the whole file or is left alone."""
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [COMPILER, *FLAGS, *flags, "-o", str(made), str(source)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.strip() or "It said nothing."
            raise CompileError(
                f"{source.name}: {compiler_version()} exited with status {done.returncode}; {said[:_SHOWN_CHARS]}"
            )
        with made.open("r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
        made.replace(path)
