"""`Judge`: the verdict on an agent's work in its workspace.

    agent's work ─→ changes that count (changes.py) ─→ a fresh workspace: the row's tree, the changes, the hidden tests
      calls    functions are called from outside, values are compared outside                          calls.py
      pytest   exact names must pass, beside tests that must fail                       pytest_run.py, canaries.py
      script   `test.sh` writes the reward; where its tests have other values, it must pay less      script_run.py
               one without such tests may start nothing that can be changed                          script_canary.py

Invariants:
- no test runs where the agent worked;
- an end that a model can cause (late, a flood, a crash, too much, a syntax error, a deleted file) is reward 0, and
  valid. A run that comes to no verdict is tried again on the untouched original (`control_run.py`);
- a reward is paid only if it was paid twice, in two fresh workspaces, with the same number.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from verl_multiturn.errors import ConfigError, UnjudgedError
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.sandbox.sandbox import Sandbox
from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.verdicts.calls import CallJudge, CallTally, expect_done
from verl_multiturn.verdicts.canaries import SuiteLayout, changed, lay_out, lots
from verl_multiturn.verdicts.changes import WorkChanges, collect
from verl_multiturn.verdicts.control_run import DisturbedError, after_control
from verl_multiturn.verdicts.hidden_file import words_of
from verl_multiturn.verdicts.pytest_run import run_pytest
from verl_multiturn.verdicts.script_canary import Canary
from verl_multiturn.verdicts.script_run import run_script
from verl_multiturn.verdicts.task import CallsVerdict, PytestVerdict, ScriptVerdict, Task
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import read_tar, write_tar
from verl_multiturn.workspaces.workspace import Workspace, WorkspaceError, WorkspacePool

T = TypeVar("T")
_PIECE_BYTES = 90_000
"""Most bytes of a tar that one cell brings into a sandbox (`program_cells.py`)."""


@dataclass(frozen=True)
class Verdict:
    """The reward for an agent's work.

    Attributes:
        reward: From 0 to 1.
        why: Why it is not 1, in words; empty if it is.
        left_out: Changes of the agent that did not count, with the reason.
    """

    reward: float
    why: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tree:
    """Files of a fresh workspace.

    Attributes:
        files: They, by path.
        executable: Those that may be executed.
        own: The row's own tree, without changes.
    """

    files: Mapping[str, bytes]
    executable: frozenset[str]
    own: Mapping[str, bytes]

    @classmethod
    def of(cls, task: Task, left: WorkChanges) -> Tree:
        """Return the row's own tree with the changes that count."""
        files, executable = task.tree()
        changes = {path: content for path, content in left.changes.items() if content is not None}
        kept = {path: content for path, content in files.items() if path not in left.changes}
        return cls(kept | changes, frozenset(executable & kept.keys()) | left.executable, files)

    def tar(self) -> bytes:
        """Return them as a tar."""
        return write_tar(self.files, self.executable)


