"""The image tool in a conversation with a real processor: the images that the model sees, and their tokens."""

from dataclasses import replace
from typing import Any

import pytest

from tests.integration.vision import image, make_runner, text
from verl_multiturn.tools.image_zoom import ImageZoomTool

# Importing verl's workers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


def call(box: str) -> str:
    return f'<tool_call>\n{{"name": "image_zoom", "arguments": {{"bbox_2d": {box}}}}}\n</tool_call><|im_end|>'


async def test_a_model_that_looks_closer(processors: dict[str, Any]) -> None:
    from PIL import Image

    processor = processors["qwen2_5_vl"]
    said = [call("[0, 0, 28, 56]"), call("[0, 0, 100, 1]"), call("[9, 9, 9, true]"), "Blue.<|im_end|>"]
    runner = make_runner(processor, "qwen2_5_vl", said)
    shown = Image.new("RGB", (112, 112), (0, 255, 0))
    shown.paste((0, 0, 255), (0, 0, 28, 56))
    tool = ImageZoomTool({"min_pixels": 56 * 112})
    row = {
        "raw_prompt": [{"role": "user", "content": [image(shown), text("Which colour is at the top left?")]}],
        "extra_info": {"tools_kwargs": {"image_zoom": {"create_kwargs": {"image": shown}}}},
    }
    request = await runner.request(row, {}, "r")
    outcome, _ = await runner.run(replace(request, tools={"image_zoom": tool}))

    assert outcome.differences == []
    assert [picture.size for picture in outcome.images] == [(112, 112), (56, 112), (784, 28)]
    assert outcome.images[1].getcolors() == [(56 * 112, (0, 0, 255))]
    assert runner.vision.count(outcome.trajectory.ids) == 3
    answers = [message["content"] for message in outcome.messages if message["role"] == "tool"]
    assert answers[0][1] == text("The region, 28 x 56 of the image's 112 x 112 pixels.")
    assert answers[2].startswith("Error: ")
    assert not tool._images
