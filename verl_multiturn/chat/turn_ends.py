"""The end of a turn that the model did not end itself, because a stop text or a budget cut it."""

from __future__ import annotations

from itertools import takewhile

from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.errors import ConfigError


def closing_ids(codec: ChatCodec) -> list[int]:
    """Return the ids that the template writes between an assistant's text and the next message.

    They end a turn that was cut. Example for ChatML: `[<|im_end|>, newline]`. Empty where the next message itself ends
    a turn (GLM), or where no message can be appended to a turn.

    Args:
        codec: The model's codec.
    """
    user: Message = {"role": "user", "content": "x"}
    try:
        one, other = (
            codec.rendered([user, {"role": "assistant", "content": text}, user], []) for text in ("q7z", "k3w")
        )
        following = codec.observation([user, {"role": "assistant", "content": "x"}], [user], [one[0]], []).observation
    except ConfigError:
        return []
    same = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))]
    same.reverse()
    closing = same[: len(same) - len(following)]
    return closing if same == [*closing, *following] else []