class Judge:
    """Judges the work of agents, on one event loop.

    Args:
        settings: Those of the workspaces in which tests run; None: the defaults, with pytest.
        at_once: Work that is scored at the same time; further one waits. Tests that share a processor may be late.
        wait_s: Seconds that a verdict may wait for others; later there is none. None: without end.
        verdict_s: Seconds of a verdict from its beginning; later there is none. None: those that its tests take.
    """

    def __init__(
        self,
        settings: WorkspaceSettings | None = None,
        at_once: int = 2,
        wait_s: float | None = None,
        verdict_s: float | None = None,
    ) -> None:
        settings = settings or WorkspaceSettings(packages=("pytest",), pool=1)
        self.packages = settings.packages
        """Installed packages that tests may import."""
        self._longest_s = max(settings.timeout_s, settings.longest_timeout_s)
        self._pool = WorkspacePool(settings)
        sandboxes = SandboxSettings(
            timeout_s=settings.timeout_s,
            cpu_s=max(1, round(settings.timeout_s + 0.5)),
            memory_mb=settings.memory_mb,
            disk_mb=settings.disk_mb,
            processes=settings.processes,
            output_characters=settings.output_characters,
            packages=settings.packages,
            pool=1,
        )
        self._calls = CallJudge(sandboxes)
        self._slots = asyncio.Semaphore(at_once)
        self._wait_s = wait_s
        self._verdict_s = verdict_s

    async def judge(self, task: Task, workspace: Workspace) -> Verdict:
        """Return the verdict on an agent's work in its workspace; processes that still run in it are ended.

        Args:
            task: The task.
            workspace: The workspace; `task.tar()` was put into it.

        Raises:
            UnjudgedError: It cannot be scored, for a cause of ours: a lost workspace, too little time, or a row or a
                setting that cannot work. Of an agent, a `ConfigError` would count as its own, with a reward.
            OutageError: No sandbox could be started.
        """
        try:
            return await self.judge_left(task, await collect(task, workspace, self.packages))
        except ConfigError as error:
            raise UnjudgedError(f"task {task.name!r} cannot be judged: {error}") from error

    async def judge_left(self, task: Task, left: WorkChanges) -> Verdict:
        """Return the verdict on changes.

        Args:
            task: The task.
            left: The changes.

        Raises:
            UnjudgedError, OutageError: As `judge`.
            ConfigError: The task cannot work, or has no guard (`Task.check_guard`).
        """
        self.check(task)
        task.check_guard()
        if left.problem is not None:
            return Verdict(0.0, left.problem, left.left_out)
        async with _within(self._wait_s, f"task {task.name!r}: its verdict waited"):
            await self._slots.acquire()
        try:
            async with _within(self._verdict_s, f"task {task.name!r}: its verdict took"):
                first, why = await self._judged_twice(task, left)
        finally:
            self._slots.release()
        return Verdict(first, why, left.left_out)

    def check(self, task: Task) -> None:
        """Check that the workspaces of the tests allow the needs of a task.

        Args:
            task: The task.

        Raises:
            ConfigError: Its tests may take longer than a command may.
        """
        if not isinstance(task.verdict, CallsVerdict) and task.timeout_s > self._longest_s:
            raise ConfigError(
                f"task {task.name!r}: timeout_s {task.timeout_s:g}, expected at most {self._longest_s:g}, the "
                "longest_timeout_s of the workspaces of its tests; raise that one, or mend the row"
            )

    async def aclose(self) -> None:
        """End every workspace and sandbox."""
        await self._pool.aclose()
        await self._calls.close()

    def close_now(self) -> None:
        """Kill every workspace and sandbox at once, without an await."""
        self._pool.close_now()
        self._calls.close_now()

    async def _judged_twice(self, task: Task, left: WorkChanges) -> tuple[float, str]:
        seed = random.SystemRandom().getrandbits(64)
        first, why = await self._judged(task, left, lots(seed, False))
        if first > 0:  # a test that was true is a twin now
            second, reason = await self._judged(task, left, lots(seed, True))
            if second != first:
                return 0.0, f"two runs give {first:g} and {second:g}: {reason or why}"
        return first, why

    async def _judged(self, task: Task, left: WorkChanges, drawn: Callable[[bool], bool]) -> tuple[float, str]:
        async def run(changes: WorkChanges) -> tuple[float, str]:
            return await self.attempt(task, await _read(task, changes), drawn)

        return await after_control(task.name, partial(run, left), partial(run, WorkChanges()))

    async def attempt(self, task: Task, tree: Tree, drawn: Callable[[bool], bool] | None = None) -> tuple[float, str]:
        """Judge a tree once; return its reward, and why that is not 1.

        Args:
            task: The task.
            tree: The tree.
            drawn: The lots, as for `lay_out`.

        Raises:
            DisturbedError: There is no verdict, for whatever reason.
            UnjudgedError: There can be none.
            OutageError: No sandbox could be started.
        """
        verdict = task.verdict
        if isinstance(verdict, CallsVerdict):
            return await self._attempt_calls(task, verdict, tree)
        if isinstance(verdict, PytestVerdict):
            layout = await asyncio.to_thread(lay_out, verdict, tree.own, random.SystemRandom(), drawn)
            return judged_outcomes(verdict, layout, await self.outcomes(task, verdict, layout, tree))
        reward = await self.script_reward(task, verdict, tree)
        if verdict.twins and reward > 0:
            other = await self.script_reward(task, verdict, tree, with_twins=True)
            if other >= reward:
                return 0.0, "test.sh pays as much where its tests expect other values"
        return reward, "" if reward == 1 else f"test.sh wrote the reward {reward:g}"

    async def outcomes(self, task: Task, verdict: PytestVerdict, layout: SuiteLayout, tree: Tree) -> Mapping[str, str]:
        """Return the outcome of each test in a fresh workspace.

        Raises:
            DisturbedError, UnjudgedError, OutageError: As `attempt`.
        """
        found = await self._fresh(task, tree, lambda fresh: run_pytest(fresh, verdict, layout, task.timeout_s))
        expected = {True: "passed", False: "failed"}
        if wrong := [name for name in layout.canaries if found.get(name) != expected[layout.passes[name]]]:
            raise DisturbedError(f"{len(wrong)} of {len(layout.canaries)} tests of our own did not end as they should")
        return found

    async def script_reward(self, task: Task, verdict: ScriptVerdict, tree: Tree, with_twins: bool = False) -> float:
        """Return the reward of `test.sh` in a fresh workspace.

        Args:
            task: The task.
            verdict: Its verdict.
            tree: The tree.
            with_twins: Whether its Python tests have other values in their assertions.

        Raises:
            DisturbedError, UnjudgedError, OutageError: As `attempt`.
        """
        files = verdict.files
        if verdict.twins or with_twins:  # in one form: comments and blank lines would show which values are true
            draw = random.SystemRandom() if with_twins else None
            files = await asyncio.to_thread(_rewritten, files, draw, tree.own)
        return await self._fresh(task, tree, lambda fresh: run_script(fresh, files, task.timeout_s, task.variables))

    async def canary_run(
        self, task: Task, verdict: ScriptVerdict, tree: Tree, canary: Canary
    ) -> tuple[float | None, list[str]]:
        """Return the reward of `test.sh` over a tree with canaries, None for nothing, and the starts that those report.

        Raises:
            DisturbedError, UnjudgedError, OutageError: As `attempt`; the first only where the workspace has ended.
        """

        async def work(fresh: Workspace) -> tuple[float | None, list[str]]:
            await fresh.put(write_tar(canary.files(), canary.files()), canary.folder)
            reward = None
            with contextlib.suppress(DisturbedError):
                reward = await run_script(fresh, verdict.files, task.timeout_s, task.variables)
            tar = await fresh.get("started", path=canary.folder)
            return reward, read_tar(tar).files.get("started", b"").decode("utf-8", "replace").splitlines()

        return await self._fresh(task, tree, work)

    async def _attempt_calls(self, task: Task, verdict: CallsVerdict, tree: Tree) -> tuple[float, str]:
        tar, tally = await asyncio.to_thread(tree.tar), CallTally()

        async def prepare(runner: Sandbox) -> None:
            await unpack(runner, tar)
            await runner.run(f"load({dict(verdict.functions)!r}, {list(verdict.roots)!r})")

        try:
            async with asyncio.timeout(task.timeout_s):
                await self._calls.run_tests(verdict.tests, prepare, tally)
        except TimeoutError:
            raise DisturbedError(f"the tests took longer than {task.timeout_s:g} s") from None
        if tally.passed == len(verdict.tests):
            return 1.0, ""
        late = ", and a call was late" if tally.late else ""
        return 0.0, f"test {tally.passed + 1} of {len(verdict.tests)} does not pass{late}"

    async def _fresh(self, task: Task, tree: Tree, work: Callable[[Workspace], Awaitable[T]]) -> T:
        """Do some work in a fresh workspace with a tree; once more where the workspace is lost."""
        tar = await asyncio.to_thread(tree.tar)
        lost: SandboxError | None = None
        for _ in range(2):
            workspace = await self._pool.open()  # where this fails, it is an outage
            try:
                async with workspace:
                    await workspace.put(tar)
                    return await work(workspace)
            except WorkspaceError as error:
                raise DisturbedError(str(error)) from None
            except SandboxError as error:
                lost = error
        raise UnjudgedError(f"task {task.name!r}: the workspace of its tests was lost twice: {lost}") from lost


