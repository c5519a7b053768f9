"""Requests to token ids: roles that a template takes, ends of cut turns, the comparison of messages, stop texts."""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agent_sessions import ADD, Agent, answer, call_text, echo, make_run, said, system, turns, user
from verl_multiturn import Ask, EngineError, Generation
from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.template_form import TemplateForm
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, RefusedError
from verl_multiturn.proxy.sessions.canonical import arguments_key, compared, content_key
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import PromptRenderer, closing_ids
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.rollout.scripted_chat import TinyBuilder, tiny_tokenizer

DEVELOPER = {"role": "developer", "content": "d"}


def tiny_codec(builder: Any = None) -> ChatCodec:
    tokenizer = tiny_tokenizer()
    return ChatCodec(builder or TinyBuilder(tokenizer), [tokenizer.eos_token_id])


class Strict(TinyBuilder):
    """A template that takes one system message, at the beginning, and roles in turns."""

    def _text(self, messages: list[Any], tools: Any, header: bool) -> str:
        roles = [message["role"] for message in messages]
        if "system" in roles[1:] or any(a == b == "user" for a, b in itertools.pairwise(roles)):
            raise ValueError("no such turn")
        return super()._text(messages, tools, header)


class WithoutSystem(TinyBuilder):
    """A template that leaves system messages out without a word."""

    def _text(self, messages: list[Any], tools: Any, header: bool) -> str:
        return super()._text([each for each in messages if each["role"] != "system"], tools, header)


def test_a_template_that_takes_all_gets_all() -> None:
    roles = TemplateForm(tiny_codec())
    assert (roles.takes_system, roles.takes_later_system, roles.takes_users_in_a_row) == (True, True, True)
    found = roles.prompt([system("s"), DEVELOPER, user("u"), system("later"), user("v")])
    assert found == [system("s\n\nd"), user("u"), system("later"), user("v")]
    assert roles.added([user("u"), DEVELOPER], said("a")) == [user("u"), system("d")]


def test_later_system_messages_and_users_in_a_row_are_joined_where_a_template_refuses_them() -> None:
    roles = TemplateForm(tiny_codec(Strict(tiny_tokenizer())))
    assert (roles.takes_system, roles.takes_later_system, roles.takes_users_in_a_row) == (True, False, False)
    found = roles.prompt([DEVELOPER, user("u"), system("later"), said("a"), user("v")])
    assert found == [system("d"), user("u\n\nlater"), said("a"), user("v")]
    image = {"type": "image", "image": "…"}
    found = roles.added([user("u"), {"role": "user", "content": [image]}], said("a"))
    blank, text = {"type": "text", "text": "\n\n"}, {"type": "text", "text": "u"}
    assert found == [{"role": "user", "content": [text, blank, image]}]


def test_a_system_message_that_is_not_shown_becomes_a_users() -> None:
    roles = TemplateForm(tiny_codec(WithoutSystem(tiny_tokenizer())))
    assert (roles.takes_system, roles.takes_later_system) == (False, False)
    assert roles.prompt([system("s"), user("u")]) == [user("s"), user("u")]


def test_tools_messages_get_their_names() -> None:
    calls = [{"id": name * 9, "type": "function", "function": {"name": name, "arguments": '{"x": 1}'}} for name in "ab"]
    turn = {"role": "assistant", "content": None, "tool_calls": calls, "audio": None}
    answers = [
        {"role": "tool", "tool_call_id": "b" * 9, "content": "1"},
        {"role": "tool", "content": "2", "name": "of the client"},
        {"role": "tool", "tool_call_id": "unknown", "content": "3"},
    ]
    found = TemplateForm(tiny_codec()).prompt([user("u"), turn, *answers])
    assert found[1]["tool_calls"][0]["function"] == {"name": "a", "arguments": {"x": 1}}
    assert "audio" not in found[1]
    assert [message["name"] for message in found[2:]] == ["b", "b", "error"]
    assert TemplateForm(tiny_codec()).added(answers, turn) == found[2:]


