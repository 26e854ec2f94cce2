"""From a source's description to its sessions: presets by name, files through their readers."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext import datasets
from vllm_ext.datasets import HASH_BLOCK_TOKENS, DatasetError, WorkloadRow
from vllm_ext.simulation import synthetic
from vllm_ext.simulation.workloads.randomness import Purpose, draws, generator
from vllm_ext.simulation.workloads.sessions import Exchange, Fitting, PresetSource, RecordedSource, Session
from vllm_ext.simulation.workloads.spec import SourceSpec

TOKENS_PER_WORD = 4 / 3
"""For texts, where no tokenizer is named: English texts have about 4 tokens to 3 words between white space."""
_OF_FILES_ONLY = ("format", "where", "sample", "conversations", "prompts_from", "tokenizer", "keep_text")
_TURNS = ("min_turns", "max_turns")
_OF_CONVERSATIONS = ("format", "prompts_from")

TokenCounter = Callable[[str], int]


def read(spec: SourceSpec, fitting: Fitting, *, seed: int, part: int) -> PresetSource | RecordedSource:
    """Return the source that a description names.

    Args:
        spec: The description.
        fitting: Applied to every request.
        seed: Of the workload.
        part: Which part of the mix this is: parts have streams of their own.

    Raises:
        ValueError: (DatasetError included) no such preset or file, a bad row, or nothing left after the filters.
    """
    preset = synthetic.preset(spec.source)
    if preset is not None:
        _refuse(spec, _OF_FILES_ONLY, "a preset")
        if preset.turns is None:
            _refuse(spec, _TURNS, "a preset without conversations")
        digest = hashlib.sha256(f"{spec.source} {preset!r} seed {seed}".encode()).hexdigest()
        return PresetSource(spec.source, preset, fitting, seed=seed, part=part, sha256=digest)
    path = _existing(spec.source, "source")
    count = _token_counter(spec.tokenizer)
    name, sha256, found = _recorded(path, spec, fitting, count, seed, part)
    if not found:
        raise DatasetError(f"{name}: no row is left after the filters on lengths and turns, and the model's context")
    return RecordedSource(name, found, spec, seed=seed, part=part, sha256=sha256)


def _recorded(
    path: Path, spec: SourceSpec, fitting: Fitting, count: TokenCounter, seed: int, part: int
) -> tuple[str, str, list[Session]]:
    where = {field: frozenset(values) for field, values in spec.where.items()}
    if spec.conversations:
        _refuse(spec, _OF_CONVERSATIONS, "conversations, which are in the sharegpt format")
        dataset = datasets.load(path, "sharegpt", where)
        conversations = ((row, *row.later) for row in dataset.rows)
        long_enough = (turns for turns in conversations if len(turns) >= spec.min_turns)
        made = (_conversation(turns[: spec.max_turns], fitting, count) for turns in long_enough)
        return dataset.name, dataset.sha256, [session for session in made if session is not None]
    _refuse(spec, _TURNS, "a file; turns are counted with conversations=true")
    dataset = datasets.load(path, spec.format, where, outputs_only=spec.prompts_from is not None)
    other_prompts: Iterator[int] | None = None
    if spec.prompts_from is not None:
        if dataset.rows[0].prompt is not None or dataset.rows[0].prompt_tokens is not None:
            raise ValueError(f"prompts_from={spec.prompts_from!r}: must be left out, {dataset.name} has prompts")
        other_prompts = _prompt_lengths(spec.prompts_from, count, seed, part)
    made = (_single(row, fitting, count, other_prompts) for row in dataset.rows)
    return dataset.name, dataset.sha256, [session for session in made if session is not None]


def _single(row: WorkloadRow, fitting: Fitting, count: TokenCounter, prompts: Iterator[int] | None) -> Session | None:
    prompt = _prompt_tokens(row, count) if prompts is None else next(prompts)
    lengths = fitting.fitted(prompt, _output_tokens(row, count))
    if lengths is None:
        return None
    turn = Exchange(*lengths, row.prompt if fitting.spec.keep_text else None)
    if row.hash_ids is None:
        return Session((turn,), row.arrival_s)
    return Session((turn,), row.arrival_s, row.hash_ids, math.ceil(HASH_BLOCK_TOKENS * fitting.spec.scale_prompt))


def _conversation(rows: tuple[WorkloadRow, ...], fitting: Fitting, count: TokenCounter) -> Session | None:
    lengths = [(_prompt_tokens(row, count), _output_tokens(row, count)) for row in rows]
    first = fitting.fitted(*lengths[0])
    if first is None:
        return None
    fitted = [first, *itertools.starmap(fitting.scaled, lengths[1:])]
    keep = fitting.spec.keep_text
    return Session(tuple(Exchange(*pair, row.prompt if keep else None) for pair, row in zip(fitted, rows, strict=True)))


def _prompt_tokens(row: WorkloadRow, count: TokenCounter) -> int:
    return row.prompt_tokens if row.prompt_tokens is not None else count(row.prompt or "")


def _output_tokens(row: WorkloadRow, count: TokenCounter) -> int:
    return row.output_tokens if row.output_tokens is not None else count(row.output_text or "")


def _prompt_lengths(name: str, count: TokenCounter, seed: int, part: int) -> Iterator[int]:
    """Prompt lengths of a preset or of the rows of a file, drawn at random without end."""
    rng = generator(seed, Purpose.PROMPT_LENGTHS, part)
    preset = synthetic.preset(name)
    if preset is not None:
        return map(int, draws(rng, lambda rng, size: _array(preset.prompt.draw(rng, size, preset.max_tokens))))
    rows = datasets.load(_existing(name, "prompts_from")).rows
    lengths = _array([_prompt_tokens(row, count) for row in rows])
    return map(int, draws(rng, lambda rng, size: rng.choice(lengths, size=size)))


def _array(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _existing(name: str, field: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{field}={name!r}: must be a file, or one of the presets {synthetic.known()}")
    return path


def _refuse(spec: SourceSpec, fields: tuple[str, ...], what: str) -> None:
    defaults: Mapping[str, Any] = SourceSpec().model_dump()
    for field in fields:
        if (value := getattr(spec, field)) != defaults[field]:
            raise ValueError(f"{field}={value!r}: must be left out; source={spec.source!r} is {what}")


def _token_counter(tokenizer: str | None) -> TokenCounter:
    if tokenizer is None:
        return lambda text: max(1, round(len(text.split()) * TOKENS_PER_WORD))
    file = Path(tokenizer) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"tokenizer={tokenizer!r}: must be a folder with a tokenizer.json")
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(file))
    return lambda text: max(1, len(loaded.encode(text).ids))
