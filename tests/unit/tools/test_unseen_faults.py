"""Faults of a conversation that no test saw once: each test here fails when the line of code for it is removed."""

import asyncio
import contextlib
import time
from typing import Any

import pytest
from PIL import Image

from tests.conftest import CharBuilder, CharTokenizer, EchoTool, make_schema
from tests.scripted import CALL, run
from tests.text_mode import quickstart_tokenizer
from verl_multiturn import Conversation, Limits, Outcome, Request, ScriptedEngine, StopReason, ToolResponse
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.images import CANNOT_BE_SHOWN
from verl_multiturn.chat.parsing.formats import make_call_parser
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS
from verl_multiturn.chat.rendering_check import UNEXPLAINED, RenderingDifference
from verl_multiturn.rollout.outcome import ConversationRow
from verl_multiturn.rollout.trajectory import Trajectory
from verl_multiturn.tools.running.gate import Gate


class Thinking(CharBuilder):
    """A template whose header opens the reasoning."""

    def build_initial_tokens(self, messages: list[Any], *, tools: list[Any] | None = None) -> list[int]:
        return super().build_initial_tokens(messages, tools=tools) + [ord(c) for c in "<think>\n"]

    def merge_context_tokens(self, *args: Any, **kwargs: Any) -> Any:
        merged = super().merge_context_tokens(*args, **kwargs)
        merged.token_ids += [ord(c) for c in "<think>\n"]
        return merged


async def think(turns: list[str], tool: EchoTool) -> Outcome:
    tokenizer = CharTokenizer()
    conversation = Conversation(
        ScriptedEngine([tokenizer.turn(turn) for turn in turns]),
        ChatCodec(Thinking(), tokenizer=tokenizer),
        make_call_parser("hermes", tokenizer, [tokenizer.eos_token_id], REASONING_MARKS),
        Limits(prompt_length=100, response_length=900),
        Gates(Gate, 5.0),
    )
    return await conversation.run(Request("r1", [{"role": "user", "content": "Q"}], {"echo": tool}))


async def test_a_call_in_a_thought_that_the_prompt_opened_is_not_run() -> None:
    """The parser sees the header before a turn, for the first turn and for later ones."""
    tool = EchoTool()
    outcome = await think([f"I could call {CALL} here.</think>No need."], tool)
    assert (outcome.stop_reason, outcome.calls, tool.counts["execute"]) == (StopReason.FINISHED, [], 0)
    tool = EchoTool()
    outcome = await think([f"Now.</think>{CALL}", f"Again {CALL}?</think>No."], tool)
    assert (outcome.stop_reason, len(outcome.calls), tool.counts["execute"]) == (StopReason.FINISHED, 1, 1)
    assert outcome.messages[-1]["content"].endswith("</think>No.")


async def test_an_observation_fits_with_its_separator_or_not_at_all() -> None:
    """The budget is filled to the last token: the turn, a separator of 1, an observation of 5, and 1 to answer with."""
    said = len(CALL) + 1
    outcome = await run([CALL, "x"], EchoTool(), response_length=said + 1 + 5 + 1)
    assert (outcome.stop_reason, outcome.trajectory.turns) == (StopReason.RESPONSE_LENGTH, 2)
    assert outcome.trajectory.response_length == said + 7
    assert outcome.trajectory.mask[3:] == [1] * said + [0] * 6 + [1]
    outcome = await run([CALL, "x"], EchoTool(), response_length=said + 1 + 5)
    assert (outcome.stop_reason, outcome.trajectory.turns) == (StopReason.RESPONSE_LENGTH, 1)
    assert outcome.trajectory.response_length == said


class Remembers(CharBuilder):
    """A builder that keeps its inputs."""

    def __init__(self) -> None:
        self.before: list[list[Any]] = []
        self.tools: list[Any] = []

    def build_initial_tokens(self, messages: list[Any], *, tools: list[Any] | None = None) -> list[int]:
        self.tools.append(tools)
        return super().build_initial_tokens(messages, tools=tools)

    def merge_context_tokens(
        self, previous: list[Any], updated: list[Any], runtime: list[int], *, tools: list[Any] | None = None
    ) -> Any:
        self.before.append(previous)
        self.tools.append(tools)
        return super().merge_context_tokens(previous, updated, runtime, tools=tools)


