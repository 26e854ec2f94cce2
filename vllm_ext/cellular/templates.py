"""Graphs of requests; those of equal shape are laid out once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from vllm_ext.cellular.graphs import CellTable
from vllm_ext.cellular.layout import CompiledGraph, compile_graph
from vllm_ext.cellular.models.base import Model, Parsed
from vllm_ext.cellular.requests import Session

_MOST = 1024


class Templates:
    """The graphs of a model, least recently used first; any thread may ask."""

    def __init__(self, model: Model, cells: CellTable) -> None:
        self._model, self._cells = model, cells
        self._kept: OrderedDict[Hashable, CompiledGraph] = OrderedDict()

    def graph(self, parsed: Parsed, session: Session | None) -> CompiledGraph:
        """Return the graph of a request; a session's has the session's rows in it."""
        values = list(parsed.data.values())
        if session is not None:
            if session.template is None:
                session.template = compile_graph(self._model.unfold(parsed), self._cells, session.rows)
            return session.template.with_data(values)
        template = self._kept.pop(parsed.shape, None)
        if template is None:
            template = compile_graph(self._model.unfold(parsed), self._cells)
        self._kept[parsed.shape] = template
        while len(self._kept) > _MOST:
            self._kept.pop(next(iter(self._kept)), None)
        return template.with_data(values)
