"""The start-up check of versions: those of a supported set cost nothing, others are looked at, or refused."""

from __future__ import annotations

import logging

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.version_sets import judge

logger = logging.getLogger(__name__)

_DOCTOR = "run `verl-multiturn doctor`, which says what to install"


def check_versions() -> None:
    """Refuse versions of verl and SGLang that this package cannot run with; warn of untried ones.

    Where a version is in no set, this imports all that we use of verl, SGLang and Ray, which takes some 30 s.

    Raises:
        ConfigError: verl or SGLang is refused, or a name that we use is missing or has changed.
    """
    judgement = judge()
    if judgement.verdict == "supported":
        return
    if refused := [judgement.wrong[name] for name in ("verl", "sglang") if name in judgement.refused]:
        raise ConfigError(f"{'; '.join(refused)}; {_DOCTOR}")
    said = "; ".join(judgement.wrong.values())
    from verl_multiturn.verl_bridge.compat.contract import check

    logger.warning("%s; it takes some 30 s to look whether all names that we use are there", said)
    if faults := check():
        raise ConfigError(f"{'; '.join([said, *faults])}; {_DOCTOR}")
    logger.warning("all names that we use are there")
