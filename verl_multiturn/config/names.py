"""Names and values of this package's settings that other rooms use, too."""

from __future__ import annotations

ASSISTANT, USER = "assistant", "user"
"""The roles of a conversation whose user is trained, too."""
BOXED = "boxed"
"""The setting for an answer that ends with its box."""
POLICY = "policy"
"""The opponent that is the trained model."""

PATH = "actor_rollout_ref.rollout.custom.multiturn"
"""Path of the settings in verl's configuration."""
DERIVED = f"{PATH}.derived"
"""Path of the state that the start-up check writes."""
