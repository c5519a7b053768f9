"""Traces: the tree of a conversation that is over, and a writer that no backend can hold up."""

import asyncio
import json
import logging
import threading
import time
from typing import Any

import pytest
from PIL import Image

from tests.conftest import CharTokenizer, EchoTool
from tests.proxy_clients import until
from tests.scripted import CALL, run
from tests.unit.proxy.test_proxy_endpoint import ROW, serving
from tests.unit.records.test_encode import ended
from tests.unit.rollout.test_context import Counting, play
from verl_multiturn import Outcome
from verl_multiturn.observe.spans import TraceSpan, tree_of
from verl_multiturn.observe.trace_writer import TraceWriter
from verl_multiturn.observe.traces import chat_of, plain, trace_of
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.life import Life, live
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer
from verl_multiturn.rollout.trajectory import Trajectory


def traced(outcome: Outcome, began: float = 0.0, **given: Any) -> Life:
    made = Life("r1", "uid", 2, loop="multiturn_agent", step=3, row={"index": 7}, began=began, **given)
    made.ended, made.outcome, made.score = time.time(), outcome, 1.0
    return made


def names(span: TraceSpan) -> list[str]:
    return [each.name for each in span.walk()]


async def test_a_trace_has_all_turns_and_calls() -> None:
    began = time.time()
    tool = EchoTool({"delays": {"a": 0.05, "b": 0.0}})
    outcome = await run(["".join(CALL.replace("hi", text) for text in "ab"), "ok"], tool)
    trace = trace_of(traced(outcome, began), CharTokenizer().decode)
    assert names(trace) == ["agent_loop", "turn 0", "generation", "tool echo", "tool echo", "turn 1", "generation"]
    assert {"step": 3, "sample_index": 7, "rollout_n": 2, "validate": False}.items() <= trace.attributes.items()
    assert (trace.outputs["stop_reason"], trace.outputs["score"], trace.error) == ("finished", 1.0, "")
    assert [message["role"] for message in chat_of(trace)] == ["user", "assistant", "tool", "tool", "assistant"]
    first, second = trace.children
    assert [call.inputs["arguments"] for call in first.children[1:]] == ['{"text": "a"}', '{"text": "b"}']
    assert [call.outputs["text"] for call in first.children[1:]] == ["a", "b"]
    assert [len(turn.children[0].outputs["tool_calls"]) for turn in trace.children] == [2, 0]
    assert second.children[0].outputs["response_text"] == "ok¶"
    assert CharTokenizer().decode(second.children[0].outputs["token_ids"]) == "ok¶"
    (row,) = trace.outputs["rows"]
    assert row["prompt_text"] + row["response_text"] == CharTokenizer().decode(outcome.trajectory.ids)
    assert "response_text" not in trace_of(traced(outcome, began)).children[0].children[0].outputs


async def test_spans_have_their_own_times_and_nest() -> None:
    outcome = await run(["".join(CALL.replace("hi", text) for text in "ab"), "ok"], EchoTool())
    # Literal times: two calls at once, one of which waited for a slot.
    for turn, (at, seconds) in zip(outcome.turns, [(12.0, 1.5), (20.0, 4.0)], strict=True):
        turn.at, turn.seconds = at, seconds
    for call, (at, seconds, queue_s) in zip(outcome.calls, [(15.0, 2.5, 0.5), (16.0, 1.0, 2.5)], strict=True):
        call.at, call.seconds, call.queue_s = at, seconds, queue_s
    made = traced(outcome, 10.0)
    made.ended = 21.0
    assert [(span.name, span.began, span.ended) for span in trace_of(made).walk()] == [
        ("agent_loop", 10.0, 21.0),
        ("turn 0", 10.5, 16.0),
        ("generation", 10.5, 12.0),
        ("tool echo", 12.0, 15.0),
        ("tool echo", 12.5, 16.0),
        ("turn 1", 16.0, 20.0),
        ("generation", 16.0, 20.0),
    ]
    made.began, made.ended = 12.5, 19.0  # somebody set the clock meanwhile
    for span in trace_of(made).walk():
        assert all(span.began <= child.began <= child.ended <= span.ended for child in span.children)


async def test_the_times_are_those_of_the_clock() -> None:
    began = time.time()
    outcome = await run([CALL, "ok"], EchoTool({"delays": {"hi": 0.02}}))
    made = traced(outcome, began)
    ends = [span.ended for span in trace_of(made).walk() if not span.children]
    assert began <= ends[0] < ends[1] < ends[2] <= made.ended
    assert outcome.calls[0].seconds >= 0.02


