"""Images in messages, and the tokens that stand for them.

An image is a block `{"type": "image", "image": <PIL image>}` in a message's content. The model's processor writes one
group of placeholder tokens for it (`<|image_pad|>`, repeated as often as the image is large), and engine and trainer
put the image's features there. So the groups in a conversation's ids and its images have to be the same, in number and
order: whatever else would be a placeholder is kept out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from verl_multiturn.describe import describe, message_of, show
from verl_multiturn.errors import ConfigError, ToolContractError

Message = dict[str, Any]
ReadImages = Callable[[Sequence[Message]], Awaitable[Sequence[Any]]]
"""Loads and resizes the images of messages, in their order; raises whatever it likes for one that it cannot read."""

CANNOT_BE_SHOWN = "[an image that this model cannot be shown]"

Result = TypeVar("Result")


def is_image(block: Any) -> bool:
    """Whether a block of a content is an image, as verl's builders and the templates see it."""
    return isinstance(block, dict) and (
        block.get("type") in ("image", "image_url") or "image" in block or "image_url" in block
    )


def images_of(messages: Sequence[Message]) -> list[Any]:
    """The images of messages, in order."""
    return [block.get("image", block.get("image_url")) for block in _blocks(messages) if is_image(block)]


def with_images(messages: Sequence[Message], images: Sequence[Any]) -> list[Message]:
    """The messages, with `images` in the place of theirs and nothing else in these blocks."""
    given = iter(images)

    def replaced(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        blocks = [{"type": "image", "image": next(given)} if is_image(block) else block for block in content]
        return {**message, "content": blocks}

    return [replaced(message) for message in messages]


def _blocks(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from content


async def load_images(messages: Sequence[Message], read: ReadImages, where: str) -> list[Message]:
    """The messages of a data row with their images loaded.

    Raises:
        ConfigError: an image cannot be read.
    """
    expected = len(images_of(messages))
    if not expected:
        return list(messages)
    try:
        images = await read(messages)
    except Exception as error:  # a data set class of the user's, files, pictures of any kind
        raise ConfigError(f"{where}: an image cannot be read: {describe(error)}"[:500]) from error
    if len(images) != expected:
        raise ConfigError(
            f"{where}: {expected} images in the messages, the data set class read {len(images)}; its "
            "process_multi_modal_info must return one for each"
        )
    return with_images(messages, images)


def check_media(messages: Sequence[Message], where: str, takes_images: bool) -> None:
    """Refuse messages with images where the model takes none, and with what no model of ours takes.

    Raises:
        ConfigError: there are such.
    """
    for message in messages:
        content = message.get("content")
        for block in content if isinstance(content, list) else []:
            kind = block.get("type") if isinstance(block, dict) else None
            if is_image(block) and not takes_images:
                raise ConfigError(
                    f"{where}: an image in a message, and the model takes none; use a vision-language model"
                )
            if kind in ("video", "audio"):
                raise ConfigError(
                    f"{where}: {kind} in a message is not supported by this agent loop; use images and text"
                )


async def tool_content(tool: str, text: str, images: Sequence[Any], read: ReadImages | None) -> Any:
    """What a tool's message holds: its images, then its text; an image that cannot be shown is told of instead.

    Args:
        read: None where the model takes no images; then it is told of each.

    Raises:
        ToolContractError: these are none.
    """
    given = [image for image in images if image is not None]
    if not given:
        return text
    if read is None:  # what a server answers depends on the arguments, which are the model's
        return "\n".join([text, *[CANNOT_BE_SHOWN] * len(given)]).lstrip("\n")
    if strange := [image for image in given if not is_pil(image)]:
        raise ToolContractError(f"tool {tool!r}: `image` must be a list of PIL images, got {show(strange[0])}")
    blocks = [{"type": "image", "image": image} for image in given]
    try:
        shown = await read([{"role": "tool", "content": blocks}])
    except Exception as error:  # what an image can be wrong in depends on the processor (an aspect ratio of 1:500, say)
        return f"{text}\nError: the image cannot be shown: {message_of(error) or describe(error)}".strip()
    content = [{"type": "image", "image": image} for image in shown]
    return [*content, {"type": "text", "text": text}] if text else content


def is_pil(image: Any) -> bool:
    """Whether this is a PIL image."""
    try:
        from PIL.Image import Image
    except ImportError:
        return False
    return isinstance(image, Image)


async def as_they_are(messages: Sequence[Message]) -> list[Any]:
    """Reads PIL images; neither files nor addresses, and resizes none."""
    images = images_of(messages)
    if strange := [image for image in images if not is_pil(image)]:
        raise ValueError(f"expected a PIL image, got {show(strange[0], 100)}")
    return [image.convert("RGB") for image in images]


def stand_in() -> Any:
    """A small image, for where only the text beside an image matters."""
    from PIL import Image

    return Image.new("RGB", (64, 64))


class Vision:
    """The placeholder tokens of a model, and the thread in which its processor works.

    Args:
        image_id: the token that is repeated for an image.
        media_ids: all placeholder tokens, of videos and audio too.
        texts: texts that the processor makes placeholders of.
        decode: the tokenizer's.
    """

    def __init__(
        self, image_id: int, media_ids: Collection[int], texts: Collection[str], decode: Callable[[list[int]], str]
    ) -> None:
        self.image_id = image_id
        self.media_ids = frozenset(media_ids) | {image_id}
        self.texts = tuple(texts)
        self._decode = decode
        # One thread: a tokenizer must not be used by two at once. Pictures are large, the event loop is everybody's.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in the thread; when cancelled, what has begun there ends unheard."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))

    def count(self, ids: Sequence[int]) -> int:
        """How many images stand in `ids`: groups of the placeholder."""
        before = [None, *ids[:-1]] if ids else []
        image_id = self.image_id
        return sum(token == image_id != previous for previous, token in zip(before, ids, strict=True))

    def collapse(self, ids: Sequence[int], flags: Sequence[bool]) -> tuple[list[int], list[bool]]:
        """Ids, and flags beside them, with one placeholder for each image, as a template's text has it."""
        kept = [i for i, token in enumerate(ids) if not (i and token == self.image_id == ids[i - 1])]
        return [ids[i] for i in kept], [flags[i] for i in kept]

    def without_media(self, ids: Sequence[int]) -> list[int]:
        """The ids that are no placeholder."""
        return [token for token in ids if token not in self.media_ids]

    def usable(self, sampled: Sequence[int]) -> int:
        """How many of a turn's first tokens write no placeholder, neither as a token nor spelled out.

        A model may sample one; no image belongs to it, and neither engine nor trainer could go on.
        """
        ids = list(sampled)
        end = next((i for i, token in enumerate(ids) if token in self.media_ids), len(ids))
        if self._spells(ids[:end]):
            end = next(length for length in range(1, end + 1) if self._spells(ids[:length])) - 1
        return end

    def _spells(self, ids: list[int]) -> bool:
        text = self._decode(ids)
        return any(placeholder in text for placeholder in self.texts)
