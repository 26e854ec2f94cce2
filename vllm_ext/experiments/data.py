"""Real lengths in place of drawn ones: the data sets themselves, where somebody has them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_ext.envs import cache_dir
from vllm_ext.files import replaced
from vllm_ext.simulation.spec import SimulationSpec

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "alpaca": {"alpaca-vllm": {}, "alpaca-like": {}},
    "sharegpt": {"sharegpt-vllm": {}, "sharegpt-like": {}, "openchat-sharegpt4": {},
                 "pensieve-sharegpt": {"conversations": True}},
    "arxiv": {"arxiv-summarization": {}},
    "burstgpt": {"burstgpt-conversations": {"sample": "file-order", "where": {"Log Type": ("Conversation log",)}},
                 "burstgpt-api": {"sample": "file-order", "where": {"Log Type": ("API log",)}}},
    "mooncake": {"mooncake-conversations": {"sample": "file-order"}},
}  # fmt: skip
"""Beginning of a file's name -> presets that stand for that data set, with what its file needs besides. The last three
presets are traces, which are looked at in order; nothing is simulated with them."""


def files_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return for each preset whose data set lies in a folder, or below it, the fields of a source of that file.

    Raises:
        ValueError: there is none, or there are several of one data set.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, presets in PRESETS.items():
        files = sorted(file for file in folder.rglob(f"{name}[._]*") if file.is_file())
        if len(files) > 1:
            named = ", ".join(file.relative_to(folder).as_posix() for file in files)
            raise ValueError(f"--data={folder}: must have one file of {name}, not {named}")
        for preset, fields in presets.items() if files else ():
            found[preset] = {"source": str(files[0]), "sample": "with-replacement", **fields}
    if not found:
        expected = ", ".join(f"{name}.*" for name in PRESETS)
        raise ValueError(f"--data={folder}: must have a file of {expected}")
    return found


def with_files(spec: SimulationSpec, files: Mapping[str, Mapping[str, Any]]) -> SimulationSpec:
    """Return a run with the data sets' files instead of presets, as far as there are any."""
    workload = spec.workload
    changes: dict[str, Any] = dict(files.get(workload.source, {}))
    if workload.mix:
        changes["mix"] = tuple(part.model_copy(update=files.get(part.source, {})) for part in workload.mix)
    return spec.model_copy(update={"workload": workload.model_copy(update=changes)})


def lengths_file(name: str, pairs: Iterable[tuple[int, int]]) -> Path:
    """Return a file of prompt and output lengths, in the folder for files that can be made again.

    Args:
        name: What its own begins with.
        pairs: Tokens of each request, in order.
    """
    text = "".join(f"{prompt},{output}\n" for prompt, output in [("num_prefill_tokens", "num_decode_tokens"), *pairs])
    file = cache_dir() / "repro" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.csv"
    with replaced(file) as opened:
        opened.write(text.encode())
    return file
