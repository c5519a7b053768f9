"""Generation servers that die.

    every server has to report that it lives: while the trainer waits for groups, and before new weights are sent
      ↓ it has died, or does not answer
    it leaves the load balancer
      ↓ standalone                                          ↓ colocated
    it is started again in the background                   the run ends, with a checkpoint: `ServerDied`
      ↓ it has started
    it gets the current weights, and joins the balancer: at once if the trainer waits, else with the next weights

A colocated server shares its devices and its memory with a training worker, so it is not started again beside it. Nor
is a standalone one whose weights come as differences: verl sends all of them once, at the start. The others go on.

Invariants:
- a server that was started again samples nothing before it has the weights that the others have;
- a server's id in the load balancer is used once. A client that learns late that a server died cannot remove the new
  one;
- a server that a client took out of the balancer comes back only when it has answered since. A client may know sooner
  than the trainer that it has died.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import ray

from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.verl_bridge.servers.registrations import OUR_REPLICA

logger = logging.getLogger(__name__)

# How many starts of a server may fail in a row, and the seconds before each, in which Ray forgets a dead one's name.
_STARTS = 3
_REST_S = 5.0
ANSWER_S = 5.0
"""Seconds for which the trainer waits for the answers of its servers before it sends new weights."""


class ServerDied(EngineError):
    """A generation server has died, and the run cannot go on without it."""


def require_ours(replicas: Iterable[Any]) -> None:
    """Refuse replicas of another class in a run that needs our server.

    The start-up check sees the registered classes of its own process. Code of the user's that is imported later may
    register another class, or make its replicas itself.

    Raises:
        ConfigError: A replica is not an `AsyncSGLangReplica`.
    """
    for replica in replicas:
        if not hasattr(replica, "look"):
            found = f"{type(replica).__module__}.{type(replica).__qualname__}"
            raise ConfigError(
                f"actor_rollout_ref.rollout.name='sglang_async' needs our servers, and a replica is a {found}; derive "
                f"it from {OUR_REPLICA}, or set actor_rollout_ref.rollout.name=sglang for verl's servers"
            )


def require_alive(replicas: Iterable[Any], wait_s: float = 0.0) -> None:
    """Look after colocated replicas.

    Args:
        replicas: `AsyncSGLangReplica`s.
        wait_s: Seconds to wait for an answer.

    Raises:
        ServerDied: One of them has died.
    """
    for replica in replicas:
        if hasattr(replica, "look") and not replica.look(wait_s):
            raise ServerDied(
                f"generation server {replica.replica_rank} ({replica.server_address}) has died, and shares its devices "
                "with the trainer, so that it cannot be started again beside it"
            )


class BalancerEntries:
    """The servers of a load balancer. A client also removes one that it could not reach for a moment.

    Args:
        balancer: Ray handle of verl's load balancer.
    """

    def __init__(self, balancer: Any) -> None:
        self._balancer = balancer
        self._asked: Any = None
        """Ray's reference of the servers that are listed; it is not awaited, the trainer has to go on."""
        self._missing: dict[str, float] = {}
        """Servers that were removed, and when that was found."""

    def put_back(self, serving: Mapping[str, Any]) -> None:
        """Add the servers that a client removed, once they have answered since.

        Args:
            serving: The replicas that take part, by their ids in the balancer.
        """
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            listed, now = set(ray.get(self._asked)), time.monotonic()
            self._asked = None
            self._missing = {name: self._missing.get(name, now) for name in serving if name not in listed}
            self.add({name: serving[name] for name, since in self._missing.items() if serving[name].heard > since})
        if self._asked is None:
            self._asked = self._balancer.get_all_servers.remote()

    def add(self, replicas: Mapping[str, Any]) -> None:
        """Add replicas to the balancer, under these ids."""
        if replicas:
            ray.get(self._balancer.add_servers.remote({name: it.server_handle for name, it in replicas.items()}))
            self._asked = None  # the answer would be that of before

    def remove(self, name: str) -> None:
        """Remove a server from the balancer."""
        ray.get(self._balancer.remove_servers.remote([name]))


