"""Rows in the form of real chat templates: their content is in the prompt, or is refused with its place."""

from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.support.families import family
from tests.support.template_builder import TemplateBuilder, prompt_codec
from verl_multiturn import ConfigError
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.first_prompts import FirstPrompts, RequiredPart
from verl_multiturn.chat.message_forms import said_is_shown
from verl_multiturn.chat.messages import read_messages
from verl_multiturn.chat.template_form import MessageError
from verl_multiturn.chat.template_rules import RuleEffect
from verl_multiturn.runs.data import make_row, write_rows

NAMES = ["quickstart", "qwen2.5", "qwen3", "qwen3.5-think", "llama3.1", "deepseek-v3", "gemma3", "gpt-oss", "mistral"]
USER = {"role": "user", "content": "Go."}
GREETING = {"role": "assistant", "content": "Hello, how can I help?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}},
    },
}


@cache
def codec_of(name: str) -> ChatCodec:
    return prompt_codec(name)


def shown(name: str, messages: Any, *tools: Any, check: RequiredPart = RequiredPart.ALL) -> str:
    """Return a row's first prompt as text."""
    codec = codec_of(name)
    trusted = codec.trusted(read_messages(messages, "row 0"))
    return str(family(name).tokenizer.decode(codec.initial(trusted, codec.trusted_schemas(tools), check)))


def history(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "c23456789", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    called = {"role": "assistant", "content": "", "tool_calls": [call], **more}
    return [USER, called, {"role": "tool", "tool_call_id": "c23456789", "content": "sunny"}, USER]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_text_blocks_are_shown_as_the_text(name: str, role: str) -> None:
    blocks = [{"type": "text", "text": text, "image_url": None} for text in ("one7", "two7")]
    rest = [] if role == "user" else [USER]
    prompt = shown(name, [{"role": role, "content": blocks}, *rest])
    assert prompt == shown(name, [{"role": role, "content": "one7\ntwo7"}, *rest])
    assert "one7\ntwo7" in prompt


@pytest.mark.parametrize("name", NAMES)
def test_a_developer_is_the_system(name: str) -> None:
    prompt = shown(name, [{"role": "developer", "content": "rules7"}, USER])
    assert prompt == shown(name, [{"role": "system", "content": "rules7"}, USER])
    assert "rules7" in prompt


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma3"])
def test_arguments_are_shown_the_same_in_each_form(name: str) -> None:
    prompt = shown(name, history({"city": "Paris"}))
    assert "Paris" in prompt
    assert '\\"city' not in prompt
    assert prompt == shown(name, history('{"city": "Paris"}'))
    assert prompt == shown(name, history({"city": "Paris", "expr": None, "opts": None}))
    assert shown(name, history("")) == shown(name, history({})) == shown(name, history(None))


@pytest.mark.parametrize("name", NAMES)
def test_no_calls_change_nothing(name: str) -> None:
    said = {"role": "assistant", "content": "said7", "tool_calls": []}
    assert "said7" in shown(name, [USER, said, USER])


def test_rows_of_one_file_do_not_show_each_others_arguments(tmp_path: Path) -> None:
    rows = [make_row("t", history(given), "x") for given in ({"city": "Paris", "on": None}, {"expr": {"deep": [1]}})]
    write_rows(tmp_path, {"train": rows})
    read = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    first, second = (shown("quickstart", row["prompt"]) for row in read)
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in first
    assert '{"name": "weather", "arguments": {"expr": {"deep": [1]}}}' in second


@pytest.mark.parametrize("name", ["quickstart", "qwen3", "qwen3.5-think", "gpt-oss", "mistral"])
def test_a_greeting_comes_behind_the_tools(name: str) -> None:
    prompt = shown(name, [GREETING, USER], TOOL)
    assert prompt.index("look_up") < prompt.index("Go.")
    assert prompt.index(GREETING["content"]) < prompt.index("Go.")


def test_gemma_3_shows_a_greeting_behind_an_empty_user_message() -> None:
    prompt = shown("gemma3", [{"role": "system", "content": "rules7"}, GREETING, USER])
    assert prompt.startswith("<bos><start_of_turn>user\nrules7")
    assert prompt.index("rules7") < prompt.index(GREETING["content"]) < prompt.index("Go.")
    assert shown("gemma3", [GREETING, USER]).startswith("<bos><start_of_turn>user\n<end_of_turn>\n<start_of_turn>model")


def test_a_template_that_refuses_a_prompt_says_so_itself() -> None:
    """Verl renders it behind an empty user message, and cuts that off with the tools before it."""
    for name in ("qwen3.5-think", "qwen3.6"):
        with pytest.raises(MessageError) as caught:
            shown(name, [GREETING], TOOL)
        assert str(caught.value).startswith("message 0 (assistant): the chat template refuses its role at this place: ")
        assert "No user query found in messages." in str(caught.value)


@pytest.mark.parametrize(
    ("name", "messages", "said"),
    [
        (
            "llama3.1",
            history({"city": "Paris"}, content="said7"),
            "message 1 (assistant): the chat template does not show its content, 'said7'; write that into",
        ),
        (
            "llama3.1",
            [USER, {**history({})[1], "tool_calls": history({})[1]["tool_calls"] * 2}, *history({})[2:]],
            "message 1 (assistant): the chat template refuses its tool_calls: This model only supports single",
        ),
        (
            "gpt-oss",
            [USER, {**history({})[1], "tool_calls": [history({"a": each})[1]["tool_calls"][0] for each in "xyz7"]}],
            "message 1 (assistant): the chat template does not show its tool_calls[",
        ),
        (
            "deepseek-v3",
            [*history({"city": "Paris"}), *history({"city": "Rome"})[1:]],
            "message 4 (assistant): the chat template writes calls in a second turn without the header of the",
        ),
        (
            "gemma3",
            history({"city": "Paris"})[:2],
            "message 1 (assistant): the chat template does not show its tool_calls[0].function.name, 'weather'",
        ),
        (
            "qwen3",
            [{"role": "user", "content": "Go.", "name": "ada7"}],
            "message 0 (user): the chat template does not show its 'name', 'ada7'; leave it out, or write it into",
        ),
    ],
)
def test_what_a_template_does_not_show_is_refused_with_its_place(name: str, messages: Any, said: str) -> None:
    with pytest.raises(MessageError) as caught:
        shown(name, messages)
    assert str(caught.value).startswith(said)


def test_tools_that_a_template_does_not_show_are_named_by_a_message() -> None:
    for name in ("deepseek-v3", "gemma3"):
        with pytest.raises(ConfigError, match="does not show the tool 'look_up'; describe it in the system message"):
            shown(name, [USER], TOOL)
        assert "look_up" in shown(name, [{"role": "system", "content": "Call look_up."}, USER], TOOL)


def test_what_the_model_wrote_may_be_shortened_by_its_template() -> None:
    messages = history({"city": "Paris"}, content="said7")
    assert "said7" not in shown("llama3.1", messages, check=RequiredPart.OTHERS)
    lost = FirstPrompts(lambda messages, schemas: "", None)
    with pytest.raises(MessageError, match=r"message 0 \(user\)"):
        lost.check([{"role": "user", "content": "lost7"}], [], RequiredPart.OTHERS)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("qwen3", ""),
        ("llama3.1", "text beside a call, several calls of a turn"),
        ("deepseek-v3", "calls in a second turn, tools that no message describes"),
        ("gpt-oss", "several calls of a turn"),
        ("gemma3", "calls in a history, tools that no message describes"),
    ],
)
def test_the_check_of_a_template_names_the_forms_that_it_does_not_take(name: str, refused: str) -> None:
    rule = said_is_shown(codec_of(name), family(name).tokenizer, tools=True)
    assert rule.verdict is (RuleEffect.KNOWN if refused else RuleEffect.KEPT)
    assert rule.found == (f"not taken, and refused where a row has it: {refused}" if refused else "")


