"""`verl-multiturn replay` on the folder of a run: output, refusals, and effects of a changed setting."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from typer.testing import CliRunner, Result
from verl.utils import hf_tokenizer

from tests.conftest import ROOT
from tests.support.rollout_config import MODEL, make_config
from tests.support.sample_records import sample_record
from verl_multiturn import Interaction, Reply, ScriptedEngine
from verl_multiturn.calls.limits import limits_of
from verl_multiturn.cli.main import app
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.run_file import digest, digest_of_vocabulary
from verl_multiturn.replay import comparison
from verl_multiturn.replay.calls import ReplayDifference
from verl_multiturn.rollout.life import Life
from verl_multiturn.runs.data import tool_call
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.loading.registry import load_tools, schema_of
from verl_multiturn.verl_bridge.loops.output import to_outputs
from verl_multiturn.verl_bridge.loops.runner import build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.offline.replay import conversations
from verl_multiturn.verl_bridge.offline.replay.loading import recorded_interactions, recorded_tools

pytestmark = pytest.mark.stack

START = "20261126T101500_9f3c2a"
TOOLS = ROOT / "tool_configs" / "calculator.yaml"
TURNS = [tool_call("calculator", {"expression": "2 + 3"}), "The answer is #### 5"]
PATH = "actor_rollout_ref.rollout"


def settings() -> Any:
    config = make_config(600, 600)
    OmegaConf.update(config, "actor_rollout_ref.model", {"path": str(MODEL)}, force_add=True)
    OmegaConf.update(config, f"{PATH}.multi_turn.tool_config_path", str(TOOLS), force_add=True)
    reward = {
        "custom_reward_function": {"path": "pkg://verl_multiturn.rewards", "name": "compute_score"},
        "reward_manager": {"source": "register", "name": "naive"},
        "reward_model": {"enable": False},
    }
    OmegaConf.update(config, "reward", reward, force_add=True)
    return config


class Greeter(Interaction):
    """A user who speaks first, and is content with the first answer."""

    async def start(self, instance_id: str, **kwargs: Any) -> Reply:
        return Reply("Hello.")

    async def reply(self, instance_id: str, messages: Sequence[Any], **kwargs: Any) -> Reply:
        return Reply("Thanks.", reward=0.5, done=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two conversations, whose rewards are 1 and 0."""
    return make_run(tmp_path_factory.mktemp("run") / "records")


def make_run(made: Path, users: Path | None = None) -> Path:
    """Write the folder of a run with two conversations, whose rewards are 1 and 0.

    Args:
        made: Its folder of records.
        users: The interactions' YAML; None: none answers.
    """
    tokenizer, config = hf_tokenizer(str(MODEL)), settings()
    if users is not None:
        OmegaConf.update(config, f"{PATH}.custom.multiturn.interaction_config_path", str(users), force_add=True)
    writer = RecordWriter(made, START)

    async def roll(number: int) -> None:
        said = [tokenizer.encode(f"{turn}<|im_end|>") for turn in TURNS]
        runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), ScriptedEngine(said))
        row = {
            "raw_prompt": [{"role": "user", "content": "What is 2 + 3?"}],
            "data_source": "openai/gsm8k",
            "reward_model": {"ground_truth": "5" if number == 0 else "6"},
            "extra_info": {"index": number},
            "interaction_kwargs": None if users is None else {"name": "greeter"},
        }
        request = await runner.request(row, runner.sampling({"temperature": 1.0}), f"request-{number}")
        outcome, generations = await runner.run(request)
        outputs = to_outputs(outcome, runner.output_settings, 1)
        assert [each.num_turns for each in outputs] == [4]
        line = {"request_id": request.request_id, "uid": "u", "number": number, "step": 1}
        ended = Life(outcome.request_id, "u", number, step=1, row=row, outcome=outcome, generations=generations)
        ended.request = request
        writer.begin(line)
        writer.keep(lambda: record_of(ended), line)
        writer.scored({**line, "score": float(number == 0)})

    for number in range(2):
        asyncio.run(roll(number))
    writer.close()
    template = tokenizer.chat_template
    run = {
        "schema": 2,
        "start": START,
        "began": 1.0,
        "host": "h",
        "versions": {},
        "settings": OmegaConf.to_container(config),
        "tools": yaml.safe_load(TOOLS.read_text()),
        "interactions": None if users is None else yaml.safe_load(users.read_text()),
        "schemas": [schema_of(tool).as_dict() for tool in load_tools(TOOLS).values()],
        "tokenizer": {"digest": digest_of_vocabulary(tokenizer.get_vocab())},
        "template": {"digest": digest(template.encode()), "text": template},
    }
    (made / f"run-{START}.json").write_text(json.dumps(run))
    return made.parent


def replay(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments), "--trust"])


