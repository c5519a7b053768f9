"""The supported sets of versions, and the place of an environment among them.

A set is one version of verl, SGLang and the packages that both pin, in which our tests were run. Its lock in
`requirements/` has everything else. `doctor` and the start of a run ask `judge`, which imports none of the packages;
the result for a version that no set names is there:

- a patch release of verl (0.9.2 beside 0.9.1), and SGLang between the versions of two sets, with the packages of
  either, are `untried`: accepted with a warning, as long as the names that we use are there
  (`verl_bridge/compat/contract.py`);
- anything else is `refused`, a minor release of verl above all, until a set names it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["supported", "untried", "refused"]


@dataclass(frozen=True)
class VersionSet:
    """A supported set of versions."""

    name: str
    locks: tuple[str, ...]
    """Its lock files."""
    versions: Mapping[str, str]
    """Version of each distribution."""


SETS = (
    VersionSet(
        "current",
        ("cpu.lock", "gpu.lock"),
        {
            "verl": "0.9.1",
            "sglang": "0.5.12",
            "torch": "2.11.0",
            "torchvision": "0.26.0",
            "transformers": "5.9.0",
            "tensordict": "0.10.0",
            "TransferQueue": "0.1.11",
        },
    ),
    VersionSet(
        "next",
        ("next.lock",),
        {
            "verl": "0.9.1",
            "sglang": "0.5.19",
            "torch": "2.13.0",
            "torchvision": "0.28.0",
            "transformers": "5.12.1",
            "tensordict": "0.10.0",
            "TransferQueue": "0.1.11",
        },
    ),
)
"""The set in which everything is tested, then the one in which `scripts/next.sh` is."""

_NO_DATACLASS = "0.5.20"
"""First version of SGLang whose `ServerArgs` is a msgspec.Struct. verl 0.9.1's `async_sglang_server.py` asks
`dataclasses.fields` of it."""


@dataclass(frozen=True)
class Judgement:
    """The result of comparing an environment's versions with the nearest set."""

    nearest: VersionSet
    verdict: Verdict
    wrong: Mapping[str, str]
    """Why it is not supported, by distribution."""
    refused: frozenset[str]
    """Those of them for which the verdict is `refused`."""


def installed() -> dict[str, str]:
    """Return the versions of the sets' distributions that are installed, without their local parts."""
    found = {}
    for name in SETS[0].versions:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def judge(versions: Mapping[str, str] | None = None) -> Judgement:
    """Judge an environment.

    Args:
        versions: Version by distribution; those that are installed by default.
    """
    found = installed() if versions is None else versions
    nearest = max(SETS, key=lambda each: sum(found.get(name) == version for name, version in each.versions.items()))
    verdicts = {
        name: _judge(name, found.get(name), version, found)
        for name, version in nearest.versions.items()
        if found.get(name) != version
    }
    refused = frozenset(name for name, (verdict, _) in verdicts.items() if verdict == "refused")
    verdict: Verdict = "refused" if refused else "untried" if verdicts else "supported"
    return Judgement(nearest, verdict, {name: why for name, (_, why) in verdicts.items()}, refused)


def _judge(name: str, found: str | None, expected: str, versions: Mapping[str, str]) -> tuple[Verdict, str]:
    """Return the result for another version than the nearest set's, and a sentence about it."""
    if found is None:
        return "refused", f"{name} is not installed, the set has {expected}"
    own, known = _numbers(found), sorted(_numbers(each.versions[name]) for each in SETS)
    if name in ("verl", "sglang") and own == _numbers(expected):
        return "untried", f"{name} {found} is untried, a build of {expected}"
    if name == "sglang" and own >= _numbers(_NO_DATACLASS) and versions.get("verl") == "0.9.1":
        return (
            "refused",
            f"verl 0.9.1 cannot start sglang {found}: since {_NO_DATACLASS} SGLang's `ServerArgs` is no dataclass, and "
            f"verl asks for its fields; verl 0.9.1 starts sglang up to {SETS[-1].versions['sglang']}",
        )
    if name == "verl" and any(own[:2] == each[:2] and own > each for each in known):
        return "untried", f"verl {found} is untried, a patch release of {expected}"
    if name == "sglang" and _is_between(found):
        return "untried", f"sglang {found} is untried, between those of two sets"
    if own in known:
        why = f"{name} {found} is that of another set, the nearest has {expected}"
        return "untried" if _is_between(versions.get("sglang")) else "refused", why
    needs = "; a minor release of verl needs a set of its own" if name == "verl" and own > known[-1] else ""
    return "refused", f"{name} {found} is in no set, the nearest has {expected}{needs}"


def _is_between(sglang: str | None) -> bool:
    """Return whether a version of SGLang lies between those of the sets."""
    ends = sorted(_numbers(each.versions["sglang"]) for each in SETS)
    return sglang is not None and ends[0] <= _numbers(sglang) < ends[-1] and sglang != SETS[0].versions["sglang"]


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers, without the mark of a release candidate."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split("."))  # type: ignore[index]
