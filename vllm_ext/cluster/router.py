"""Our policies as a request router of Ray Serve: reports in, a choice out.

Ray pickles this class by value, with this module: what it remembers is in itself, and what it does elsewhere.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vllm_ext.cluster.steering import Steering


class LoadRouter(FIFOMixin, RequestRouter):
    """Chooses a replica by what the replicas report; `Steering` does the work."""

    def initialize_state(self, policy: str = "marginal", **options: Any) -> None:
        """Take the arguments that the configuration has for it.

        Raises:
            ValueError: there is no such policy.
        """
        self._steering = Steering(policy, **options)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in who is there, and what they report."""
        self._steering.update({one.replica_id.unique_id: one.routing_stats for one in replicas})
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which to ask them."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        metadata = None if pending_request is None else pending_request.metadata
        arguments = () if pending_request is None else pending_request.args
        session = "" if metadata is None else metadata.session_id
        names = self._steering.ranked(by_name, session, arguments[0] if arguments else None)
        return [[by_name[name]] for name in names]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Send it nothing more."""
        self._steering.died(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count it; Ray does not tell where tokens go past it."""
        self._steering.completed(replica_id.unique_id)
        super().on_request_completed(replica_id, internal_request_id)
