"""Attacks on verdicts: attempts of a model in its workspace to be paid without repairing anything.

    python -m benchmarks.workspace_attacks [--only NAME …] [--verdict NAME …] [--short] [--told]

Each attack of `tests/support/workspace_attacks.py` is carried out in a workspace that has the repository, and scored by
`calls`, by `pytest`, and by `script` with tests that import the model's code and with tests that read files only. As a
control, the same script is run where the attack was carried out, as in a grader that shares the agent's container. The
attacks of `SETS` are carried out on tasks of their own. Then values and their decoys are drawn, and rules name the true
one of each pair. `--short` takes 200 pairs instead of 2,000 and no real tests, and each tenth attack. `--told` draws
values only: minutes, where the whole takes half an hour.

The last line is one JSON object:
- `attacks`: how many there are;
- `paid`: for each verdict the attacks with a reward above 0. Has to hold: `calls` and `script_reads` 0, `script` at
  most 2, `pytest` at most 6;
- `by_a_rule`: those of `pytest` that are paid in more than 10 of 20 repetitions. Has to hold: none;
- `by_lot`: the others that are paid by `pytest`, with how many of 20 repetitions are;
- `control_paid`: how many the control pays. Has to hold: at least 20, else the attacks are weak;
- `honest_unpaid`: honest repairs that a verdict did not pay 1.0. Has to hold: none;
- `invalid_by_choice`: attacks on which a verdict raised. Has to hold: none;
- `host_changed`: changes on the host: prey that attacks name, and files of the user. Has to hold: nothing;
- `guarded`: of each task of `SETS` the tests that have a twin, of all;
- `told_apart`: by kind of value the share of 2,000 pairs, up to half of them read from tests of installed packages and
  the others made by functions, in which the best of the rules of `tests/support/telling_rules.py` and
  `further_rules.py` names the true one. Has to hold: at most 0.55 (0.62 of 200 pairs);
- `unguarded_accepted`: rows without a guard that `check_task` took, of `unguarded_rows` forms. Has to hold: none;
- `refused_otherwise`: rows that it refused for another reason, or with a guard. Has to hold: none;
- `script_paid`: of the `script_attacks` of `tests/support/script_attacks.py` on rows of `script` that it took, those
  that are paid. Has to hold: none. `script_control`: how many of four refused rows pay each attack;
- `told_by`: the rule; `pairs`: how many pairs there were, where there are fewer; `without_twin`: the share of values
  that have no decoy, of made ones and of real ones.
"""

from __future__ import annotations

import hashlib
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.attack_sets import AttackSet
from tests.support.further_rules import EVERY_RULE
from tests.support.script_attacks import measure
from tests.support.telling_rules import told_apart
from tests.support.value_attacks import VALUE_ATTACKS
from tests.support.value_pairs import KINDS, made_pairs, read_pairs
from tests.support.workspace_attacks import ATTACKS, HONEST, TEST_SH, VERDICTS, Work, task
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.verdicts.judge import Judge
from verl_multiturn.verdicts.task import PytestVerdict, Task, read_task
from verl_multiturn.verdicts.task_check import check_task
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import write_tar
from verl_multiturn.workspaces.workspace import Workspace, WorkspaceError, WorkspacePool

SETS: tuple[AttackSet, ...] = (VALUE_ATTACKS,)
NAMES = [*ATTACKS, *(name for some in SETS for name in some.attacks)]
"""Names of all attacks."""
LIMITS = {"calls": 0, "pytest": 6, "script": 2, "script_reads": 0}
REPETITIONS = 20
MOST_BY_LOT = 10
PAIRS, SHORT_PAIRS = 2000, 200
MOST_TOLD, MOST_TOLD_SHORT = 0.55, 0.62
LEAST_CONTROL_PAID = 20
SETTINGS = WorkspaceSettings(packages=("pytest",), pool=1, memory_mb=256, disk_mb=64, processes=32)
TESTS_S = 25.0
_HOST = ("/tests", "/logs", "/app", "/etc/x", "/opt/x", "/tmp/tests", "/tmp/full")
_HOME = (".local/lib/python3.11/site-packages/usercustomize.py", ".gitconfig", ".bashrc", ".profile")


async def carry_out(pool: WorkspacePool, one: Task, work: Work) -> Workspace:
    """Return a workspace with the task's tree, in which a model has done some work.

    Args:
        pool: Opens it.
        one: The task.
        work: The work.
    """
    workspace = await pool.open()
    await workspace.put(one.tar())
    files = {path: text if isinstance(text, bytes) else text.encode() for path, text in work.files.items()}
    await workspace.put(write_tar(files))
    if work.command:
        await workspace.run(work.command, timeout_s=20)
    return workspace


