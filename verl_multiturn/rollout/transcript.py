"""`transcript_of`: a finished conversation in plain words, for a reward whose judge reads the whole of it.

`verl_bridge` writes it for the reward `rubric`. However many rows a conversation has, it is there once, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.chat.parsing.turns import MalformedCall, ToolCall
from verl_multiturn.config import USER
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.turn import Turn

IMAGE = "[image]"
"""The text in the place of an image, of which a transcript has none."""


def spoken_turns(outcome: Outcome) -> list[Turn]:
    """Return the turns whose texts a reward scores: those of the assistant that were read, without summaries.

    Args:
        outcome: A conversation that is over.
    """
    return [turn for turn in outcome.assistant_turns if turn.said is not None and not turn.summary]


def transcript_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the messages of a conversation, each with `role` and `text`.

    Those of the assistant have the number of the turn (`turn`, from 1, as `spoken_turns` has them) and its `calls`,
    pairs of `name` and `arguments` (JSON text); those of a tool have its `name`. The messages before the first turn are
    the row's own.

    Args:
        outcome: A conversation that is over.
    """
    written = [_plain(message) for message in outcome.messages[: outcome.asked]]
    if outcome.opening is not None and outcome.opening.text:
        written.append({"role": "user", "text": outcome.opening.text})
    numbers = {turn.number: number for number, turn in enumerate(spoken_turns(outcome), start=1)}
    for turn in outcome.turns:
        if outcome.trained and turn.role == USER:
            continue  # its text is the reply to the assistant's turn
        written += [_plain(message) for message in turn.given]
        if turn.said is not None and turn.number in numbers:
            calls = [plain_call(call) for call in turn.said.calls]
            said = {"turn": numbers[turn.number], "role": "assistant", "text": turn.said.content}
            written.append({**said, **({"calls": calls} if calls else {})})
        for call in turn.calls:
            written.append({"role": "tool", "name": call.tool, "text": _with_images(call.text, call.images)})
        if turn.reply is not None:
            written.append({"role": "user", "text": _with_images(turn.reply.text, turn.reply.images)})
    return written


def plain_call(call: ToolCall | MalformedCall) -> dict[str, str]:
    """Return a call in plain types, for reward functions; a malformed call has no name and its text as arguments."""
    if isinstance(call, MalformedCall):
        return {"name": "", "arguments": call.text}
    return {"name": call.name, "arguments": call.arguments}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    blocks = content if isinstance(content, list | tuple) else [content]
    texts = [text for block in blocks if (text := _text(block))]
    return {"role": str(message.get("role", "")), "text": "\n".join(texts)}


def _text(block: Any) -> str:
    if isinstance(block, Mapping):
        return str(block["text"]) if isinstance(block.get("text"), str) else IMAGE
    return "" if block is None else str(block)


def _with_images(text: str, images: Sequence[Any]) -> str:
    return "\n".join([*([text] if text else []), *[IMAGE] * len(images)])
