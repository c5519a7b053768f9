"""`PolicyUser`: a user played by the model that is being trained.

Its text as the user is trained if `custom.multiturn.train` names the role `user`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.chat.model_text import spoken
from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.errors import EnvironmentFailedError
from verl_multiturn.interactions.simulated_user import SimulatedUser, UserSettings


class PolicyUserSettings(UserSettings):
    """Settings of `PolicyUser`, beside those of every simulated user."""

    attempts: int = Field(3, gt=0)
    """Most turns that are sampled for one message of the user; a further one is sampled when one is empty.

    A user that is trained has one attempt: its silence is an act of the model's, an empty message.
    """


class PolicyUser(SimulatedUser):
    """A user whom the engine of the run plays, with the weights of the moment.

    Args:
        config: `PolicyUserSettings`.

    Raises:
        ConfigError: A setting is wrong.
    """

    outage_limits = OutageLimits(mode="off")  # it asks the engine alone
    role = "user"

    def __init__(self, config: dict[str, Any]) -> None:
        self._policy_settings = read_model(PolicyUserSettings, config, "PolicyUser: config")
        super().__init__(config, self._policy_settings)

    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of the model that is being trained, without its reasoning.

        Raises:
            ConfigError: There is no engine.
            EngineError: The engine failed.
            EnvironmentFailedError: Each turn that was sampled is empty.
        """
        if self.policy is None:
            raise ConfigError(
                "PolicyUser needs the engine of a run, and there is none here; run it in a rollout, or set its "
                "attribute 'policy'"
            )
        settings = self._policy_settings
        for _ in range(settings.attempts):
            text = await self.policy.write(messages, settings.max_tokens, {"temperature": settings.temperature})
            said = spoken({"content": text})
            if said or self.is_trained:
                return said
        raise EnvironmentFailedError(
            f"the policy wrote no message as the user, in {settings.attempts} attempts of {settings.max_tokens} tokens"
        )
