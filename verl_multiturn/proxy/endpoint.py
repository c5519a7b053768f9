"""`Endpoint`: runs an agent for a data row, and returns its session's outcome.

    row → session, secret → agent ⇄ server ⇄ session ⇄ engine → the agent ends → rows and receipts

One endpoint serves all sessions of a process. It raises only for a mistake of an author (`ConfigError`,
`AgentContractError`) and for cancellation. Everything else ends in an outcome with a `StopReason`.

Invariants:
- when `run` returns or raises, the agent has ended (or its thread is abandoned), the session's secret is dead, and no
  generation of it is under way;
- only answers delivered until the agent's return or end was known count: its remaining processes, threads and tasks get
  no completion, and train none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextvars import Context
from dataclasses import replace
from typing import Any

from verl_multiturn.calls.outages.guarded_call import GuardedCall
from verl_multiturn.calls.outages.process import OutageEndError, Watch
from verl_multiturn.calls.tasks import finish
from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.describe import describe, show
from verl_multiturn.errors import AgentContractError, ConfigError, OutageError
from verl_multiturn.proxy.agents.agent import SessionAddress, agent_row
from verl_multiturn.proxy.agents.end import AgentEnd, role_rewards, session_reward
from verl_multiturn.proxy.agents.runner import AgentRunner
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.rollout.life import current, note, running
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome, SessionReport

logger = logging.getLogger(__name__)

GOOD_AFTER_S = 30.0
"""Seconds after which a session that is a probe of its agent is good: it has hit no outage, and may take hours more.

