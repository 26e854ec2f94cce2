"""Compiled code kept on disk: to compile for a layout takes seconds, which a user pays once and not in every process.

numba's own cache holds pickles, and finds no function that is made of others. Here a file in the cache folder holds the
machine code of one function after its SHA-256; what the code depends on is in the file's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from vllm_ext import envs

logger = logging.getLogger(__name__)


def function(name: str, kernel: Callable[..., None], signature: Any, made_for: tuple[object, ...]) -> Any:
    """Return a C function from the cache folder, or compile it and keep it there; calls of it release the GIL.

    Args:
        name: Of the file.
        kernel: For numba, with addresses and numbers as arguments, and without a result.
        signature: Of the C function.
        made_for: What the kernel depends on, besides the sources beside this file.
    """
    codegen = cpu_target.target_context.codegen()
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    made_of = (name, signature, made_for, numba.__version__, llvmlite.__version__, codegen.magic_tuple(), sources)
    path = _folder() / f"{name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}"
    with global_compiler_lock:
        if kept := _read(path):
            symbol, code, bitcode = kept
            rtsys.initialize(cpu_target.target_context)  # what allocates memory
            library = codegen.unserialize_library((name, "object", (code, bitcode)))
        else:
            compiled = numba.cfunc(signature)(kernel)
            symbol, library = compiled.native_name, compiled._library
            _write(path, symbol, *library.serialize_using_object_code()[2])
        address = library.get_pointer_to_function(symbol)
    kinds = [ctypes.c_void_p if isinstance(arg, numba.types.CPointer) else ctypes.c_ssize_t for arg in signature.args]
    found: Any = ctypes.CFUNCTYPE(None, *kinds)(address)
    found.library = library  # the code goes with it
    return found


def _folder() -> Path:
    try:
        return envs.cache_dir() / "machine-code"
    except RuntimeError:  # no home
        return Path(os.devnull, "no-folder")


def _read(path: Path) -> tuple[str, bytes, bytes] | None:
    """Return symbol, machine code and bitcode; None if there is no such file, or none to be trusted."""
    try:
        about, content = path.stat(), path.read_bytes()
    except OSError:
        return None
    if about.st_uid != os.geteuid() or hashlib.sha256(content[32:]).digest() != content[:32]:
        logger.warning("%s is damaged, or another user's: compiled again", path)
        return None
    symbol, size, body = content[32:].split(b"\n", 2)
    return symbol.decode(), body[: int(size)], body[int(size) :]


def _write(path: Path, symbol: str, code: bytes, bitcode: bytes) -> None:
    content = f"{symbol}\n{len(code)}\n".encode() + code + bitcode
    fresh = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            fresh = file.name
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(fresh, path)
    except OSError as error:
        logger.warning("compiled code is not kept for other processes: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(fresh or "")