async def test_a_call_that_fails_and_one_that_cannot_be_read() -> None:
    outcome = await run([CALL.replace("echo", "other"), "<tool_call>{</tool_call>", "ok"], EchoTool())
    trace = trace_of(traced(outcome))
    (unknown,), (malformed,) = (turn.children[1:] for turn in trace.children[:2])
    assert (unknown.name, unknown.outputs["status"]) == ("tool", "unknown_tool")
    assert unknown.error.startswith("Error: there is no tool")
    assert malformed.inputs == {"id": outcome.calls[1].call_id, "malformed": "<tool_call>{</tool_call>"}


async def test_a_conversation_of_several_rows_with_an_interaction_is_one_trace() -> None:
    outcome, _ = await play(["a", "b", "c"], Counting(), Context(mode="window", turns=1))
    assert len(outcome.rows) == 3
    trace = trace_of(traced(outcome), tiny_tokenizer().decode)
    each = ["generation", "interaction"]
    assert names(trace) == ["agent_loop", "turn 0", *each, "turn 1", *each, "turn 2", *each]
    assert [turn.attributes["row"] for turn in trace.children] == [0, 1, 2]
    assert [turn.children[0].outputs["response_text"] for turn in trace.children] == [
        "a<|im_end|>",
        "b<|im_end|>",
        "c<|im_end|>",
    ]
    assert [turn.children[1].outputs["text"] for turn in trace.children] == ["n1", "n2", "n3"]
    assert [turn.outputs["reward"] for turn in trace.children] == [1.0, 1.0, 1.0]
    assert len(trace.outputs["rows"]) == 3


