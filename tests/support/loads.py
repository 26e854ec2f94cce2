"""A KV connector that has what a test says, and loads it between steps when the test lets it."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from tests.support.steering import Rig


class Loads:
    """Stands for a connector; loads nothing, and says it did.

    Attributes:
        hits: Tokens that it has, by request.
        started: Requests whose loads began, in order.
        untold: Tokens that it has of requests of which it was not told yet.
        undecided: Requests of which it can't tell yet.
    """

    supports_divergent_local_hybrid_hits = requires_kv_delivery = False

    def __init__(self, rig: Rig, hits: dict[str, int]) -> None:
        self.hits = dict(hits)
        self.started: list[str] = []
        self.untold: dict[str, int] = {}
        self.undecided: set[str] = set()
        self._scheduler = scheduler = rig.scheduler
        rig.runner.ledger = None  # nothing is loaded, and whoever looked at the KV would see that
        scheduler.connector = self
        scheduler.prefixes.host = self
        scheduler._connector_finished = lambda request: (False, None)
        scheduler._build_kv_connector_meta = lambda *args, **kwargs: None

    def on_new_request(self, request: Request) -> None:
        if (hit := self.untold.pop(request.request_id, 0)) > 0:
            self.hits[request.request_id] = hit

    def peek(self, request: Request, local_tokens: int) -> tuple[int, bool]:
        hit = self.hits.get(request.request_id, 0)
        return hit, hit > 0

    def can_tell(self, request: Request, local_tokens: int) -> bool:
        return request.request_id not in self.undecided

    def get_num_new_matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self.undecided:
            return None, False
        return self.peek(request, local_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, tokens: int) -> None:
        if tokens:
            self.started.append(request.request_id)
            del self.hits[request.request_id]

    def finish(self) -> None:
        """Let every load that began be through by the next step."""
        self._scheduler.finished_recving_kv_req_ids.update(self.started)

    def request_finished(self, request: Request, *args: Any) -> tuple[bool, None]:
        return False, None

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return ()

    def get_external_cache_hit_sources(self, *args: Any) -> dict[str, Any]:
        return {}

    def has_pending_block_frees(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name in ("tier", "account"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
