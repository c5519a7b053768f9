"""`Opponents`: who plays a role in a session, drawn from `proxy.opponents`.

    role, session ─→ the names of the list that are there ─→ one by seed ─→ its `RemoteModel`; None: the trained model

Invariants:
- the same session of the same run draws the same opponent, whichever process it runs in, where the same are there;
- where all trained roles have opponents, the trained model plays one of them, which is drawn, too. In a validation it
  plays all of them, since it is what is validated;
- a name that is not there yet is left out, and reported once in each process.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from verl_multiturn.calls.outages.process import Watch
from verl_multiturn.clients.http_connections import is_http
from verl_multiturn.config import POLICY
from verl_multiturn.proxy.opponents.remote_model import RemoteModel, answer_of
from verl_multiturn.rollout.life import Life

logger = logging.getLogger(__name__)

OpponentName = int | str
"""A step, a folder, an address or `policy`, as `proxy.opponents` has it."""


class ServedModels(Protocol):
    """The servers beside the run."""

    async def has(self, name: OpponentName, step: int) -> bool:
        """Return whether a model is there for a session that a step has begun.

        Args:
            name: Step of a checkpoint, or folder of a model.
            step: The step.

        Raises:
            OutageError: It cannot be found out.
        """

    async def address(self, name: OpponentName) -> str:
        """Return the address of a model's server, which is started if none serves it, ending in `/v1`.

        Raises:
            OutageError: It cannot be started.
        """


def is_address(name: OpponentName) -> bool:
    """Return whether an opponent is an endpoint, which somebody else serves."""
    return isinstance(name, str) and is_http(name)


def shown(name: OpponentName) -> str:
    """Return an opponent as records and messages name it."""
    return f"step {name}" if isinstance(name, int) else name


class Opponents:
    """The opponents of all sessions of a process.

    Args:
        listed: For each role the opponents, as `proxy.opponents` has them.
        seed: Seed of the run's data.
        models: The servers beside the run; None: all opponents are at addresses.
        make: Makes the client of an opponent that is not the trained model.
        trained: The trained roles.
        watch: The watch over the one who says which models are there; None: its outages are not tracked.
    """

    def __init__(
        self,
        listed: Mapping[str, Sequence[OpponentName]],
        seed: int,
        models: ServedModels | None,
        make: Callable[[OpponentName], RemoteModel],
        trained: Sequence[str],
        watch: Watch | None = None,
    ) -> None:
        self._watch = watch
        self._listed = listed
        self._trained = tuple(trained)
        self._seed = seed
        self._models = models
        self._make = make
        self._made: dict[OpponentName, RemoteModel] = {}
        self._has_told: set[OpponentName] = set()

    def plays(self, role: str | None) -> bool:
        """Return whether a role has opponents."""
        return role in self._listed

    async def draw(self, role: str, life: Life | None) -> RemoteModel | None:
        """Return who plays a role in a session; None: the trained model does.

        Args:
            role: The role, which has opponents.
            life: The session; None: it is no session of a run.

        Raises:
            OpponentLostError: Nobody says which of them are there.
        """
        step, number = (0, 0) if life is None else (life.step, life.number)
        index = None if life is None else life.row.get("index")
        validates = life is not None and life.validation
        if validates and role in self._trained:
            return None
        there = [name for name in self._listed[role] if await self._has(name, step, "" if life is None else life.id)]
        if not there:
            return None
        session = f"{self._seed} {validates} {step} {index} {number}"
        if all(map(self.plays, self._trained)) and random.Random(session).choice(self._trained) == role:
            return None
        drawn = random.Random(f"{session} {role}").choice(there)
        if drawn == POLICY:
            return None
        if drawn not in self._made:
            self._made[drawn] = self._make(drawn)
        return self._made[drawn]

    async def _has(self, name: OpponentName, step: int, session: str) -> bool:
        models = self._models
        if name == POLICY or is_address(name) or models is None:
            return True
        if await answer_of(self._watch, session, "the opponents' servers", lambda: models.has(name, step)):
            return True
        if name not in self._has_told:
            self._has_told.add(name)
            logger.warning("the opponent %s is not there in step %d, and does not play yet", shown(name), step)
        return False

    async def aclose(self) -> None:
        """Close the connections to all opponents."""
        for model in self._made.values():
            await model.aclose()
        self._made.clear()


class SessionOpponents:
    """The opponents of one session: who plays a role is drawn with the role's first request.

    Args:
        opponents: The opponents of all sessions; None: there are none.
        life: The session; None: it is no session of a run.
    """

    def __init__(self, opponents: Opponents | None, life: Life | None) -> None:
        self._opponents = opponents
        self._life = life
        self._drawn: dict[str, asyncio.Task[RemoteModel | None]] = {}
        self._names: dict[str, str] = {}
        self.outage = ""
        """Name of the outage of an opponent that ended the session; "" without one."""

    @property
    def names(self) -> dict[str, str]:
        """Return the names of the opponents that were drawn, by role."""
        return dict(self._names)

    async def of(self, role: str | None) -> RemoteModel | None:
        """Return who plays a role in this session; None: the trained model does.

        Raises:
            OpponentLostError: It cannot be drawn.
        """
        if role is None or self._opponents is None or not self._opponents.plays(role):
            return None
        if role not in self._drawn:
            self._drawn[role] = asyncio.ensure_future(self._opponents.draw(role, self._life))
        drawn = await asyncio.shield(self._drawn[role])
        if drawn is not None:
            self._names[role] = drawn.name
        return drawn
