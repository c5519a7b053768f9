"""`RoleFigures`: trained tokens and advantages of each role, and warnings about self-play that trains nothing."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from verl_multiturn.observe.metrics import Stats, compared_groups
from verl_multiturn.observe.roles import role_of, silent, speakers_of, trained_roles
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.rows.reward_numbers import have_signal
from verl_multiturn.verl_bridge.compat.row_store import get_columns
from verl_multiturn.verl_bridge.trainer.report import PREFIX
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

logger = logging.getLogger(__name__)

_STEPS = 2
"""Steps after which a warning is due."""
_OF_AN_AGENT = "let the agent name it as the model of its requests, or take it out of proxy.train"
_OF_A_USER = "give rows a PolicyUser whose turn comes, or take it out of train"


class RoleFigures:
    """The figures of the roles in a trainer's steps; without roles none.

    Its metrics of a step, under `rollout/role/NAME/`:
    - `trained_tokens`: tokens of the role that the loss counts;
    - `advantage/mean_abs`: mean of their advantages' sizes; missing where there is no such token.

    After the second step of a start it warns of a trained role that never spoke, and of sessions of several speakers
    without roles, if no group had a signal.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sessions: Counter[str] = Counter()
        """Valid conversations so far in which a trained role could speak."""
        self._has_users = False
        """Whether the roles are those of conversations (`train`)."""
        self._silent: Counter[str] = Counter()
        """Number of conversations in which it did not speak."""
        self._groups = self._signals = self._several = 0
        """Groups so far that were compared, those with a signal, and sessions with several roots and no roles."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._tokens: Counter[str] = Counter()
        self._sizes: dict[str, float] = defaultdict(float)

    def look(self, rows: BatchRows) -> None:
        """Count the trained tokens of a batch, whose masks and advantages are final, by role."""
        roles: dict[RowKey, str] = {
            key: role for key, stats in rows.stats.items() if (role := role_of(stats)) is not None
        }
        if not roles:
            return
        data = get_columns([*roles], rows.partition_id, ["response_mask", "advantages"])
        columns = zip(roles.values(), data["response_mask"].unbind(), data["advantages"].unbind(), strict=True)
        for role, mask, advantages in columns:
            own = advantages[mask != 0].to(torch.float64)
            self._tokens[role] += len(own)
            self._sizes[role] += float(own.abs().sum())

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        found: dict[str, float] = {}
        for role, tokens in sorted(self._tokens.items()):
            found[f"{PREFIX}role/{role}/trained_tokens"] = tokens
            if tokens:
                found[f"{PREFIX}role/{role}/advantage/mean_abs"] = self._sizes[role] / tokens
        return found

    def watch(self, stats: Sequence[Stats]) -> None:
        """Note the conversations of a step that is over; after the second one warn of those that teach nothing."""
        if self._steps >= _STEPS:
            return
        self._steps += 1
        self._has_users |= any("speakers" in each for each in stats)
        for role in trained_roles(stats):
            self._sessions[role] += sum(
                each["valid"] and role in speakers_of(each).get("trained", ()) for each in stats
            )
            self._silent[role] += len(silent(stats, role))
        groups = compared_groups(stats)
        self._groups += len(groups)
        self._signals += sum(map(have_signal, groups))
        sessions = [each["session"] for each in stats if "session" in each and "roles" not in each]
        self._several += sum(session["roots"] > 1 for session in sessions if not session.get("trained"))
        if self._steps == _STEPS:
            self._warn()

    def _warn(self) -> None:
        for role, sessions in self._sessions.items():
            if sessions and self._silent[role] == sessions:
                logger.warning(
                    "role %r is trained and never spoke in %d sessions of %d steps, so that it learns nothing; %s",
                    role, sessions, _STEPS, _OF_A_USER if self._has_users else _OF_AN_AGENT,
                )  # fmt: skip
        if self._groups and not self._signals and self._several:
            logger.warning(
                "none of %d groups of %d steps has a signal, and sessions have several roots: if several players speak "
                "in them, zero-sum scores cancel; set proxy.roles",
                self._groups, _STEPS,
            )  # fmt: skip
