"""The step record: a file of measured steps of one engine, which says on its first line what it is of."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_ext.files import set_aside
from vllm_ext.metrics.json_lines import JsonLines
from vllm_ext.step_time.samples import MOST

logger = init_logger("vllm.vllm_ext.step_record")


class StepRecord:
    """Writes measured steps of one engine, at most `MOST` to a file, those of earlier starts included."""

    def __init__(self, path: Path) -> None:
        """Take the file; it is not looked at yet."""
        self._path, self._file = path, JsonLines(path, "step_record")
        self._unwritten: list[Any] = []
        self._room: int | None = None
        """Steps that may still be written; None: the file was not looked at."""

    def append(self, engine: Mapping[str, Any], steps: Sequence[Any]) -> None:
        """Write steps; those that can't be written now are written with the next.

        At first the file of another engine, or of another vLLM, is renamed, which is reported. Later it is somebody
        else's: no more steps are recorded, as when the file is full, which is said once.
        """
        if self._room is None:
            self._room = MOST - self._begin(engine)
        elif self._room and (foreign := self._foreign(engine)):
            self._stop(foreign)
        if not self._room:
            return
        self._unwritten += steps[: self._room - len(self._unwritten)]
        lost = self._file.append(self._unwritten, head=engine)
        self._room -= len(self._unwritten) - lost
        self._unwritten = self._unwritten[-lost:] if lost else []
        if not self._room:
            self._stop(f"holds {MOST} steps")

    def _begin(self, engine: Mapping[str, Any]) -> int:
        """Set the file of another engine aside; return the steps that the file holds, `MOST` if it can't be used."""
        if foreign := self._foreign(engine):
            set_aside(
                self._path, ValueError(foreign), what=f"step_record={self._path}", instead="a new file is begun",
                logger=logger, suffix="other",
            )  # fmt: skip
            if self._foreign(engine):
                return MOST
        held = min(MOST, sum(line.startswith(b"[") for line in self._lines()))
        if held == MOST:
            self._stop(f"holds {held} steps")
        return held

    def _foreign(self, engine: Mapping[str, Any]) -> str:
        """Return what is wrong if the file is not of this engine; nothing if there is none, or an empty one."""
        first = next(self._lines(), None)
        try:
            found = engine if first is None else json.loads(first)
        except ValueError:
            found = None
        return "" if found == engine else f"begins with {first!r:.300}, not with {json.dumps(engine)}"

    def _lines(self) -> Iterator[bytes]:
        if self._path.is_file():  # a pipe would wait for a writer
            with contextlib.suppress(OSError), self._path.open("rb") as file:  # what can't be read may be appended to
                yield from file

    def _stop(self, why: str) -> None:
        logger.warning("step_record=%s %s: recording stops; name another file, or move this one", self._path, why)
        self._room, self._unwritten = 0, []
