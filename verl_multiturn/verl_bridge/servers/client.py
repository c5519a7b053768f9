"""`RolloutClient`: samples a turn on verl's SGLang servers, and goes on with it after a pause or a server's death.

The trainer makes one client; every agent-loop worker has a copy, and `verl_engine.py` asks it for each generation of a
conversation. It returns verl's `TokenOutput` of the whole turn, however often the turn was interrupted.

A generation is sampled in attempts. An attempt ends early when its server is paused, which the asynchronous trainers do
at each update of the weights. The client then waits until the server samples again, and asks for the rest:

    attempt 1 (version 3) → paused → attempt 2 (version 4) → paused → attempt 3 (version 5) → the end of the turn

When the server dies, the tokens of its attempt are lost. The client takes the server out of the load balancer, and asks
another one to go on behind the attempts that have ended. Where no server remains, it waits for a new one.

Invariants:
- `extra_fields["segments"]` of the output lists the attempts that sampled tokens, each with the weight version that the
  server had when it began;
- the server reports the end of a pause at once: the client does not ask again and again, or after a fixed time.
  Only where no server remains does it ask once a second;
- time in which a generation waits for a server, its cache or a sibling (`caches.py`) does not count as the
  conversation's (`rollout/life.py`);
- a cancelled generation is stopped at its server, and its tokens so far are returned with the stop reason `abort`. A
  server that has not stopped it after half a minute is not waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any
from uuid import uuid4

import numpy as np
from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_multiturn.calls.tasks import keep
from verl_multiturn.calls.timeline import during
from verl_multiturn.describe import describe
from verl_multiturn.rollout.life import current, stopped
from verl_multiturn.verl_bridge.servers.admission import PAUSED
from verl_multiturn.verl_bridge.servers.caches import Caches
from verl_multiturn.verl_bridge.servers.router import GROUP
from verl_multiturn.verl_bridge.settings import settings_of

logger = logging.getLogger(__name__)

SEGMENTS = "segments"
"""Field of an output: `(version, tokens)` of each attempt, in order."""

# Seconds until the second order to stop a generation; the first one may come before the generation is known to its
# server. The next ones come after twice as long each, up to a second.
_AGAIN_S = 0.02
_SELDOM_S = 1.0
# Seconds in which a server must stop a generation that is cancelled.
_STOP_S = 30.0
# Seconds that a generation waits for a server when none remains. The trainer ends a run that gets none.
_NO_SERVER_S = 3600.0
# Servers that may die of one generation.
_MOST_LOST = 3
# The error of verl's load balancers without a server.
_NONE_LEFT = "No available servers"
# Attempts in a row that a server may end for no reason that we know, without a token.
_FRUITLESS = 3
# Stop reasons of an attempt that did not end by itself.
_INTERRUPTED = ("abort", "aborted")


class RolloutClient(FullyAsyncLLMServerClient):
    """The client of our trainers for the servers of `rollout.name=sglang_async`.

    Its arguments are those of verl's client.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._servers: dict[str, tuple[str, Any]] = {}
        """Server of the running attempt of each request: its id in the load balancer, and its handle."""
        self._attempts: dict[str, str] = {}
        """The attempt's id at the server, for each request."""
        self._dead: set[str] = set()
        """Servers whose death was logged."""
        self._caches = Caches(settings_of(self.config.actor_rollout_ref.rollout).cache)
        self._waiting: set[str] = set()
        """Requests whose attempts wait before they are sent, for a lead or for room in the server's cache."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Sample after `prompt_ids`, in as many attempts as it takes.

        A request has one generation at a time. A cancellation stops it; see the module's invariants.

        Args:
            request_id: Name of the request; its generations go to the same server.
            prompt_ids: Token ids to continue.
            sampling_params: Sampling parameters. `max_tokens` or `max_new_tokens` holds for all attempts together;
                without either of them `rollout.response_length` does.
            kwargs: Images and the like, as for verl's client.

        Raises:
            CancelledError: The generation was cancelled before its first token.
            RayActorError: Three servers died of it.
            RuntimeError: There has been no server for an hour.
        """
        whole = TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
        limit_key = "max_tokens" if "max_tokens" in sampling_params else "max_new_tokens"
        limit = sampling_params.get(limit_key, self._configured_response_length())
        segments: list[tuple[int | None, int]] = []
        fruitless = 0
        troubles = _Troubles()
        try:
            while True:
                asked = dict(sampling_params)
                if limit is not None:
                    asked[limit_key] = limit - len(whole.token_ids)
                try:
                    output = await self._attempt(
                        request_id, prompt_ids=[*prompt_ids, *whole.token_ids], sampling_params=asked, **kwargs
                    )
                except (RayActorError, RuntimeError) as error:
                    await self._get_over(request_id, error, troubles)
                    continue
                _add(whole, output, segments)
                if output.stop_reason not in _INTERRUPTED:
                    break
                if limit is not None and len(whole.token_ids) >= limit:
                    whole.stop_reason = "length"
                    break
                if output.extra_fields.get(PAUSED):
                    fruitless = 0
                    await self._resumed(request_id, troubles)
                else:
                    fruitless = 0 if output.token_ids else fruitless + 1
                    if fruitless == _FRUITLESS:
                        break
        except _Stopped as stopped:
            if stopped.output is not None:
                _add(whole, stopped.output, segments)
            whole.stop_reason = "abort"
            if not whole.token_ids:
                raise asyncio.CancelledError from stopped
        finally:
            self._servers.pop(request_id, None)
            self._attempts.pop(request_id, None)
            whole.extra_fields |= self._caches.told(request_id)
        return _with_versions(whole, segments)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        self._attempts.pop(request_id, None)
        self._servers.pop(request_id, None)
        life = current()
        fields = {**extra, GROUP: life.group} if life is not None and life.group else extra
        server_id, server = self._servers[request_id] = await super()._acquire_server(request_id, **fields)
        led = GROUP in (self._lb_require_acquire_fields or ())
        self._waiting.add(request_id)
        try:
            prompt, params = extra["prompt_ids"], extra["sampling_params"]
            await self._caches.before(request_id, server_id, server, prompt, params, led)
        except BaseException:  # a cancellation, too: the server is given back, and it goes on
            self._release_server(server_id, request_id=request_id)
            raise
        finally:
            self._waiting.discard(request_id)
        return server_id, server

    def _vllm_request_id(self, request_id: str) -> str:
        """Return a new id for an attempt, which verl asks for just before it calls the server."""
        attempt = self._attempts[request_id] = uuid4().hex
        self._caches.sent(request_id, attempt)
        return attempt

    async def _attempt(self, request_id: str, **asked: Any) -> TokenOutput:
        """Ask a server once.

        Raises:
            _Stopped: The task was cancelled, and the server has stopped sampling.
        """
        asking = asyncio.ensure_future(super(FullyAsyncLLMServerClient, self).generate(request_id, **asked))
        try:
            return await self._end_of(asking, request_id)
        finally:
            is_there = asking.done() and not asking.cancelled() and asking.exception() is None
            self._caches.ended(request_id, asking.result() if is_there else None)

    async def _end_of(self, asking: asyncio.Future[TokenOutput], request_id: str) -> TokenOutput:
        """Return the output of an attempt; stop it where the task is cancelled."""
        loop = asyncio.get_running_loop()
        again_s, until = _AGAIN_S, 0.0
        while not asking.done():
            try:
                await asyncio.wait({asking}, timeout=again_s if until else None)
            except asyncio.CancelledError:
                until = until or loop.time() + _STOP_S
            if not until:
                continue
            if loop.time() > until:
                keep(asking)
                raise _Stopped
            again_s = min(2 * again_s, _SELDOM_S)
            if request_id in self._waiting:
                asking.cancel()
            elif request_id in self._attempts:
                self._servers[request_id][1].abort_request.remote(self._attempts[request_id])
        if until:
            failed = asking.cancelled() or asking.exception() is not None
            raise _Stopped(None if failed else asking.result())
        return asking.result()

    async def _resumed(self, request_id: str, troubles: _Troubles) -> None:
        """Wait until the paused server of a request samples again, or leaves the load balancer.

        A removed server that the load balancer names again is coming back: it is given a second at a time.

        Raises:
            _Stopped: The task was cancelled.
        """
        server_id, server = self._servers[request_id]
        try:
            patience_s = _SELDOM_S if troubles.left == server_id else 0.0
            goes_on = await _idle(server.resumed.remote(patience_s))
        except RayActorError as error:
            await self._get_over(request_id, error, troubles)
        else:
            troubles.left = None if goes_on else server_id

    async def _get_over(self, request_id: str, error: Exception, troubles: _Troubles) -> None:
        """Leave the server of a request, which has died; wait for a while if there is none.

        Raises:
            _Stopped: The task was cancelled.
            Exception: `error`, which is neither, or has been so too often.
        """
        server_id, _ = self._servers.pop(request_id, (None, None))
        if isinstance(error, RayActorError) and server_id is not None:
            if server_id not in self._dead:
                self._dead.add(server_id)
                logger.warning("generation server %s has died: %s", server_id, describe(error).splitlines()[0])
            # First of all, for the others: a dead server has the fewest requests, and would get all new ones.
            await _idle(self._load_balancer.remove_servers.remote([server_id]))
            troubles.lost += 1
            if troubles.lost == _MOST_LOST:
                raise error
        elif _NONE_LEFT in str(error) and troubles.waited_s < _NO_SERVER_S:
            await _idle(asyncio.sleep(_SELDOM_S))
            troubles.waited_s += _SELDOM_S
        else:
            raise error