If it meets one after all, it is taken back (`Breaker.take_back`).
"""
_TIME_UP = ("timed_out", "stuck")


class Endpoint:
    """The endpoint and the runner of the agents of one process; its methods are called on one event loop.

    Args:
        run: State that all sessions share.
        agents: Runs the agents.
        server: Lets them in. It is started with the first session.
        wall_clock_s: Seconds that a session may take.
        error_reward: Reward of a session whose agent failed after it got a completion.
        watch: The watch over the agent; None: an outage that it reports is a failure as any other.
    """

    name = "proxy"
    """Name of the closed object, in the log."""

    def __init__(
        self,
        run: ProxyRun,
        agents: AgentRunner,
        server: ProxyServer,
        wall_clock_s: float,
        error_reward: float = 0.0,
        watch: Watch | None = None,
    ) -> None:
        self._run = run
        self._agents = agents
        self._server = server
        self._wall_clock_s = wall_clock_s
        self._error_reward = error_reward
        self._watch = watch
        self._starting: asyncio.Future[None] | None = None

    def is_listening(self) -> None:
        """Note that the caller has started the server; a gateway listens before its first session."""
        self._starting = asyncio.get_running_loop().create_future()
        self._starting.set_result(None)

    async def aclose(self) -> None:
        """End everything that is under way, and stop listening."""
        await self._agents.aclose()
        await self._server.aclose()
        if self._run.opponents is not None:
            await self._run.opponents.aclose()
        self._run.renderer.close()

    async def run(
        self,
        name: str,
        row: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> tuple[Outcome, list[Receipt]]:
        """Run the agent for a data row. Where this raises, the session so far is noted in its life.

        Args:
            name: Request id of the row.
            row: The row.
            sampling: Sampling parameters, under the engine's own names.

        Returns:
            The session's outcome, and the receipts of its generations in the order of `Outcome.turns`.

        Raises:
            ConfigError: The agent cannot be imported, a column of the row cannot be given to it, the agent raised
                one before it got a completion, or the function `select` failed.
            AgentContractError: The agent's result is not a reward.
            asyncio.CancelledError: The caller cancelled.
        """
        if self._starting is None:
            # In no conversation's context, since the server is all sessions'.
            self._starting = asyncio.get_running_loop().create_task(self._server.start(), context=Context())
        await asyncio.shield(self._starting)
        plain = agent_row(row)
        watched = GuardedCall(self._watch, name)
        try:
            await watched.wait()  # before the clock starts, and before the agent asks for a token
        except OutageEndError as error:
            session = AgentSession(name, self._run, sampling)
            session.returned()
            return await session_end(session, AgentEnd("outage", problem=str(error)), self._run, self._error_reward), []

        def runs() -> None:
            if watched.is_probe:
                watched.answered()

        good = asyncio.get_running_loop().call_later(GOOD_AFTER_S, runs)
        try:
            return await self._run_agent(name, plain, sampling, watched)
        finally:
            good.cancel()
            watched.dropped()  # where nothing else was reported

    async def _run_agent(
        self,
        name: str,
        plain: Mapping[str, Any],
        sampling: Mapping[str, Any],
        watched: GuardedCall,
    ) -> tuple[Outcome, list[Receipt]]:
        """Run the agent, as in `run`, and return whether it hit an outage."""
        time_up = asyncio.Event()
        try:
            async with asyncio.timeout(self._wall_clock_s) as deadline, running(deadline):
                session = AgentSession(name, self._run, sampling)  # it keeps the context, and so the deadline
                until = time.monotonic() + self._wall_clock_s
                address = replace(self._server.open(session), deadline=until)
                agent = asyncio.ensure_future(self._agents.run(plain, address, time_up, session.returned))
                await asyncio.wait({agent})
        except TimeoutError:
            session.end()
            time_up.set()
        except asyncio.CancelledError:
            await self._closed(agent, session, address)
            _note(session)
            raise
        try:
            try:
                await asyncio.wait({agent})
            finally:
                receipts = await self._closed(agent, session, address)
            end = agent.result()
            # An agent may print its environment, or an error may name its address.
            end = replace(end, problem=end.problem.replace(address.api_key, "[key]"))
            if session.opponents.outage:  # it shows nothing about the agent's own services
                watched.dropped()
                outcome = await session_end(session, replace(end, kind="outage"), self._run, self._error_reward)
                outcome.outages = [session.opponents.outage]
                return outcome, receipts
            if end.kind == "outage":
                await watched.failed(OutageError(end.problem))
            elif end.kind in (*_TIME_UP, "failed", "unjudged", "misconfigured"):
                watched.dropped()  # it may have hung, or never begun, or failed for a reason beside the service
            else:
                watched.answered()
            if end.kind == "outage" and not watched.met:  # outages are not tracked
                end = replace(end, kind="raised")
            outcome = await session_end(session, end, self._run, self._error_reward)
            if watched.met:
                outcome.outages = [watched.name]
            return outcome, receipts
        except BaseException:  # the session's caller gets the error, and it goes on
            _note(session)
            raise
        finally:
            session.forget()

    async def _closed(
        self, agent: asyncio.Future[AgentEnd], session: AgentSession, address: SessionAddress
    ) -> list[Receipt]:
        """End the remaining parts of a session, wait for them, and return the session's receipts."""

        async def close() -> None:
            agent.cancel()
            await asyncio.wait({agent})
            session.returned()
            await session.closed()
            await self._server.close_session(address)

        try:
            await finish(asyncio.ensure_future(close()))
        finally:
            receipts = session.receipts()
        return receipts


