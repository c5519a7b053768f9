"""The estimators that count conversations: their names, their options, and the state of one's own."""

from pathlib import Path
from typing import Any

import pytest

from verl_multiturn import ConfigError
from verl_multiturn.advantages.estimators import Estimator, counts_conversations, is_own_function, load_estimator
from verl_multiturn.advantages.turns import GroupMember
from verl_multiturn.config import read_settings
from verl_multiturn.errors import AdvantageContractError
from verl_multiturn.rollout.turn import Turn

OWN = '''
class Counts:
    """Gives the number of members that it has seen; raises for a reward of 9."""

    def __init__(self):
        self.seen = []

    def __call__(self, group, *, by=1):
        for member in group:
            self.seen.append(member.reward)
            if member.reward == 9:
                raise ValueError("nine")
        return [by * len(self.seen)] * len(group)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Other(Counts):
    pass


def plain(group):
    return [1] * len(group)
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def group(*rewards: float) -> dict[str, list[GroupMember]]:
    return {"u": [GroupMember([Turn(0, reward)]) for reward in rewards]}


def loaded(name: str, options: Any = None, std: bool = True, **settings: Any) -> Estimator:
    return load_estimator(name, read_settings({"advantage": {"options": options}, **settings}), std)


@pytest.mark.parametrize(
    ("name", "counts", "is_own"),
    [
        ("grpo", False, False),
        ("gae", False, False),
        ("mt_grpo", True, False),
        ("mt_gigpo", True, False),
        ("mt_own", False, False),  # one that a plug-in of verl registers
        ("own.algorithms:advantages", True, True),
        ("algorithms/own.py:advantages", True, True),
        ("own_package/advantages", True, True),
    ],
)
def test_who_counts_conversations(name: str, counts: bool, is_own: bool) -> None:
    assert (counts_conversations(name), is_own_function(name)) == (counts, is_own)


def test_the_options_of_our_estimators() -> None:
    games = {"u": [GroupMember([Turn(0), Turn(1, 1.0)]), GroupMember([Turn(0)])]}
    assert loaded("mt_turns").of_groups(games, set()) == {"u": [[0.5, 0.5], [-0.5]]}
    assert loaded("mt_turns", {"gamma": 0.5}).of_groups(games, set()) == {"u": [[0.25, 0.5], [-0.25]]}
    assert loaded("mt_gigpo", {"across_rows": True}).of_groups(games, set())["u"][1] == [pytest.approx(-2 / 3)]
    for name, options, said in (
        ("mt_turns", {"weight": 1.0}, r"advantage\.options\.weight: .*mt_turns.* takes gamma"),
        ("mt_turns", {"gamma": 1.5}, r"options\.gamma=1\.5: .*mt_turns.* refuses it: .*less than or equal to 1"),
        ("mt_gigpo", {"weight": -1.0}, r"options\.weight=-1\.0: .*greater than or equal to 0"),
        ("mt_gigpo", {"weight": float("inf")}, r"advantage\.options: \['weight'\] is inf"),
        ("mt_gigpo", {"group": 1}, r"options\.group: "),
        (
            "mt_grpo",
            {"std": False},
            r"options=.*std.*: mt_grpo takes no option; set algorithm\.norm_adv_by_std",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            loaded(name, options)


def test_sessions_are_credited_as_the_settings_say() -> None:
    forest = {
        "s": [GroupMember([Turn(0, after=1), Turn(1, parent=0)], outcome=1.0), GroupMember([Turn(0)], outcome=0.0)]
    }
    estimator = loaded("mt_grpo", std=False, proxy={"credit": "discounted", "gamma": 0.5})
    both = estimator.of_groups({**forest, "c": forest["s"]}, {"s"})
    assert both == {"s": [[0.25, 0.5], [-0.5]], "c": [[0.5, 0.5], [-0.5]]}


def test_a_state_is_kept_over_starts(own: Path) -> None:
    first = loaded(f"{own}:Counts", {"by": 10})
    assert first.of_groups(group(0, 1), set()) == {"u": [[20.0], [20.0]]}
    saved = first.saved()
    assert saved == {"function": f"{own}:Counts", "state": {"seen": [0.0, 1.0]}}
    first.of_groups(group(0), set())
    assert saved["state"] == {"seen": [0.0, 1.0]}  # a copy
    again = loaded(f"{own}:Counts", {"by": 10})
    assert again.restore(saved) == ""
    assert again.of_groups(group(5), set()) == {"u": [[30.0]]}


def test_a_state_that_cannot_be_gone_on_from_is_named(own: Path) -> None:
    counts, other, plain = (loaded(f"{own}:{name}") for name in ("Counts", "Other", "plain"))
    counts.of_groups(group(0), set())
    saved = counts.saved()
    assert other.restore(saved) == (
        f"the checkpoint has a state of '{own}:Counts', which is not read: '{own}:Other' begins anew"
    )
    assert other.of_groups(group(0), set()) == {"u": [[1.0]]}
    assert other.restore(None) == f"the checkpoint has no state of '{own}:Other', which begins anew"
    assert (
        plain.restore(saved)
        == f"the checkpoint has a state of '{own}:Counts', and '{own}:plain' keeps none: it is not read"
    )
    assert plain.restore(None) == ""
    assert plain.saved() is None
    moved = {**(saved or {}), "function": "/elsewhere/own.py:Counts"}
    assert other.restore(moved) != ""
    assert counts.restore(moved) == ""
    for wrong in ({"function": "f"}, {"function": f"{own}:Counts", "state": 3}, [1]):
        with pytest.raises(ConfigError, match=r"in the place of a state of algorithm\.adv_estimator"):
            counts.restore(wrong)  # type: ignore[arg-type]
    with pytest.raises(AdvantageContractError, match=r"load_state_dict\(\{\}\) raised KeyError: 'seen'"):
        counts.restore({"function": f"{own}:Counts", "state": {}})


def test_the_state_of_a_step_that_failed_is_that_before_it(own: Path) -> None:
    """The run's last checkpoint is one of the step before."""
    estimator = loaded(f"{own}:Counts")
    estimator.of_groups(group(0, 1), set())
    said = r"raised ValueError: nine \(own\.py:12\) for the group v of 2 conversations"
    with pytest.raises(AdvantageContractError, match=said):
        estimator.of_groups({**group(2), "v": group(3, 9)["u"]}, set())
    assert estimator.saved() == {"function": f"{own}:Counts", "state": {"seen": [0.0, 1.0]}}
