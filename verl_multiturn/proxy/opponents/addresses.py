"""Opponents at addresses: OpenAI-compatible endpoints that somebody else serves, for a run and for `serve`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.clients.chat_endpoint import check_address, key_of
from verl_multiturn.config import PATH, POLICY, ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.opponents.draw import OpponentName, Opponents, is_address, shown
from verl_multiturn.proxy.opponents.remote_model import RemoteModel
from verl_multiturn.proxy.sessions.roles import Roles

SETTING = f"{PATH}.proxy.opponents"
OPENAI = ("temperature", "top_p")
"""Sampling parameters that every such endpoint takes."""
_KEY = "OPENAI_API_KEY"


def model_at(name: str, outages: Outages, timeout_s: float, connections: int) -> RemoteModel:
    """Return the client of an opponent at an address; its key is that of the environment, where there is one.

    Args:
        name: The address as `proxy.opponents` has it, with the model's name there behind `#`.
        outages: The process's state of outages.
        timeout_s: Seconds for one answer.
        connections: Requests at once.

    Raises:
        ConfigError: The key in the environment cannot be one.
    """
    where, _, model = name.partition("#")

    async def address() -> str:
        return where

    return RemoteModel(
        shown(name),
        address,
        model=model,
        key=key_of(_KEY if os.environ.get(_KEY) else None, SETTING),
        sampled=OPENAI,
        timeout_s=timeout_s,
        connections=connections,
        watch=outages.of(f"opponent {shown(name)}", OutageLimits(timeouts="outage"), timeout_s),
        setting=SETTING,
    )


def read_opponents(given: Sequence[str]) -> dict[str, list[str]]:
    """Return the opponents of each role, as `proxy.opponents` has them, for the option of `serve`.

    Args:
        given: Texts `ROLE=ADDRESS`.

    Raises:
        ConfigError: One has another form.
    """
    found: dict[str, list[str]] = {}
    for each in given:
        role, _, name = each.partition("=")
        if not (role and name):
            raise ConfigError(f"{SETTING}: expected ROLE=ADDRESS, black=http://127.0.0.1:8000/v1 say, got {each!r}")
        found.setdefault(role, []).append(name)
    return found


def opponents_at_addresses(settings: ProxySettings, outages: Outages, timeout_s: float) -> Opponents | None:
    """Return the opponents of a session outside a run, as `serve` has it; None: there are none.

    Args:
        settings: The settings of the endpoint.
        outages: As for `model_at`.
        timeout_s: As for `model_at`.

    Raises:
        ConfigError: One of them is a checkpoint or a folder, which a run alone serves.
    """
    roles = Roles.of(settings)
    if roles is None or not settings.opponents:
        return None
    for role, names in settings.opponents.items():
        for name in names:
            if not is_address(name) and name != POLICY:
                raise ConfigError(
                    f"{SETTING}: {role}: the opponent {shown(name)} is served by a run alone; serve a model yourself, "
                    "and give its address, http://…/v1"
                )
            if is_address(name):
                check_address(str(name).partition("#")[0], f"{SETTING}: {role}")

    def make(name: OpponentName) -> RemoteModel:
        return model_at(str(name), outages, timeout_s, settings.max_completions)

    return Opponents(settings.opponents, 0, None, make, roles.trained)