class StandaloneServers:
    """The standalone replicas of a trainer: each that dies is started again.

    Args:
        replicas: `AsyncSGLangReplica`s.
        balancer: Ray handle of verl's load balancer, which names the replicas by their addresses.
        restarts: False: a server that dies is excluded from then on, since only differences of weights are sent.
    """

    def __init__(self, replicas: Iterable[Any], balancer: Any, restarts: bool = True) -> None:
        self._restarts = restarts
        self._replicas = [replica for replica in replicas if hasattr(replica, "look")]
        self._listing = BalancerEntries(balancer)
        self._ids = {replica: replica.server_address for replica in self._replicas}
        self._starts: dict[Any, Future[None]] = {}
        """The running start of each dead replica; no replica serves while it is here."""
        self._failed: dict[Any, int] = {}
        """Starts in a row that failed, for each replica."""
        self._restarted = 0

    def look(self, wait_s: float = 0.0) -> None:
        """Find the replicas that have died, and begin to start them again.

        Args:
            wait_s: Seconds to wait for each answer.

        Raises:
            ServerDied: No replica remains, and none can be started again.
        """
        for replica in list(self._replicas):
            if replica in self._starts or replica.look(wait_s):
                continue
            self._listing.remove(self._ids[replica])
            if self._restarts:
                self._begin(replica)
            else:
                self._give_up(replica, "none can be started again where only changes of weights are sent")
        for replica, start in list(self._starts.items()):
            if not start.done() or (error := start.exception()) is None:
                continue
            self._failed[replica] = self._failed.get(replica, 0) + 1
            logger.error("generation server %d did not start again: %s", replica.replica_rank, describe(error))
            if self._failed[replica] < _STARTS:
                self._begin(replica)
            else:
                del self._starts[replica]
                self._give_up(replica, f"none could be started again in {_STARTS} attempts")
        self._listing.put_back({self._ids[replica]: replica for replica in self._replicas if replica.serves})

    def ready(self) -> list[Any]:
        """Return the replicas that have been started again and wait for weights."""
        return [replica for replica, start in self._starts.items() if start.done() and start.exception() is None]

    def any_serves(self) -> bool:
        """Return whether any replica serves."""
        return any(replica.serves for replica in self._replicas)

    def send_weights(self, send: Callable[[], Any]) -> Any:
        """Send weights to all replicas, also to those that have started meanwhile, which join the balancer then.

        Args:
            send: Sends them, and leaves out replicas that do not serve.

        Returns:
            The result of `send`.
        """
        joining = self.ready()
        for replica in joining:
            replica.serves = True
            del self._starts[replica]
        sent = send()
        for replica in joining:
            if replica.serves:  # it may have died again
                self._restarted += 1
                self._ids[replica] = f"{replica.server_address}/{self._restarted}"
                self._failed.pop(replica, None)
                logger.warning("generation server %d is back: %s", replica.replica_rank, replica.server_address)
        self._listing.add({self._ids[replica]: replica for replica in joining if replica.serves})
        return sent

    def _give_up(self, replica: Any, why: str) -> None:
        """Go on without a replica; raise ServerDied where none remains."""
        self._replicas.remove(replica)
        if not self._replicas:
            raise ServerDied(f"all generation servers have died, and {why}")
        logger.error("the run goes on without generation server %d: %s", replica.replica_rank, why)

    def _begin(self, replica: Any) -> None:
        """Start a replica in a thread: that takes minutes with a large model, and other replicas go on meanwhile."""
        started: Future[None] = Future()

        def start() -> None:
            try:
                time.sleep(_REST_S)
                asyncio.run(replica.restart())
            except Exception as error:  # of Ray, of the engine or of the machine; logged by `look`
                started.set_exception(error)
            else:
                started.set_result(None)

        self._starts[replica] = started
        threading.Thread(target=start, name=f"start-server-{replica.replica_rank}", daemon=True).start()
