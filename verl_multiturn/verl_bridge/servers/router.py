"""`GroupRouter`: verl's load balancer, which sends the conversations of a group to one server while that has room.

Siblings share their prompt. On one server it is read once, on several once each. The start-up check names it by
`router.yaml` in `rollout.router_config_path`, unless the user has a router there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachetools import LRUCache
from verl.workers.rollout.router import GlobalRequestLoadBalancer

GROUP = "group"
"""Field that the client gives a router that declares it: the group's name. Only then do first turns lead."""

# How many more requests than the least loaded one a server may have, so that a group still goes there: as many as a
# large group has, or a quarter of the load.
_MORE, _SHARE = 16, 0.25


class GroupRouter(GlobalRequestLoadBalancer):
    """verl's balancer: a request goes where it went before, and else where the fewest are, or where its siblings went.

    Args:
        servers: The handles of the servers by name.
        config: The content of the YAML.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(servers))
        self._group_to_server: LRUCache[str, str] = LRUCache(maxsize=self._request_id_to_server.maxsize)

    def require_acquire_fields(self) -> list[str]:
        """Ask for the group of each request."""
        return [GROUP]

    def acquire_server(self, request_id: str, group: str = "") -> tuple[str, Any]:
        """Return the server of a request, and its handle.

        Args:
            request_id: Name of the request.
            group: Name of its group; "": it has none.

        Raises:
            RuntimeError: There is no server.
        """
        siblings = self._group_to_server.get(group)
        known = self._request_id_to_server.get(request_id)
        if known not in self._servers and siblings is not None and self._has_room(siblings):
            self._request_id_to_server[request_id] = siblings
        name, handle = super().acquire_server(request_id)
        if group:
            self._group_to_server.setdefault(group, name)
            if self._group_to_server[group] not in self._servers:
                self._group_to_server[group] = name
        return name, handle

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget where requests and groups went."""
        self._group_to_server.clear()
        cleared: dict[str, Any] = super().clear_sticky_cache()
        return cleared

    def _has_room(self, server: str) -> bool:
        if server not in self._servers:
            return False
        least = min(self._inflight_requests.values())
        return bool(self._inflight_requests[server] - least < max(_MORE, _SHARE * least))
