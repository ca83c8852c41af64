"""Ray's prefix router, with a fallback to routing by load if the prefix tree fails."""

from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError

# Its public name, in ray.serve.llm.request_router, can be imported only if vLLM or SGLang is installed.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

_MOST_STALE = 64  # maximum number of replicas that may have ended unnoticed


# D349: guarded, since requests hang if a router raises
class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]  # Ray's types aren't seen
    """Router that prefers the replica with the longest matching prefix, unless that replica is much busier.

    If a router raises an error, Ray never answers the request. Ray's prefix tree is an actor: it may end, and
    it keeps the old replicas of an application that is deleted and deployed again.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> Any:
        """Return one rank of replicas: those with the longest matching prefix, or two random replicas."""
        with suppress(RayActorError):
            for _ in range(_MOST_STALE):
                try:
                    return await super().choose_replicas(candidate_replicas, pending_request)
                except KeyError as error:  # a replica that exists only in the tree
                    (unknown,) = error.args
                    await self._tree_actor.remove_tenants.remote([unknown.to_full_id_str()])
        return await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidate_replicas, pending_request)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record the prompt in the prefix tree, if the tree still exists."""
        with suppress(RayActorError):
            super().on_request_routed(pending_request, replica_id, result)
