"""The estimators that count conversations, by their names in `algorithm.adv_estimator`: ours, and a run's own.

    name                                        function                                        keywords
    mt_grpo                                     of_conversations; of sessions by proxy.credit   verl's norm_adv_by_std_…
    mt_turns, mt_gigpo                          of_turns, of_states                             advantage.options
    package.module:function, path/file.py:function, or a package's NAME/NAME                    advantage.options

All of them are an `AdvantageFunction`: one mechanism calls them and reads their values.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl_multiturn.advantages.function import ESTIMATOR, AdvantageFunction, function_of, load_function, not_plain
from verl_multiturn.advantages.options import OPTIONS
from verl_multiturn.advantages.turns import (
    Advantages,
    GroupMember,
    of_completions,
    of_conversations,
    of_discounted,
    of_states,
    of_turns,
)
from verl_multiturn.config import MultiTurnSettings, ProxySettings
from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError, MultiTurnError

ESTIMATORS: Mapping[str, Callable[..., Advantages]] = {
    "mt_grpo": of_conversations,
    "mt_turns": of_turns,
    "mt_gigpo": of_states,
}
"""Our estimators. verl's own count rows: `grpo` reads the last one of a conversation alone."""


def is_own_function(estimator: str) -> bool:
    """Return whether an estimator's name is the place of a function, and neither ours nor one that verl registers."""
    return ":" in estimator or "/" in estimator


def counts_conversations(estimator: str) -> bool:
    """Return whether an estimator counts conversations, and not rows: ours, and functions of a run's own."""
    return estimator in ESTIMATORS or is_own_function(estimator)


@dataclass(frozen=True)
class Estimator:
    """The estimator of a run, for the trainer and the start-up check."""

    function: AdvantageFunction
    of_sessions: AdvantageFunction
    """The function for sessions of agents: the same one, but for `mt_grpo`."""

    def of_groups(self, groups: Mapping[str, Sequence[GroupMember]], sessions: Set[str]) -> dict[str, Advantages]:
        """Return the advantages of a step's groups.

        Args:
            groups: All members of each prompt and role, by the name that errors have for it.
            sessions: Names of the groups of agents' sessions.

        Raises:
            AdvantageContractError, RewardContractError: As in `AdvantageFunction.of_group`.
        """
        if self.of_sessions is self.function:
            before = self.saved()
            try:
                return self.function.of_groups(groups)
            except MultiTurnError:
                with contextlib.suppress(MultiTurnError):  # the first error counts
                    self.restore(before)  # for the run's last checkpoint, which is one of the step before
                raise
        made = self.function.of_groups({name: each for name, each in groups.items() if name not in sessions})
        return made | self.of_sessions.of_groups({name: each for name, each in groups.items() if name in sessions})

    def saved(self) -> dict[str, Any] | None:
        """Return the function's name and a copy of its state, for a checkpoint; None: it keeps none.

        Raises:
            AdvantageContractError: The state is no plain data.
        """
        function = self.function
        return {"function": function.name, "state": copy.deepcopy(function.state())} if function.has_state else None

    def restore(self, saved: Mapping[str, Any] | None) -> str:
        """Go on from the result of `saved` in a checkpoint.

        Returns:
            A sentence about a state that is missing, or is another function's, so that this one begins anew; "" else.

        Raises:
            AdvantageContractError: The function does not take its state.
            ConfigError: The checkpoint has something else in its place.
        """
        function = self.function
        if saved is None:
            return f"the checkpoint has no state of {function.name!r}, which begins anew" if function.has_state else ""
        try:
            name, state = str(saved["function"]), {**saved["state"]}
        except (LookupError, TypeError) as error:
            raise ConfigError(
                f"the checkpoint has {show(saved)} in the place of a state of {ESTIMATOR} ({describe(error)}); go on "
                "from another one"
            ) from None
        if not function.has_state:
            return f"the checkpoint has a state of {name!r}, and {function.name!r} keeps none: it is not read"
        if _without_folder(name) != _without_folder(function.name):
            return f"the checkpoint has a state of {name!r}, which is not read: {function.name!r} begins anew"
        function.load_state(state)
        return ""


def _without_folder(place: str) -> str:
    """Return the place of a function; one in a file without its folder, which may have moved."""
    return place.rpartition("/")[2] if ".py:" in place else place


def load_estimator(name: str, settings: MultiTurnSettings, std: bool) -> Estimator:
    """Return the estimator of a run that counts conversations; imports the code of an own one.

    Args:
        name: `algorithm.adv_estimator`, for which `counts_conversations` is true.
        settings: Our settings.
        std: verl's `algorithm.norm_adv_by_std_in_grpo`: whether `mt_grpo` divides by the standard deviation.

    Raises:
        ConfigError: There is no such function, it cannot be called with a group, or it does not take the options.
    """
    options = settings.advantage.options
    if problem := not_plain(options):
        raise ConfigError(f"{OPTIONS}: {problem}; write texts, numbers, lists and mappings")
    if name not in ESTIMATORS:
        function = load_function(name, options)
        return Estimator(function, function)
    if name != "mt_grpo":
        function = function_of(ESTIMATORS[name], options, name)
        return Estimator(function, function)
    if options:
        raise ConfigError(
            f"{OPTIONS}={show(options)}: mt_grpo takes no option; set algorithm.norm_adv_by_std_in_grpo and, for "
            "agents, proxy.credit and proxy.gamma, or leave it out"
        )
    return Estimator(
        AdvantageFunction(name, partial(of_conversations, std=std)),
        AdvantageFunction(name, _of_sessions(settings.proxy, std)),
    )


def _of_sessions(proxy: ProxySettings, std: bool) -> Any:
    if proxy.credit == "session":
        return partial(of_conversations, std=std)
    return partial(of_discounted if proxy.credit == "discounted" else of_completions, gamma=proxy.gamma, std=std)
