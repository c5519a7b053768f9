"""BFCL's dialogues: the package's content, the worlds' answers, the verdict on each turn, the user and the tools."""

from __future__ import annotations

import asyncio
import decimal
import importlib.util
import json
import re
import sys
from typing import Any

import mpmath
import pytest
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

from verl_multiturn import Limits, Outcome, scripted_rollout
from verl_multiturn.errors import ConfigError, ToolContractError
from verl_multiturn.runs.data import tool_call
from verl_multiturn.task_sets.bfcl import package
from verl_multiturn.task_sets.bfcl.episode import DialogueEpisode
from verl_multiturn.task_sets.bfcl.package import (
    CATEGORIES,
    WorldCall,
    dialogue_of,
    dialogues,
    read_call,
    read_dialogue,
)
from verl_multiturn.task_sets.bfcl.tools import bfcl_tools
from verl_multiturn.task_sets.bfcl.user import EPISODES, BfclUser, own_dialogue
from verl_multiturn.task_sets.bfcl.worlds import DialogueWorlds

FILES = {
    "GorillaFileSystem": {
        "root": {
            "home": {
                "type": "directory",
                "contents": {
                    "docs": {"type": "directory", "contents": {}},
                    "log.txt": {"type": "file", "content": "b\na"},
                },
            }
        }
    }
}
ENTRY = {
    "id": "mine_0",
    "question": [[{"role": "user", "content": "Make old."}], [{"role": "user", "content": "Sort log.txt."}]],
    "initial_config": FILES,
    "involved_classes": ["GorillaFileSystem"],
    "ground_truth": [["mkdir(dir_name='old')"], ["sort('log.txt')"]],
}
OWN = json.dumps(ENTRY)


def files() -> DialogueWorlds:
    return DialogueWorlds(["GorillaFileSystem"], FILES)


def rollout(turns: list[str], config: dict[str, Any], dialogue: str = OWN) -> Outcome:
    return asyncio.run(
        scripted_rollout(
            bfcl_tools(["GorillaFileSystem"]),
            turns,
            [{"role": "system", "content": "Call functions."}],
            interaction=BfclUser(config),
            interaction_kwargs={"dialogue": dialogue},
            limits=Limits(prompt_length=8192, response_length=8192, max_parallel_calls=8),
        )
    )


# The package


def test_gold_calls_are_read_and_never_evaluated() -> None:
    assert read_call("sort('log.txt')") == WorldCall("sort", {}, ("log.txt",))
    assert read_call("add(a=-1.5, b=[1, None])") == WorldCall("add", {"a": -1.5, "b": [1, None]})
    for text in ("sort(__import__('os'))", "a.sort()", "sort", "sort(", "(lambda: 1)()"):
        with pytest.raises(ConfigError, match="write it as name"):
            read_call(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"involved_classes": ["Gorilla"]}, "'Gorilla' is no class of BFCL's worlds"),
        ({"involved_classes": ["WebSearchAPI"]}, "'WebSearchAPI' is no class of BFCL's worlds; known are"),
        ({"ground_truth": [[]]}, "2 turns and gold calls of 1"),
        ({"question": None}, "expected the form of BFCL's data"),
        ({"ground_truth": None}, "expected the form of BFCL's data"),
        ({"ground_truth": [None, []]}, "expected the form of BFCL's data"),
        ({"ground_truth": [[5], []]}, "gold call '5'"),
        ({"initial_config": None}, "expected the form of BFCL's data"),
        ({"path": [1]}, "expected the form of BFCL's data"),
        ({"ground_truth": [["ls()"], ["x"]]}, "gold call 'x'"),
        ({"ground_truth": [["open('x')"], ["ls()"]]}, "gold call of 'open': none of the classes"),
        ({"ground_truth": [["cd('x', 'y')"], ["ls()"]]}, r"'cd': it takes \['folder'\], got \['x', 'y'\]"),
    ],
)
def test_a_wrong_dialogue_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own_dialogue(json.dumps({**ENTRY, **change}))


@pytest.mark.parametrize("state", [{"root": {}}, {"root": []}, None, 7])
def test_a_state_in_which_no_world_can_be_is_refused(state: Any) -> None:
    entry = {**ENTRY, "initial_config": {"GorillaFileSystem": state}}
    with pytest.raises(ConfigError, match="'mine_0': initial_config: GorillaFileSystem cannot be in the state"):
        DialogueEpisode(own_dialogue(json.dumps(entry)))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "7"])
