"""Where sessions come from: presets, which are drawn, files, which are read, and mixtures of both."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_ext import datasets
from vllm_ext.config import HASH_BLOCK_TOKENS
from vllm_ext.datasets import DatasetError
from vllm_ext.prediction.text import estimated_tokens
from vllm_ext.simulation.workloads import synthetic
from vllm_ext.simulation.workloads.randomness import Purpose, choices, draws, generator
from vllm_ext.simulation.workloads.spec import SourceSpec, WorkloadSpec

_MOST_REFUSALS = 100_000
_OF_FILES_ONLY = (
    "format",
    "where",
    "sample",
    "pool",
    "conversations",
    "prompts_from",
    "tokenizer",
    "keep_text",
    "skip_bad_rows",
)
_TOKENIZER = "tokenizer.json"
_TURNS = ("min_turns", "max_turns")

TokenCounter = Callable[[str], int]


class Turn(NamedTuple):
    """A prompt, or what a turn adds to the history, its answer, and what is random about the request.

    That is drawn by the workload when the session begins: nothing the server does changes a draw.
    """

    prompt_tokens: int
    output_tokens: int
    text: str | None = None
    """Prompt text, where the workload keeps it."""
    predicted: tuple[int, ...] | None = None
    """Quantiles of its length that a predictor said beforehand, in tokens."""
    think: float = 0.0
    """Time from the end of the client's last request, over its mean; unused where there was none."""
    error: float = 0.0
    """Standard normal number behind the announced length."""
    ttft: float = 0.0
    tbt: float = 0.0
    e2e: float = 0.0
    """Choose the objectives between their bounds: uniform in [0, 1), as is ``abort``."""
    abort: float = 0.0
    """Decides whether the client disconnects ..."""
    abort_time: float = 0.0
    """... and when, over the mean time."""


class Session(NamedTuple):
    """What one client sends, be it a single request or a conversation."""

    turns: tuple[Turn, ...]
    """At least one; each waits for the one before."""
    arrival_s: float | None = None
    """Recorded arrival on the file's clock."""
    hash_ids: tuple[int, ...] | None = None
    """Of the first prompt: one id per block of ``hash_block_tokens``."""
    token_ids: tuple[int, ...] | None = None
    """The first prompt, where it was recorded and is served as it was."""
    hash_block_tokens: int = HASH_BLOCK_TOKENS
    conversation: int | None = None
    """Number of the session that began the recorded conversation which this one goes on with; None: it is in none."""
    earlier: tuple[tuple[int, int], ...] = ()
    """Prompt and output length of that conversation's sessions before this one."""
    tenant: str = ""
    """Who sent it, as it was recorded."""
    tier: str | None = None
    """Name of the tier that the client belongs to; None: to be drawn by the workload."""
    number: int = 0
    """Sessions of a workload are counted from 0, in the order in which they begin."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Sessions in an order that depends on the seed only."""

    name: str
    """File or preset, for reports."""
    sha256: str
    """Of the file, or of what describes the preset."""
    rows: int = 0
    """Sessions in the file, after filters; 0 for a preset."""
    size: int | None = None
    """How many sessions it yields; None: no end."""
    mean_turns: float
    """Expected turns of a session."""
    think_s: float | None = None
    """Mean think time that belongs to the data, in seconds."""
    arrivals_s: Sequence[float | None] = (None,)
    """Recorded arrivals in file order."""
    share: float = 1.0
    """Share of the requests that came which were recorded."""
    bad_rows: int = 0
    """Rows of the file that cannot be read and are left out."""
    notes: tuple[str, ...] = ()
    """What the reader should know of the lengths, a line each."""
    sessions: Callable[[], Iterator[Session]]
    """Begins the sessions anew."""


