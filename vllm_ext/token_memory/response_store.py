"""Bounds what vLLM's Responses API keeps for ``previous_response_id``, which it would keep for ever."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping
from itertools import islice
from typing import Any

_RUNNING = ("queued", "in_progress")


class BoundedResponses(OrderedDict[str, Any]):
    """Responses by id, those used least recently dropped first; running ones stay, whatever the bound."""

    def __init__(self, most: int, messages: MutableMapping[str, Any], events: MutableMapping[str, Any]) -> None:
        """Start empty.

        Args:
            most: Responses that are kept.
            messages: Kept by their ids, too, before there is a response, and go with them. Entries without a response
                are of requests that run, or failed; as many of them are kept. A response whose messages went while its
                request ran is not kept: who goes on from it must hear of that.
            events: As messages.
        """
        super().__init__()
        self._most = most
        self._messages, self._beside = messages, (messages, events)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a response, which is then the last to be dropped."""
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._messages:
            return
        super().__setitem__(key, value)
        self.move_to_end(key)
        ended = (known for known, response in self.items() if response.status not in _RUNNING and known != key)
        for known in [*islice(ended, max(0, len(self) - self._most))]:
            del self[known]
            for store in self._beside:
                store.pop(known, None)
        for store in self._beside:
            alone = (known for known in store if known not in self)
            for known in [*islice(alone, max(0, len(store) - len(self) - self._most))]:
                del store[known]