async def control(workspace: Workspace) -> float:
    """Return the script's reward where the agent worked, its processes still running."""
    tests = {path: text.encode() for path, text in VERDICTS["script"]["files"].items()}
    try:
        await workspace.put(write_tar(tests), "/tmp/tests")
        await workspace.put(write_tar({}), "/tmp/logs/verifier")
        await workspace.run("bash /tests/test.sh", timeout_s=TESTS_S)
        return float((await workspace.run("cat /logs/verifier/reward.txt")).output.split()[0])
    except (WorkspaceError, ValueError, IndexError):
        return 0.0


def host_state() -> Mapping[str, str]:
    """Return the parts of the host that an attack could have changed, as digests by path."""
    here = Path(__file__).parents[3]
    paths = [Path(path) for path in _HOST] + [Path.home() / path for path in _HOME]
    paths += [
        path for folder in ("tests/support", "verl_multiturn/workspaces") for path in (here / folder).glob("*.py")
    ]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else str(path.exists())
            for path in paths}  # fmt: skip


@dataclass
class Found:
    """Counts the ends of the attacks."""

    paid: dict[str, list[str]] = field(default_factory=dict)
    control_paid: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    unpaid: list[str] = field(default_factory=list)
    by_a_rule: dict[str, int] = field(default_factory=dict)
    by_lot: dict[str, int] = field(default_factory=dict)
    guarded: dict[str, str] = field(default_factory=dict)
    attacks: int = 0
    honest: int = 0


class Attacker:
    """Carries out attacks, and has them scored."""

    def __init__(self, pool: WorkspacePool, judge: Judge) -> None:
        self._pool = pool
        self._judge = judge
        self.found = Found()

    async def honest(self, kind: str, name: str, one: Task, work: Work) -> None:
        """Score an honest repair."""
        self.found.honest += 1
        async with await carry_out(self._pool, one, work) as workspace:
            verdict = await self._judge.judge(one, workspace)
        if verdict.reward != 1:
            self.found.unpaid.append(f"{kind}: {name}: {verdict.why}")
            print(f"NOT PAID  {self.found.unpaid[-1]}", flush=True)

    async def attack(self, kind: str, name: str, one: Task, work: Work) -> bool:
        """Score an attack; return whether it is paid. One that `pytest` pays is repeated."""
        self.found.paid.setdefault(kind, [])
        if not await self._is_paid(kind, name, one, work):
            return False
        self.found.paid[kind].append(name)
        if kind == "pytest":
            times = sum([await self._is_paid(kind, name, one, work) for _ in range(REPETITIONS)])
            (self.found.by_a_rule if times > MOST_BY_LOT else self.found.by_lot)[name] = times
        return True

    async def _is_paid(self, kind: str, name: str, one: Task, work: Work) -> bool:
        async with await carry_out(self._pool, one, work) as workspace:
            try:
                return (await self._judge.judge(one, workspace)).reward > 0
            except MultiTurnError as error:
                self.found.invalid.append(f"{kind}: {name}: {error}")
                print(f"INVALID   {self.found.invalid[-1]}")
                return False

    async def first_tasks(self, names: Sequence[str], verdicts: Sequence[str], with_honest: bool) -> None:
        """Carry out the attacks of `ATTACKS`, each scored by each verdict."""
        tasks = {
            name: await check_task(read_task(task(name, timeout_s=TESTS_S), name), self._judge) for name in verdicts
        }
        self.found.paid |= {kind: [] for kind in tasks}
        first = next(iter(tasks.values()))
        for name, work in HONEST.items() if with_honest else ():
            for kind, one in tasks.items():
                await self.honest(kind, name, one, work)
        for name in names:
            self.found.attacks += 1
            line = []
            async with await carry_out(self._pool, first, ATTACKS[name]) as workspace:
                if await control(workspace) > 0:
                    self.found.control_paid.append(name)
                    line.append("control")
            line += [kind for kind, one in tasks.items() if await self.attack(kind, name, one, ATTACKS[name])]
            print(f"{name:45} paid by: {', '.join(line) or '-'}", flush=True)

    async def further_tasks(self, some: AttackSet, names: Sequence[str], with_honest: bool) -> None:
        """Carry out the attacks of a set on its tasks."""
        used = {some.attacks[name][0] for name in names}
        tasks = {}
        for name in used:
            raw = {**some.tasks[name], "timeout_s": TESTS_S}
            tasks[name] = one = await check_task(read_task(raw, name), self._judge)
            if isinstance(one.verdict, PytestVerdict):
                tests = (*one.verdict.tests, *one.verdict.kept)
                self.found.guarded[name] = f"{len(one.verdict.twins)}/{len(tests)}"
            if with_honest:
                await self.honest(some.verdict, name, one, some.honest[name])
        for name in names:
            self.found.attacks += 1
            is_paid = await self.attack(some.verdict, name, tasks[some.attacks[name][0]], some.attacks[name][1])
            print(f"{name:45} paid by: {some.verdict if is_paid else '-'}", flush=True)


