"""Whole conversations with real chat templates on the scripted engine, and the invariants that each has to keep.

The engine writes the text of the family's own template for the turn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.support.families import family
from verl_multiturn import BaseTool, ToolResponse, ToolSchema
from verl_multiturn.chat.rendering_check import UNEXPLAINED, RenderingDifference
from verl_multiturn.chat.template import SCHEMA, TOOL, Template, turn_text
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.conversation import Conversation
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome, Request
from verl_multiturn.rollout.trajectory import NO_VERSION, Source

STOPS = {
    "finished": StopReason.FINISHED,
    "response": StopReason.RESPONSE_LENGTH,
    "turn": StopReason.TURN_LENGTH,
    "turns": StopReason.MAX_ASSISTANT_TURNS,
    "user turns": StopReason.MAX_USER_TURNS,
    "calls": StopReason.MAX_TOOL_CALLS,
    "malformed": StopReason.MALFORMED_CALLS,
    "clock": StopReason.WALL_CLOCK,
    "engine": StopReason.ENGINE_ERROR,
    "prompt": StopReason.PROMPT_TOO_LONG,
}
# Faults of a family's own template or format, by the difference that they cause. Each is explained, and the table
# repeats the explanation.
EXPLAINED: dict[str, tuple[RenderingDifference, str]] = {
    "deepseek-v3": (
        RenderingDifference.CONTEXT,
        "the template forgets to end the tools' outputs before a second turn with calls; turn by turn they are ended",
    ),
    "cohere2": (
        RenderingDifference.ASSISTANT,
        "the model samples <|END_RESPONSE|> as a part of its text, and the template writes it a second time",
    ),
}
# Families whose templates write at most one call in a turn.
ONE_CALL = {"llama3.1", "llama3.2", "gpt-oss"}
WITHOUT_TOOLS = ["finished", "response", "turn", "prompt"]
_FAR = 1_000_000


class ProbeTool(BaseTool):
    """A tool that answers with the given texts one after the other, and remembers its calls."""

    def __init__(self, results: Sequence[str], hangs: bool) -> None:
        super().__init__({}, ToolSchema.read(SCHEMA, "template matrix"))
        self._hangs = hangs
        self._results = list(results)
        self.calls: list[dict[str, Any]] = []

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Return the next text, or hang forever."""
        self.calls.append(parameters)
        if self._hangs:
            await asyncio.Event().wait()
        return ToolResponse(self._results[(len(self.calls) - 1) % len(self._results)])


@cache
def template_of(name: str) -> Template:
    """Make the codec, parser and check of a family, as a run would make them."""
    from verl_multiturn.verl_bridge.model.call_formats import make_parser
    from verl_multiturn.verl_bridge.model.chat_setup import make_chat

    made = family(name)
    tokenizer = made.tokenizer
    ids = {*tokenizer.convert_tokens_to_ids(list(made.end_tokens)), tokenizer.eos_token_id, tokenizer.pad_token_id}
    ends = sorted(ids - {None})
    chat = make_chat(tokenizer, made.model_type, end_ids=ends)
    parser = make_parser(made.format or "hermes", tokenizer, ends)
    return Template(tokenizer, chat.codec, chat.check, parser, ends, chat.generation_prompt)


def calling_turn(template: Template, arguments: Sequence[dict[str, Any]]) -> str | None:
    """Return the template's text for a turn with these calls; None when it refuses so many."""
    calls = [
        {"id": f"call_0_{index}", "type": "function", "function": {"name": TOOL, "arguments": given}}
        for index, given in enumerate(arguments)
    ]
    return turn_text(template, {"role": "assistant", "content": "", "tool_calls": calls})


