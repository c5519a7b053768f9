"""`check-interaction`: its output about sound interactions and about broken ones."""

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.tools.broken_tools import on_any_machine
from verl_multiturn.checking.episodes import PlayedEpisode, drawn_actions
from verl_multiturn.checking.interaction_contract import CheckResult, Grade, check_interaction, interactions_to_check
from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError, OutageError
from verl_multiturn.interactions.base import Interaction, Reply
from verl_multiturn.interactions.old_verl.classes import BaseInteraction
from verl_multiturn.interactions.running.registry import build_interaction

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    on_any_machine(monkeypatch)
    yield
    while OPENED:
        os.close(OPENED.pop())


class Dice(Interaction):
    """A game of luck: three turns, each a throw, from a generator of the conversation's own."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config or {})
        self.worlds: dict[str, random.Random] = {}

    async def start(self, instance_id: str, *, seed: int = 0) -> Reply:  # type: ignore[override]
        self.worlds[instance_id] = self.world(seed)
        return Reply("Throw.", state=seed)

    def world(self, seed: int) -> Any:
        return random.Random(seed)

    async def reply(self, instance_id: str, messages: Any, **_: Any) -> Reply:
        await asyncio.sleep(0)
        eyes = self.worlds[instance_id].randint(1, 1_000_000)
        return Reply(f"You threw {eyes}.", reward=float(eyes > 400_000), state=eyes, done=len(messages) >= 6)

    async def score(self, instance_id: str) -> float:
        return 1.0

    async def close(self, instance_id: str) -> None:
        self.worlds.pop(instance_id, None)


class Shared(Dice):
    """Its conversations draw from one generator, as many packages do."""

    def world(self, seed: int) -> Any:
        random.seed(seed)
        return random


class Unseeded(Dice):
    def world(self, seed: int) -> Any:
        return random.Random()


class NoReply(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        return "You threw 3."


class WrongText(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        return Reply(3)  # type: ignore[arg-type]


class NotANumber(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        return Reply("", reward=float("nan"))


class NoScore(Dice):
    async def score(self, instance_id: str) -> Any:
        return "much"


class Over(Dice):
    async def start(self, instance_id: str, **_: Any) -> Any:  # type: ignore[override]
        return Reply("", done=True)


class StartHangs(Dice):
    async def start(self, instance_id: str, **_: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(60)


class Exits(Dice):
    def reply(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise SystemExit(3)


class Blocks(Dice):
    async def reply(self, *arguments: Any, **kwargs: Any) -> Any:
        time.sleep(0.15)  # noqa: ASYNC251
        return Reply("")


class Keeps(Dice):
    async def close(self, instance_id: str) -> None:
        """Forget nothing."""


class LeavesATask(Dice):
    async def reply(self, *arguments: Any, **kwargs: Any) -> Any:
        self.task = asyncio.create_task(asyncio.sleep(60), name="left behind")
        return Reply("")


class LeavesAThread(Dice):
    def reply(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        threading.Thread(target=time.sleep, args=(20,), daemon=True, name="left behind").start()
        return Reply("")


OPENED: list[int] = []


class LeavesAFile(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        OPENED.append(os.open("/dev/null", os.O_RDONLY))
        return Reply("")


class Deaf(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        loop = asyncio.get_running_loop()
        until = loop.time() + 0.1
        while loop.time() < until:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                until = loop.time() + 1.0
        return Reply("")


class Picky(Dice):
    async def reply(self, instance_id: str, messages: Any, **_: Any) -> Any:
        return Reply("ABC"["abc".index(messages[-1]["content"][0])])


class ClosesOnce(Dice):
    async def close(self, instance_id: str) -> None:
        del self.worlds[instance_id]


def check(interaction: Interaction, **given: Any) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in check_interaction(interaction, **{"rounds": 3, **given})}


def problems(findings: dict[str, CheckResult]) -> list[str]:
    return [name for name, finding in findings.items() if finding.verdict is Grade.PROBLEM]


def test_a_sound_interaction_passes() -> None:
    findings = check(Dice(), kwargs={"seed": 3})
    assert {name: finding.verdict for name, finding in findings.items() if finding.verdict is not Grade.OK} == {}
    assert findings["start"].found == "opens with 'Throw.'"
    assert findings["reply"].found == "3 turns, done, rewards 0, 1"
    assert findings["one episode"].found.startswith("3 turns alone, again, and beside 16 others in")


@pytest.mark.parametrize(
    ("broken", "name", "found"),
    [
        (Shared, "one episode", "beside 16 others"),
        (Unseeded, "one episode", "played again it is another one: turn 1: text 'You threw"),
        (NoReply, "reply", "reply must return a Reply, got 'You threw 3.'"),
        (WrongText, "reply", "a Reply whose text is 3; give a str"),
        (NotANumber, "reply", "reply gave nan, which is no finite number"),
        (NoScore, "score", "score must give a number as reward, got 'much'"),
        (Over, "start", "it was over before the model's first turn"),
        (StartHangs, "start", "hangs: no answer within 0.5 s"),
        (Exits, "reply", "called exit(3)"),
        (Blocks, "event loop", "reply blocks it for"),
        (Keeps, "leftovers", "the id of an ended conversation in self.worlds"),
        (LeavesATask, "leftovers", "1 task (left behind)"),
        (LeavesAThread, "leftovers", "1 thread (left behind)"),
        (LeavesAFile, "leftovers", "1 file descriptor (/dev/null)"),
        (Deaf, "cancel reply", "reply goes on after it was cancelled"),
        (Picky, "any answer", "an empty turn: raised IndexError"),
    ],
)
def test_what_is_broken_is_named(broken: type[Dice], name: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken is Blocks:
        on_any_machine(monkeypatch, late_s=0.1)
    actions = ["a", "b", "c"] if broken is Picky else []
    findings = check(broken(), kwargs={"seed": 3}, timeout_s=0.5, actions=actions)
    assert name in problems(findings), findings
    assert found in findings[name].found
    assert findings[name].remedy


def test_an_early_problem_skips_the_rest() -> None:
    findings = check(NoReply(), kwargs={"seed": 3})
    assert problems(findings) == ["reply"]
    assert {finding.verdict for name, finding in findings.items() if name not in ("start", "reply", "close")} == {
        Grade.SKIPPED
    }


def test_without_a_seed_another_episode_is_a_warning() -> None:
    findings = check(Unseeded())
    assert problems(findings) == []
    assert findings["one episode"].verdict is Grade.WARNING
    assert "--kwargs" in findings["one episode"].remedy


def test_a_close_that_needs_a_start_is_a_warning() -> None:
    finding = check(ClosesOnce(), kwargs={"seed": 3})["close after a failed start"]
    assert (finding.verdict, "raised KeyError" in finding.found) == (Grade.WARNING, True)
    assert "(test_interaction_contract.py:" in finding.found


def test_kwargs_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"start\(.*cannot be called with {'sed': 3}"):
        check_interaction(Dice(), kwargs={"sed": 3})


class KeepsNoConfig(Dice):
    def __init__(self) -> None:
        self.worlds = {}


def test_a_class_may_keep_no_config() -> None:
    assert problems(check(KeepsNoConfig(), kwargs={"seed": 3})) == []


class Deafened(Dice):
    """An environment that finds an action in the word `throw` alone."""

    async def reply(self, instance_id: str, messages: Any, *, seed: int = 0) -> Reply:  # type: ignore[override]
        read = messages[-1]["content"] == "throw"
        return Reply("You threw.", metrics={"unreadable_actions": float(not read)})


def test_a_player_whom_the_environment_never_understands_is_a_warning() -> None:
    finding = check(Deafened(), kwargs={"seed": 3})["actions"]
    assert (finding.verdict, "--actions" in finding.remedy) == (Grade.WARNING, True)
    assert "actions" not in check(Deafened(), kwargs={"seed": 3}, actions=["hm", "throw"])


class Shop(Interaction):
    """A seller who knows one word, and gives no metric."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config or {})

    async def reply(self, instance_id: str, messages: Any, **_: Any) -> Reply:
        bought = messages[-1]["content"] == "buy"
        return Reply("Sold." if bought else "Well?", reward=float(bought), done=bought)


