"""Verdicts on honest repairs and attacks, in real workspaces; `benchmarks.workspace_attacks` has all of the attacks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.script_attacks import ROWS, left_by
from tests.support.value_attacks import VALUE_ATTACKS
from tests.support.workspace_attacks import ATTACKS, FILES, FIXED, HONEST, SETTINGS, SLOW, VERDICTS, Work, task
from verl_multiturn.errors import ConfigError, UnjudgedError
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.verdicts.changes import WorkChanges, collect
from verl_multiturn.verdicts.judge import Judge
from verl_multiturn.verdicts.script_run import run_script
from verl_multiturn.verdicts.task import Task, UnguardedError, read_task
from verl_multiturn.verdicts.task_check import check_task, gold_left
from verl_multiturn.verdicts.thread_judge import judge_workspace
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import write_tar
from verl_multiturn.workspaces.threads import open_workspace
from verl_multiturn.workspaces.workspace import WorkspacePool

pytestmark = pytest.mark.slow

SMALL = WorkspaceSettings(packages=("pytest",), pool=1, memory_mb=256, disk_mb=64, processes=32)
ALL = ("tests/test_ops.py::test_add", "tests/test_ops.py::test_total", "tests/test_ops.py::test_label")


@pytest.fixture
async def judge() -> AsyncIterator[Judge]:
    made = Judge(SMALL)
    yield made
    await made.aclose()


def one(verdict: str, /, **more: Any) -> Task:
    return read_task({**task(verdict), "timeout_s": 120.0, **more}, verdict)


def with_twins() -> Task:
    return one("pytest", verdict={**VERDICTS["pytest"], "twins": ALL})


def scripted(script: str, **more: Any) -> Task:
    verdict = {"kind": "script", "files": {"test.sh": script}, "unguarded": True}
    return one("script_reads", verdict=verdict, **more)


def left(work: Work) -> WorkChanges:
    return WorkChanges({path: text if isinstance(text, bytes) else text.encode() for path, text in work.files.items()})


GRADED = "grep -q 3 settings.json && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


async def test_what_is_left_in_a_workspace_is_judged_by_values(judge: Judge) -> None:
    judged = one("calls")
    honest = ("one_line", "tests_edited_too", "a_process_left")
    attacks = [name for name in ATTACKS if name not in SLOW and not name.startswith("source_patches")]
    works = {**{name: HONEST[name] for name in honest}, **{name: ATTACKS[name] for name in attacks[::9]}}
    async with WorkspacePool(SMALL) as pool:
        for name, work in works.items():
            async with await pool.open() as workspace:
                await workspace.put(judged.tar())
                files = {path: text if isinstance(text, bytes) else text.encode() for path, text in work.files.items()}
                await workspace.put(write_tar(files))
                await workspace.run(work.command or "true")
                assert (await judge.judge(judged, workspace)).reward == (name in HONEST), name


@pytest.mark.parametrize(
    "attack",
    [
        "source_exits_with_0",
        "source_lets_tests_of_a_known_file_pass",
        "source_equals_everything",
        "source_forges_our_report",
    ],
)
async def test_pytest_pays_no_code_that_lies(attack: str, judge: Judge) -> None:
    assert (await judge.judge_left(with_twins(), left(ATTACKS[attack]))).reward == 0


@pytest.mark.parametrize(
    "attack",
    [
        "float_as_the_pair_says",
        "approx_as_the_pair_says",
        "text_as_the_pair_says",
        "parametrized_equals_everything",
        "parametrized_by_its_id",
    ],
)
async def test_no_expected_value_says_that_it_is_true(attack: str, judge: Judge) -> None:
    name, work = VALUE_ATTACKS.attacks[attack]
    checked = await check_task(read_task(VALUE_ATTACKS.tasks[name], name), judge)
    assert (await judge.judge_left(checked, gold_left(checked))).reward == 1
    assert (await judge.judge_left(checked, left(work))).reward == 0


async def test_pytest_pays_the_repair(judge: Judge) -> None:
    assert (await judge.judge_left(with_twins(), gold_left(with_twins()))).reward == 1


async def test_a_script_that_pays_wrong_values_too_pays_nothing(judge: Judge) -> None:
    judged = one("script", verdict={**VERDICTS["script"], "twins": True})
    found = await judge.judge_left(judged, left(ATTACKS["source_exits_with_0"]))
    assert (found.reward, found.why) == (0, "test.sh pays as much where its tests expect other values")


async def test_the_form_of_a_scripts_tests_does_not_say_whether_their_values_are_true(judge: Judge) -> None:
    # As an author writes it, there are two blank lines and double quotation marks; a tree that is unparsed has neither.
    ends = "import os\nif '\\n\\n\\n' in open('/tests/test_ops.py').read():\n    os._exit(0)\n"
    judged = one("script", verdict={**VERDICTS["script"], "twins": True})
    found = await judge.judge_left(judged, WorkChanges({"calc/ops.py": f"{ends}{FILES['calc/ops.py']}".encode()}))
    assert found.reward == 0
    assert (await judge.judge_left(judged, gold_left(judged))).reward == 1


async def test_what_a_model_does_to_a_script_is_0_and_valid(judge: Judge) -> None:
    kills = scripted(f"grep -q kill settings.json && kill -9 $$; {GRADED}")
    assert (await judge.judge_left(kills, WorkChanges({"settings.json": b"3 kill"}))).reward == 0
    assert (await judge.judge_left(kills, WorkChanges({"settings.json": b"3"}))).reward == 1
    writes = scripted("cat settings.json > /logs/verifier/reward.txt", files={"settings.json": "0"})
    for text, reward in ((b"0.5", 0.5), (b"1e9", 0.0), (b"nan", 0.0), (b"-1", 0.0), (b"", 0.0)):
        assert (await judge.judge_left(writes, WorkChanges({"settings.json": text}))).reward == reward
    assert (await judge.judge_left(writes, WorkChanges({"settings.json": None}))).reward == 0


async def test_a_script_that_hangs_with_the_models_files_is_0_and_valid(judge: Judge) -> None:
    for timeout_s in (3, 24, 192):  # until that is enough for the untouched tree
        hangs = scripted(f"grep -q hang settings.json && sleep 1000; {GRADED}", timeout_s=timeout_s)
        with contextlib.suppress(UnjudgedError):
            found = await judge.judge_left(hangs, WorkChanges({"settings.json": b"3 hang"}))
            break
    assert (found.reward, found.why) == (0, f"test.sh took longer than {timeout_s} s")


async def test_a_reward_that_is_not_the_same_twice_is_0(judge: Judge) -> None:
    flaky = scripted("echo 0.$(date +%N) > /logs/verifier/reward.txt")
    found = await judge.judge_left(flaky, WorkChanges())
    assert found.reward == 0
    assert "two runs give" in found.why


@pytest.mark.parametrize("script", ["true", "kill -9 $$", "echo 2 > /logs/verifier/reward.txt", "echo PASSED"])
async def test_what_says_nothing_of_the_untouched_tree_either_is_not_judged(script: str, judge: Judge) -> None:
    with pytest.raises(UnjudgedError, match="its untouched tree cannot be judged either"):
        await judge.judge_left(scripted(script), WorkChanges({"settings.json": b"3"}))


async def test_tests_that_cannot_be_judged_are_not(judge: Judge) -> None:
    wrong = one("calls", verdict={**VERDICTS["calls"], "tests": ["assert add(open('/dev/null'), 1) == 2"]})
    with pytest.raises(UnjudgedError, match="hands over a value of the type"):
        await judge.judge_left(wrong, WorkChanges())


async def test_a_workspace_that_is_lost_is_replaced_once(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [SandboxError("the zygote ended")]

    async def breaks(*args: Any) -> float:
        if lost:
            raise lost.pop()
        return await run_script(*args)

    monkeypatch.setattr("verl_multiturn.verdicts.judge.run_script", breaks)
    judged, repaired = scripted(GRADED), WorkChanges({"settings.json": b"3"})
    assert (await judge.judge_left(judged, repaired)).reward == 1
    lost.extend([SandboxError("the zygote ended")] * 2)
    with pytest.raises(UnjudgedError, match="lost twice: the zygote ended"):
        await judge.judge_left(judged, repaired)


async def test_an_agents_workspace_that_ended_counts_for_nothing(judge: Judge) -> None:
    async with WorkspacePool(SMALL) as pool:
        workspace = await pool.open()
        workspace.close()
        found = await judge.judge(one("calls"), workspace)
        assert (found.reward, found.why) == (0, "the workspace ended: the workspace was closed")
        await pool.aclose()


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (one("calls", gold={}), "it has no 'gold'"),
        (
            scripted(GRADED, timeout_s=601),
            "timeout_s 601, expected at most 600, the longest_timeout_s of the workspaces",
        ),
        (one("calls", gold={"conftest.py": ""}), "'conftest.py' is never taken: configuration of tests"),
        (one("calls", files={**FILES, "calc/ops.py": FIXED}), "the untouched tree passes its tests"),
        (one("calls", gold={"calc/ops.py": FIXED + "\nadd = None\n"}), "the repair is not paid: test 1 of 3"),
        (scripted("echo 0.$(date +%N) > /logs/verifier/reward.txt"), "the repair is paid 0.* and then 0"),
        (scripted("echo 1 > /logs/verifier/reward.txt"), "the repair is paid 1, and the untouched tree 1"),
        (scripted("echo PASSED"), "the untouched tree cannot be judged: test.sh wrote no reward; it printed: PASSED"),
        (one("pytest", files={**FILES, "calc/ops.py": FIXED}), "tests/test_ops.py::test_add passes before the repair"),
        (
            one("pytest", verdict={**VERDICTS["pytest"], "kept": ["tests/test_ops.py::test_gone"]}),
            "tests/test_ops.py::test_gone of 'kept' is not found before the repair",
        ),
    ],
)
async def test_rows_are_refused_by_name(refused: Task, said: str, judge: Judge) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        await check_task(refused, judge)
    assert str(error.value).startswith(f"task {refused.name!r}: ")


async def test_a_checked_task_has_its_twins(judge: Judge) -> None:
    checked = (await check_task(one("pytest"), judge)).verdict
    assert checked.kind == "pytest"
    assert set(checked.twins) == set(ALL)
    graded = (await check_task(scripted(GRADED), judge)).verdict
    assert graded.kind == "script"
    assert (graded.twins, graded.reads_only) == (False, True)


async def test_a_test_of_several_parts_is_one_test(judge: Judge) -> None:
    parts = "        for number in (1, 2):\n            with self.subTest(number=number):\n                "
    source = "import unittest\nfrom calc.ops import label\nclass T(unittest.TestCase):\n    def test_it(self):\n"
    verdict = {
        "kind": "pytest",
        "files": {"tests/test_hidden.py": f"{source}{parts}self.assertEqual(label(number)[:3], 'cat')\n"},
        "tests": ["tests/test_hidden.py::T::test_it"],
    }
    files = {"calc/__init__.py": "", "calc/ops.py": "def label(number):\n    return 'dog'\n"}
    gold = {"calc/ops.py": "def label(number):\n    return f'cat{number}'\n"}
    row = {"name": "row", "files": files, "allowed": ["calc/*.py"], "gold": gold, "verdict": verdict}
    assert (await check_task(read_task(row, "row"), judge)).guard == "guarded 1 of 1 tests"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bash_comparison", "starts 'main.py', which may be changed: a canary there wrote the reward"),
        ("bash_fresh_folder", "starts 'main.py', which may be changed: a canary there could read in /tests what is"),
        ("make", "starts 'Makefile', which"),
        ("awk", "starts 'a.awk', which"),
        ("python_evaluates", "starts 'answer.txt', which"),
        ("python_takes_a_command", "starts 'c.txt', which"),
        (
            "bash_looks_at_the_text_first",
            "names the program 'main.py', which may be changed; a canary there was not st",
        ),
        ("script_no_literal", "starts 'ops.py', which"),
        ("sqlite_has_no_place", "starts 'sqlite3', in whose programs no canary has a place"),
        ("pytest_sum", "none of its 'tests' has a twin"),
        ("pytest_only_kept_has_a_twin", "none of its 'tests' has a twin"),
    ],
)
async def test_a_row_without_a_guard_has_to_say_so(name: str, said: str, judge: Judge) -> None:
    row = ROWS[name]
    with pytest.raises(UnguardedError, match=f"^task '{name}': .*{said}.*'unguarded: true'"):
        await check_task(row.task(name), judge)
    assert (await check_task(row.task(name, unguarded=True), judge)).guard == ""


async def test_what_a_script_starts_is_paid_where_the_row_says_so(judge: Judge) -> None:
    row = ROWS["bash_comparison"]
    assert (await judge.judge_left(row.task("row", unguarded=True), left_by(row, "reward_locked"))).reward == 1
    with pytest.raises(UnguardedError):
        await judge.judge_left(row.task("row"), left_by(row, "reward_locked"))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.guarded])
async def test_what_a_guarded_script_starts_is_not_paid(name: str, judge: Judge) -> None:
    task = await check_task(ROWS[name].task(name), judge)
    assert task.guard == ("guarded by twins" if name == "script_literals" else "reads files only")
    for attack in ("reward_locked", "expected_read", "equals_everything"):
        assert (await judge.judge_left(task, left_by(ROWS[name], attack))).reward == 0, attack


async def test_links_are_not_taken() -> None:
    judged = one("script_reads")
    async with WorkspacePool(SMALL) as pool, await pool.open() as workspace:
        await workspace.put(judged.tar())
        await workspace.run("ln -sf /etc/passwd settings.json; ln -s / calc/root")
        found = await collect(judged, workspace, ("pytest",))
        assert found.changes == {"settings.json": None}
        assert found.left_out == {"'settings.json'": "a symbolic link", "'calc/root'": "a symbolic link"}


async def test_agents_in_threads_judge_their_workspaces() -> None:
    judged = one("script_reads", verdict={**VERDICTS["script_reads"], "reads_only": True})

    def agent(repair: str) -> float:
        with open_workspace(SMALL) as workspace:
            workspace.put(judged.tar())
            workspace.run(f"echo '{repair}' > settings.json")
            return judge_workspace(judged, workspace, SMALL).reward

    works = [asyncio.to_thread(agent, repair) for repair in (SETTINGS, "{}", SETTINGS)]
    assert await asyncio.gather(*works) == [1, 0, 1]
