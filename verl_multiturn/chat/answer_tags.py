"""The tags that a chat template writes around the answers of tools, found out by rendering some.

Where a tokenizer has no token for such a tag (Qwen2.5's `<tool_response>` is plain text to it), it is text that an
answer could hold as well as the template: it would close its own block, and open the next.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.errors import ConfigError

_MARKS = ("resultq7", "otherq7")
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]{3,}\]")


def answer_tags(codec: ChatCodec, decode: Callable[[list[int]], str], end_ids: Sequence[int]) -> list[str]:
    """The tags in what the template writes between a turn with calls and the model's next one.

    Args:
        codec: without a firewall.
        end_ids: each ends a turn.
    """
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": "probe", "arguments": {}}}
        for index in range(2)
    ]
    answers: list[Message] = [
        {"role": "tool", "content": mark, "tool_call_id": call["id"], "name": "probe"}
        for mark, call in zip(_MARKS, calls, strict=True)
    ]
    found: set[str] = set()
    for count, end_id in itertools.product((1, 2), end_ids):
        asked: Message = {"role": "assistant", "content": "", "tool_calls": calls[:count]}
        found |= _tags(codec, decode, [{"role": "user", "content": "x"}, asked], answers[:count], end_id)
    return sorted(found)


def _tags(
    codec: ChatCodec,
    decode: Callable[[list[int]], str],
    before: Sequence[Message],
    answers: Sequence[Message],
    end_id: int,
) -> set[str]:
    try:
        text = decode(codec.observation(before, answers, [end_id], []).observation)
    except ConfigError:
        return set()  # the template has no answers of tools
    return set(_TAG.findall(text)) if all(str(answer["content"]) in text for answer in answers) else set()