def test_a_cut_turn_is_ended_as_the_template_ends_turns() -> None:
    assert tiny_tokenizer().decode(closing_ids(tiny_codec())) == "<|im_end|>\n"


@pytest.mark.stack
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2.5", "<|im_end|>\n"),
        ("qwen3", "<|im_end|>\n"),
        ("qwen3.8", "<|im_end|>\n"),
        ("llama3.1", "<|eot_id|>"),
        ("mistral", "</s>"),
        ("deepseek-v3", "<｜end▁of▁sentence｜>"),
        ("gpt-oss", "<|end|>"),
        ("gemma4", "<turn|>\n"),
        ("glm4-moe", ""),  # the next message ends the turn
        ("gemma3", ""),  # nothing can be appended: the next request is a root
    ],
)
def test_a_cut_turn_is_ended_as_the_families_end_turns(name: str, text: str) -> None:
    from tests.support.template_play import template_of

    template = template_of(name)
    assert template.tokenizer.decode(closing_ids(template.codec)) == text


@pytest.mark.stack
@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("qwen3", (True, True, True)),
        ("qwen3.5-think", (True, False, True)),
        ("qwen3.8", (True, False, True)),
        ("gpt-oss", (True, False, True)),
        ("gemma3", (True, False, False)),
    ],
)
def test_what_families_take(name: str, takes: tuple[bool, bool, bool]) -> None:
    from tests.support.template_play import template_of

    roles = TemplateForm(template_of(name).codec)
    assert (roles.takes_system, roles.takes_later_system, roles.takes_users_in_a_row) == takes


@pytest.mark.stack
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "mistral"])
async def test_a_tool_without_a_description_is_shown(name: str) -> None:
    """gpt-oss' template refuses it; others show an empty description otherwise than none."""
    from tests.support.template_play import template_of

    template = template_of(name)
    tool = {"type": "function", "function": {"name": "q7z", "parameters": {"type": "object", "properties": {}}}}
    renderer = PromptRenderer(template.codec, template.end_ids)
    text = template.tokenizer.decode((await renderer.prompt([user("x")], [tool], "t")).ids)
    renderer.close()
    assert "q7z" in text
    assert "description" not in text or name == "gpt-oss"


@pytest.mark.stack
@pytest.mark.parametrize("name", ["qwen3", "qwen3.8", "glm4-moe", "lfm2", "deepseek-v3"])
async def test_a_history_with_calls_is_rendered_by_each_template(name: str) -> None:
    """DeepSeek-V3's template takes arguments as text, others as objects alone."""
    from tests.support.template_play import template_of

    template = template_of(name)
    call = {"id": "a23456789", "type": "function", "function": {"name": "f", "arguments": '{"word": "q7z"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "b23456789"}]}
    answers = [{"role": "tool", "content": "r", "tool_call_id": each} for each in ("a23456789", "b23456789")]
    renderer = PromptRenderer(template.codec, template.end_ids)
    prompt = await renderer.prompt([user("x"), said, *answers, user("y")], [], "")
    renderer.close()
    assert template.tokenizer.decode(prompt.ids).count("q7z") == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": [true]}', ' {"b":[true],"a":1.0} ', True),
        ("", "{}", True),
        ('{"a": "\\u00fc"}', '{"a": "ü"}', True),
        ('{"a": "\\ud83d!"}', '{"a": "�!"}', True),  # as the body of a client that sends it as an object is read
        ('{"a": "\\ud83d\\ude00"}', '{"a": "😀"}', True),
        ('{"a": "\\\\ud83d"}', '{"a": "�"}', False),
        ('{"a": "\\ud8zz"}', '{"a": "\\ud8yy"}', False),  # neither is JSON
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', '{"a": 1', False),
        ('{"a": 1e400}', '{"a": 1e401}', True),  # both are infinite to a parser
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}', True),  # JavaScript's numbers
        ('{"a": 1234567890123456}', '{"a": 1234567890123457}', False),
        ("[" * 100_000, "[" * 100_000, True),
        ("[" * 100_000, "[" * 99_999, False),
    ],
)
def test_arguments_are_compared_parsed(one: str, other: str, same: bool) -> None:
    assert (arguments_key(one) == arguments_key(other)) is same


