"""A class of one's own computes the advantages of a real training on the CPU, over a resume and until its mistake."""

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.integration.test_training import SMALL, processes_of, start
from verl_multiturn.records.read.records import Records

# `test_own_advantages` shows by default what this one would find.
pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

OWN = '''
class Counts:
    """Gives each conversation the number of its group, counted from 1 over all steps; fails at one."""

    def __init__(self):
        self.groups = 0

    def __call__(self, group, *, fails_at: int = 0):
        self.groups += 1
        if self.groups == fails_at:
            raise ValueError(f"group {fails_at}")
        return [self.groups / 100] * len(group)

    def state_dict(self):
        return {"groups": self.groups}

    def load_state_dict(self, state):
        self.groups = state["groups"]
'''
GROUPS = 8
"""Prompts of a step."""


def trained(out: Path) -> dict[int, list[float]]:
    """Return the advantage of each group of a step, in the order of data rows; all its trained tokens have the same."""
    records, values = Records(out / "records"), defaultdict[str, set[float]](set)
    groups = {each["request_id"]: each for each in records.records() if not each["validation"]}
    for row in records.joined().select(["request_id", "advantages"]).to_pylist():
        if row["request_id"] in groups:
            values[groups[row["request_id"]]["uid"]] |= {round(each, 6) for each in row["advantages"] if each}
    firsts = {each["uid"]: each for each in groups.values()}
    found = defaultdict[int, list[float]](list)
    for uid in sorted(values, key=lambda uid: firsts[uid]["sample"]["index"]):
        found[firsts[uid]["step"]] += values[uid]
    return dict(found)


def run(out: Path, *arguments: str) -> tuple[int, str]:
    """Run the quickstart, and return its status and its console."""
    process = start(out, *SMALL, "trainer.save_freq=2", *arguments)
    try:
        status = process.wait(timeout=1500)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return status, (out.parent / "console.log").read_text(errors="replace")


def kept(out: Path, step: int) -> dict[str, object]:
    file = out / "checkpoints" / f"global_step_{step}" / "trained.json"
    return dict(json.loads(file.read_text())["advantage"])


def test_a_class_trains_goes_on_from_a_checkpoint_and_its_mistake_ends_the_run(tmp_path: Path) -> None:
    out, place = tmp_path / "out", f"{tmp_path / 'own.py'}:Counts"
    (tmp_path / "own.py").write_text(OWN)
    estimator = f"algorithm.adv_estimator={place}"
    status, console = run(out, "--steps", "2", estimator)
    assert status == 0, console[-4000:]
    counted = [[(GROUPS * step + group + 1) / 100 for group in range(GROUPS)] for step in range(3)]
    assert trained(out) == {1: counted[0], 2: counted[1]}
    assert kept(out, 2) == {"function": place, "state": {"groups": 2 * GROUPS}}

    fails = "+actor_rollout_ref.rollout.custom.multiturn.advantage.options.fails_at=26"
    status, console = run(out, "--steps", "4", estimator, fails)
    assert status not in (0, None)
    assert trained(out) == {step + 1: each for step, each in enumerate(counted)}
    log = console + "".join(file.read_text(errors="replace") for file in sorted(out.glob("train*.log")))
    said = f"algorithm.adv_estimator={place!r} raised ValueError: group 26 (own.py:11) for the group "
    assert said in log, console[-4000:]
    assert f"the weights of step 3 are saved in '{out}/checkpoints/global_step_3'" in log
    assert kept(out, 3) == {"function": place, "state": {"groups": 3 * GROUPS}}
    assert processes_of(out) == set()
