"""`Roles`: the roles in which an agent asks (`proxy.roles`, `proxy.train`). The model of a request names its role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_multiturn.config import ProxySettings
from verl_multiturn.describe import show
from verl_multiturn.proxy.protocols.requests import RefusedError


@dataclass(frozen=True)
class Roles:
    """The roles of all sessions of a run."""

    names: Sequence[str]
    """Their names, in the order of the setting."""
    trained: Sequence[str]
    """The names of those that are trained, in that order."""

    @classmethod
    def of(cls, settings: ProxySettings) -> Roles | None:
        """Return the roles that are set; None without any."""
        if settings.roles is None:
            return None
        train = settings.roles if settings.train is None else settings.train
        return cls(tuple(settings.roles), tuple(name for name in settings.roles if name in train))

    def named(self, model: str) -> str:
        """Return the role that a request's model names.

        Raises:
            RefusedError: It names none.
        """
        if model in self.names:
            return model
        raise RefusedError(
            400,
            "unknown_role",
            f"model {show(model, 60)} is no role of this run; name one of {list(self.names)} as the request's model",
        )

    def trains(self, role: str | None) -> bool:
        """Return whether completions of a role are trained."""
        return role in self.trained
