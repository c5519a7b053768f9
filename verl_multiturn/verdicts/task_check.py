"""`check_task`: the check of a task before it is used.

A row is refused that would teach something else than its text: one whose tests pass before the repair, whose repair
does not pass or passes only now and then, whose tests are not found, or that has no guard and does not declare that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from verl_multiturn.errors import ConfigError, UnjudgedError
from verl_multiturn.verdicts.canaries import SuiteLayout, changed, function_of, lay_out, lots, shared
from verl_multiturn.verdicts.changes import WorkChanges, names_of, why_uncollected
from verl_multiturn.verdicts.control_run import DisturbedError
from verl_multiturn.verdicts.hidden_file import candidates, words_of
from verl_multiturn.verdicts.import_places import exposing, why_never
from verl_multiturn.verdicts.judge import Judge, Tree, judged_outcomes
from verl_multiturn.verdicts.script_canary import Canary, canary_runs, named_program, why_no_place
from verl_multiturn.verdicts.task import PytestVerdict, ScriptVerdict, Task, UnguardedError

T = TypeVar("T")
_BEFORE, _AFTER = "the untouched tree", "the repair"


async def check_task(task: Task, judge: Judge, repair: WorkChanges | None = None) -> Task:
    """Check a task, and return it with the guard that its verdict may have: its `twins`, or that it `reads_only`.

    Args:
        task: The task.
        judge: Judges it.
        repair: A repair's work, as `collect` returns it; None: the task's `gold`.

    Raises:
        UnguardedError: It has no guard: no test under `tests` has a twin, or the script starts changeable files.
        ConfigError: The row has to be refused for another reason; the error gives the reason.
        OutageError: No sandbox could be started.
    """
    judge.check(task)
    if repair is None and not task.gold:
        raise _refusal(task, "it has no 'gold', so nobody knows whether its tests can pass")
    original, gold = task.tree()[0], gold_left(task).changes
    names = names_of(task, original, judge.packages)
    never = [(path, why_never(path, names)) for path in gold]
    for path, reason in (*never, *exposing(gold, names)):
        if reason:
            raise _refusal(task, f"gold: {path!r} is never taken: {reason}")
    before, after = Tree.of(task, WorkChanges()), Tree.of(task, gold_left(task) if repair is None else repair)
    if reason := why_uncollected(task, after.files):
        raise _refusal(task, f"{_AFTER}: {reason}")
    if isinstance(task.verdict, PytestVerdict):
        return _guarded(await _check_pytest(task, task.verdict, judge, before, after))
    if isinstance(task.verdict, ScriptVerdict):
        return _guarded(await _check_script(task, task.verdict, judge, before, after))
    if (await _said(task, _BEFORE, judge.attempt(task, before)))[0] > 0:
        raise _refusal(task, f"{_BEFORE} passes its tests")
    for _ in range(2):
        reward, why = await _said(task, _AFTER, judge.attempt(task, after))
        if reward < 1:
            raise _refusal(task, f"{_AFTER} is not paid: {why}")
    return task


def gold_left(task: Task) -> WorkChanges:
    """Return the gold repair as an agent's work.

    Args:
        task: The task.
    """
    return WorkChanges({path: None if text is None else text.encode() for path, text in task.gold.items()})


async def _check_pytest(task: Task, verdict: PytestVerdict, judge: Judge, before: Tree, after: Tree) -> Task:
    draw = random.SystemRandom()
    plain = verdict.model_copy(update={"twins": ()})
    layout = lay_out(plain, before.own, draw)
    found = await _said(task, _BEFORE, judge.outcomes(task, plain, layout, before))
    for name in verdict.tests:
        if found.get(layout.names[name]) == "passed":
            raise _refusal(task, f"{name} passes before the repair")
    for name in verdict.kept:
        if (outcome := found.get(layout.names[name])) != "passed":
            raise _refusal(task, f"{name} of 'kept' is {outcome or 'not found'} before the repair")

    names = [*verdict.tests, *verdict.kept]
    counts = await asyncio.to_thread(_candidates, verdict, names, before)  # seconds for a few hundred tests

    async def repaired(drawn: Callable[[bool], bool], place: int | None) -> tuple[SuiteLayout, Mapping[str, str]]:
        tried = verdict.model_copy(update={"twins": tuple(name for name in names if name in counts)})
        layout = await asyncio.to_thread(lay_out, tried, after.own, draw, drawn, place)
        return layout, await _said(task, _AFTER, judge.outcomes(task, tried, layout, after))

    layout, found = await repaired(lambda _: False, None)
    if counts and not all(found.get(layout.names[name]) == "passed" for name in names):
        counts = {}  # the tests need the form in which they are written, or the names of their parameters
        layout, found = await repaired(lambda _: False, None)
    _check_passed(task, names, layout, found)
    for place in range(max(counts.values(), default=0)):  # each value by itself, since a run changes any of them
        layout, found = await repaired(lambda _: True, place)
        wrong = [name for name in counts if found.get(layout.names[name]) != "failed"]
        counts = {name: count for name, count in counts.items() if name not in wrong}
    seed = draw.getrandbits(64)
    for second in (False, True):
        layout, found = await repaired(lots(seed, second), None)
        tried = verdict.model_copy(update={"twins": tuple(name for name in names if name in counts)})
        if judged_outcomes(tried, layout, found)[0] < 1:  # the tests need each other, or are flaky
            counts = {}
            layout, found = await repaired(lambda _: False, None)
            _check_passed(task, names, layout, found)
            break
    return task.model_copy(
        update={"verdict": verdict.model_copy(update={"twins": tuple(name for name in names if name in counts)})}
    )


def _candidates(verdict: PytestVerdict, names: Sequence[str], before: Tree) -> dict[str, int]:
    used, words = shared(verdict.files), words_of(before.own, verdict.files)
    counts: dict[str, int] = {}
    for path, source in verdict.files.items():
        counts |= candidates(path, source, names, words)
    return {name: count for name, count in counts.items() if function_of(name) not in used}


def _check_passed(task: Task, names: Sequence[str], layout: SuiteLayout, found: Mapping[str, str]) -> None:
    for name in names:
        if (outcome := found.get(layout.names[name])) != "passed":
            raise _refusal(task, f"{_AFTER}: {name} is {outcome or 'not found'}")


async def _check_script(task: Task, verdict: ScriptVerdict, judge: Judge, before: Tree, after: Tree) -> Task:
    verdict = verdict.model_copy(update={"twins": False})
    untouched = await _said(task, _BEFORE, judge.script_reward(task, verdict, before))
    rewards = [await _said(task, _AFTER, judge.script_reward(task, verdict, after)) for _ in range(2)]
    if rewards[0] != rewards[1]:
        raise _refusal(task, f"{_AFTER} is paid {rewards[0]:g} and then {rewards[1]:g}")
    if rewards[0] < 1 or untouched >= rewards[0]:
        raise _refusal(task, f"{_AFTER} is paid {rewards[0]:g}, and {_BEFORE} {untouched:g}; expected 1 and less")
    words = words_of(before.own)
    if any(changed(text, None, words)[1] for path, text in verdict.files.items() if path.endswith(".py")):
        paired = verdict.model_copy(update={"twins": True})
        true = await _said(task, _AFTER, judge.script_reward(task, paired, after))
        twins = await _said(task, _AFTER, judge.script_reward(task, paired, after, with_twins=True))
        verdict = paired if twins < true == rewards[0] else verdict
    why = "" if verdict.twins else await _why_started(task, verdict, judge, after)
    if why and not verdict.unguarded:
        raise UnguardedError(str(_refusal(task, why)))
    return task.model_copy(update={"verdict": verdict.model_copy(update={"reads_only": not verdict.twins and not why})})


async def _why_started(task: Task, verdict: ScriptVerdict, judge: Judge, after: Tree) -> str:
    """Return the changeable files that a script starts, or why they are unknown; empty if it reads files only."""
    instead = (
        "compare with literals in a Python test of /tests, let test.sh read only files that are no "
        "programs, or write 'unguarded: true' into the verdict"
    )
    if program := why_no_place(task, verdict, after.files):
        return f"its script has no twins, and starts {program!r}, in whose programs no canary has a place; {instead}"
    canary, names = Canary(), names_of(task, task.tree()[0], judge.packages)
    for each in canary_runs(task, verdict, after.files, names, canary):
        tree = Tree({**after.files, **each.changed}, after.executable | each.changed.keys(), after.own)
        reward, started = await _said(task, "the repair with canaries", judge.canary_run(task, verdict, tree, canary))
        if started:
            number = int(started[0]) if started[0].isdigit() else -1
            which = repr(each.places[number]) if 0 <= number < len(each.places) else "what a file says"
            did = "wrote the reward" if reward == canary.reward else "could read in /tests what is expected"
            return f"test.sh has no twins, and starts {which}, which may be changed: a canary there {did}; {instead}"
    if program := named_program(task, verdict, after.files, names):
        return (
            f"test.sh has no twins, and names the program {program!r}, which may be changed; a canary there was not "
            f"started, but test.sh may look at the text first; {instead}"
        )
    return ""


def _guarded(task: Task) -> Task:
    if why := task.why_unguarded():
        raise UnguardedError(str(_refusal(task, why)))
    return task


async def _said(task: Task, what: str, judged: Awaitable[T]) -> T:
    try:
        return await judged
    except (DisturbedError, UnjudgedError) as error:
        raise _refusal(task, f"{what} cannot be judged: {error}") from None


def _refusal(task: Task, why: str) -> ConfigError:
    return ConfigError(f"task {task.name!r}: {why}; leave the row out, or mend it")
