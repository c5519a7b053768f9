"""Find the tags that a chat template writes around tool responses, by rendering some.

Some tokenizers have no token for such a tag (to Qwen2.5's tokenizer, `<tool_response>` is plain text). A tool response
could then hold the same text that the template writes: it would close its own block and open the next one. The firewall
(`chat.control_tokens`) therefore breaks these tags in the text of tools and users, whether they are tokens or not.
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
    """Return the tags that the template writes between a turn with tool calls and the model's next turn, sorted.

    Args:
        codec: The model's codec, made without a firewall.
        decode: The tokenizer's `decode`.
        end_ids: Every token id that ends a turn. All are tried.

    Returns:
        The tags, for example `["</tool_response>", "<tool_response>", …]`. The list is empty when the template cannot
            render tool responses.
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
        return set()  # the template cannot render tool responses
    return set(_TAG.findall(text)) if all(str(answer["content"]) in text for answer in answers) else set()