def test_the_check_of_a_template_finds_what_is_lost_and_a_first_token_that_is_missing() -> None:
    codec, tokenizer = codec_of("quickstart"), family("quickstart").tokenizer

    class Lost(ChatCodec):
        def initial(self, messages: Any, schemas: Any, check: RequiredPart = RequiredPart.ALL) -> list[int]:
            return super().initial([message for message in messages if message["role"] != "system"], schemas, check)

    class Adds:
        bos_token_id = 5

        def encode(self, text: str) -> list[int]:
            return [5, *tokenizer.encode(text)]

        def decode(self, ids: Any) -> str:
            return str(tokenizer.decode(ids))

    lost = Lost(codec._builder, tokenizer=tokenizer, write=TemplateBuilder(tokenizer).write)
    found = said_is_shown(lost, tokenizer, tools=False)
    assert (found.verdict, found.found) == (
        RuleEffect.REFUSED,
        "a system message: 'sysq7' is not in the prompt, and nothing says so",
    )
    found = said_is_shown(codec, Adds(), tools=False)
    assert found.verdict is RuleEffect.REFUSED
    assert "the tokenizer begins a text with" in found.found


def test_arguments_in_single_quotes_are_shown() -> None:
    code = "a\\b 'c' \"d\"\nend ü"
    assert r"code='a\\b \'c\' " in shown("lfm2", history({"code": code}))


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5-think", "deepseek-v3"])
def test_a_text_before_reasoning_is_refused_where_it_is_left_out(name: str) -> None:
    message = {"role": "assistant", "content": "first <think>why</think>then"}
    with pytest.raises(MessageError, match="does not show its content, 'first '"):
        shown(name, [USER, message, USER])