def test_what_is_no_dialogue_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected JSON in the form of BFCL's data"):
        own_dialogue(text)


@pytest.mark.parametrize("name", ["multi_turn_base_200", "base_0_", "simple_0", ""])
def test_an_unknown_dialogue_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="BFCL has none; expected an id such as"):
        dialogue_of(name)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    package.dialogues.cache_clear()
    line = re.escape(f"{sys.executable} -m pip install --no-deps bfcl-eval==")
    with pytest.raises(ConfigError, match=f"'bfcl-eval', which is not installed; {line}"):
        dialogue_of("multi_turn_base_0")
    with pytest.raises(ConfigError, match=line):
        BfclUser({})


def test_the_data_are_those_of_the_leaderboard() -> None:
    assert {category: len(dialogues(category)) for category in CATEGORIES} == dict.fromkeys(CATEGORIES, 200)
    hidden = dialogue_of("multi_turn_miss_func_0")
    assert hidden.hidden == {3: ("sort",)}
    assert hidden.turns[3] == package.functions_shown()
    assert dialogue_of("multi_turn_long_context_7").long_context
    assert not dialogue_of("multi_turn_base_7").long_context


# The worlds


@pytest.mark.parametrize(
    "call",
    [
        WorldCall("cd", {"folder": "docs"}),
        WorldCall("cd", {"folder": "nowhere"}),
        WorldCall("cd", {"folder": 5}),
        WorldCall("cd", {}),
        WorldCall("cd", {"folder": "docs", "deep": True}),
        WorldCall("mkdir", {"dir_name": "new"}),
        WorldCall("rmdir", {"dir_name": None}),
        WorldCall("wc", {"file_name": "log.txt", "mode": "w"}),
        WorldCall("touch", {"file_name": ["a"]}),
        WorldCall("_load_scenario", {"scenario": {}}),
        WorldCall("__init__", {}),
        WorldCall("no_such_function", {"a": 1}),
    ],
    ids=lambda call: f"{call.name}-{len(call.arguments)}",
)
def test_a_result_has_the_words_of_the_packages_executor(call: WorldCall) -> None:
    listed = [f"{name}={value!r}" for name, value in call.arguments.items()]
    theirs_, _ = multi_turn_utils.execute_multi_turn_func_call(
        [f"{call.name}({', '.join(listed)})"], FILES, ["GorillaFileSystem"], "words", f"x{id(call)}"
    )
    assert files().call(call.name, call.arguments) == theirs_[0]


def test_no_text_of_a_call_is_evaluated() -> None:
    world = files()
    name = "__import__('os').getcwd"
    assert world.call(name, {}) == f"Error during execution: name {name!r} is not defined"
    assert world.call("print", {}) == "Error during execution: name 'print' is not defined"
    assert json.loads(world.call("echo", {"content": "cd(folder='docs')"})) == {"terminal_output": "cd(folder='docs')"}


def reachable(made: Any, found: dict[int, Any]) -> dict[int, Any]:
    """Return all objects that may change and are reached from one, by their identity."""
    if id(made) in found or made is None or isinstance(made, str | int | float | type):
        return found
    if not isinstance(made, tuple):
        found[id(made)] = made
    parts = made.values() if isinstance(made, dict) else made if isinstance(made, list | set | tuple) else ()
    for part in [*parts, *vars(made).values()] if hasattr(made, "__dict__") else parts:
        reachable(part, found)
    return found


def test_no_two_worlds_share_what_may_change() -> None:
    # Eight dialogues with all eight classes. The package's own TravelAPI shares its cards in long_context.
    for name in ("long_context", "base"):
        for dialogue in list(dialogues(name).values())[::25]:
            made = [DialogueWorlds(dialogue.classes, dialogue.config, dialogue.long_context) for _ in range(2)]
            first, second = (reachable(worlds._objects, {}) for worlds in made)
            assert not [first[each] for each in first.keys() & second.keys()]
            given = reachable(dict(dialogue.config), {})
            assert not given.keys() & first.keys()