def test_a_player_of_letters_who_reaches_nothing_is_a_warning() -> None:
    finding = check(Shop())["actions"]
    assert (finding.verdict, "--actions" in finding.remedy) == (Grade.WARNING, True)
    assert finding.found == "the player writes letters, and in 3 turns came to no reward above 0 and no end"
    for reaches in (["buy"], ["hm", "buy"], ["hm"]):  # turns of the author's own are no letters
        assert "actions" not in check(Shop(), actions=reaches)
    assert "actions" not in check(Shop({"actions": ["look", "buy"]}))
    assert "actions" not in check(Dice(), kwargs={"seed": 3})  # it rewards whatever is written


class Endless(Shop):
    """A user who never leaves."""

    async def reply(self, instance_id: str, messages: Any, **_: Any) -> Reply:
        return Reply("Go on.", reward=self.config.get("reward"))


@pytest.mark.parametrize("given", [{}, {"actions": ["hm"]}])
def test_a_conversation_that_never_ends_is_a_warning(given: dict[str, Any]) -> None:
    reward = None if given else 0.1
    findings = check(Endless({"reward": reward}), **given)
    assert problems(findings) == []
    assert findings["reply"].found == f"3 turns, goes on, {'no reward' if given else 'reward 0.1'}"
    finding = findings["end"]
    assert (finding.verdict, "--actions" in finding.remedy, "--rounds" in finding.remedy) == (Grade.WARNING, True, True)
    assert finding.found == ("never done or truncated in 3 turns; only the turn limits or the response's length end it")
    assert "end" not in check(Dice(), kwargs={"seed": 3})
    assert "end" in check(Dice(), kwargs={"seed": 3}, rounds=2)  # it needs more turns