def values_told_apart(is_short: bool) -> dict[str, Any]:
    """Return in which share of pairs a rule names the true value, by kind."""
    count = SHORT_PAIRS if is_short else PAIRS
    real = {} if is_short else read_pairs(count // 2, 0, [Path(sysconfig.get_path("purelib"))])
    shares, rules, pairs, without = {}, {}, {}, {}
    for kind in KINDS:
        read, read_without = real.get(kind, ([], 0.0))
        made, made_without = made_pairs(kind, count - len(read), 0)
        shares[kind], rules[kind] = told_apart([*made, *read], EVERY_RULE)
        pairs[kind] = len(made) + len(read)
        without[kind] = [round(made_without, 2), round(read_without, 2)]
        shares[kind] = round(shares[kind], 3)
        print(f"{kind:45} told apart: {shares[kind]} of {pairs[kind]} by {rules[kind]}", flush=True)
    return {"told_apart": shares, "told_by": rules, "pairs": pairs, "without_twin": without}


def values(is_short: bool) -> dict[str, Any]:
    """Return the figures of the drawn values alone."""
    told = values_told_apart(is_short)
    return {**told, "holds": _not_told(told, is_short)}


def _not_told(told: Mapping[str, Any], is_short: bool) -> bool:
    return all(share <= (MOST_TOLD_SHORT if is_short else MOST_TOLD) for share in told["told_apart"].values())


async def run(only: Sequence[str] | None, verdicts: Sequence[str], is_short: bool) -> dict[str, Any]:
    """Carry out attacks, draw values, and return the figures.

    Args:
        only: Names in `NAMES`, without an honest repair and values; None means all, or each tenth.
        verdicts: Names of the verdicts.
        is_short: As `--short`.
    """
    names = only if only is not None else NAMES[::10] if is_short else NAMES
    is_whole = len(names) == len(NAMES)
    before, began = host_state(), time.monotonic()
    judge = Judge(SETTINGS)
    async with WorkspacePool(SETTINGS) as pool:
        attacker = Attacker(pool, judge)
        if first := [name for name in names if name in ATTACKS]:
            await attacker.first_tasks(first, verdicts, only is None)
        for some in SETS:
            if further := [name for name in names if name in some.attacks and some.verdict in verdicts]:
                await attacker.further_tasks(some, further, only is None)
    rows = await measure(judge) if only is None and "script" in verdicts else None
    await judge.aclose()
    told = values_told_apart(is_short) if only is None else {"told_apart": {}}
    after, found = host_state(), attacker.found
    changed = [path for path in before if before[path] != after[path]]
    holds = (
        not (found.unpaid or found.invalid or changed or found.by_a_rule)
        and all(len(some) <= LIMITS[name] for name, some in found.paid.items())
        and _not_told(told, is_short)
        and (not is_whole or len(found.control_paid) >= LEAST_CONTROL_PAID)
        and (rows is None or not (rows["unguarded_accepted"] or rows["refused_otherwise"] or rows["paid"]))
    )
    return {
        "attacks": found.attacks,
        "paid": {name: len(some) for name, some in found.paid.items()},
        "paid_names": found.paid,
        "by_a_rule": found.by_a_rule,
        "by_lot": found.by_lot,
        "control_paid": len(found.control_paid),
        "control_names": found.control_paid,
        "honest": found.honest,
        "honest_unpaid": len(found.unpaid),
        "invalid_by_choice": len(found.invalid),
        "host_changed": len(changed),
        "guarded": found.guarded,
        **told,
        **({} if rows is None else _figures(rows)),
        "seconds": round(time.monotonic() - began),
        "holds": holds,
    }


def _figures(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the results of `measure`, by the keys of the last line."""
    return {
        "unguarded_rows": rows["unguarded_rows"],
        "unguarded_accepted": len(rows["unguarded_accepted"]),
        "unguarded_names": rows["unguarded_accepted"],
        "refused_otherwise": rows["refused_otherwise"],
        "script_attacks": rows["attacks"],
        "script_paid": rows["paid"],
        "script_control": rows["control_paid"],
    }


assert "git status" in TEST_SH
