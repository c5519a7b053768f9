"""Rows that end in a greeting of the assistant's: the interaction speaks next."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from verl_multiturn import ConfigError, Interaction, InteractionContractError, Reply, Source, scripted_rollout
from verl_multiturn.cli.main import app
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.scripted_chat import transcript

GREETING = [{"role": "system", "content": "S"}, {"role": "assistant", "content": "Hello, how can I help?"}]


class Answers(Interaction):
    """A user who answers the greeting, and then ends."""

    first = Reply("Cancel my order.")

    def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        return self.first if messages[-1]["content"] == GREETING[-1]["content"] else Reply(done=True, reward=1.0)


class Begins(Answers):
    """A user who speaks first."""

    def start(self, instance_id: str, **kwargs: Any) -> Reply:
        return Reply("Cancel my order.")


@pytest.mark.parametrize("user", [Answers, Begins])
async def test_the_user_speaks_behind_a_greeting(user: type[Interaction]) -> None:
    outcome = await scripted_rollout({}, ["Done."], GREETING, interaction=user({}))
    assert outcome.stop_reason is StopReason.ENVIRONMENT_DONE
    assert [(message["role"], message["content"]) for message in outcome.messages] == [
        ("system", "S"),
        ("assistant", "Hello, how can I help?"),
        ("user", "Cancel my order."),
        ("assistant", "Done."),
    ]
    prompt = transcript(outcome)[0]
    assert prompt[0] is Source.PROMPT
    assert prompt[1].endswith("Cancel my order.<|im_end|>\n<|im_start|>assistant\n")


async def test_a_user_who_is_done_at_the_greeting_has_failed() -> None:
    class Done(Answers):
        first = Reply(done=True)

    outcome = await scripted_rollout({}, [], GREETING, interaction=Done({}))
    assert outcome.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert outcome.error == "interaction 'done': it was over before the model's first turn"


async def test_a_user_shows_no_tools_at_the_greeting() -> None:
    class Shows(Answers):
        first = Reply("Here.", shows=["echo"])

    with pytest.raises(InteractionContractError, match="shows the tool 'echo' before the model's first turn; show it"):
        await scripted_rollout({}, [], GREETING, interaction=Shows({}))


async def test_without_a_user_such_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt ends in the assistant's answer; leave it out, or put it into"):
        await scripted_rollout({}, ["Done."], GREETING)


async def test_a_row_that_its_template_does_not_show_is_refused_by_name() -> None:
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q", "name": "ada"}]
    with pytest.raises(ConfigError, match=r"^prompt: message 1 \(user\): the chat template does not show its 'name'"):
        await scripted_rollout({}, ["Done."], prompt)


SCORED = {"data_source": "sums", "reward_model": {"ground_truth": "2"}}


def test_validate_takes_a_greeting_with_a_user_alone(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    answered = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows.write_text(
        "\n".join(json.dumps({"prompt": prompt, **SCORED}) for prompt in (GREETING[:1] + answered[:1], answered))
    )
    users, tools = tmp_path / "users.yaml", tmp_path / "tools.yaml"
    users.write_text(f"interaction:\n  - class_name: {__name__}.Answers\n")
    tools.write_text("tools:\n  - class_name: tests.conftest.EchoTool\n")
    done = CliRunner().invoke(app, ["validate", "--interactions", str(users), "--dataset", str(rows)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["validate", str(tools), "--dataset", str(rows)])
    assert done.exit_code == 1
    assert "row 1 ends in the assistant's answer; leave it out, or put it into reward_model.ground_truth" in done.output