def test_many_rewards_are_shown_by_their_ends() -> None:
    episode = PlayedEpisode([("", None, None, False, False)])
    episode.answers += [("", reward, None, False, True) for reward in (1.0, -0.2, 0.0, 1.0)]
    assert episode.in_words() == "4 turns, truncated, rewards -0.2, 0, 1"
    episode.answers += [("", reward / 10, None, False, True) for reward in range(20)]
    assert episode.in_words() == "24 turns, truncated, rewards from -0.2 to 1.9"


class Nothing(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        """Forget to return."""


class TextReward(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        return Reply("", reward="1.0")  # type: ignore[arg-type]


class Hangs(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(60)


class HangsInAThread(Dice):
    def reply(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        time.sleep(2)


class Misspelt(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        return Reply("", finished=True)  # type: ignore[call-arg]


class MisspeltNearly(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        return Reply("", rewards=1.0)  # type: ignore[call-arg]


class Away(Dice):
    async def reply(self, *_: Any, **__: Any) -> Any:
        raise OutageError("the service is down")


@pytest.mark.parametrize(
    ("broken", "remedy"),
    [
        (NoReply, "return Reply(text, reward=…, done=…) on every path"),
        (Nothing, "return Reply(text, reward=…, done=…) on every path"),
        (WrongText, "give the field its type: text a str"),
        (TextReward, "reward a number"),
        (NotANumber, "mend what makes it: a division by 0"),
        (Hangs, "let each wait and loop in it end"),
        (HangsInAThread, "--timeout-s"),
        (Misspelt, "a Reply takes text, image, reward, done, truncated, state, metrics, shows; `done` ends"),
        (MisspeltNearly, "did you mean 'reward'?"),
        (Away, "start the service where it is down"),
    ],
)
def test_a_fault_of_reply_has_its_own_remedy_and_place(broken: type[Dice], remedy: str) -> None:
    finding = check(broken(), kwargs={"seed": 3}, timeout_s=0.5)["reply"]
    assert finding.verdict is Grade.PROBLEM
    assert remedy in finding.remedy
    assert re.search(r"\(test_interaction_contract\.py:\d+\)", finding.found)


def test_the_player_draws_from_known_actions() -> None:
    assert set(drawn_actions({"actions": ["up", "down"]}, 20)) == {"up", "down"}
    letters = drawn_actions({}, 8)
    assert letters == drawn_actions({}, 8)
    assert all(word.isalpha() for word in letters)


class Polite(BaseInteraction):
    """An interaction for verl 0.6, with the two kinds of signature."""

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return len(messages) > 3, f"{len(messages)} messages, {kwargs['name']}", 0.5, {}

    async def calculate_score(self) -> float:  # type: ignore[override]
        return 0.5


class PoliteKeeps(Polite):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.kept: dict[str, int] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.kept[str(instance_id)] = 1
        return str(instance_id)


def test_a_class_of_older_verl() -> None:
    sound = build_interaction({"class_name": f"{__name__}.Polite"}, "here")
    findings = check(sound)
    assert {finding.verdict for finding in findings.values()} == {Grade.OK}
    assert findings["reply"].found == "2 turns, done, reward 0.5"
    keeps = build_interaction({"class_name": f"{__name__}.PoliteKeeps"}, "here")
    assert "self.kept" in check(keeps)["leftovers"].found


def test_the_command(tmp_path: Path) -> None:
    run, name = CliRunner(), f"{__name__}.Dice"
    turns = tmp_path / "turns.txt"
    turns.write_text("throw\n\nthrow hard\n")
    done = run.invoke(
        app, ["check-interaction", name, "--kwargs", '{"seed": 3}', "--rounds", "2", "--actions", str(turns)]
    )
    assert done.exit_code == 0, done.output
    assert "interaction dice" in done.output
    assert "one episode" in done.output
    done = run.invoke(app, ["check-interaction", f"{__name__}.NoReply", "--rounds", "1"], env={"COLUMNS": "80"})
    assert (done.exit_code, "1 problem(s)" in done.stderr) == (1, True)
    lines = done.output.splitlines()
    at = next(index for index, line in enumerate(lines) if "problem │ reply: interaction 'noreply': reply must" in line)
    assert any("→ return Reply(text, reward=…, done=…) on every path: a text" in line for line in lines[at : at + 4])
    assert any("skipped │ score: first mend what is above" in line for line in lines)
    for arguments, said in [
        ([f"{__name__}.Dise"], "did you mean 'Dice'"),
        (["collections.OrderedDict"], "derive it from Interaction"),
        ([name, "--actions", str(tmp_path / "none.txt")], "cannot be read"),
        ([name, "--kwargs", "[1]"], "expected a JSON object"),
        ([str(tmp_path / "none.yaml")], "is no file"),
    ]:
        done = run.invoke(app, ["check-interaction", *arguments])
        assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


def test_validate_takes_interactions(tmp_path: Path) -> None:
    users, rows = tmp_path / "users.yaml", tmp_path / "rows.jsonl"
    gsm8k = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    users.write_text(f"interaction: [{{class_name: {__name__}.Dice}}, {{class_name: {gsm8k}, config: {{}}}}]")

    def validate(*kwargs: str) -> tuple[int, str]:
        row = '{"prompt": [{"role": "user", "content": "Hi"}], "extra_info": {"interaction_kwargs": %s}}\n'
        rows.write_text("".join(row % each for each in kwargs))
        arguments = ["validate", "--interactions", str(users), "--dataset", str(rows)]
        done = CliRunner().invoke(app, arguments)
        return done.exit_code, done.output + done.stderr

    status, said = validate('{"dice": {"seed": 3}}', '{"name": "gsm8k", "ground_truth": "4"}')
    assert status == 0, said
    assert "ok interaction dice: " in said
    assert "ok interaction gsm8k: verl_multiturn.interactions.old_verl.classes.Gsm8kInteraction" in said.replace(
        "\n", ""
    )
    for kwargs, wrong in [
        ("null", "row 0: interaction_kwargs names none of the run's interactions"),
        ('{"dise": {}}', "did you mean 'dice'"),
        ('{"dice": {"sed": 3}}', "start(instance_id: str, *, seed: int = 0)"),
    ]:
        status, said = validate(kwargs)
        assert (status, wrong in said) == (1, True), said
    done = CliRunner().invoke(app, ["validate"])
    assert (done.exit_code, "nothing to validate" in done.stderr) == (2, True)


def test_one_interaction_of_a_yaml(tmp_path: Path) -> None:
    path = tmp_path / "worlds.yaml"
    entry = f"class_name: {__name__}.Dice"
    path.write_text(f"interaction:\n- {{name: one, {entry}}}\n- {{name: two, {entry}}}\n")
    assert [each.name for each in interactions_to_check(str(path), None)] == ["one", "two"]
    assert [each.name for each in interactions_to_check(f"{path}:two", None)] == ["two"]
    assert [each.name for each in interactions_to_check(str(path), None, "two")] == ["two"]
    with pytest.raises(ConfigError, match="name two interactions"):
        interactions_to_check(f"{path}:two", None, "one")
    with pytest.raises(ConfigError, match=r"no interaction 'three'; known are \['one', 'two'\]"):
        interactions_to_check(f"{path}:three", None)


class Goal(Dice):
    """The goal of the conversation that began last is everybody's."""

    goal = 0

    async def start(self, instance_id: str, *, goal: int = 3, seed: int = 0) -> Reply:  # type: ignore[override]
        self.goal = goal
        return await super().start(instance_id, seed=seed)

    async def score(self, instance_id: str) -> float:
        return float(self.goal == 3)


class GoalThatNobodySees(Goal):
    async def score(self, instance_id: str) -> float:
        return 1.0


class GoalOfItsOwn(Dice):
    """Each conversation has its goal, and another one than those that it knows is refused."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.goals: dict[str, str] = {}
        self.begun = 0

    async def start(self, instance_id: str, *, goal: str, size: int = 3) -> Reply:  # type: ignore[override]
        if goal != "here":
            raise ValueError(goal)
        self.begun += 1
        self.goals[instance_id] = goal
        return await super().start(instance_id, seed=size)

    async def close(self, instance_id: str) -> None:
        self.goals.pop(instance_id, None)
        await super().close(instance_id)


def test_state_of_one_conversation_is_found_with_other_kwargs() -> None:
    finding = {each.check: each for each in check_interaction(Goal(), {"goal": 3}, timeout_s=60.0)}["one episode"]
    assert finding.verdict is Grade.PROBLEM
    assert "score 1.0, then 0.0" in finding.found
    unseen = check_interaction(GoalThatNobodySees(), {"goal": 3}, timeout_s=60.0)
    finding = {each.check: each for each in unseen}["one episode"]
    assert (finding.verdict, finding.found) == (
        Grade.WARNING,
        "self.goal, which all conversations share, is 3 for one row, 4 for another",
    )
    sound = check_interaction(GoalOfItsOwn(), {"goal": "here", "size": 3}, timeout_s=60.0)
    assert {each.verdict for each in sound} == {Grade.OK}
    finding = {each.check: each for each in sound}["one episode"]
    assert "with made kwargs {'goal': 'here', 'size': 4}" in finding.found
