"""Images in messages, and their placeholder tokens.

An image is a block `{"type": "image", "image": <PIL image>}` in a message's content. The model's processor writes one
group of placeholder tokens for each image: `<|image_pad|>`, repeated more often the larger the image is. Engine and
trainer put the image's features there. So the groups in a conversation's ids and the images must be the same in number
and order. This module keeps out everything else that would become a placeholder.
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
"""A coroutine function that loads and resizes the images of messages, and returns them in their order.

It may raise anything for an image that it cannot read.
"""

CANNOT_BE_SHOWN = "[an image that this model cannot be shown]"
"""Text in a tool response in the place of each image that the model cannot take."""

Result = TypeVar("Result")


def is_image(block: Any) -> bool:
    """Return whether a block of a content is an image, by the same rule as verl's builders and the templates."""
    return isinstance(block, dict) and (
        block.get("type") in ("image", "image_url") or "image" in block or "image_url" in block
    )


def images_of(messages: Sequence[Message]) -> list[Any]:
    """Return the images of messages, in order."""
    return [block.get("image", block.get("image_url")) for block in _blocks(messages) if is_image(block)]


def with_images(messages: Sequence[Message], images: Sequence[Any]) -> list[Message]:
    """Return the messages with each image block replaced by one that holds nothing but the next of `images`."""
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
    """Return the messages of a data row with their images loaded.

    Args:
        messages: The row's messages.
        read: Loads the images.
        where: Name of the row in errors, for example `data row 7`.

    Raises:
        ConfigError: An image cannot be read, or `read` returned another number of images than the messages have.
    """
    expected = len(images_of(messages))
    if not expected:
        return list(messages)
    try:
        images = await read(messages)
    except Exception as error:  # a user's data set class, files and damaged images may raise anything
        raise ConfigError(f"{where}: an image cannot be read: {describe(error)}"[:500]) from error
    if len(images) != expected:
        raise ConfigError(
            f"{where}: {expected} images in the messages, the data set class read {len(images)}; its "
            "process_multi_modal_info must return one for each"
        )
    return with_images(messages, images)


def check_media(messages: Sequence[Message], where: str, takes_images: bool) -> None:
    """Refuse messages with images if the model takes none, and messages with video or audio.

    Args:
        messages: The messages to check.
        where: Name of their source in errors, for example `data row 7`.
        takes_images: Whether the model takes images.

    Raises:
        ConfigError: A message holds such a block.
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
    """Return the content of a tool's message: its images, then its text.

    A text replaces an image that cannot be shown.

    Args:
        tool: Name of the tool.
        text: The tool's answer.
        images: Values that the tool returned as images. Each None is skipped.
        read: Loads and resizes images; None if the model takes no images: `CANNOT_BE_SHOWN` replaces each.

    Returns:
        The text alone, or a list of blocks where images are shown.

    Raises:
        ToolContractError: The model takes images, and the tool returned something else than PIL images.
    """
    given = [image for image in images if image is not None]
    if not given:
        return text
    if read is None:  # not an error of the author: a server's answer depends on the model's arguments
        return "\n".join([text, *[CANNOT_BE_SHOWN] * len(given)]).lstrip("\n")
    if strange := [image for image in given if not is_pil(image)]:
        raise ToolContractError(f"tool {tool!r}: `image` must be a list of PIL images, got {show(strange[0])}")
    blocks = [{"type": "image", "image": image} for image in given]
    try:
        shown = await read([{"role": "tool", "content": blocks}])
    except Exception as error:  # each processor refuses other images (for example an aspect ratio of 1:500)
        return f"{text}\nError: the image cannot be shown: {message_of(error) or describe(error)}".strip()
    content = [{"type": "image", "image": image} for image in shown]
    return [*content, {"type": "text", "text": text}] if text else content


def is_pil(image: Any) -> bool:
    """Return whether an object is a PIL image."""
    try:
        from PIL.Image import Image
    except ImportError:
        return False
    return isinstance(image, Image)


async def as_they_are(messages: Sequence[Message]) -> list[Any]:
    """Return the PIL images of messages as RGB, in order and not resized.

    Raises:
        ValueError: An image is not a PIL image; files and addresses are not loaded.
    """
    images = images_of(messages)
    if strange := [image for image in images if not is_pil(image)]:
        raise ValueError(f"expected a PIL image, got {show(strange[0], 100)}")
    return [image.convert("RGB") for image in images]


def stand_in() -> Any:
    """Return a small image, for use where only the text beside an image matters."""
    from PIL import Image

    return Image.new("RGB", (64, 64))


class Vision:
    """The placeholder tokens of a model, and the thread in which its processor works.

    Args:
        image_id: Id of the token that is repeated for an image.
        media_ids: Ids of all placeholder tokens, also those for video and audio.
        texts: Texts that the processor turns into placeholders.
        decode: The tokenizer's `decode`.
    """

    def __init__(
        self, image_id: int, media_ids: Collection[int], texts: Collection[str], decode: Callable[[list[int]], str]
    ) -> None:
        self.image_id = image_id
        self.media_ids = frozenset(media_ids) | {image_id}
        self.texts = tuple(texts)
        self._decode = decode
        # One thread, because two must not use a tokenizer at once. Not the event loop, because images are large and all
        # conversations share the loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in the processor's thread.

        A call that has begun cannot be stopped: when the caller is cancelled, the call goes on and its result is
        dropped.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))

    def count(self, ids: Sequence[int]) -> int:
        """Count the images in `ids`: groups of the placeholder token."""
        before = [None, *ids[:-1]] if ids else []
        image_id = self.image_id
        return sum(token == image_id != previous for previous, token in zip(before, ids, strict=True))

    def collapse(self, ids: Sequence[int], flags: Sequence[bool]) -> tuple[list[int], list[bool]]:
        """Shorten each group of placeholders to one, as the template's text has it.

        Args:
            ids: Token ids, `(tokens,)`.
            flags: A flag for each token, `(tokens,)`.

        Returns:
            The ids that remain, and their flags.
        """
        kept = [i for i, token in enumerate(ids) if not (i and token == self.image_id == ids[i - 1])]
        return [ids[i] for i in kept], [flags[i] for i in kept]

    def without_media(self, ids: Sequence[int]) -> list[int]:
        """Return the ids without the placeholders."""
        return [token for token in ids if token not in self.media_ids]

    def usable(self, sampled: Sequence[int]) -> int:
        """Return how many of a turn's first tokens can be kept before the model writes a placeholder.

        A model may sample a placeholder token, or spell its text out. No image belongs to it, and neither engine nor
        trainer could go on.

        Args:
            sampled: Ids of the turn.
        """
        ids = list(sampled)
        end = next((i for i, token in enumerate(ids) if token in self.media_ids), len(ids))
        if self._spells(ids[:end]):
            end = next(length for length in range(1, end + 1) if self._spells(ids[:length])) - 1
        return end

    def _spells(self, ids: list[int]) -> bool:
        text = self._decode(ids)
        return any(placeholder in text for placeholder in self.texts)
