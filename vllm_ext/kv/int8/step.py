"""What a step's workers are told about records: which move, and which are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple

ATTRIBUTE = "vllm_ext_records"
"""Of a step's scheduler output: its `RecordStep`, if there is anything to say."""


class Direction(Enum):
    """Of a move."""

    TO_RECORD = "to-record"
    TO_BLOCK = "to-block"


class RecordMove(NamedTuple):
    """KV that moves between a block and a record, in all layers."""

    direction: Direction
    block: int
    record: int
    """Id of the record, as block tables have it."""
    num_tokens: int | None = None
    """Tokens of a block that is not full: what lies behind them is anything, and no part of the record."""


@dataclass(frozen=True)
class RecordStep:
    """One step's share."""

    moves: Sequence[RecordMove] = ()
    """To be made before anything else that the step writes, in this order: what is given away is read first."""
    reads: Sequence[int] = ()
    """Records in the block tables of the step's requests."""

    def runs(self) -> Iterator[tuple[Direction, list[RecordMove]]]:
        """Yield neighbouring moves that may be made in any order: of one direction, each with a place of its own."""
        for direction, moves in groupby(self.moves, key=lambda move: move.direction):
            run = _Run()
            for move in moves:
                written = move.record if direction is Direction.TO_RECORD else move.block
                if written in run.written:
                    yield direction, run.moves
                    run = _Run()
                run.written.add(written)
                run.moves.append(move)
            yield direction, run.moves


@dataclass
class _Run:
    moves: list[RecordMove] = field(default_factory=list)
    written: set[int] = field(default_factory=set)


def step_of(output: Any) -> RecordStep | None:
    """Return what a step says about records, if anything."""
    step: RecordStep | None = getattr(output, ATTRIBUTE, None)
    return step