async def session_end(session: AgentSession, end: AgentEnd, run: ProxyRun, error_reward: float = 0.0) -> Outcome:
    """Return the outcome of a session whose agent has ended.

    Args:
        session: The session.
        end: The agent's end.
        run: State that sessions share.
        error_reward: Reward of a session whose agent failed after it got a completion.

    Raises:
        AgentContractError: The agent gave a reward for a completion that this session never made, or for an unknown
            role, or none for one that is trained and has spoken.
        ConfigError: The agent raised one before it got a completion, or the function `select` failed.
    """
    for completion, reward in end.result.completions.items():
        if not session.reward(completion, reward):
            raise AgentContractError(
                f"the agent returned a reward for the completion {show(completion, 100)}, and its session has none "
                "of this id; use the `id` of the answers that it got"
            )
    unread = [each for each in session.forest.completions.values() if each.reward is not None and not each.delivered]
    if unread:
        logger.warning(
            "session %s: rewards for %d completions are not used: their clients had left before they got them, as "
            "far as the server knows; the first is %s",
            session.id,
            len(unread),
            unread[0].completion.id,
        )
    delivered = any(node.delivered for node in session.forest.completions.values())
    roles, trained = ((), ()) if run.roles is None else (run.roles.names, run.roles.trained)
    spoke = {node.prompt.role for node in session.forest.delivered}
    rewards = role_rewards(end, roles, [name for name in trained if name in spoke])
    first = next(iter(session.forest.roots), None)
    too_long = first is not None and len(first.ids) > run.limits.prompt_length
    alone = not session.forest.completions and bool(session.opponents.names)
    reason = stop_reason(end, delivered, "" if session.opponents.outage else session.failed, too_long, alone)
    if end.kind == "misconfigured":
        if reason is StopReason.AGENT_FAILED:
            raise ConfigError(f"the agent raised {end.problem}")
        end = replace(end, kind="raised")  # a model that answered may have caused it, by a path or a time limit
    if end.problem:
        logger.warning("session %s: its agent did not end well: %s", session.id, end.problem)
    await session.select()
    outcome = session.outcome(reason, session.failed or end.problem or ("" if delivered else _nothing(session, alone)))
    outcome.session = SessionReport(
        roots=sum(bool(root.completions) for root in session.forest.roots),
        unenforced=dict(session.unenforced),
        reward=session_reward(end, error_reward),
        by_id=end.result.by_id,
        rewards=rewards,
        roles=roles,
        trained=trained,
        opponents=session.opponents.names,
        end=end.kind,
        problem=end.problem,
        requests=session.journal.requests(),
        events=tuple(session.journal.events),  # a client's departure may still be reported
    )
    return outcome


def _nothing(session: AgentSession, alone: bool) -> str:
    """Return why a session whose agent did not fail has no completion of the trained model."""
    if alone:
        names = ", ".join(sorted(set(session.opponents.names.values())))
        return (
            f"the trained model was not asked, and only opponents spoke: {names}; if many sessions end so, let a "
            "trained role begin"
        )
    return "no request of the agent got a completion"


def _note(session: AgentSession) -> None:
    """Note the session up to its cancellation or to its author's mistake, for its record and trace."""
    if current() is None:
        return
    try:
        note(session.outcome(StopReason.AGENT_FAILED))
    except Exception as error:  # a bug of ours must not hide why the session ends
        logger.warning("session %s: nothing of it is kept: %s", session.id, describe(error), exc_info=True)


def stop_reason(
    end: AgentEnd, delivered: bool, engine_failed: str, too_long: bool = False, alone: bool = False
) -> StopReason:
    """Return why a session ended, in the order that `rollout.limits` writes down.

    Args:
        end: The agent's end.
        delivered: Whether it got a completion.
        engine_failed: The engine's failure; "" if there was none.
        too_long: Whether its first prompt was too long.
        alone: Whether only opponents spoke.
    """
    if engine_failed:
        return StopReason.ENGINE_ERROR
    if end.kind == "outage":
        return StopReason.OUTAGE
    if end.kind == "unjudged":
        return StopReason.UNJUDGED
    if not delivered:
        silent = StopReason.NO_COMPLETION if alone and end.kind == "returned" else StopReason.AGENT_FAILED
        return StopReason.PROMPT_TOO_LONG if too_long else silent
    if end.kind in _TIME_UP:
        return StopReason.WALL_CLOCK
    return StopReason.FINISHED if end.kind == "returned" else StopReason.AGENT_ERROR
