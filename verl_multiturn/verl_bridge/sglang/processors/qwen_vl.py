"""An image processor for the Qwen-VL series that does not change the ids of the prompt.

SGLang decodes the ids of a request with images, and encodes the text again. That does not always give the same
ids: tokens that the model sampled in earlier turns could become other tokens than those that are trained. With this
processor only the images go through SGLang's processing, and the ids stay as they were given.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from verl_multiturn.verl_bridge.compat.engine import then


class GivenIdsQwenVL(QwenVLImageProcessor):
    """SGLang's processor, which keeps the ids of a prompt that is given as ids with images and no other media."""

    models: ClassVar[list[type]] = QwenVLImageProcessor.models

    def load_mm_data(self, prompt: Any, multimodal_tokens: Any, image_data: Any = None, **others: Any) -> Any:
        """Load a request's images, as SGLang does.

        Where the ids are kept, the processor gets a text with one placeholder for each image instead of the prompt.
        """
        only_images = image_data and not (others.get("video_data") or others.get("audio_data"))
        # An image that is a dictionary holds features that were computed before.
        if not (isinstance(prompt, list) and only_images) or any(isinstance(image, dict) for image in image_data):
            return super().load_mm_data(prompt, multimodal_tokens, image_data, **others)
        text = multimodal_tokens.image_token * len(image_data)

        def keep(loaded: Any) -> Any:
            loaded.given_ids = list(prompt)
            return loaded

        return then(super().load_mm_data(text, multimodal_tokens, image_data, **others), keep)

    def compose_image_artifacts(self, input_text: Any, artifacts: Any) -> Any:
        """Leave SGLang's quick way for images, which ids with one placeholder for each token of an image cannot go.

        SGLang has it since 0.5.20. None leads back to `load_mm_data`.
        """
        return None if isinstance(input_text, list) else super().compose_image_artifacts(input_text, artifacts)

    def process_and_combine_mm_data(self, base_output: Any, mm_tokens: Any, **settings: Any) -> Any:
        """Process a request's images, as SGLang does.

        Where the ids of the prompt are kept, they are returned, and each image gets the place of its placeholders.

        Returns:
            SGLang's items, the ids of the prompt, and the result of the processor.

        Raises:
            ValueError: The groups of placeholders in the prompt do not fit the images in number or length.
        """
        items, ids, returned = super().process_and_combine_mm_data(base_output, mm_tokens, **settings)
        given_ids = getattr(base_output, "given_ids", None)
        if given_ids is None:
            return items, ids, returned
        ids = torch.tensor(given_ids)
        groups = self.get_mm_items_offset(ids, mm_tokens.image_token_id)
        needed = [offset for item in items for offset in item.offsets]
        if _lengths(groups) != _lengths(needed):
            raise ValueError(
                f"image placeholders of {_lengths(groups)} tokens in the prompt, the images need {_lengths(needed)}"
            )
        left = iter(groups)
        for item in items:
            item.offsets = [next(left) for _ in item.offsets]
        return items, ids, returned


def _lengths(offsets: list[tuple[int, int]]) -> list[int]:
    return [end - start + 1 for start, end in offsets]
