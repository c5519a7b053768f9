"""`check-tool` finds state of one conversation on the shared object, and lets honest tools pass."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.tools.broken_tools import Sound, on_any_machine
from tests.unit.tools.test_contract import check, problems
from verl_multiturn import ConfigError, OutageError
from verl_multiturn.checking.examination import Grade
from verl_multiturn.checking.other_rows import made_kwargs, varied
from verl_multiturn.checking.tool_contract import check_tool
from verl_multiturn.cli.main import app

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_machine(monkeypatch)


class Quick(Sound):
    """A sound tool that waits for nothing."""

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        self.notes[instance_id] = []

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.notes[instance_id].append(parameters["text"])
        return " ".join(self.notes[instance_id])[:100]


class Goal(Quick):
    """The goal of the conversation that began last is everybody's."""

    goal = 0

    async def create(self, instance_id: str, goal: int, **kwargs: Any) -> Any:  # type: ignore[override]
        await super().create(instance_id)
        self.goal = goal

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.goal == 3)


class GoalThatNobodySees(Goal):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0


class LastText(Quick):
    """Score the last words, by any speaker."""

    last = ""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.last = parameters["text"]
        return "ok"

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.last == "tea")


class StepsOfAll(Quick):
    """The step reward depends on the calls of all conversations."""

    calls = 0

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        self.calls = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.calls += 1
        return "ok", float(self.calls), {}


class CountsUnseen(StepsOfAll):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.calls += 1
        return "ok"


class Current(Quick):
    current = ""

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        self.current = instance_id
        await super().create(instance_id)


class Best(Quick):
    """The best goal so far stays for the conversations that follow."""

    best = 0

    async def create(self, instance_id: str, goal: int = 3, **kwargs: Any) -> Any:  # type: ignore[override]
        self.best = max(self.best, goal)
        await super().create(instance_id)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.best)


@pytest.mark.parametrize(
    ("kind", "given", "found"),
    [
        (Goal, {"goal": 3}, "alone calc_reward gives 1.0, beside another 0.0"),
        (LastText, {}, "alone calc_reward gives 1.0, beside another 0.0"),
        (StepsOfAll, {}, "alone it answers [('ok', '1.0'), ('ok', '2.0')], beside another"),
        (Best, {}, "alone calc_reward gives 3.0, after another one 4.0"),
    ],
)
def test_state_of_one_conversation_is_found(kind: type[Quick], given: dict[str, Any], found: str) -> None:
    finding = check(kind(), create_kwargs=given)["isolation"]
    assert finding.verdict is Grade.PROBLEM
    assert finding.found.startswith(found)
    assert finding.remedy == "keep what belongs to a conversation under its instance_id, as in self.goals[instance_id]"


@pytest.mark.parametrize(
    ("kind", "given", "found"),
    [
        (GoalThatNobodySees, {"goal": 3}, "self.goal, which all conversations share, is 3 for one row, 4 for another"),
        (CountsUnseen, {}, "self.calls, which all conversations share, is set to 0 again by each conversation that"),
        (Current, {}, "self.current, which all conversations share, is the id of the conversation that began last"),
    ],
)
def test_state_that_shows_nowhere_is_a_warning(kind: type[Quick], given: dict[str, Any], found: str) -> None:
    finding = check(kind(), create_kwargs=given)["isolation"]
    assert finding.verdict is Grade.WARNING
    assert finding.found.startswith(found)


class Honest(Quick):
    """A counter, a number of those that run, a connection made at first, a cache by row, and a table by instance."""

    def __init__(self, config: Any = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.begun = self.running = self.calls = 0
        self.client: Any = None
        self.cache: dict[int, str] = {}
        self.goals: dict[str, int] = {}

    async def create(self, instance_id: str, goal: int = 3, **kwargs: Any) -> Any:  # type: ignore[override]
        await super().create(instance_id)
        self.begun += 1
        self.running += 1
        self.client = self.client or object()
        self.cache[goal] = "loaded"
        self.goals[instance_id] = goal

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.calls += 1
        return await super().execute(instance_id, parameters)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.goals[instance_id] == 3)

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        await super().release(instance_id)
        if self.goals.pop(instance_id, None) is not None:
            self.running -= 1


class Particular(Honest):
    """A tool that refuses goals that it did not get."""

    async def create(self, instance_id: str, goal: int = 3, **kwargs: Any) -> Any:
        if goal != 3:
            raise KeyError(goal)
        await super().create(instance_id, goal)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Honest, "the second has made kwargs: {'create_kwargs': {'goal': 4}, 'execute_kwargs': {}}"),
        (Particular, "two conversations at once answer as one alone; the second has other arguments"),
    ],
)
def test_honest_tools_pass(kind: type[Quick], said: str) -> None:
    findings = check(kind(), timeout_s=10.0)
    assert problems(findings) == []
    assert findings["isolation"].verdict is Grade.OK
    assert said in findings["isolation"].found