async def test_a_conversation_that_was_cancelled_has_a_trace_of_what_it_did() -> None:
    from tests.conftest import CharBuilder
    from verl_multiturn import Conversation, Limits, Request, ScriptedEngine
    from verl_multiturn.chat.codec import ChatCodec
    from verl_multiturn.chat.parsing.json_calls import JsonParser

    tool = EchoTool({"delays": {"slow": 60.0}})
    tokenizer = CharTokenizer()
    engine = ScriptedEngine([tokenizer.turn(CALL), tokenizer.turn(CALL.replace("hi", "slow"))])
    parser = JsonParser(tokenizer, [tokenizer.eos_token_id])
    conversation = Conversation(engine, ChatCodec(CharBuilder()), parser, Limits(100, 400))
    outcome = Outcome.begun("r1")
    request = Request("r1", [{"role": "user", "content": "Q"}], {"echo": tool})
    task = asyncio.ensure_future(conversation.run(request, outcome))
    await until(lambda: tool.counts["execute"] == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trace = trace_of(traced(outcome, status="cancelled"))
    assert names(trace) == ["agent_loop", "turn 0", "generation", "tool echo", "turn 1", "generation"]
    assert (trace.outputs["status"], trace.outputs["stop_reason"], trace.error) == ("cancelled", None, "cancelled")
    assert trace.children[1].children[0].outputs["tool_calls"][0]["arguments"] == '{"text": "slow"}'


async def test_the_trace_of_an_agents_session() -> None:
    async with serving("chat", "a", "b") as endpoint:
        outcome, _ = await endpoint.run("r", ROW, {"temperature": 1.0})
    trace = trace_of(traced(outcome))
    assert names(trace) == ["agent_loop", "turn 0", "generation", "turn 1", "generation"]
    asked = [turn.children[0].inputs["messages"] for turn in trace.children]
    assert [[message["content"] for message in messages] for messages in asked] == [["1+1?"], ["Go on."]]
    assert [turn.children[0].outputs["content"] for turn in trace.children] == ["a", "b"]
    assert [(turn.attributes["parent"], turn.outputs["reward"]) for turn in trace.children] == [(None, 0.25), (0, 0.5)]


@pytest.mark.parametrize("agent", ["slow", "dreamer"])
async def test_a_session_that_is_cancelled_or_wrong_tells_what_it_did(agent: str) -> None:
    life = Life("r")
    async with serving(agent, "a") as endpoint:

        async def lives() -> None:
            with live(life):
                await endpoint.run("r", ROW, {})

        task = asyncio.ensure_future(lives())
        if agent == "slow":
            await until(lambda: any(each.session.forest.delivered for each in endpoint._server._open.values()))
            task.cancel()
        with pytest.raises((asyncio.CancelledError, Exception)):
            await task
    assert life.outcome is not None
    assert names(trace_of(traced(life.outcome, status="cancelled")))[1:] == ["turn 0", "generation"]


def test_what_no_backend_could_store_becomes_plain() -> None:
    given = {"image": Image.new("RGB", (3, 4)), "text": "a\ud800", 3: float("nan"), "deep": [(1, object)]}
    found = plain(given)
    assert found["image"] == "<image 3×4>"
    assert (found["text"], found["3"], found["deep"][0][0]) == ("a\ufffd", "nan", 1)


class Sink:
    """A backend in memory."""

    name = "sink"

    def __init__(self) -> None:
        self.traces: list[TraceSpan] = []
        self.fails: Exception | None = None
        self.refuses = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_closed = False

    def open(self) -> None:
        if self.refuses:
            self.refuses -= 1
            raise ConnectionError("nobody there")

    def write(self, life: Life, trace: TraceSpan) -> None:
        self.goes_on.wait()
        if self.fails is not None:
            raise self.fails
        self.traces.append(trace)

    def close(self) -> None:
        self.is_closed = True


def empty() -> Life:
    outcome = Outcome.begun("r1")
    outcome.rows[0] = type(outcome.rows[0])(Trajectory(), [])
    return traced(outcome, status="cancelled")


async def test_a_writer_writes_all_before_it_is_closed() -> None:
    sink = Sink()
    await TraceWriter([sink]).aclose()  # nothing was put
    writer = TraceWriter([sink])
    for _ in range(3):
        writer.put(empty())
    await writer.aclose()
    assert (len(sink.traces), sink.is_closed) == (3, True)
    writer.put(empty())
    await writer.aclose()
    assert (len(sink.traces), writer.waiting) == (3, 0)


async def test_a_backend_that_raises_is_told_once_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    broken, sink = Sink(), Sink()
    broken.fails = RuntimeError("no space left")
    writer = TraceWriter([broken, sink])
    for _ in range(3):
        writer.put(empty())
    await until(lambda: len(sink.traces) == 3)
    broken.fails = None
    writer.put(empty())
    await writer.aclose()
    assert (len(broken.traces), len(sink.traces)) == (1, 4)
    assert [record.message for record in caplog.records] == [
        "traces are lost: sink: RuntimeError: no space left; the run goes on (said once)",
        "traces are written again; 3 were lost so far: sink",
    ]


async def test_a_backend_that_is_down_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.refuses = 2
    writer = TraceWriter([sink], pause_s=0.0)
    for _ in range(4):
        writer.put(empty())
    await writer.aclose()
    assert len(sink.traces) == 2
    assert [record.message for record in caplog.records] == [
        "traces are lost: sink: ConnectionError: nobody there; the run goes on (said once)",
        "traces are written again; 2 were lost so far: sink",
    ]


async def test_a_backend_that_hangs_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.goes_on.clear()
    writer = TraceWriter([sink])
    for _ in range(300):
        writer.put(empty())
    with caplog.at_level(logging.WARNING):
        closing = asyncio.ensure_future(writer.aclose())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    sink.goes_on.set()
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("traces are lost: sink: 256 wait already, since writing is too slow")
    assert said[1].startswith("the last traces may be lost: some 25")


async def test_a_live_trace_and_a_converted_one_are_one_tree() -> None:
    life = await ended("".join(CALL.replace("hi", text) for text in "ab"), "ok", began=1.0, ended=time.time() + 60)
    read = tree_of(json.loads(line_of(record_of(life)))).root
    assert [(span.name, span.kind, span.began, span.ended, span.error) for span in trace_of(life).walk()] == [
        (span.name, span.kind, span.began, span.ended, span.error) for span in read.walk()
    ]
    assert len(list(read.walk())) == 7


async def test_stretches_of_the_timeline_are_parts_of_spans() -> None:
    life = await ended(CALL, "ok", began=1.0, ended=time.time() + 60)
    record = json.loads(line_of(record_of(life)))
    at = record["calls"][0]["at"]
    kinds = [
        ("create", None),
        ("generation", 0),
        ("wait", 0),
        ("call", 0),
        ("call", 0),
        ("pause", 1),
        ("generation", 7),
    ]
    record["timeline"] = [
        {"kind": kind, "name": "echo" if kind == "call" else "", "turn": turn, "start": at + number, "end": at + number}
        for number, (kind, turn) in enumerate(kinds)
    ]
    assert [(wait["kind"], span.name) for wait, span in tree_of(record).timeline] == [
        ("create", "agent_loop"),
        ("generation", "generation"),
        ("wait", "turn 0"),
        ("call", "tool echo"),
        ("call", "turn 0"),
        ("pause", "turn 1"),
        ("generation", "agent_loop"),
    ]


async def test_a_trace_says_what_a_record_says_and_hides_nothing() -> None:
    outcome = await run([CALL, "ok"], EchoTool())
    outcome.calls[0].whole = "the whole answer, of which the model read a part"
    outcome.turns[1].end = outcome.turns[1].start  # no row holds it
    life = traced(outcome)
    life.row = {"extra_info": {"index": 9}}
    trace = trace_of(life)
    assert trace.children[0].children[1].outputs["text"] == outcome.calls[0].whole
    assert trace.attributes["sample_index"] == 9
    assert [turn.attributes["row"] for turn in trace.children] == [0, "invalid"]
    assert trace.children[1].children[0].outputs["token_ids"] == []
