"""The loop, on the scripted engine: literal ids and masks, calls, and the texts that the model reads."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import CharBuilder, CharTokenizer, EchoTool
from tests.scripted import CALL, run
from verl_multiturn import Conversation, Limits, Request, ScriptedEngine, StopReason
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.template_form import MessageError
from verl_multiturn.rollout.engines.protocol import Ask, Generation


async def test_one_call_then_an_answer() -> None:
    tool = EchoTool({"reward": 0.5})
    outcome = await run([CALL, "ok"], tool)
    trajectory = outcome.trajectory
    said = len(CALL) + 1
    assert CharTokenizer().decode(trajectory.ids) == f"PQ>{CALL}¶\n[hi]>ok¶"
    assert trajectory.mask == [0] * 3 + [1] * said + [0] * 6 + [1] * 3
    assert trajectory.sources[3 + said :] == [2, 3, 3, 3, 3, 3, 1, 1, 1]
    assert {v for v, m in zip(trajectory.versions, trajectory.mask, strict=True) if m} == {3}
    assert outcome.stop_reason is StopReason.FINISHED
    assert (trajectory.turns, outcome.user_turns) == (2, 1)
    assert outcome.calc_rewards == {"echo": 0.5}
    assert [m["role"] for m in outcome.messages] == ["user", "assistant", "tool", "assistant"]
    assert tool.counts == {"create": 1, "execute": 1, "calc_reward": 1, "release": 1}


async def test_the_engine_sees_exactly_what_is_recorded() -> None:
    tokenizer = CharTokenizer()
    engine = ScriptedEngine([tokenizer.turn(CALL), tokenizer.turn("ok")])
    conversation = Conversation(
        engine, ChatCodec(CharBuilder()), JsonParser(tokenizer, [tokenizer.eos_token_id]), Limits(100, 400)
    )
    outcome = await conversation.run(Request("r1", [{"role": "user", "content": "Q"}], {"echo": EchoTool()}))
    last = len(tokenizer.turn("ok"))
    assert engine.seen[1][1] == outcome.trajectory.ids[:-last]


async def test_a_message_that_the_template_does_not_show_is_refused_by_the_name_of_its_row() -> None:
    class Refusing(ChatCodec):
        async def render(self, *_: Any) -> Any:
            raise MessageError("its name is not shown", 0, "user")

    tokenizer = CharTokenizer()
    parser = JsonParser(tokenizer, [tokenizer.eos_token_id])
    conversation = Conversation(ScriptedEngine([]), Refusing(CharBuilder()), parser, Limits(100, 400))
    with pytest.raises(MessageError, match=r"^data row 7: message 0 \(user\): its name is not shown$"):
        await conversation.run(Request("r1", [{"role": "user", "content": "Q"}], {}, row="data row 7"))


async def test_it_is_counted_what_the_engine_had_in_its_cache() -> None:
    class Caching(ScriptedEngine):
        async def generate(self, ask: Ask) -> Generation:
            return replace(await super().generate(ask), cached=len(ask.ids) - 2, cache_use=0.25)

    tokenizer = CharTokenizer()
    engine = Caching([tokenizer.turn(CALL), tokenizer.turn("ok")])
    conversation = Conversation(
        engine, ChatCodec(CharBuilder()), JsonParser(tokenizer, [tokenizer.eos_token_id]), Limits(100, 400)
    )
    outcome = await conversation.run(Request("r1", [{"role": "user", "content": "Q"}], {"echo": EchoTool()}))
    first, second = (len(ids) for _, ids in engine.seen)
    cache = outcome.cache
    assert (cache.given, cache.cached, cache.use) == (first + second, first + second - 4, 0.25)
    assert list(cache.prompts.values()) == [first]


async def test_parallel_calls_run_at_once_and_answer_in_order() -> None:
    tool = EchoTool({"delays": {"a": 0.05, "b": 0.0, "c": 0.02}})
    calls = "".join(CALL.replace("hi", text) for text in "abc")
    outcome = await run([calls, "ok"], tool)
    assert tool.most_running == 3
    assert [call.text for call in outcome.calls] == ["a", "b", "c"]
    assert "[a][b][c]>" in CharTokenizer().decode(outcome.trajectory.ids)


async def test_the_model_is_told_how_many_turns_are_left() -> None:
    limits = {"max_assistant_turns": 3, "turns_reminder": True, "observation_length": 2}
    outcome = await run([CALL + CALL, CALL, "ok"], EchoTool(), **limits, max_parallel_calls=2, response_length=900)
    text = CharTokenizer().decode(outcome.trajectory.ids)
    left = "\n<reminder>You have {} turns left to complete the task.</reminder>"
    assert f"[hi][hi{left.format(2)}]>" in text
    assert f"[hi{left.format(1)}]>" in text
    assert text.count("<reminder>") == 2
    assert [message["content"] for message in outcome.messages if message["role"] == "tool"] == [
        "hi",
        "hi" + left.format(2),
        "hi" + left.format(1),
    ]
    assert [call.text for call in outcome.calls] == ["hi"] * 3


async def test_no_call_is_dropped_in_silence() -> None:
    calls = CALL + CALL + '<tool_call>{"name": "nope", "arguments": {}}</tool_call><tool_call>{oops</tool_call>'
    tool = EchoTool()
    outcome = await run([calls, "ok"], tool, max_parallel_calls=1, response_length=900)
    assert [str(call.status) for call in outcome.calls] == ["ok", "over_limit", "unknown_tool", "malformed"]
    assert "at most 1" in outcome.calls[1].text
    assert "'nope'" in outcome.calls[2].text
    assert "echo" in outcome.calls[2].text
    assert tool.counts["execute"] == 1
    assert all(call.text in CharTokenizer().decode(outcome.trajectory.ids) for call in outcome.calls)


async def test_bad_arguments_are_told_to_the_model() -> None:
    tool = EchoTool()
    bad = [
        '{"name": "echo", "arguments": {"text": 1}}',
        '{"name": "echo", "arguments": {}}',
        '{"name": "echo", "arguments": "no"}',
    ]
    outcome = await run(["".join(f"<tool_call>{text}</tool_call>" for text in bad), "ok"], tool)
    assert [str(call.status) for call in outcome.calls] == ["bad_arguments"] * 3
    assert '1 is not of type "string"' in outcome.calls[0].text
    assert tool.counts["execute"] == 0


async def test_provenance_tells_the_loops_own_words_from_a_tools() -> None:
    outcome = await run(["<tool_call>{</tool_call>", CALL + "<tool_call>{</tool_call>", "ok"], EchoTool())
    sources = [source for source, _ in itertools.groupby(outcome.trajectory.sources)]
    assert [source.name for source in sources] == [
        "PROMPT", "SAMPLED", "TEMPLATE", "INJECTED", "SAMPLED", "TEMPLATE", "OBSERVATION", "SAMPLED"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("side", "kept"),
    [("right", "abcd...(truncated)..."), ("left", "...(truncated)...wxyz"), ("middle", "ab...(truncated)...yz")],
)
async def test_an_observation_has_a_budget_of_tokens(side: str, kept: str) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    call = CALL.replace("hi", text)
    outcome = await run([call, "ok"], EchoTool(), observation_length=21, tool_response_truncate_side=side)
    assert outcome.messages[-2]["content"] == kept
    assert outcome.calls[0].text == text


async def test_what_a_model_may_write_never_raises() -> None:
    digits = "9" * 5000
    calls = [
        f'<tool_call>{{"name": "echo", "arguments": {{"text": {digits}}}}}</tool_call>',
        f'<tool_call>{{"name": "echo", "arguments": "{{\\"text\\": {digits}}}"}}</tool_call>',
        '<tool_call>{"name": "echo", "arguments": {"text": "\\ud83d"}}</tool_call>',
    ]
    outcome = await run(["".join(calls), "ok"], EchoTool(), response_length=20_000)
    assert [str(call.status) for call in outcome.calls] == ["malformed", "bad_arguments", "malformed"]
    assert "half a character" in outcome.calls[2].text
    assert outcome.stop_reason is StopReason.FINISHED


@pytest.mark.parametrize(
    ("side", "seen"),
    [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")],
)
async def test_a_long_answer_is_cut_where_verl_says(side: str, seen: str) -> None:
    call = CALL.replace("hi", "0123456789")
    limits = {"max_tool_response_length": 4, "tool_response_truncate_side": side}
    outcome = await run([call, "ok"], EchoTool(), **limits)
    assert f"[{seen}]>" in CharTokenizer().decode(outcome.trajectory.ids)
    assert outcome.calls[0].text == "0123456789"


async def test_answers_of_one_turn_are_one_turn_of_the_environment() -> None:
    outcome = await run([CALL + CALL, CALL + CALL, "ok"], EchoTool(), max_user_turns=2)
    assert (outcome.stop_reason, outcome.user_turns, len(outcome.calls)) == (StopReason.FINISHED, 2, 4)


async def test_a_turn_costs_the_builder_the_same_however_long_the_history() -> None:
    seen = []

    class Counts(CharBuilder):
        def merge_context_tokens(self, previous: list[Any], *args: Any, **kwargs: Any) -> Any:
            seen.append((len(previous), len(str(previous))))
            return super().merge_context_tokens(previous, *args, **kwargs)

    codec = ChatCodec(Counts())
    tokenizer = CharTokenizer()
    engine = ScriptedEngine([*[tokenizer.turn(CALL)] * 20, tokenizer.turn("ok")])
    conversation = Conversation(engine, codec, JsonParser(tokenizer, [tokenizer.eos_token_id]), Limits(100, 4000))
    outcome = await conversation.run(Request("r1", [{"role": "user", "content": "Q"}], {"echo": EchoTool()}))
    assert outcome.trajectory.turns == 21
    assert len({length for length, _ in seen}) == 1
    assert max(size for _, size in seen) < 300


@pytest.mark.parametrize("limits", [{"max_tool_response_length": 5}, {"observation_length": 5}])
async def test_what_the_model_did_not_get_to_read_is_noted(limits: dict[str, Any]) -> None:
    long = CALL.replace("hi", "much longer than five")
    outcome = await run([long, CALL, "ok"], EchoTool(), **limits)
    assert [call.truncated for call in outcome.calls] == [True, False]