def test_a_call_keeps_nothing_of_its_arguments() -> None:
    dialogue = next(each for each in dialogues("base").values() if "TwitterAPI" in each.classes)
    worlds, tags = DialogueWorlds(dialogue.classes, dialogue.config), ["#a"]
    worlds.call("authenticate_twitter", {"username": worlds._objects["TwitterAPI"].username, "password": "x"})
    worlds._objects["TwitterAPI"].authenticated = True
    worlds.call("post_tweet", {"content": "hello", "tags": tags})
    tags.append("#b")
    assert worlds._objects["TwitterAPI"].tweets[worlds._objects["TwitterAPI"].tweet_counter - 1]["tags"] == ["#a"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("power", {"base": 10, "exponent": 10**10}),
        ("power", {"base": 7**5000, "exponent": 99}),
        ("square_root", {"number": 2, "precision": 10**9}),
        ("logarithm", {"value": 2, "base": 10, "precision": 1e9}),
        ("round_number", {"number": 5, "decimal_places": -(10**9)}),
    ],
)
def test_what_python_would_compute_for_hours_is_refused(name: str, arguments: dict[str, Any]) -> None:
    said = DialogueWorlds(["MathAPI"], {}).call(name, arguments)
    assert said == "Error during execution: at most 10000 digits are computed"


def test_mathematics_leaves_the_precision_of_the_process() -> None:
    before = decimal.getcontext().prec, mpmath.mp.dps
    worlds = DialogueWorlds(["MathAPI"], {})
    assert worlds.call("square_root", {"number": 2, "precision": 5}) == "{'result': Decimal('1.4142')}"
    assert worlds.call("logarithm", {"value": 8, "base": 2, "precision": 40}).startswith("{'result': mpf('3.0")
    assert worlds.call("power", {"base": 2, "exponent": 10}) == '{"result": 1024}'
    assert worlds.call("power", {"base": 10, "exponent": 5000}).startswith("Error during execution: Exceeds the limit")
    assert (decimal.getcontext().prec, mpmath.mp.dps) == before


def test_a_folder_that_is_put_into_itself_is_a_wrong_state_and_no_crash() -> None:
    episode = DialogueEpisode(own_dialogue(OWN))
    episode.call("cp", {"source": "docs", "destination": "docs"})
    assert episode.call("find", {}) == "Error during execution: the file system has become too large"
    assert [episode.end_turn().wrong, episode.end_turn().wrong] == ["state", "no call"]
    ours, others = files(), files()
    assert ours.same(others) == {"GorillaFileSystem": True}
    for worlds in (ours, others):
        worlds.call("cp", {"source": "docs", "destination": "docs"})
    assert ours.same(others) == {"GorillaFileSystem": False}  # they are not compared
    moved = DialogueEpisode(own_dialogue(OWN))
    moved.call("mv", {"source": "docs", "destination": "docs"})  # the package loses the folder
    assert json.loads(moved.call("find", {})) == {"matches": ["./log.txt"]}
    assert moved.end_turn().wrong == "state"


# The verdict


def test_the_verdict_on_a_turn() -> None:
    def verdicts(*turns: list[tuple[str, dict[str, Any]]]) -> list[str]:
        episode = DialogueEpisode(own_dialogue(OWN))
        for calls in turns:
            for name, arguments in calls:
                episode.call(name, arguments)
            episode.end_turn()
        return [verdict.wrong for verdict in episode.verdicts]

    make, sort, wrong = ("mkdir", {"dir_name": "old"}), ("sort", {"file_name": "log.txt"}), ("ls", dict[str, Any]())
    assert verdicts([make], [sort]) == ["", ""]
    assert verdicts([make, sort], [wrong]) == ["", ""]  # a result of an earlier turn counts, as in BFCL
    assert verdicts([make, sort], []) == ["", "no call"]
    assert verdicts([make], [wrong]) == ["", "results"]
    assert verdicts([wrong], [make, sort]) == ["state", ""]
    assert verdicts([], [sort]) == ["no call", "state"]


def test_rewards_and_what_is_cut() -> None:
    dialogue = own_dialogue(OWN)
    episode = DialogueEpisode(dialogue)
    episode.call("mkdir", {"dir_name": "old"})
    episode.end_turn()
    assert {name: episode.score(name) for name in ("turns", "all", "paper")} == {"turns": 0.5, "all": 0, "paper": 0.25}
    assert episode.call("sort", {"file_name": "log.txt"}) == '{"sorted_content": "a\\nb"}'
    episode.end_turn()
    assert [episode.score(name) for name in ("turns", "all", "paper")] == [1, 1, 1]
    assert episode.call("ls", {}) == "Error during execution: the dialogue is over"
    silent = DialogueEpisode(dialogue)
    silent.end_turn()
    silent.end_turn()
    assert [silent.score(name) for name in ("turns", "all", "paper")] == [0, 0, 0]


# The user and the tools


