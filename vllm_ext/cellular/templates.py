"""Graphs of requests; those of equal shape are laid out once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from vllm_ext.cellular.graphs import CellTable
from vllm_ext.cellular.layout import CompiledGraph, compile_graph
from vllm_ext.cellular.models.base import Model, Parsed
from vllm_ext.cellular.requests import Session

_MOST = 1024
_MOST_OF_SESSION = 16


class Templates:
    """The graphs of a model, least recently used first; any thread may ask."""

    def __init__(self, model: Model, cells: CellTable) -> None:
        self._model, self._cells = model, cells
        self._kept: OrderedDict[Hashable, CompiledGraph] = OrderedDict()

    def graph(self, parsed: Parsed, session: Session | None) -> CompiledGraph:
        """Return the graph of a request; a session's has the session's rows in it.

        Raises:
            ValueError: the model's graph is none of its cells, or its data is not that of the request's shape.
        """
        kept, most = (self._kept, _MOST) if session is None else (session.templates, _MOST_OF_SESSION)
        template = kept.pop(parsed.shape, None)
        if template is None:
            held = None if session is None else session.rows
            template = compile_graph(self._model.unfold(parsed), self._cells, held)
        kept[parsed.shape] = template
        while len(kept) > most:
            kept.popitem(last=False)  # several threads lay out at once
        return template.with_data(parsed.data)