def rows(path: Path, *given: Mapping[str, Any] | None) -> Path:
    """Write data rows with these `create_kwargs`; None for a row without the tool."""
    listed = [
        {"extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"other": {"create_kwargs": {}}}}}
        if each is None
        else {"extra_info": {"tools_kwargs": {"notes": {"create_kwargs": each}}}}
        for each in given
    ]
    path.write_text("\n".join(json.dumps(row) for row in listed))
    return path


class Place(Goal):
    """A tool whose goals cannot be made."""

    async def create(self, instance_id: str, goal: str, **kwargs: Any) -> Any:  # type: ignore[override]
        if goal not in ("here", "there"):
            raise KeyError(goal)
        await super().create(instance_id, goal)  # type: ignore[arg-type]

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.goal == "here")  # type: ignore[comparison-overlap]


def test_two_rows_of_a_data_set_that_differ_are_played(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", None, {"goal": "here"}, {"goal": "here"}, {"goal": "there"})
    finding = check(Place(), dataset=data)["isolation"]
    assert (finding.verdict, finding.found) == (
        Grade.PROBLEM,
        "alone calc_reward gives 1.0, beside another 0.0",
    )
    given = check(Place(), dataset=data, create_kwargs={"goal": "there"})["isolation"]
    assert given.found == "alone calc_reward gives 0.0, beside another 1.0"
    same = check(Honest(), timeout_s=10.0, dataset=rows(tmp_path / "same.jsonl", {"goal": 5}, {"goal": 5}))
    assert "made kwargs: {'create_kwargs': {'goal': 6}" in same["isolation"].found
    apart = check(Honest(), timeout_s=10.0, dataset=rows(tmp_path / "two.jsonl", {"goal": 5}, {"goal": 9}))
    assert apart["isolation"].found.endswith("the second has another row: {'create_kwargs': {'goal': 9}}")


def test_a_data_set_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no row has the tool 'notes'"):
        check_tool(Place(), dataset=rows(tmp_path / "rows.jsonl", None))
    with pytest.raises(ConfigError, match="is no file"):
        check_tool(Place(), dataset=tmp_path / "none.jsonl")


def test_command_line(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", {"goal": "here"}, {"goal": "there"})
    done = CliRunner().invoke(app, ["check-tool", f"{__name__}.Place", "--dataset", str(data)])
    assert done.exit_code == 1
    assert "isolation" in done.output


def test_made_values() -> None:
    assert varied({"goal": 3, "words": ["a", "7"], "strict": True, "none": None, "share": 0.5}) == {
        "goal": 4,
        "words": ["a-2", "8"],
        "strict": True,
        "none": None,
        "share": 1.5,
    }
    assert list(made_kwargs({"a": 1, "b": "x", "c": None})) == [
        {"a": 2, "b": "x-2", "c": None},
        {"a": 2, "b": "x", "c": None},
        {"a": 1, "b": "x-2", "c": None},
    ]
    assert list(made_kwargs({"a": True})) == []


def down() -> str:
    """Ask a database."""
    raise RuntimeError("database is down")


class Down(Quick):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise RuntimeError("database is down")


class Unborn(Quick):
    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        raise RuntimeError("database is down")


class NoJudge(Quick):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        raise RuntimeError("database is down")


class Away(Quick):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise OutageError("database is down")


class FewServers(Quick):
    """A tool whose service takes eight conversations at once, and refuses more."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: set[str] = set()

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        if len(self.inside) == 8:
            raise OutageError("the server did not start")
        self.inside.add(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return "done"

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        self.inside.discard(instance_id)


def test_a_service_that_fails_under_many_conversations_is_advised_as_one() -> None:
    finding = check(FewServers())["concurrency"]
    assert finding.found.startswith("create failed in 56 of 64 conversations at once: raised OutageError")
    assert finding.remedy.startswith("do what the error names; start the service")


@pytest.mark.parametrize("tool", [down, Down()])
def test_advice_for_a_tool_that_raises_names_the_two_errors(tool: Any) -> None:
    finding = check(tool)["execute"]
    assert finding.found.startswith("raised RuntimeError: database is down (test_check_isolation.py:")
    assert finding.remedy == (
        "raise ValueError for the model's mistake, OutageError for a service that is down; else mend that line"
    )
    assert check(Unborn())["create"].remedy.startswith("raise ValueError for a wrong row, OutageError for a service")
    assert check(NoJudge())["calc_reward"].remedy.startswith("raise UnjudgedError where it cannot judge")
    assert (
        check(Away())["execute"].remedy
        == "do what the error names; start the service where it is down, and check again"
    )