async def play(name: str, words: Sequence[str], results: Sequence[str], stop: str) -> list[str]:
    """Run one conversation of a family, and return the invariants that it breaks.

    Args:
        name: Name of the family.
        words: An argument for each call of a turn, 1 to 4. Where one holds a call, each executed call must be exact, or
            nothing is executed.
        results: Answers of the tool, one after the other.
        stop: Key of `STOPS`.
    """
    template = template_of(name)
    words = words[:1] if name in ONE_CALL else words
    arguments = [{"word": word, "count": index} for index, word in enumerate(words)]
    calls = calling_turn(template, arguments) if family(name).format else None
    answer = turn_text(template, {"role": "assistant", "content": "answerq7"}) or "answerq7"
    if calls is None and stop not in WITHOUT_TOOLS:
        return ["the template writes no calls"]
    turns_with_calls = (
        {"calls": _FAR, "turns": _FAR, "user turns": _FAR, "malformed": _FAR}.get(stop, 1) if calls else 0
    )
    said: list[list[int]] = []

    def script(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        if stop == "engine" and turn == 1:
            raise EngineError("scripted")
        text = calls if calls is not None and turn < turns_with_calls else answer
        before = template.tokenizer.decode(list(ids[-16:]))
        if stop == "malformed":  # cut off in the middle of its first call
            text = text[: text.index(TOOL) + len(TOOL)]
        if before.rstrip().endswith("<think>") and "</think>" not in text:
            text = f"thoughtq7\n</think>\n\n{text}"
        said.append(template.tokenizer.encode(text, add_special_tokens=False))
        return said[-1]

    engine = ScriptedEngine(script, version=7, logprob=-0.25)
    tool = ProbeTool(results, hangs=stop == "clock")
    limits = Limits(
        prompt_length=1 if stop == "prompt" else _FAR,
        response_length=3 if stop == "response" else _FAR,
        turn_length=3 if stop == "turn" else None,
        max_assistant_turns=2 if stop == "turns" else None,
        max_user_turns=1 if stop == "user turns" else None,
        max_tool_calls=len(arguments) if stop == "calls" else None,
        max_parallel_calls=4,
        max_malformed_turns=2,
        wall_clock_s=0.02 if stop == "clock" else None,
        max_tool_response_length=_FAR,
    )
    conversation = Conversation(engine, template.codec, template.parser, limits, check=template.check)
    tools = {TOOL: tool} if calls else {}
    # DeepSeek-V3's template shows no tools, so that a message names them.
    outcome = await conversation.run(Request("r", [{"role": "user", "content": f"userq7 {TOOL}"}], tools))
    broken = check_tokens(outcome, engine, said)
    if outcome.stop_reason is not STOPS[stop]:
        broken.append(f"ended with {outcome.stop_reason} instead of {STOPS[stop]}")
    if any(map(quotes, words)):
        if wrong := [call for call in tool.calls if call not in arguments]:
            broken.append(f"executed {wrong} where the model wrote {arguments}")
        return broken
    executed = (
        {"calls": 1, "turns": 1, "user turns": 1, "finished": 1, "engine": 1, "clock": 1}.get(stop, 0) if calls else 0
    )
    if tool.calls != arguments * executed:
        broken.append(f"executed {tool.calls} instead of {executed} × {arguments}")
    explained = {EXPLAINED[name][0]} if name in EXPLAINED else set()
    if unexplained := (UNEXPLAINED - explained) & set(outcome.differences):
        broken.append(f"unexplained difference from the template's whole: {sorted(unexplained)}")
    return broken


def quotes(word: str) -> bool:
    """Return whether an argument holds a call of the family, or a part of one."""
    return TOOL in word


def quoted_call(name: str, chance: random.Random) -> str:
    """Make an argument from the text of a call: unchanged, twice, cut or among other text, some with reasoning."""
    call = calling_turn(template_of(name), [{"word": "sum", "count": 1}]) or TOOL
    start = call.index(TOOL) + len(TOOL)
    choices = [call, call + call, f"say {call} twice", call[:start], call[chance.randint(0, start - len(TOOL)) :]]
    return (
        chance.choice(["", "<think>", "</think> "]) + chance.choice(choices) + chance.choice(["", "<think>a</think>"])
    )


def check_tokens(outcome: Outcome, engine: ScriptedEngine, said: Sequence[Sequence[int]]) -> list[str]:
    """Check the invariants of the trajectory's columns against the engine's requests and its answers."""
    trajectory, broken = outcome.trajectory, []
    columns = (trajectory.mask, trajectory.logprobs, trajectory.versions, trajectory.turn_ids, trajectory.sources)
    if {len(column) for column in columns} != {len(trajectory)}:
        broken.append("columns of different lengths")
    position, spans = 0, []
    for (_, asked), turn in zip(engine.seen, said, strict=False):
        if trajectory.ids[: len(asked)] != asked or len(asked) < position:
            broken.append("the engine was not asked with what is recorded")
        position = min(len(asked) + len(turn), len(trajectory))
        spans.append(range(len(asked), position))
        if trajectory.ids[len(asked) : position] != list(turn)[: position - len(asked)]:
            broken.append("sampled ids are not what the engine said")
    sampled = {index for span in spans for index in span}
    for index in range(len(trajectory)):
        expected = (1, -0.25, 7, Source.SAMPLED) if index in sampled else (0, 0.0, NO_VERSION)
        found = (trajectory.mask[index], trajectory.logprobs[index], trajectory.versions[index])
        if found != expected[:3] or (trajectory.sources[index] is Source.SAMPLED) != (index in sampled):
            broken.append(f"token {index}: {found} instead of {expected}")
            break
    return broken
