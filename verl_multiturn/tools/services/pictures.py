"""Pictures in the answers of servers of tools and of agents."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from verl_multiturn.describe import message_of


def decode_pictures(pictures: Sequence[str | bytes]) -> list[Any]:
    """Return pictures as PIL images. It takes a while: call it in a thread.

    Args:
        pictures: The bytes of each picture's file, or their base64 text.

    Raises:
        RuntimeError: One of them cannot be read.
    """
    from PIL import Image  # a large import, and few tools send images

    images = []
    for picture in pictures:
        try:
            image = Image.open(io.BytesIO(picture if isinstance(picture, bytes) else base64.b64decode(picture)))
            image.load()
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise RuntimeError(f"the tool server sent an image that cannot be read: {message_of(error)}") from None
        images.append(image)
    return images
