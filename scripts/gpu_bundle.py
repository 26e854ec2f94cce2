#!/usr/bin/env python3
"""Pack vLLM's CUDA build for a machine that has a GPU and PyTorch, but neither vLLM nor a network.

    python scripts/gpu_bundle.py .gpu          # where pip works: writes .gpu/vllm.tar.xz
    python scripts/gpu_site.py .gpu/vllm.tar.xz          # on the machine: see there

vLLM's compiled modules are of PyTorch's stable ABI, so that they load into PyTorch 2.11 as well as into the one that
they were built with. The bundle leaves out device code of other chips (`gpu_fatbin`), FlashAttention 2, kernels for
mixtures of experts, DeepGEMM, the front end in Rust, headers and tests. Standard library and pip only.

It runs again only if something that it depends on has changed. An interrupted or refused run leaves an older bundle as
it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_fatbin

ROOT = Path(__file__).resolve().parent.parent
BUNDLE = "vllm.tar.xz"
STAMP = f"{BUNDLE}.json"
PINS = (ROOT / "requirements" / "cuda.txt", ROOT / "requirements" / "gpu" / "bundle.txt")
"""vLLM, and what it needs besides."""
SCRIPTS = (Path(__file__), Path(gpu_fatbin.__file__))
COMPILED = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/fs_io_C.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
"""Those of vLLM's compiled modules that a dense model on Hopper needs."""
_VLLM_KINDS = (".py", ".json", ".jinja")
_VLLM_LEFT_OUT = re.compile(r"vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/")
_LEFT_OUT = re.compile(r"/tests/|\.data/|\.dist-info/RECORD$|\.(pyi|js|css)$")
_GLIBC = (28, 27, 24, 17, 31, 34, 35, 39)
"""Minor versions of the wheels' tags; pip takes a tag as it stands, so that the older ones must be listed too."""
_MIB = 2**20


class BundleError(Exception):
    """What went wrong and what to do about it, in one line."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that a bundle is for."""

    architecture: int
    """Of its GPU: compute capability times ten."""
    python: str
    limit_mib: float
    """What the bundle may weigh."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Bytes of device code, by chip."""

    kept: Counter[str]
    dropped: Counter[str]


def build(out: Path, target: Target) -> bool:
    """Bring the bundle in a folder up to date; return whether it had to be packed.

    Raises:
        BundleError: pip failed, a wheel is not what it was, or the bundle would be too large; an older one stays.
    """
    key = inputs(target)
    if is_current(out, key):
        return False
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=out) as scratch:
        wheels, root, packed = (Path(scratch, name) for name in ("wheels", "root", BUNDLE))
        say(f"downloading {len(requirements())} wheels for Python {target.python}")
        download(wheels, target.python)
        unpack(sorted(wheels.glob("*.whl")), root)
        report(thin(root, target.architecture))
        say("packing")
        pack(root, packed)
        refuse_too_large(packed, root, target.limit_mib)
        stamp = {"inputs": key, "sha256": digest(packed)}
        Path(scratch, STAMP).write_text(json.dumps(stamp, indent=1))
        (out / STAMP).unlink(missing_ok=True)  # a bundle without its stamp counts as none
        packed.replace(out / BUNDLE)
        Path(scratch, STAMP).replace(out / STAMP)
    return True


def inputs(target: Target) -> str:
    """Return a key of all that a bundle depends on but the index."""
    key = hashlib.sha256(repr(target).encode())
    for path in (*SCRIPTS, *PINS):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return key.hexdigest()


