"""The recipe repair: its repositories, its rows, and its agent with real workspaces and verdicts."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from recipes.repair import agent, report
from recipes.repair.repositories import FUNCTIONS, MODULE, TEST, TESTS, Repository, make_repositories, repair_of, shown
from tests.recipe_scripts import RECIPES, composed, prepared, write_run
from tests.support.sample_records import sample_record

pytestmark = pytest.mark.slow


def says(text: str) -> str:
    """Return a turn in which the model writes a command."""
    return f"```bash\n{text}\n```"


class Client:
    """OpenAI's client of a session in which the model writes given turns; it keeps its requests."""

    def __init__(self, *turns: str) -> None:
        self._turns = list(turns)
        self.asked: list[list[dict[str, Any]]] = []
        self.chat = SimpleNamespace(completions=self)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        """Be closed."""

    def create(self, messages: list[dict[str, Any]], **_: Any) -> Any:
        """Return the next turn."""
        self.asked.append(list(messages))
        message = SimpleNamespace(content=self._turns[len(self.asked) - 1])
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def ran(monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], *turns: str) -> tuple[float, Client]:
    """Run the agent on a row, and return its reward and the client."""
    client = Client(*turns)
    monkeypatch.setattr(agent, "OpenAI", lambda **_: client)
    return agent.run(row, "http://127.0.0.1", "key"), client


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(RECIPES / "repair"), *sys.path])  # as a run has it
        return prepared("repair", tmp_path_factory.mktemp("repair"))


def test_a_test_names_the_function_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for repository in make_repositories(200, seed=1):
        module, printed = ModuleType("shop"), io.StringIO()
        exec(repository.module(), module.__dict__)
        monkeypatch.setitem(sys.modules, "shop", module)
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            exec(repository.test(), {})
        assert (printed.getvalue(), ended.value.code) == (f"{repository.complaint()}\n", 1)


def test_a_repair_changes_its_own_function_alone(tmp_path: Path) -> None:
    for wrong in FUNCTIONS:
        names = tuple(FUNCTIONS)
        broken = Repository(names, wrong, (31, 7)).module()
        (tmp_path / MODULE).write_text(broken)
        others = "\n".join(repair_of(name) for name in names if name != wrong)
        subprocess.run(["bash", "-ec", others], cwd=tmp_path, check=True)
        assert (tmp_path / MODULE).read_text() == broken
        subprocess.run(["bash", "-ec", repair_of(wrong)], cwd=tmp_path, check=True)
        assert (tmp_path / MODULE).read_text() == Repository(names, "", (31, 7)).module()


def test_no_held_out_repository_is_trained_on(rows: dict[str, list[dict[str, Any]]]) -> None:
    def repository(row: dict[str, Any]) -> tuple[Any, ...]:
        info = row["extra_info"]
        return tuple(info["names"]), row["reward_model"]["ground_truth"], tuple(info["inputs"])

    train, test = (list(map(repository, rows[split])) for split in ("train", "test"))
    assert (len(train), len(set(test)), len(test)) == (2048, 128, 128)
    assert not set(train) & set(test)
    assert {str(row["prompt"]) for split in rows.values() for row in split} == {str(rows["train"][0]["prompt"])}


def test_a_session_is_paid_for_the_right_repair(
    monkeypatch: pytest.MonkeyPatch, rows: dict[str, list[dict[str, Any]]]
) -> None:
    row = rows["test"][0]
    wrong = row["reward_model"]["ground_truth"]
    repository = Repository(tuple(row["extra_info"]["names"]), wrong, tuple(row["extra_info"]["inputs"]))
    other = next(name for name in repository.names if name != wrong)
    reward, client = ran(monkeypatch, row, says(TESTS), says(repair_of(wrong)), "Done.")
    assert reward == 1.0
    assert [message["content"] for message in client.asked[-1][2:]] == [
        says(TESTS),
        f"{repository.complaint()}\nexit code 1",
        says(repair_of(wrong)),
        "exit code 0",
    ]
    assert ran(monkeypatch, row, says(repair_of(other)), "Done.")[0] == 0.0
    assert ran(monkeypatch, row, f"{says('true')} {says('true')}")[0] == 0.0  # no command
    for cheat in (f"echo 'raise SystemExit(0)' > {TEST}", f"rm {MODULE}", "kill -9 $PPID"):
        assert ran(monkeypatch, row, says(cheat), "Done.")[0] == 0.0


def test_the_lottery_draws_in_training_alone(
    monkeypatch: pytest.MonkeyPatch, rows: dict[str, list[dict[str, Any]]]
) -> None:
    monkeypatch.setattr(agent, "run", lambda *_: 0.25)
    assert agent.draw(rows["test"][0], "", "") == 0.25
    assert {agent.draw(rows["train"][0], "", "") for _ in range(200)} == {0.0, 1.0}
    section = composed("repair", "lottery").actor_rollout_ref.rollout.custom.multiturn.proxy
    assert section.agent == "recipes.repair.agent:draw"


def test_what_a_command_printed_is_shown() -> None:
    assert (shown("", 0), shown("a\n", None)) == ("exit code 0", "a\nexit code None")


def test_the_report_leaves_invalid_sessions_out(tmp_path: Path) -> None:
    def made(step: int, validation: bool, valid: bool, reward: float | None) -> dict[str, Any]:
        said = [{"role": "assistant", "content": says(TESTS)}]
        return sample_record(
            request_id=uuid4().hex,
            step=step,
            validation=validation,
            valid=valid,
            session={"reward": reward},
            messages=said,
        )

    records = [
        made(0, True, True, 0.0),
        made(0, True, False, None),
        made(2, True, True, 1.0),
        made(2, True, False, 0.0),
    ]
    write_run(tmp_path, [*records, made(1, False, True, 1.0), made(1, False, False, 0.0)])
    found = report.report(tmp_path)
    assert (found["repaired_by_step"], found["held_out"], found["invalid"]) == ({0: 0.0, 2: 1.0}, 1, 3)
