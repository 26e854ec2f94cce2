"""Sources of sessions: what one client sends, be it a single request or a conversation."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_ext.datasets import HASH_BLOCK_TOKENS
from vllm_ext.simulation.synthetic import Preset
from vllm_ext.simulation.workloads.expectations import choices
from vllm_ext.simulation.workloads.randomness import Purpose, draws, generator
from vllm_ext.simulation.workloads.spec import SourceSpec

_CHUNK = 1024
_MOST_REFUSALS = 100_000


class Exchange(NamedTuple):
    """A prompt, or what a turn adds to the history, and its answer."""

    prompt_tokens: int
    output_tokens: int
    text: str | None = None
    """Prompt text, where the workload keeps it."""


class Session(NamedTuple):
    """What one client sends."""

    turns: tuple[Exchange, ...]
    """At least one; each waits for the one before."""
    arrival_s: float | None = None
    """Recorded arrival on the file's clock."""
    hash_ids: tuple[int, ...] | None = None
    """Of the first prompt: one id per block of ``hash_block_tokens``."""
    hash_block_tokens: int = HASH_BLOCK_TOKENS
    tier: str | None = None
    """Name of the tier that the client belongs to; None: to be drawn."""


class Source(ABC):
    """Sessions in an order that depends on the seed only."""

    name: str
    """File or preset, for reports."""
    sha256: str
    """Of the file, or of what describes the preset."""
    rows: int
    """Sessions in the file, after filters; 0 for a preset."""
    size: int | None
    """How many sessions it yields; None: no end."""
    mean_turns: float
    """Expected turns of a session."""
    think_s: float | None
    """Mean think time that belongs to the data, in seconds."""
    conversations: bool
    """Whether sessions may have several turns."""

    @abstractmethod
    def sessions(self) -> Iterator[Session]:
        """Yield the sessions, from the first."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Scales, cuts and filters lengths, and fits them into the context."""

    spec: SourceSpec
    context_tokens: int | None
    """Room for prompt and output beside the system prompt; None: unlimited."""
    cut: bool
    """Cut what does not fit into the context, instead of leaving it out."""
    most_output_tokens: int | None
    """What the client's ``max_tokens`` allows, if that is a constant."""

    def scaled(self, prompt_tokens: int, output_tokens: int) -> tuple[int, int]:
        """Return the lengths after scaling and the caps."""
        spec = self.spec
        prompt = max(1, round(prompt_tokens * spec.scale_prompt))
        output = max(1, round(output_tokens * spec.scale_output))
        return min(prompt, spec.cap_prompt_tokens or prompt), min(output, spec.cap_output_tokens or output)

    def fitted(self, prompt_tokens: int, output_tokens: int) -> tuple[int, int] | None:
        """Return the lengths of a first turn as they are sent, or None if it is left out."""
        spec = self.spec
        prompt, output = self.scaled(prompt_tokens, output_tokens)
        if prompt < spec.min_prompt_tokens or prompt > (spec.max_prompt_tokens or prompt):
            return None
        if output < spec.min_output_tokens or output > (spec.max_output_tokens or output):
            return None
        if self.context_tokens is None or prompt + self.served(output) <= self.context_tokens:
            return prompt, output
        if not self.cut:
            return None
        return max(1, min(prompt, self.context_tokens - self.served(output))), min(output, self.context_tokens - 1)

    def served(self, output_tokens: int) -> int:
        """Return how much of an output the client's bound lets through."""
        return min(output_tokens, self.most_output_tokens or output_tokens)