def is_current(out: Path, key: str) -> bool:
    """Whether a folder holds the bundle of these inputs, unharmed."""
    try:
        stamp = json.loads((out / STAMP).read_text())
        return bool(stamp == {"inputs": key, "sha256": digest(out / BUNDLE)})
    except (OSError, ValueError):
        return False


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def requirements() -> list[str]:
    """Return the pins, one each.

    Raises:
        BundleError: a line is no pin.
    """
    lines = [line.strip() for path in PINS for line in path.read_text().splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    for pin in pins:
        if not re.fullmatch(r"[\w.-]+==[\w.]+", pin):
            raise BundleError(f"requirement {pin!r}: must be NAME==VERSION, because nothing is resolved")
    return pins


def download(folder: Path, python: str) -> None:
    """Let pip fetch the wheels for a machine that is not this one.

    Raises:
        BundleError: there is no pip, or it found no such wheel; ends with its last words.
    """
    glibc = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    platforms = [*glibc, "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-input", *options, "-d", str(folder)]
    done = subprocess.run([*command, *requirements()], capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["It said nothing."]
        raise BundleError(f"pip download exited with status {done.returncode}: {words[-1]}")


def unpack(wheels: Iterable[Path], root: Path) -> None:
    """Unpack what is carried of wheels.

    Raises:
        BundleError: a compiled module of vLLM is not among it any more.
    """
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root, [name for name in archive.namelist() if is_carried(name)])
    if missing := [name for name in COMPILED if not (root / name).is_file()]:
        raise BundleError(f"vLLM's wheel has no {', '.join(missing)}: see what replaced it, and change COMPILED")


def is_carried(name: str) -> bool:
    """Whether a file of a wheel, by its name there, belongs into the bundle."""
    if name.startswith("vllm/"):
        return name in COMPILED or (name.endswith(_VLLM_KINDS) and not _VLLM_LEFT_OUT.match(name))
    return not (name.endswith("/") or _LEFT_OUT.search(f"/{name}"))


def thin(root: Path, architecture: int) -> Device:
    """Clear device code of other chips in vLLM's compiled modules.

    Raises:
        BundleError: one of them is not understood.
    """
    device = Device(kept=Counter(), dropped=Counter())
    for name in COMPILED:
        try:
            thinned = gpu_fatbin.thin(root / name, architecture)
        except gpu_fatbin.MalformedError as error:
            raise BundleError(f"{name}: {error}") from error
        device.kept.update(thinned.kept)
        device.dropped.update(thinned.dropped)
    return device


def report(device: Device) -> None:
    for what, sizes in (("kept", device.kept), ("dropped", device.dropped)):
        listed = ", ".join(f"{name} {size / _MIB:.1f}" for name, size in sorted(sizes.items())) or "none"
        say(f"{what} of the device code, MiB: {listed}")


def pack(root: Path, archive: Path) -> None:
    """Pack a folder; the same files give the same bytes."""

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            tar.add(path, str(path.relative_to(root)), filter=anonymous)


def refuse_too_large(packed: Path, root: Path, limit_mib: float) -> None:
    """Raise a BundleError with the largest parts if a bundle weighs too much."""
    size = packed.stat().st_size / _MIB
    if size > limit_mib:
        parts = ", ".join(f"{name} about {part:.1f}" for name, part in largest(root))
        raise BundleError(f"{size:.1f} MiB: must be at most --limit-mib {limit_mib:g}; the largest parts: {parts}")


def largest(root: Path, count: int = 5) -> list[tuple[str, float]]:
    """Return the parts that weigh most, in MiB of a quick compression: each compiled module, each package's rest."""
    sizes: Counter[str] = Counter()
    for path in (path for path in root.rglob("*") if path.is_file()):
        name = str(path.relative_to(root))
        part = name if name.endswith(".so") else name.partition("/")[0]
        sizes[part] += len(zlib.compress(path.read_bytes(), 1))
    return [(name, size / _MIB) for name, size in sizes.most_common(count)]


def say(text: str) -> None:
    print(f"gpu-bundle: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, 2 for a wrong command line, or 3 if there is no bundle."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER", help=f"receives {BUNDLE}")
    parser.add_argument(
        "--arch",
        type=int,
        default=90,
        help="compute capability of the GPU "
        "times ten (default: 90; without FlashAttention 2, FLASH_ATTN serves no older one)",
    )
    parser.add_argument("--python", default="3.12", help="of the machine (default: 3.12)")
    parser.add_argument("--limit-mib", type=float, default=52.0, help="refuse a larger bundle (default: 52)")
    options = parser.parse_args(argv)
    target = Target(architecture=options.arch, python=options.python, limit_mib=options.limit_mib)
    try:
        packed = build(options.out, target)
    except (BundleError, OSError) as error:
        say(f"error: {error}")
        return 3
    size = (options.out / BUNDLE).stat().st_size / _MIB
    say(f"{options.out / BUNDLE}: {size:.1f} MiB{'' if packed else ', up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