def read(workload: WorkloadSpec) -> Source:
    """Return the source, or the mixture of sources, that a workload names.

    Raises:
        ValueError: (DatasetError included) no such preset or file, a bad row, or nothing left after the filters.
    """
    parts = []
    for index, part in enumerate(workload.mix or (workload,)):
        preset = synthetic.preset(part.source)
        source = _file(workload, part, index) if preset is None else _preset(workload, part, index, preset)
        if workload.mix and source.size is not None:
            raise ValueError(f"sample={part.sample!r} of {source.name} in mix: must be 'with-replacement'")
        next(source.sessions())  # filters that leave nothing are to be noticed before the run
        parts.append(source)
    return _mixed(workload, parts) if workload.mix else parts[0]


def _mixed(workload: WorkloadSpec, parts: Sequence[Source]) -> Source:
    weights = [part.weight for part in workload.mix]
    total = sum(weights)
    pairs = list(zip(weights, parts, strict=True))

    def sessions() -> Iterator[Session]:
        streams = [part.sessions() for part in parts]
        for index in choices(weights, generator(workload.seed, Purpose.MIX)):
            yield next(streams[index])._replace(tier=workload.mix[index].tier)

    return Source(
        name=" + ".join(f"{w / total:.0%} {p.name}" for w, p in pairs),
        sha256=hashlib.sha256("".join(f"{p.sha256} {w / total!r}\n" for w, p in pairs).encode()).hexdigest(),
        rows=sum(part.rows for part in parts),
        mean_turns=sum(w * p.mean_turns for w, p in pairs) / total,
        think_s=next((part.think_s for part in parts if part.think_s is not None), None),
        bad_rows=sum(part.bad_rows for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        sessions=sessions,
    )


def _preset(workload: WorkloadSpec, spec: SourceSpec, part: int, preset: synthetic.Preset) -> Source:
    _refuse(spec, _OF_FILES_ONLY, "a preset")
    if preset.turns is None:
        _refuse(spec, _TURNS, "a preset without conversations")

    def sessions() -> Iterator[Session]:
        refused = 0
        for lengths in preset.sessions(*(generator(workload.seed, Purpose.LENGTHS, part, kind) for kind in (0, 1))):
            if fitted := _fitted(workload, spec, lengths):
                refused = 0
                yield Session(tuple(Turn(*pair) for pair in fitted))
            elif (refused := refused + 1) == _MOST_REFUSALS:
                raise ValueError(
                    f"source={spec.source!r}: {refused} requests in a row were left out; widen "
                    f"min_/max_prompt_tokens, min_/max_output_tokens or max_model_len"
                )

    return Source(
        name=spec.source,
        sha256=hashlib.sha256(f"{spec.source} {preset!r} seed {workload.seed}".encode()).hexdigest(),
        mean_turns=1.0 if preset.turns is None else preset.turns.mean_of_at_least(spec.min_turns, spec.max_turns),
        think_s=preset.think_s,
        sessions=sessions,
    )


class _Rows(NamedTuple):
    """A file that was read."""

    dataset: datasets.Dataset
    sessions: list[Session]
    """What is left of it after the filters, in its order."""


_WHEN = {
    "arrivals", "rate_per_s", "cv", "clients", "duration_s", "num_requests", "skip_requests", "seed", "sample", "pool",
}  # fmt: skip
"""Fields of a workload that rows are read alike for: when requests come, which, how many, and in which order."""
_MOST_READ = 2
_read: OrderedDict[tuple[object, ...], _Rows] = OrderedDict()
"""Files that were read last, by what decides what is read: one search simulates the same file a hundred times."""


def _rows(workload: WorkloadSpec, spec: SourceSpec, part: int) -> _Rows:
    path = _existing(spec.source, "source")
    if spec.prompts_from is not None:  # whose lengths are drawn
        return _read_rows(workload, spec, part)
    stamps = [_stamp(path), *([_stamp(Path(spec.tokenizer) / _TOKENIZER)] if spec.tokenizer else [])]
    key = (path.resolve(), *stamps, *(one.model_dump_json(exclude=_WHEN) for one in (workload, spec)))
    if key not in _read:
        _read[key] = _read_rows(workload, spec, part)
    _read.move_to_end(key)
    while len(_read) > max(_MOST_READ, len(workload.mix)):
        _read.popitem(last=False)
    return _read[key]


def _stamp(path: Path) -> tuple[int, ...] | None:
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read_rows(workload: WorkloadSpec, spec: SourceSpec, part: int) -> _Rows:
    path, count = _existing(spec.source, "source"), _token_counter(spec.tokenizer)
    if spec.conversations:
        _refuse(spec, ("format", "prompts_from"), "conversations, which are in the sharegpt format")
    else:
        _refuse(spec, _TURNS, "a file; turns are counted with conversations=true")
    dataset = datasets.load(
        path,
        "sharegpt" if spec.conversations else spec.format,
        {field: frozenset(values) for field, values in spec.where.items()},
        outputs_only=spec.prompts_from is not None,
        skip_bad_rows=spec.skip_bad_rows,
    )
    prompts = None
    if spec.prompts_from is not None:
        if dataset.rows[0].prompt is not None or dataset.rows[0].prompt_tokens is not None:
            raise ValueError(f"prompts_from={spec.prompts_from!r}: must be left out, {dataset.name} has prompts")
        prompts = _prompt_lengths(spec.prompts_from, count, workload.seed, part)
    found: list[Session] = []
    recorded: dict[str, tuple[int, list[tuple[int, int]]]] = {}  # by conversation: its first session, its turns by now
    for row in dataset.rows:
        turns = (row, *row.later) if spec.conversations else (row,)
        lengths = [
            (
                _tokens(turn.prompt_tokens, turn.prompt, count) if prompts is None else next(prompts),
                _tokens(turn.output_tokens, turn.output_text, count),
            )
            for turn in turns
        ]
        if fitted := _fitted(workload, spec, lengths):
            texts = [turn.prompt if spec.keep_text else None for turn in turns]
            sent = tuple(
                Turn(*pair, text, turn.output_quantiles) for pair, text, turn in zip(fitted, texts, turns, strict=False)
            )
            block_tokens = math.ceil(HASH_BLOCK_TOKENS * spec.scale_prompt)
            session = Session(sent, row.arrival_s, row.hash_ids, hash_block_tokens=block_tokens, tenant=row.tenant)
            if row.token_ids is not None and len(row.token_ids) == fitted[0][0]:
                session = session._replace(token_ids=row.token_ids)
            if row.conversation is not None:
                began, earlier = recorded.setdefault(row.conversation, (len(found), []))
                session = session._replace(conversation=began, earlier=tuple(earlier))
                earlier.append(fitted[0])
            found.append(session)
    return _Rows(replace(dataset, rows=dataset.rows[:1]), found)  # the others' texts would stay in memory


def _file(workload: WorkloadSpec, spec: SourceSpec, part: int) -> Source:
    dataset, found = _rows(workload, spec, part)
    if spec.pool is not None:
        found = found[slice(*spec.pool)]
    rows = len(found)
    if not rows:
        raise DatasetError(
            f"{dataset.name}: no row is left after the filters on lengths and turns, the model's context and pool"
        )

    def order() -> Iterator[int]:
        rng = generator(workload.seed, Purpose.ROWS, part)
        if spec.sample == "with-replacement":
            return draws(rng, lambda rng, size: rng.integers(rows, size=size))
        return iter(range(rows) if spec.sample == "file-order" else rng.permutation(rows).tolist())

    return Source(
        name=dataset.name,
        sha256=dataset.sha256,
        rows=rows,
        size=None if spec.sample == "with-replacement" else rows,
        mean_turns=sum(len(session.turns) for session in found) / rows,
        arrivals_s=[session.arrival_s for session in found],
        share=dataset.share,
        bad_rows=dataset.bad_rows,
        notes=tuple(_notes(dataset, spec)),
        sessions=lambda: (found[index] for index in order()),
    )


def _notes(dataset: datasets.Dataset, spec: SourceSpec) -> Iterator[str]:
    if dataset.bad_rows:
        yield f"{dataset.name}: {dataset.bad_rows} rows cannot be read and are left out"
    if dataset.share < 1:
        yield (
            f"{dataset.name}: a sample of {dataset.share:.3g} of the requests; recorded arrivals are moved "
            "together to the rate of all of them, also those of a conversation's turns"
        )
    first = dataset.rows[0]
    if first.prompt_tokens is None or first.output_tokens is None:
        how = "are estimates, 4 ASCII characters or 1 other to a token; name a folder with --tokenizer to count them"
        if spec.tokenizer is not None:
            how = f"are counted by the tokenizer in {Path(spec.tokenizer).name}"
        yield f"{dataset.name}: lengths of texts {how}"


def _fitted(workload: WorkloadSpec, spec: SourceSpec, lengths: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return prompt and output lengths of a session's turns as they are sent; none if it is left out.

    Filters and the context look at the first turn: how long a later prompt is depends on the run.
    """
    fitted = [
        (
            _scaled(prompt, spec.scale_prompt, spec.cap_prompt_tokens),
            _scaled(output, spec.scale_output, spec.cap_output_tokens),
        )
        for prompt, output in lengths[: spec.max_turns]
    ]
    prompt, output = fitted[0]
    if len(lengths) < spec.min_turns:
        return []
    if prompt < spec.min_prompt_tokens or prompt > (spec.max_prompt_tokens or prompt):
        return []
    if output < spec.min_output_tokens or output > (spec.max_output_tokens or output):
        return []
    if workload.max_model_len is not None:
        context = workload.max_model_len - workload.system_prompt_tokens
        served = workload.served(output)
        if prompt + served > context:
            if workload.over_context == "drop":
                return []
            fitted[0] = max(1, min(prompt, context - served)), min(output, context - 1)
    return fitted


def _scaled(tokens: int, factor: float, cap: int | None) -> int:
    scaled = max(1, round(tokens * factor))
    return min(scaled, cap or scaled)


def _prompt_lengths(name: str, count: TokenCounter, seed: int, part: int) -> Iterator[int]:
    """Prompt lengths of a preset or of the rows of a file, drawn at random without end."""
    rng = generator(seed, Purpose.PROMPT_LENGTHS, part)
    if (preset := synthetic.preset(name)) is not None:
        return draws(rng, lambda rng, size: np.array(preset.prompt.draw(rng, size, preset.max_tokens)))
    rows = datasets.load(_existing(name, "prompts_from")).rows
    lengths = [_tokens(row.prompt_tokens, row.prompt, count) for row in rows]
    return draws(rng, lambda rng, size: rng.choice(lengths, size=size))


def _tokens(stated: int | None, text: str | None, count: TokenCounter) -> int:
    return count(text or "") if stated is None else stated


def _existing(name: str, field: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{field}={name!r}: must be a file, or one of the presets {synthetic.known()}")
    return path


def _refuse(spec: SourceSpec, fields: Sequence[str], what: str) -> None:
    for field in fields:
        if (value := getattr(spec, field)) != getattr(SourceSpec(), field):
            raise ValueError(f"{field}={value!r}: must be left out; source={spec.source!r} is {what}")


def _token_counter(tokenizer: str | None) -> TokenCounter:
    if tokenizer is None:
        return lambda text: max(1, round(estimated_tokens(text)))
    file = Path(tokenizer) / _TOKENIZER
    if not file.is_file():
        raise ValueError(f"tokenizer={tokenizer!r}: must be a folder with a tokenizer.json")
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(file))
    return lambda text: max(1, len(loaded.encode(text).ids))
