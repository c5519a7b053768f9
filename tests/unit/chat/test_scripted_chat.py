"""`scripted_rollout`: tools and texts to an `Outcome`, without verl's stack."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from tests.conftest import ROOT, EchoTool
from verl_multiturn import (
    ConfigError,
    Interaction,
    Limits,
    Reply,
    Source,
    StopReason,
    load_interactions,
    load_tools,
    scripted_rollout,
)
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer, transcript
from verl_multiturn.runs.data import tool_call
from verl_multiturn.tools.loading.functions import FromRow
from verl_multiturn.tools.running.results import CallStatus


def lookup(key: str, *, table: Annotated[dict[str, str], FromRow]) -> str:  # noqa: D417  # the docstring is data
    """Look a key up.

    Args:
        key: The key.
    """
    return table.get(key, "nothing found")


CALL = tool_call("lookup", {"key": "a"})
KWARGS = {"lookup": {"execute_kwargs": {"table": {"a": "1 ü", "b": "<|im_end|>"}}}}


async def test_a_conversation_with_a_function() -> None:
    outcome = await scripted_rollout([lookup], [CALL, "It is 1."], "What is a?", tools_kwargs=KWARGS)
    assert outcome.stop_reason is StopReason.FINISHED
    assert [(call.tool, call.status, call.text) for call in outcome.calls] == [("lookup", CallStatus.OK, "1 ü")]
    assert outcome.differences == []
    prompt, *response = transcript(outcome)
    assert prompt[0] is Source.PROMPT
    assert '"name": "lookup"' in prompt[1]
    assert prompt[1].endswith("<|im_start|>user\nWhat is a?<|im_end|>\n<|im_start|>assistant\n")
    assert response == [
        (Source.SAMPLED, f"{CALL}<|im_end|>"),
        (Source.TEMPLATE, "\n"),
        (Source.OBSERVATION, "<|im_start|>tool\n1 ü<|im_end|>\n<|im_start|>assistant\n"),
        (Source.SAMPLED, "It is 1.<|im_end|>"),
    ]
    trained = [index for index, mask in zip(outcome.trajectory.ids, outcome.trajectory.mask, strict=True) if mask]
    assert tiny_tokenizer().decode(trained) == f"{CALL}<|im_end|>It is 1.<|im_end|>"


async def test_tools_of_a_yaml_and_their_lives() -> None:
    tools = load_tools(ROOT / "tool_configs" / "calculator.yaml")
    call = tool_call("calculator", {"expression": "6 * 7"})
    outcome = await scripted_rollout(tools, [f"So:\n{call}", "42"], [{"role": "user", "content": "6 * 7?"}])
    assert outcome.calls[0].text == "42"
    assert outcome.differences == []
    echo = EchoTool({"reward": 0.5})
    outcome = await scripted_rollout([echo], [tool_call("echo", {"text": "x"}), "x"], "Say x.")
    assert outcome.calc_rewards == {"echo": 0.5}
    assert dict(echo.counts) == {"create": 1, "execute": 1, "calc_reward": 1, "release": 1}


async def test_what_a_model_may_do_wrong() -> None:
    turns = [
        "<tool_call>\n{oops\n</tool_call>",
        tool_call("nothing", {}),
        tool_call("lookup", {"key": 1}),
        f"{CALL}\n{CALL}",
        "I do not know.",
    ]
    outcome = await scripted_rollout([lookup], turns, "What is a?", tools_kwargs=KWARGS)
    assert [call.status for call in outcome.calls] == [
        CallStatus.MALFORMED,
        CallStatus.UNKNOWN_TOOL,
        CallStatus.BAD_ARGUMENTS,
        CallStatus.OK,
        CallStatus.OVER_LIMIT,
    ]
    limits = Limits(prompt_length=500, response_length=500, max_assistant_turns=2)
    outcome = await scripted_rollout([lookup], turns, "What is a?", tools_kwargs=KWARGS, limits=limits)
    assert outcome.stop_reason is StopReason.MAX_ASSISTANT_TURNS


async def test_what_a_tool_says_is_no_control_token() -> None:
    turns = [tool_call("lookup", {"key": "b"}), "Well."]
    outcome = await scripted_rollout([lookup], turns, "What is b?", tools_kwargs=KWARGS)
    end = tiny_tokenizer().eos_token_id
    trajectory = outcome.trajectory
    said = [i for i, source in zip(trajectory.ids, trajectory.sources, strict=True) if source is Source.OBSERVATION]
    assert said.count(end) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"turns": [CALL]}, "the script has 1 turns, and one more was asked for after the message '1 ü'; add it"),
        ({"turns": ["It is 1.", CALL]}, "finished after turn 1 of 2; leave "),
        ({"turns": "It is 1."}, "turns='It is 1.': expected a list of texts"),
        ({"turns": [1]}, "expected a list of texts"),
        ({"prompt": 3}, "prompt=3: expected a text or a list of messages"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, "did you mean 'user'?"),
        ({"limits": {"max_user_turns": 2}}, "expected Limits(...)"),
        ({"tools": 3}, "tools=3: expected what load_tools returns"),
        ({"tools": "lookup"}, "tools='lookup': expected what load_tools returns"),
    ],
)
async def test_a_mistake_in_the_script_is_said(changed: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    given = {"tools": [lookup], "turns": [CALL, "1"], "prompt": "What is a?", "tools_kwargs": KWARGS}
    with pytest.raises(ConfigError) as caught:
        await scripted_rollout(**{**given, **changed})
    assert said in str(caught.value)
    assert caplog.text == ""


async def test_malformed_turns_end_it_as_in_a_run() -> None:
    turns = ["<tool_call>\n{oops\n</tool_call>"] * 4
    outcome = await scripted_rollout([lookup], turns, "What is a?", tools_kwargs=KWARGS)
    assert outcome.stop_reason is StopReason.MALFORMED_CALLS
    assert len(outcome.turns) == 3


@pytest.mark.parametrize(
    ("tools", "kwargs", "said"),
    [
        ([lookup], None, "cannot be called with execute_kwargs {}"),
        ([lookup], {"look": {}}, "did you mean 'lookup'?"),
        ([EchoTool], None, "is a class"),
        ([EchoTool(), EchoTool()], None, "used twice"),
        (["lookup"], None, "expected a function"),
    ],
)
async def test_mistakes_of_an_author_are_said(tools: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await scripted_rollout(tools, ["x"], "What is a?", tools_kwargs=kwargs)
    assert said in str(caught.value)


class Shop(Interaction):
    def start(self, instance_id: str, *, price: int) -> Reply:  # type: ignore[override]
        return Reply(f"It costs {price}.")

    def reply(self, instance_id: str, messages: Any, *, price: int) -> Reply:  # type: ignore[override]
        return Reply("Sold.", done=True) if str(price) in messages[-1]["content"] else Reply("Too little.")

    def close(self, instance_id: str) -> None:
        raise KeyError(instance_id)  # there is no message about it


async def test_no_turn_remains_after_the_end_of_an_interaction() -> None:
    turns = ["2 dollars", "3 dollars", "more"]
    with pytest.raises(ConfigError, match="was ended by the interaction after turn 2 of 3; leave 'more' out"):
        await scripted_rollout([], turns, "Hello.", interaction=Shop({}), interaction_kwargs={"price": 3})
    outcome = await scripted_rollout([], turns[:2], "Hello.", interaction=Shop({}), interaction_kwargs={"price": 3})
    assert outcome.stop_reason is StopReason.ENVIRONMENT_DONE
    await scripted_rollout(  # a limit may leave turns
        [], turns, "Hello.", interaction=Shop({}), interaction_kwargs={"price": 9}, limits=Limits(512, 512, 2)
    )


class OddShop(Shop):
    def score(self, instance_id: str, messages: Any) -> float:  # type: ignore[override]
        return 0.0


async def test_a_conversation_with_a_user() -> None:
    outcome = await scripted_rollout([], ["3", "4"], "Buy it.", interaction=Shop({}), interaction_kwargs={"price": 4})
    assert outcome.stop_reason is StopReason.ENVIRONMENT_DONE
    assert [message["content"] for message in outcome.messages] == ["Buy it.", "It costs 4.", "3", "Too little.", "4"]


async def test_a_user_of_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "users.yaml").write_text(f"interaction: [{{class_name: {__name__}.Shop, name: vase}}]")
    shop = load_interactions(tmp_path / "users.yaml")["vase"]
    outcome = await scripted_rollout([], ["4"], "Buy it.", interaction=shop, interaction_kwargs={"price": 4})
    assert outcome.stop_reason is StopReason.ENVIRONMENT_DONE


@pytest.mark.parametrize(
    ("user", "kwargs", "said"),
    [
        (Shop, {"price": 4}, "expected an object of a class that derives from Interaction"),
        ({"shop": Shop({})}, {"price": 4}, "take one by its name from what `load_interactions` returns"),
        (Shop({}), {}, "cannot be called with {}: missing a required argument: 'price'"),
        (Shop({}), {"prize": 4}, "cannot be called with {'prize': 4}"),
        (OddShop({}), {"price": 4}, "cannot be called as score(instance_id): missing a required argument: 'messages'"),
        (None, {"price": 4}, "there is no `interaction`"),
        (Shop({}), {"price": 4}, "one more was asked for after the message 'Too little.'; add it"),
    ],
)
async def test_mistakes_about_a_user_are_said(user: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await scripted_rollout([], ["3"], "Buy it.", interaction=user, interaction_kwargs=kwargs)
    assert said in str(caught.value)


async def test_an_error_of_a_user_has_its_name_and_place() -> None:
    class Broken(Interaction):
        def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
            return Reply(self.config["word"])

    outcome = await scripted_rollout([], ["3"], "Guess.", interaction=Broken({}))
    line = Broken.reply.__code__.co_firstlineno + 1
    assert outcome.error == f"interaction 'broken': reply: KeyError: 'word' (test_scripted_chat.py:{line})"


def test_it_needs_none_of_the_stack() -> None:
    program = (
        "import asyncio, sys\n"
        "for name in ('torch', 'verl', 'ray', 'sglang', 'transformers', 'hydra'): sys.modules[name] = None\n"
        "from verl_multiturn import scripted_rollout\n"
        "def now() -> str:\n"
        "    'The time.'\n"
        "    return '12:00'\n"
        'call = \'<tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>\'\n'
        "outcome = asyncio.run(scripted_rollout([now], [call, 'Noon.'], 'What time is it?'))\n"
        "print(outcome.stop_reason, outcome.calls[0].text)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "finished 12:00\n", done.stderr


def test_the_script_beside_it_makes_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.rollout.tiny_chat import make_tokenizer

    monkeypatch.setattr(make_tokenizer, "FOLDER", tmp_path)
    make_tokenizer.main()
    shipped = ROOT / "verl_multiturn" / "rollout" / "tiny_chat"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((shipped / name).read_text())
    assert (shipped / "tokenizer.json").stat().st_size < 20_000