class PresetSource(Source):
    """Sessions drawn from a preset, without end."""

    def __init__(self, name: str, preset: Preset, fitting: Fitting, *, seed: int, part: int, sha256: str) -> None:
        self.name = name
        self.sha256 = sha256
        self.rows = 0
        self.size = None
        spec, turns = fitting.spec, preset.turns
        self.mean_turns = 1.0 if turns is None else turns.mean_of_at_least(spec.min_turns, spec.max_turns)
        self.think_s = preset.think_s
        self.conversations = preset.turns is not None
        self._preset = preset
        self._fitting = fitting
        self._key = (seed, Purpose.LENGTHS, part)

    def sessions(self) -> Iterator[Session]:
        """Yield sessions.

        Raises:
            ValueError: the filters and the context leave next to nothing.
        """
        refused = 0
        for lengths in self._drawn():
            first = self._fitting.fitted(*lengths[0])
            if first is not None and len(lengths) >= self._fitting.spec.min_turns:
                refused = 0
                later = (self._fitting.scaled(*pair) for pair in lengths[1 : self._fitting.spec.max_turns])
                yield Session((Exchange(*first), *(Exchange(*pair) for pair in later)))
            elif (refused := refused + 1) == _MOST_REFUSALS:
                raise ValueError(
                    f"source={self.name!r}: {refused} requests in a row were left out; widen min_/max_prompt_tokens, "
                    f"min_/max_output_tokens or max_model_len"
                )

    def _drawn(self) -> Iterator[Sequence[tuple[int, int]]]:
        seed, purpose, part = self._key
        preset = self._preset
        lengths_rng, turns_rng = generator(seed, purpose, part, 0), generator(seed, purpose, part, 1)
        while True:
            turns = [1] * _CHUNK if preset.turns is None else preset.turns.draw(turns_rng, _CHUNK)
            pairs = list(zip(*preset.draw(lengths_rng, sum(turns)), strict=True))
            start = 0
            for count in turns:
                yield pairs[start : start + count]
                start += count


class RecordedSource(Source):
    """Sessions of a file, in its order or drawn at random."""

    def __init__(
        self, name: str, recorded: Sequence[Session], spec: SourceSpec, *, seed: int, part: int, sha256: str
    ) -> None:
        self.name = name
        self.sha256 = sha256
        self.rows = len(recorded)
        self.size = None if spec.sample == "with-replacement" else self.rows
        self.conversations = spec.conversations
        self.think_s = None
        self.mean_turns = sum(len(s.turns) for s in recorded) / len(recorded)
        self._recorded = recorded
        self._sample = spec.sample
        self._key = (seed, Purpose.ROWS, part)

    @property
    def arrival_times_s(self) -> list[float | None]:
        """Recorded arrivals in file order."""
        return [session.arrival_s for session in self._recorded]

    def sessions(self) -> Iterator[Session]:
        """Yield sessions."""
        return (self._recorded[index] for index in self._order())

    def _order(self) -> Iterator[int]:
        if self._sample == "file-order":
            return iter(range(self.rows))
        rng = generator(*self._key)
        if self._sample == "without-replacement":
            return iter(rng.permutation(self.rows).tolist())
        rows = self.rows

        def rows_drawn(rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return rng.integers(rows, size=count)

        return map(int, draws(rng, rows_drawn))


class MixedSource(Source):
    """Sessions of several endless sources, each as often as its weight says."""

    def __init__(
        self, parts: Sequence[Source], weights: Sequence[float], tiers: Sequence[str | None], seed: int
    ) -> None:
        total = sum(weights)
        pairs = list(zip(parts, weights, strict=True))
        self.name = " + ".join(f"{w / total:.0%} {p.name}" for p, w in pairs)
        self.sha256 = hashlib.sha256("".join(f"{p.sha256} {w / total!r}\n" for p, w in pairs).encode()).hexdigest()
        self.size = None
        self.rows = sum(part.rows for part in parts)
        self.mean_turns = sum(w * p.mean_turns for p, w in pairs) / total
        self.conversations = any(part.conversations for part in parts)
        self.think_s = next((part.think_s for part in parts if part.think_s is not None), None)
        self._parts, self._weights, self._tiers, self._seed = parts, weights, tiers, seed

    def sessions(self) -> Iterator[Session]:
        """Yield sessions."""
        streams = [part.sessions() for part in self._parts]
        uniforms = draws(generator(self._seed, Purpose.MIX), lambda rng, count: rng.random(count))
        for index in choices(self._weights, uniforms):
            session = next(streams[index])
            yield session if self._tiers[index] is None else session._replace(tier=self._tiers[index])