def test_contents_are_compared_as_text() -> None:
    text = {"type": "text", "text": "ab", "cache_control": {"type": "ephemeral"}}
    assert content_key([text]) == content_key("ab") == content_key(["a", "b"])
    assert content_key(None) == content_key("") == content_key([])
    image, other = ({"type": "image", "image": f"data:image/png;base64,{each}"} for each in "ab")
    assert content_key([text, image]) == content_key(["a", "b", dict(image)])
    assert content_key([text, image]) != content_key([text, other])
    assert content_key([image, text]) != content_key([text, image])


def test_a_developer_is_the_system_and_no_user() -> None:
    assert compared(DEVELOPER) == compared(system("d"))
    assert compared(system("d")) != compared(user("d"))


async def test_what_cannot_be_rendered_is_refused_and_asked_for_again() -> None:
    codec = tiny_codec(Strict(tiny_tokenizer()))
    run = make_run(turns("a", "b"))
    agent = Agent(make_run(turns("a", "b")))
    agent.session._run = run.__class__(**{**run.__dict__, "renderer": PromptRenderer(codec, [])})
    broken = [user("x"), said("y"), {"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,"}]}]
    for _ in range(2):
        with pytest.raises(RefusedError, match="the model takes no images") as caught:
            await agent.ask(broken)
        assert (caught.value.status, caught.value.code) == (400, "invalid_request_error")
    assert agent.session.forest.roots == []


async def test_what_a_template_cannot_append_is_rendered_whole() -> None:
    class Whole(TinyBuilder):
        def merge_context_tokens(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("roles must alternate")

    run = make_run(turns("a", "b"))
    renderer = PromptRenderer(tiny_codec(Whole(tiny_tokenizer())), [tiny_tokenizer().eos_token_id])
    agent = Agent(run.__class__(**{**run.__dict__, "renderer": renderer}))
    await agent.ask([user("x")])
    await agent.ask([user("x"), said("a"), user("y")])
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, None]
    written = outcome.trajectory
    assert tiny_tokenizer().decode(written.ids[: written.prompt_length]) == (
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\ny<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_roots_and_long_messages_are_rendered_in_a_thread() -> None:
    run = make_run(turns(call_text("add", {"a": 1}), "b", "c", "d"), response_length=40_000)
    codec, threads = run.renderer._codec, []
    for name in ("initial", "observation"):
        real = getattr(codec, name)

        def told(*args: Any, real: Any = real, name: str = name) -> Any:
            threads.append((name, threading.current_thread() is threading.main_thread()))
            return real(*args)

        setattr(codec, name, told)
    agent = Agent(run)
    first = await agent.ask([user("x")], [ADD])
    answered = [user("x"), {"role": "assistant", "tool_calls": [{"id": first.calls[0].id, **_function(first)}]}]
    second = await agent.ask([*answered, {"role": "tool", "content": "short"}], [ADD])
    await agent.ask(
        [*answered, {"role": "tool", "content": "short"}, said(second.content), user("long " * 2_000)], [ADD]
    )
    assert threads == [("initial", False), ("observation", True), ("observation", False)]
    await agent.ask([*answered, *({"role": "tool", "content": ""} for _ in range(200))], [ADD])
    assert threads[3:] == [("observation", False)]


def _function(completion: Any) -> dict[str, Any]:
    call = completion.calls[0]
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@pytest.mark.parametrize("at_once", [1, 3])
async def test_a_prompt_that_fails_fails_for_all_that_wait_for_it(at_once: int) -> None:
    class Refusing(TinyBuilder):
        def build_initial_tokens(self, *args: Any, **kwargs: Any) -> list[int]:
            raise ValueError("no such role")

    run = make_run(turns("a"))
    renderer = PromptRenderer(tiny_codec(Refusing(tiny_tokenizer())), [])
    agent = Agent(run.__class__(**{**run.__dict__, "renderer": renderer}))
    asked = (agent.session.complete(ChatRequest([user("x")])) for _ in range(at_once))
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in found] == [
        "the chat template cannot render the prompt: no such role; change its messages, or use another chat template"
    ] * at_once