def last(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_all_is_made_again_with_its_rewards(folder: Path) -> None:
    result = replay(folder)
    assert result.exit_code == 0, result.output
    found = last(result)
    assert (found["conversations"], found["same"], found["different"], found["skipped"]) == (2, 2, 0, 0)
    assert found["scored"] == 2


@pytest.fixture(scope="module")
def with_user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose conversations a user opens and ends."""
    place = tmp_path_factory.mktemp("users")
    (place / "users.yaml").write_text(f"interaction:\n  - class_name: {__name__}.Greeter\n")
    return make_run(place / "records", place / "users.yaml")


def test_a_users_conversations_are_made_again(with_user: Path) -> None:
    result = replay(with_user)
    assert (result.exit_code, last(result)["same"], last(result)["different"]) == (0, 2, 0), result.output


def test_a_difference_is_printed_once(with_user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reward of each reply, and two differences that read the same: each is one line."""
    changed = comparison.differences

    def twice(recorded: Any, now: Any, until: int | None = None) -> list[ReplayDifference]:
        now = {**now, "replies": [{**each, "metrics": {"new": 1}} for each in now["replies"]]}
        return [each for each in changed(recorded, now, until) for _ in range(2)]

    monkeypatch.setattr(conversations, "differences", twice)
    result = replay(with_user, "request-0")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:-1] == [
        "request-0: turn 1, replies.metrics: {} in the record, now {'new': 1}",
        "request-0: the opening, replies.metrics: {} in the record, now {'new': 1}",
    ]


def test_live_tools_answer_the_same(folder: Path) -> None:
    assert last(replay(folder, "--live", "request-1"))["same"] == 1


def test_the_beginning_of_an_id_is_enough(folder: Path) -> None:
    assert last(replay(folder, "request-1"))["conversations"] == 1
    assert last(replay(folder, "request-1", "request-0"))["conversations"] == 2
    result = replay(folder, "request-")
    assert result.exit_code == 2
    assert "REQUEST 'request-': 2 ids begin so, such as 'request-0', 'request-1'; write more of it" in result.stderr


def test_an_unknown_id_is_refused_beside_a_known_one(folder: Path) -> None:
    result = replay(folder, "request-0", "reqest-1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "REQUEST 'reqest-1': there is no such recorded conversation among 2" in result.stderr


def test_control_characters_of_an_id_are_not_printed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / f"run-{START}.json").write_bytes((folder / "records" / f"run-{START}.json").read_bytes())
    writer = RecordWriter(tmp_path, START)
    record = sample_record(request_id="a\x1b[2J\nb")
    line = {"request_id": record["request_id"], "uid": "u", "number": 0, "step": 1}
    writer.begin(line)
    writer.keep(lambda: record, line)
    writer.close()
    result = replay(tmp_path, "--no-scores")
    assert result.stdout.startswith("a\\x1b[2J\\nb: ")


def test_without_verl_it_cannot_be_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl_multiturn.verl_bridge.offline.replay.command", None)
    result = replay(folder)
    assert result.exit_code == 2
    assert "a replay needs verl and transformers" in result.stderr


def test_a_changed_setting_names_the_turn(folder: Path) -> None:
    result = replay(folder, "--set", "multi_turn.max_tool_response_length=20", "--set", "turns_reminder=true")
    assert last(result)["same"] == 2  # the answer is short, and there is no limit of turns
    result = replay(folder, "--set", "turns_reminder=true", "--set", "multi_turn.max_assistant_turns=4")
    assert last(result)["from_turn"] == {"1": 2}
    assert result.stdout.splitlines()[0].startswith("request-0: turn 1, generations.prompt, token ")


def test_a_mistaken_setting_is_refused(folder: Path) -> None:
    result = replay(folder, "--set", "multi_turn.no_such=1")
    assert (result.exit_code, "--set multi_turn.no_such: the run has no such setting" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("tokenizer", {"digest": "0"}, "is another than the run's; say --set actor_rollout_ref.model.path=FOLDER"),
        ("template", {"digest": "0"}, "the chat template of"),
        ("schemas", [], "the tools are ['calculator'], the run's []; say --set"),
    ],
)
def test_another_model_or_schema_is_refused(folder: Path, tmp_path: Path, entry: str, value: Any, said: str) -> None:
    for path in (folder / "records").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / f"run-{START}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), entry: value}))
    result = replay(tmp_path)
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = replay(tmp_path)
    assert result.exit_code == 2


def test_a_folder_of_the_version_before_derived() -> None:
    made = ROOT / "tests" / "support" / "run_before_derived"
    model = ROOT / "recipes" / "quickstart" / "model"
    found = replay(made, "--no-scores", "--set", f"model.path={model}")
    assert found.exit_code == 0, found.output
    assert (last(found)["same"], last(found)["different"]) == (4, 0)
    tools = f"rollout.multi_turn.tool_config_path={TOOLS}"  # beside the file that the run has moved
    found = replay(made, "--no-scores", "--set", f"model.path={model}", "--set", tools)
    assert (found.exit_code, last(found)["same"]) == (0, 4), found.output


def test_settings_of_an_earlier_version_that_are_constants_now() -> None:
    limits, own = {"backoff_s": 2.0, "timeout_s": 7.0}, {"class_name": "nowhere.Tool", "config": {"connections": 3}}
    schema = schema_of(load_tools(TOOLS)["calculator"]).as_dict()
    for entry in ({"mcp": {"url": "http://x"}, "limits": limits}, {**own, "limits": limits}):
        tool = recorded_tools({"tools": [entry]}, [schema])["calculator"]
        assert limits_of(tool, ToolLimits).timeout_s == 7.0
    config = {"base_url": "http://x/v1", "model": "m", "connections": 8}
    user = {"name": "user", "class_name": "verl_multiturn.interactions.llm_user.LlmUser", "config": config}
    assert recorded_interactions({"interaction": [user]}).keys() == {"user"}
    strange = {**user, "config": {**config, "own": 1}}
    assert recorded_interactions({"interaction": [strange, "odd"]}) == {}