def test_an_observation_is_rendered_after_the_calls_that_it_answers() -> None:
    """Templates read a call's name or id to write its answer, and refuse an answer without a call before it."""
    builder = Remembers()
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": f"f{i}", "arguments": {"a": 1}}} for i in (0, 1)]
    asked = [{"role": "user", "content": "long " * 99}, {"role": "assistant", "content": "text", "tool_calls": calls}]
    answers = [{"role": "tool", "content": "1", "tool_call_id": f"c{i}"} for i in (0, 1)]
    ChatCodec(builder).observation(asked, answers, [65, 66], [])
    named = [{**call, "function": {"name": f"f{i}", "arguments": {}}} for i, call in enumerate(calls)]
    assert builder.before == [
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": named}]
    ]
    ChatCodec(builder).observation([asked[0], {"role": "assistant", "content": "text"}], answers, [65, 66], [])
    assert builder.before[1] == [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("role", ["user", "system"])
async def test_what_a_chat_renders_goes_through_the_firewall(role: str) -> None:
    """The firewall sees a row's messages, its tools' schemas, and the tools' answers."""
    end = "<|im_end|>"
    tokenizer, builder = CharTokenizer(), Remembers()
    schema = make_schema("echo", text="string")
    tool = EchoTool({"returns": ToolResponse(f"A{end}B")}, schema)
    tool.tool_schema.function.description = f"C{end}D"
    engine = ScriptedEngine([tokenizer.turn(CALL), tokenizer.turn("ok")])
    conversation = Conversation(
        engine,
        ChatCodec(builder, firewall=Firewall(quickstart_tokenizer()), tokenizer=tokenizer),
        make_call_parser("hermes", tokenizer, [tokenizer.eos_token_id], REASONING_MARKS),
        Limits(prompt_length=100, response_length=900),
        Gates(Gate, 5.0),
    )
    outcome = await conversation.run(Request("r1", [{"role": role, "content": f"Q{end}R"}], {"echo": tool}))
    seen = tokenizer.decode(engine.seen[-1][1])
    assert end not in seen
    assert all(f"{a}<" in seen and f">{b}" in seen for a, b in ("QR", "AB"))
    assert all(end not in str(message["content"]) for message in outcome.messages)
    shown = [tools for tools in builder.tools if "echo" in str(tools)]  # the others are those of trial conversations
    assert shown
    assert all(end not in str(tools) and "C<" in str(tools) for tools in shown)


class Compared:
    """A stand-in for the comparison with the template's rendering that keeps its arguments."""

    def __init__(self, *found: RenderingDifference) -> None:
        self.given: list[Any] = []
        self.found = list(found)

    def differences(self, messages: Any, schemas: Any, ids: list[int], sampled: list[bool]) -> list[Any]:
        self.given.append((messages, ids, sampled))
        return self.found


def compared(turns: Any, check: Any, **limits: Any) -> Conversation:
    tokenizer = CharTokenizer()
    engine = ScriptedEngine([tokenizer.turn(turn) for turn in turns]) if isinstance(turns, list) else turns
    return Conversation(
        engine,
        ChatCodec(CharBuilder(), tokenizer=tokenizer),
        make_call_parser("hermes", tokenizer, [tokenizer.eos_token_id], REASONING_MARKS),
        Limits(**{"prompt_length": 100, "response_length": 900, **limits}),
        Gates(Gate, 5.0),
        check=check,
    )


async def compare(turns: Any, **limits: Any) -> tuple[Outcome, list[Any]]:
    check = Compared()
    conversation = compared(turns, check, **limits)
    asked = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "shown"}]
    outcome = await conversation.run(Request("r1", [*asked, asked[0]], {"echo": EchoTool()}))
    return outcome, check.given


async def test_what_was_sampled_is_what_the_rendering_is_compared_at() -> None:
    outcome, ((messages, ids, sampled),) = await compare([CALL, "ok"])
    assert (messages, ids) == (outcome.messages, outcome.trajectory.ids)
    assert sampled == [trained == 1 for trained in outcome.trajectory.mask]
    assert any(sampled)


async def test_a_difference_of_one_kind_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    (kind, *_) = UNEXPLAINED
    conversation = compared(["ok"], Compared(kind))
    for request_id in ("r1", "r2"):
        outcome = await conversation.run(Request(request_id, [{"role": "user", "content": "Q"}]))
        assert outcome.differences == [kind]
    assert len([record for record in caplog.records if "differently" in record.getMessage()]) == 1


async def test_a_turn_that_was_not_read_is_not_compared() -> None:
    """A turn that the engine or the clock cut off has no message."""
    outcome, given = await compare([CALL])
    assert (outcome.stop_reason, given) == (StopReason.ENGINE_ERROR, [])
    tokenizer = CharTokenizer()
    outcome, given = await compare(Slow([tokenizer.turn(CALL), tokenizer.turn("ok")]), wall_clock_s=0.5)
    assert (outcome.stop_reason, outcome.valid, outcome.trajectory.turns) == (StopReason.WALL_CLOCK, True, 2)
    assert given == []


class Slow(ScriptedEngine):
    """An engine whose second turn comes when the time is up."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        made = await super().generate(*args, **kwargs)
        if len(self.seen) == 2:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return made


async def test_the_name_of_an_answer_is_its_tools() -> None:
    """Some templates write the name."""
    outcome = await run([CALL, "<tool_call>{</tool_call>", "ok"], EchoTool())
    named = [message["name"] for message in outcome.messages if message["role"] == "tool"]
    assert named == ["echo", "error"]


async def test_each_call_is_put_down_to_its_turn() -> None:
    """The step reward of a call goes to its turn."""
    outcome = await run([CALL + CALL, CALL, "ok"], EchoTool(), response_length=900)
    assert [len(turn.calls) for turn in outcome.turns] == [2, 1, 0]
    assert set(outcome.trajectory.turn_ids) == {0, 1, 2}


def test_a_conversation_that_is_not_over_has_no_end() -> None:
    with pytest.raises(RuntimeError, match="is not over"):
        _ = Outcome("r1", [ConversationRow(Trajectory(), [])], []).stop_reason


async def test_time_is_told_in_seconds() -> None:
    began = time.perf_counter()
    outcome = await run(["ok"], EchoTool())
    assert outcome.tools_s == 0.0
    assert 0 < outcome.generate_s < time.perf_counter() - began
    outcome = await run([CALL, "ok"], EchoTool())
    assert 0 < outcome.tools_s < time.perf_counter() - began


@pytest.mark.parametrize("limits", [{}, {"observation_length": 60}])
async def test_a_tools_image_is_told_of_where_the_model_takes_none(limits: dict[str, int]) -> None:
    tool = EchoTool({"returns": ToolResponse("red", image=[Image.new("RGB", (2, 2), "red")])})
    outcome = await run([CALL, "ok"], tool, max_tool_response_length=100, **limits)
    assert (outcome.messages[2]["content"], outcome.images) == (f"red\n{CANNOT_BE_SHOWN}", [])
    assert f"[red\n{CANNOT_BE_SHOWN}]>" in CharTokenizer().decode(outcome.trajectory.ids)