# Text of each id; the ids are positions in this list.
PIECES = ["x", "\n", "</", "code", ">", "</code>\n", "a</code>b", "STOP", "ST", "OP"]
STOPS = ["</code>", "STOP", "\n"]


class Pieces:
    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(PIECES[index] for index in token_ids)


@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=10), stops=st.lists(st.sampled_from(STOPS), max_size=3))
async def test_stop_texts_end_a_generation_at_the_token_that_completes_the_first(
    ids: list[int], stops: list[str]
) -> None:
    class Engine:
        async def generate(self, *_: Any, **__: Any) -> Generation:
            return Generation(ids, [-float(at) for at in range(len(ids))], list(range(len(ids))), "length")

    stopping = StopTexts(Engine(), Pieces())  # type: ignore[arg-type]
    made = await stopping.generate(Ask("r", [1], {"stop_regex": stops} if stops else {}, 99))
    reached = [n for n in range(1, len(ids) + 1) if any(stop in Pieces().decode(ids[:n]) for stop in stops)]
    end = reached[0] if reached else len(ids)
    assert (made.ids, made.versions) == (ids[:end], list(range(end)))
    assert made.finish == ("stop" if reached else "length")


async def test_stop_texts_say_what_is_no_generation() -> None:
    stopping = StopTexts(ScriptedEngine([[-5]]), tiny_tokenizer())
    with pytest.raises(EngineError, match="what is not a generation"):
        await stopping.generate(Ask("r", [1], {"stop_regex": ["x"]}, 9))


@pytest.mark.stack
async def test_the_thoughts_of_earlier_questions_are_shown_as_they_were_sampled() -> None:
    """Qwen3's template, which would write the whole anew, keeps only those since the user's last message."""
    from tests.support.template_play import template_of

    template = template_of("qwen3")
    left = [
        f"<think>\nI must add.\n</think>\n\n{call_text('add', {'a': 1})}",
        "<think>\nThat was it.\n</think>\n\nIt is 5.",
        "<think>\nHm.\n</think>\n\nYes.",
    ]
    prompts: list[str] = []

    def script(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        prompts.append(template.tokenizer.decode(list(ids)))
        return list(template.tokenizer.encode(f"{left.pop(0)}<|im_end|>", add_special_tokens=False))

    run = ProxyRun(
        engine=ReceiptingEngine(StopTexts(ScriptedEngine(script), template.tokenizer)),
        renderer=PromptRenderer(template.codec, template.end_ids),
        reader=TurnReader(template.parser, template.tokenizer, template.end_ids, [THINK]),
        limits=Limits(prompt_length=4096, response_length=4096),
        fill_id=template.end_ids[0],
    )
    agent = Agent(run)

    def back(completion: Completion) -> dict[str, Any]:
        return echo(completion, reasoning_content=completion.reasoning)

    messages = [user("What is 1 + 4?")]
    called = await agent.ask(messages, [ADD])
    messages += [back(called), *answer(called, "5")]
    answered = await agent.ask(messages, [ADD])
    assert (called.reasoning, answered.reasoning, answered.content) == ("I must add.", "That was it.", "It is 5.")
    await agent.ask([*messages, back(answered), user("Really?")], [ADD])
    outcome, _ = await agent.close()
    run.renderer.close()
    assert "I must add." in prompts[1]
    assert all(text in prompts[2] for text in ("I must add.", "That was it.", "It is 5."))
    assert (len(agent.session.forest.roots), outcome.places) == (1, [0, 0, 0])
