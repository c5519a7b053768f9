"""Report a smoke run of `researcher` as a table and one JSON object: `python recipes/researcher/report.py OUT_DIR`.

Beside the usual report it computes the advantages anew: r * gamma^(T - i) for turn i of a conversation's T
turns, less the mean of this over the group, from the records and the join. It shares nothing with
`verl_multiturn.advantages.turns`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common.report import report as common_report
from recipes.researcher.reward import PENALTY
from verl_multiturn.records.read.records import Records, read_records
from verl_multiturn.records.read.scores import joined_rewards
from verl_multiturn.records.rows import columns
from verl_multiturn.runs.last_table import figure_text, print_last
from verl_multiturn.trust.settings import read_settings

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Trained:
    """A conversation of the training, as the trainer had it."""

    record: Mapping[str, Any]
    score: float
    """Its reward."""
    advantages: Sequence[Sequence[float]]
    """For each row those of its sampled tokens."""

    @property
    def turns(self) -> int:
        """Return how many turns it has, summaries among them."""
        return sum(turn["row"] is not None and turn["tokens"] > 0 for turn in self.record["generations"])


def report(out: Path) -> dict[str, Any]:
    """Return the results of the run in a folder.

    Args:
        out: Folder of the run.
    """
    settings = read_settings(out)
    options = settings["actor_rollout_ref"]["rollout"]["custom"]["multiturn"]["advantage"]["options"] or {}
    is_decayed = settings["algorithm"]["adv_estimator"] == "mt_turns"
    groups = trained(out / "records")
    every = [each for group in groups for each in group]
    different = max_difference(groups, options["gamma"]) if is_decayed else None

    def share(chosen: list[bool]) -> float | None:
        return sum(chosen) / len(chosen) if chosen else None

    return common_report(out) | {
        "conversations": len(every),
        "several_rows": share([len(each.record["rows"]) > 1 for each in every]),
        "summaries": sum(turn["summary"] for each in every for turn in each.record["generations"]),
        "right": share([each.score == 1.0 for each in every]),
        "penalized": share([each.score == -PENALTY for each in every]),
        "gamma": options.get("gamma", 1.0),
        "advantages_max": max((value for each in every for row in each.advantages for value in row), default=None),
        "advantages_max_difference": different,
        "advantages_equal": None if different is None else different <= TOLERANCE,
    }


def trained(folder: Path) -> list[list[Trained]]:
    """Return the valid conversations of the training, by group.

    Args:
        folder: Folder of the records.

    Raises:
        KeyError: Of a conversation that was trained, a row is not in the join.
    """
    records = Records(folder)
    rewards, joined = (
        joined_rewards(records),
        records.joined().select(["request_id", "row", "validation", "advantages"]),
    )
    rows = {(row["request_id"], row["row"]): row for row in joined.to_pylist() if not row["validation"]}
    groups: dict[str, list[Trained]] = defaultdict(list)
    for record in read_records(folder):
        request_id = record["request_id"]
        score = rewards[request_id].score if request_id in rewards and record["valid"] else None
        if record["validation"] or score is None:
            continue  # also a row that no step has trained, as where a run was stopped
        advantages = [rows[request_id, number]["advantages"] for number in range(len(record["rows"]))]
        groups[record["uid"]].append(Trained(record, score, advantages))
    return list(groups.values())


def max_difference(groups: Sequence[Sequence[Trained]], gamma: float) -> float:
    """Return the largest difference between an advantage of the trainer and r * gamma^(T - i) less the group's mean.

    Args:
        groups: The conversations.
        gamma: `advantage.options.gamma`.
    """
    found = [0.0]
    for group in groups:
        for each in group:
            expected = [list(row) for row in _expected(each, group, gamma)]
            assert [len(row) for row in expected] == [len(row) for row in each.advantages], each.record["request_id"]
            for ours, theirs in zip(expected, each.advantages, strict=True):
                found += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(found)


def _expected(each: Trained, group: Sequence[Trained], gamma: float) -> Iterator[Iterator[float]]:
    """Yield for each row of a conversation the advantages of its sampled tokens."""
    before = 0
    for row in each.record["rows"]:
        held = columns(row)
        sampled = [turn for turn, mask in zip(held["turn_ids"], held["mask"], strict=True) if mask]
        yield (_of_turn(each, before + turn, group, gamma) for turn in sampled)
        before += 1 + max(sampled)


def _of_turn(each: Trained, turn: int, group: Sequence[Trained], gamma: float) -> float:
    """Return the advantage of a turn, counted from 0; a conversation that is alone has nothing to compare with."""
    if len(group) == 1:
        return 0.0
    decayed = [other.score * gamma ** (other.turns - 1 - turn) if turn < other.turns else 0.0 for other in group]
    return each.score * gamma ** (each.turns - 1 - turn) - sum(decayed) / len(decayed)


def main() -> None:
    """Print the results of the run in the folder that the command line names."""
    out = Path(sys.argv[1])
    found = report(out)
    print_last(out, found, {"right answers in training": figure_text(found["right"])})


if __name__ == "__main__":
    main()
