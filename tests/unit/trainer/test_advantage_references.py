"""Functions of advantages of installed packages, by their references."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.installed_packages import install
from verl_multiturn.advantages.estimators import is_own_function
from verl_multiturn.advantages.function import load_function
from verl_multiturn.advantages.turns import GroupMember
from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.turn import Turn

CODE = """
class Mean:
    def __init__(self):
        self.steps = 0

    def __call__(self, group, *, scale: float = 1.0):
        self.steps += 1
        mean = sum(member.reward for member in group) / len(group)
        return [scale * (member.reward - mean) for member in group]

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package `plug-adv` for one test."""
    lines: dict[str, str | list[str]] = {
        "advantages": ["mean = plug_adv:Mean", "gone = plug_adv:Gone"],
        "tools": "mean = plug_adv:Tool",
    }
    install(tmp_path, "plug-adv", lines, {"plug_adv.py": CODE})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plug_adv", raising=False)


def test_a_reference_is_a_function_of_ones_own() -> None:
    assert is_own_function("plug_adv/mean")
    function = load_function("plug_adv/mean", {"scale": 2})
    members = [GroupMember([Turn(0, reward)]) for reward in (1.0, 0.0)]
    assert function.of_groups({"a": members}) == {"a": [[1.0], [-1.0]]}
    assert function.state() == {"steps": 1}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "plug-adv/meen",
            r"no installed package gives 'plug-adv/meen' in verl_multiturn.advantages; did you mean 'plug-adv/mean'",
        ),
        ("plug-adv/gone", "the module 'plug_adv' has no 'Gone'"),
        ("plug_adv.Mean", "or for an installed package's 'package/name'; write it so"),
    ],
)
def test_refusals(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_function(name)