@contextlib.asynccontextmanager
async def _within(limit_s: float | None, what: str) -> AsyncIterator[None]:
    """Give work some seconds, and raise `UnjudgedError` when they are over."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise UnjudgedError(
            f"{what} longer than {limit_s:g} s; use a machine with more processors, or fewer conversations at once"
        ) from None


def _rewritten(files: Mapping[str, str], draw: random.Random | None, own: Mapping[str, bytes]) -> dict[str, str]:
    words = words_of(own)
    return {path: changed(text, draw, words)[0] if path.endswith(".py") else text for path, text in files.items()}


async def _read(task: Task, left: WorkChanges) -> Tree:
    """Return a tree whose files are read in a thread, since others wait for the event loop."""
    return await asyncio.to_thread(Tree.of, task, left)


def judged_outcomes(verdict: PytestVerdict, layout: SuiteLayout, found: Mapping[str, str]) -> tuple[float, str]:
    """Return the reward for the outcomes of a run, and why it is not 1.

    Args:
        verdict: The verdict.
        layout: The tests of the run.
        found: The outcome of each test by its name.
    """
    for name in (*verdict.tests, *verdict.kept):
        outcome, in_run = found.get(layout.names[name]), layout.names[name]
        if layout.passes[in_run] and outcome != "passed":
            return 0.0, f"{name} is {outcome or 'not found'}"
        if not layout.passes[in_run] and outcome != "failed":
            return (
                0.0,
                "a test passes whatever it expects" if outcome == "passed" else f"{name} is {outcome or 'not found'}",
            )
    return 1.0, ""


async def unpack(sandbox: Sandbox, tar: bytes) -> None:
    """Unpack a tar in the folder of a sandbox.

    Args:
        sandbox: A sandbox that has the functions of `program_cells.py`, and no untrusted code yet.
        tar: The tar.

    Raises:
        DisturbedError: It cannot be unpacked: the disk is full.
        OutageError: The sandbox ended, in which no untrusted code has run.
    """
    for start in range(0, len(tar), _PIECE_BYTES):
        piece = base64.b64encode(tar[start : start + _PIECE_BYTES]).decode()
        await sandbox.run(f"upload({piece!r})", with_value=True)  # a cell that is not kept
    result = await sandbox.run("unpack()", with_value=True)
    expect_done(result)
    if result.value != b"unpacked":
        raise DisturbedError(f"the tree cannot be unpacked: {result.output[-300:]}")
