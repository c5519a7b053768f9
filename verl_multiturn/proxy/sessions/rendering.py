"""Requests to token ids, without holding up the event loop.

The prompt of a root is rendered in a thread, since many tools take a tenth of a second. So are long new messages; short
ones are rendered where they are, which is quicker than going to the thread. A first prompt is rendered once for all
sessions that begin with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from verl_multiturn.calls.tasks import keep
from verl_multiturn.chat.codec import ChatCodec, Increment, Message
from verl_multiturn.chat.control_tokens import text_parts
from verl_multiturn.chat.first_prompts import RequiredPart
from verl_multiturn.chat.images import ReadImages, as_they_are, images_of, load_images
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.protocols.requests import RefusedError

# New messages with more characters than this are rendered in the thread.
_MOST_AT_ONCE = 8192
# A message takes as long as this many characters, however short it is.
_MESSAGE = 64
# The most prompts that are remembered. The prompts of a step's groups are requested at the same time.
_MOST_PROMPTS = 64
# Longer prompts are not remembered.
_MOST_TOKENS = 131_072

Result = TypeVar("Result")


@dataclass(frozen=True)
class RenderedPrompt:
    """The prompt of a root."""

    ids: list[int]
    shown: Sequence[dict[str, Any]]
    """The tools' schemas as the model is shown them."""
    images: list[Any]


@dataclass(frozen=True)
class RenderedMessages:
    """Messages after a turn."""

    template: list[int]
    """Ids between the turn and the messages; they end the turn, if the model did not."""
    added: list[int]
    """Ids of the messages, with the header of the next turn."""
    images: list[Any]


class PromptRenderer:
    """A renderer of requests, the same for all sessions of a process.

    Args:
        codec: Renders messages.
        end_ids: Token ids that end a turn.
        read_images: Loads and resizes images, for a model that takes some.
    """

    def __init__(self, codec: ChatCodec, end_ids: Collection[int], read_images: ReadImages = as_they_are) -> None:
        self._codec = codec
        self._end_ids = frozenset(end_ids)
        self._closing = closing_ids(codec)
        self._form = codec.form  # found out here, not in the thread
        self._read_images = read_images
        # One thread: the codec remembers schemas in a dictionary of its own.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._prompts: OrderedDict[str, asyncio.Future[RenderedPrompt]] = OrderedDict()

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], tools_key: str
    ) -> RenderedPrompt:
        """Render all messages of a request.

        Args:
            messages: The messages.
            tools: The tools' schemas.
            tools_key: Their key.

        Raises:
            RefusedError: The template cannot render the messages, or the model cannot be shown their images.
        """
        if any(message["role"] == "assistant" for message in messages):  # no other session begins with it
            return await self._rendered(messages, tools)
        said = json.dumps([tools_key, messages], sort_keys=True, default=repr)
        key = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
        found = self._prompts.get(key)
        if found is None:
            found = asyncio.ensure_future(self._rendered(messages, tools))
            keep(found)  # the session with the first request may end before the others
            self._prompts[key] = found
            if len(self._prompts) > _MOST_PROMPTS:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(key)
        made = await asyncio.shield(found)
        if len(made.ids) > _MOST_TOKENS:
            self._prompts.pop(key, None)
        return made

    async def _rendered(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> RenderedPrompt:
        written = await self._loaded(self._form.prompt(messages))

        def render() -> tuple[list[int], Sequence[dict[str, Any]]]:
            shown = self._codec.trusted_schemas(tools)
            return self._codec.initial(self._codec.trusted(written), shown, RequiredPart.OTHERS), shown

        ids, shown = await self._in_thread(render)
        return RenderedPrompt(ids, shown, images_of(written))

    async def following(
        self,
        said: Message,
        messages: Sequence[Message],
        sampled: Sequence[int],
        shown: Sequence[dict[str, Any]],
    ) -> RenderedMessages:
        """Render the messages that follow a turn.

        Args:
            said: The turn as a message of a request.
            messages: The messages after it, of tools, users and the system.
            sampled: The turn's ids.
            shown: The tools' schemas as the model is shown them.

        Raises:
            RefusedError: As for `prompt`.
        """
        added = await self._loaded(self._form.added(messages, said))
        closing = [] if sampled[-1] in self._end_ids else self._closing
        before: list[Message] = [{"role": "assistant", "content": said["content"], **self._form.assistant_fields(said)}]

        def render() -> Increment:
            return self._codec.observation(before, self._codec.trusted(added), sampled, shown)

        characters = sum(_MESSAGE + sum(map(len, text_parts(_parts(message)))) for message in added)
        in_thread = characters > _MOST_AT_ONCE or self._codec.vision is not None
        increment = await self._in_thread(render) if in_thread else _checked(render)
        return RenderedMessages([*closing, *increment.separator], increment.observation, images_of(added))

    async def _loaded(self, messages: list[Message]) -> list[Message]:
        if not images_of(messages):
            return messages
        if self._codec.vision is None:
            raise _refused("the model takes no images; send text")
        try:
            return await load_images(messages, self._read_images, "the request")
        except ConfigError as error:
            raise _refused(str(error)) from error

    async def _in_thread(self, render: Callable[[], Result]) -> Result:
        if self._codec.vision is not None:  # the processor has a thread of its own
            return await self._codec.vision.run(_checked, render)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _checked, render)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _checked(render: Callable[[], Result]) -> Result:
    try:
        return render()
    except ConfigError as error:
        raise _refused(str(error)) from error


def _refused(message: str) -> RefusedError:
    return RefusedError(400, "invalid_request_error", message)


def _parts(message: Message) -> list[Any]:
    content = message["content"]
    return content if isinstance(content, list) else [content]


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