class _Troubles:
    """Counts of a generation's troubles: servers that died, and seconds without any; and the server that last left."""

    def __init__(self) -> None:
        self.lost = 0
        self.waited_s = 0.0
        self.left: str | None = None


async def _idle(awaited: Awaitable[Any]) -> Any:
    """Return the result of something for which a generation waits; the conversation's clock is stopped.

    Raises:
        _Stopped: The task was cancelled.
    """
    with stopped(), during("pause"):
        try:
            return await awaited
        except asyncio.CancelledError as error:
            raise _Stopped from error


class _Stopped(Exception):
    """The caller's task was cancelled.

    Attributes:
        output: The attempt's tokens until then; None where there was no attempt, or it failed.
    """

    def __init__(self, output: TokenOutput | None = None) -> None:
        super().__init__()
        self.output = output


def _add(whole: TokenOutput, output: TokenOutput, segments: list[tuple[int | None, int]]) -> None:
    """Add an attempt's output to the whole, and its version to the segments."""
    if output.token_ids:
        segments.append((output.extra_fields.get("global_steps"), len(output.token_ids)))
        if output.routed_experts is not None:
            known = [] if whole.routed_experts is None else [whole.routed_experts]
            # The experts of an attempt are those of its prompt, too; the first attempt's are kept whole.
            added = output.routed_experts[-len(output.token_ids) :] if known else output.routed_experts
            whole.routed_experts = np.concatenate([*known, added])
    whole.token_ids.extend(output.token_ids)
    whole.log_probs = [*(whole.log_probs or []), *(output.log_probs or [])]
    whole.num_preempted = (whole.num_preempted or 0) + (output.num_preempted or 0)
    whole.stop_reason = output.stop_reason
    # Statistics of the engine: those of the first attempt stay, for example how much of the prompt it had cached.
    whole.extra_fields = {**output.extra_fields, **whole.extra_fields}


def _with_versions(whole: TokenOutput, segments: list[tuple[int | None, int]]) -> TokenOutput:
    """Write the versions of a generation into its extra fields, ours and those that verl reads."""
    # Without a token the version is that of the first attempt: verl's own agent loops need one.
    versions = [version for version, _ in segments] or [whole.extra_fields.get("global_steps")]
    known = [version for version in versions if version is not None]
    certain = len(known) == len(versions)
    whole.extra_fields.pop(PAUSED, None)
    whole.extra_fields |= {
        SEGMENTS: segments,
        "global_steps": versions[-1],
        "min_global_steps": min(known) if certain else None,
        "max_global_steps": max(known) if certain else None,
    }
    return whole
