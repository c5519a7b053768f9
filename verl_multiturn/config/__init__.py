"""The settings of this package, under `actor_rollout_ref.rollout.custom.multiturn`.

verl's settings under `rollout.multi_turn.*` keep their meaning.
"""

from verl_multiturn.config.model import Model, fixed, read_model, why_gone
from verl_multiturn.config.names import ASSISTANT, BOXED, DERIVED, PATH, POLICY, USER
from verl_multiturn.config.places import check_place, names_in, why_not_derived, with_derived
from verl_multiturn.config.proxy import HarborSettings, Opponent, ProxySettings, VerifiersSettings
from verl_multiturn.config.sections import (
    AdvantageSettings,
    CacheSettings,
    CheckpointEvaluationSettings,
    ContextSettings,
    DerivedSettings,
    OtcSettings,
    OutageMode,
    OutageSettings,
    ReferenceResetSettings,
    ScoreSettings,
    TirSettings,
)
from verl_multiturn.config.settings import (
    OPTIONS_BEFORE,
    FilterMode,
    ImportanceWeight,
    MultiTurnSettings,
    PrefixTree,
    read_settings,
)

__all__ = [
    "ASSISTANT",
    "BOXED",
    "DERIVED",
    "OPTIONS_BEFORE",
    "PATH",
    "POLICY",
    "USER",
    "AdvantageSettings",
    "CacheSettings",
    "CheckpointEvaluationSettings",
    "ContextSettings",
    "DerivedSettings",
    "FilterMode",
    "HarborSettings",
    "ImportanceWeight",
    "Model",
    "MultiTurnSettings",
    "Opponent",
    "OtcSettings",
    "OutageMode",
    "OutageSettings",
    "PrefixTree",
    "ProxySettings",
    "ReferenceResetSettings",
    "ScoreSettings",
    "TirSettings",
    "VerifiersSettings",
    "check_place",
    "fixed",
    "names_in",
    "read_model",
    "read_settings",
    "why_gone",
    "why_not_derived",
    "with_derived",
]
