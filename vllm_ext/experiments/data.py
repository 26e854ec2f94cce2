"""Real lengths in place of drawn ones: the data sets themselves, where somebody has them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
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
    "wmt": {},
    "sst": {},
}  # fmt: skip
"""Beginning of a file's name -> presets that stand for that data set, with what its file needs besides.

Those of BurstGPT and Mooncake are traces, which are looked at in order; nothing is simulated with them. WMT and SST
have no preset: BatchMaker's figures read their files themselves.
"""


class Files:
    """Files of data sets that are served in place of presets; takes note of those that were.

    Args:
        found: Data set -> its files.
    """

    def __init__(self, found: Mapping[str, Sequence[Path]]) -> None:
        self._found = found
        self.served: set[str] = set()
        """Names of the files that somebody asked for."""

    def of(self, name: str) -> Path | None:
        """Return a data set's file, which counts as served from then on; None without one.

        Raises:
            ValueError: there are several.
        """
        files = self._found.get(name, ())
        if len(files) > 1:
            named = ", ".join(map(str, files))
            raise ValueError(f"--data: must have one file of {name}, or one that is named {name}.*, not {named}")
        self.served.update(file.name for file in files)
        return files[0] if files else None

    def source(self, preset: str) -> dict[str, Any]:
        """Return the fields of a source that serve the file in place of a preset; none where there is no file.

        Raises:
            ValueError: as `of`.
        """
        for name, presets in PRESETS.items():
            if preset in presets and (file := self.of(name)) is not None:
                return {"source": str(file), "sample": "with-replacement", **presets[preset]}
        return {}


def files_of(folder: Path) -> Files:
    """Return the files of data sets in a folder, or below it: those named ``NAME.*``, else those named ``NAME_*``.

    Raises:
        ValueError: there is none.
    """
    found = {}
    for name in PRESETS:
        files = sorted(file for file in folder.rglob(f"{name}[._]*") if file.is_file())
        found[name] = [file for file in files if file.name.startswith(f"{name}.")] or files
    if not any(found.values()):
        expected = ", ".join(f"{name}.*" for name in PRESETS)
        raise ValueError(f"--data={folder}: must have a file of {expected}")
    return Files(found)


def with_files(spec: SimulationSpec, files: Files) -> SimulationSpec:
    """Return a run with the data sets' files instead of presets, as far as there are any.

    Raises:
        ValueError: there are several files of a data set that it serves.
    """
    workload, changes = spec.workload, dict[str, Any]()
    if not workload.mix:
        changes = files.source(workload.source)
    elif any(fields := [files.source(part.source) for part in workload.mix]):
        parts = zip(workload.mix, fields, strict=True)
        changes["mix"] = tuple(part.model_copy(update=own) for part, own in parts)
    return spec.model_copy(update={"workload": workload.model_copy(update=changes)}) if changes else spec


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