def test_a_dialogue_is_played_and_judged() -> None:
    outcome = rollout(
        [tool_call("mkdir", {"dir_name": "old"}), "Done.", tool_call("sort", {"file_name": "log.txt"}), "Sorted."],
        {"reward": "turns"},
    )
    said = [(message["role"], message["content"]) for message in outcome.messages if message["role"] != "assistant"]
    assert said == [
        ("system", "Call functions."),
        ("user", "Make old."),
        ("tool", "None"),
        ("user", "Sort log.txt."),
        ("tool", '{"sorted_content": "a\\nb"}'),
    ]
    assert outcome.stop_reason == "environment_done"
    assert [reply.reward for reply in outcome.replies] == [0.5, 0.5]
    assert not EPISODES


@pytest.mark.parametrize(("reward", "score"), [("all", 0.0), ("paper", 0.75), ("turns", 0.0)])
def test_the_score_of_a_whole_dialogue(reward: str, score: float) -> None:
    outcome = rollout([tool_call("mkdir", {"dir_name": "old"}), "Done.", "I do not know."], {"reward": reward})
    assert outcome.score == score


def test_calls_of_one_turn_are_made_in_their_order() -> None:
    calls = [
        tool_call("mkdir", {"dir_name": "old"}),
        tool_call("cd", {"folder": "old"}),
        tool_call("touch", {"file_name": "a"}),
        tool_call("cd", {"folder": ".."}),
        tool_call("mv", {"source": "log.txt", "destination": "old"}),
        tool_call("find", {}),
    ]
    outcome = rollout(["\n".join(calls), "Done.", "Done."], {})
    found = [message["content"] for message in outcome.messages if message["role"] == "tool"]
    assert json.loads(found[-1]) == {"matches": ["./docs", "./old", "./old/a", "./old/log.txt"]}


def test_arguments_that_do_not_fit_are_judged_by_the_world() -> None:
    outcome = rollout([tool_call("cd", {"folder": 5}), tool_call("cd", {}), "I give up.", "I give up."], {})
    answers = [message["content"] for message in outcome.messages if message["role"] == "tool"]
    assert answers[0] == "Error during execution: 'int' object has no attribute 'rstrip'"
    assert "missing 1 required positional argument: 'folder'" in answers[1]


def test_a_missing_function_is_shown_in_its_turn() -> None:
    dialogue = dialogue_of("multi_turn_miss_func_0")
    sort = tool_call("sort", {"file_name": "final_report.pdf"})
    turns = ["Done.", "Done.", sort, "I have no such function.", sort, "Sorted.", "Done."]
    outcome = asyncio.run(
        scripted_rollout(
            bfcl_tools(dialogue.classes),
            turns,
            "Help me.",
            tools_kwargs={"sort": {"shown": False}},
            interaction=BfclUser({}),
            interaction_kwargs={"id": dialogue.id},
            limits=Limits(prompt_length=30_000, response_length=30_000),
        )
    )
    first, later = (message["content"] for message in outcome.messages if message["role"] == "tool")
    assert first.startswith("Error: there is no tool 'sort'")
    assert later == '{"error": "sort: final_report.pdf: No such file or directory"}'  # it lies in another folder
    (shown,) = (
        message["content"] for message in outcome.messages if "updated some more functions" in message["content"]
    )
    assert '"name": "sort"' in shown


def test_every_function_is_a_tool_with_a_schema() -> None:
    tools = {tool.name: tool for tool in bfcl_tools()}
    assert len(tools) == 128
    assert tools["cd"].tool_schema.function.parameters["required"] == ["folder"]
    assert tools["mean"].tool_schema.function.parameters["properties"]["numbers"]["items"] == {"type": "number"}
    assert "response" not in tools["cd"].tool_schema.as_dict()["function"]
    with pytest.raises(ConfigError, match="'Files' is no class of BFCL's worlds"):
        bfcl_tools(["Files"])


def test_a_tool_without_a_dialogue_is_a_mistake_of_the_author() -> None:
    tool = bfcl_tools(["GorillaFileSystem"])[0]
    with pytest.raises(ToolContractError, match="give its row the interaction"):
        asyncio.run(tool.execute("x", {}))


def test_wrong_settings_and_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"BfclUser: config\.reward"):
        BfclUser({"reward": "some"})
    for given in ({}, {"id": "multi_turn_base_0", "dialogue": OWN}):
        with pytest.raises(ConfigError, match="expected 'id' or 'dialogue'"):
            asyncio.run(BfclUser({}).start("x", **given))
    assert read_dialogue(ENTRY, [["ls()"], []]).gold[1] == ()
