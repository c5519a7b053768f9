"""Images in messages and their placeholders, without a model."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from verl_multiturn import Ask, ConfigError, EngineError, ScriptedEngine, ToolContractError
from verl_multiturn.certificate.check import CertificateRow, verify
from verl_multiturn.certificate.receipts import ReceiptingEngine, Receipts
from verl_multiturn.chat.images import (
    CANNOT_BE_SHOWN,
    Vision,
    as_they_are,
    images_of,
    load_images,
    tool_content,
    with_images,
)
from verl_multiturn.rollout.engines.stop_texts import PlaceholderGuard

PAD, FILM = 9, 8


def decode(ids: list[int]) -> str:
    return "".join({PAD: "<img>", FILM: "<film>"}.get(i, chr(i)) for i in ids)


@pytest.fixture
def vision() -> Vision:
    return Vision(PAD, [FILM], ["<img>", "<film>"], decode)


def block(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def test_images_are_found_and_replaced() -> None:
    text = {"type": "text", "text": "and"}
    by_url = {"type": "image_url", "image_url": {"url": "u"}}
    messages = [{"role": "user", "content": [block("a"), text, by_url]}, {"role": "user", "content": "none"}]
    assert images_of(messages) == ["a", {"url": "u"}]
    replaced = with_images(messages, [1, 2])
    assert replaced == [{"role": "user", "content": [block(1), text, block(2)]}, messages[1]]
    assert images_of(messages[1:]) == []


def test_groups_are_counted_and_collapsed(vision: Vision) -> None:
    ids = [1, PAD, PAD, 2, PAD, 3]
    assert [vision.count(ids), vision.count([PAD]), vision.count([])] == [2, 1, 0]
    flags = [False, False, False, True, False, True]
    assert vision.collapse(ids, flags) == ([1, PAD, 2, PAD, 3], [False, False, True, False, True])
    assert vision.without_media([1, PAD, FILM, 2]) == [1, 2]


def test_a_turn_is_usable_up_to_a_placeholder(vision: Vision) -> None:
    plain = [ord(c) for c in "ab"]
    spelled = [ord(c) for c in "<img>"]
    assert vision.usable(plain) == 2
    assert vision.usable([*plain, PAD, *plain]) == 2
    assert vision.usable([*plain, FILM]) == 2
    assert vision.usable([*plain, *spelled, *plain]) == 6
    assert vision.usable([PAD]) == 0


async def test_the_guard_cuts_a_turn_below_the_receipts(vision: Vision) -> None:
    scripted = ScriptedEngine([[1, 2, PAD, 3], [4, 5], [PAD]], version=6)
    engine = ReceiptingEngine(PlaceholderGuard(scripted, vision))
    cut = await engine.generate(Ask("r", [0], {}, 10))
    assert (cut.ids, cut.logprobs, cut.versions, cut.finish) == ([1, 2], [-0.5, -0.5], [6, 6], "abort")
    whole = await engine.generate(Ask("r", [0, 1, 2], {}, 10, images=["picture"]))
    assert (whole.ids, whole.finish) == ([4, 5], "stop")
    with pytest.raises(EngineError, match="begins with an image placeholder"):
        await engine.generate(Ask("r", [0], {}, 10))
    assert [receipt.ids.tolist() for receipt in engine.take("r")] == [[1, 2], [4, 5]]
    assert scripted.images == [[], ["picture"], []]


async def test_what_a_tool_shows() -> None:
    red = Image.new("RGBA", (2, 2), "red")
    shown = await tool_content("look", "Red.", [red, None], as_they_are)
    assert [part["type"] for part in shown] == ["image", "text"]
    assert shown[0]["image"].mode == "RGB"
    assert await tool_content("look", "", [red], as_they_are) == [block(red.convert("RGB"))]
    assert await tool_content("look", "Nothing.", [], None) == "Nothing."

    async def refuses(messages: Any) -> list[Any]:
        raise ValueError("too narrow")

    told = await tool_content("look", "Red.", [red], refuses)
    assert told == "Red.\nError: the image cannot be shown: too narrow"
    assert await tool_content("look", "Red.", [red, None, red], None) == f"Red.\n{CANNOT_BE_SHOWN}\n{CANNOT_BE_SHOWN}"
    assert await tool_content("look", "", ["cat.png"], None) == CANNOT_BE_SHOWN

    async def refuses_the_file(messages: Any) -> list[Any]:
        raise OSError(f"cannot identify image file {io.BytesIO()!r}")

    told = await tool_content("look", "", [red], refuses_the_file)
    assert told == "Error: the image cannot be shown: cannot identify image file <_io.BytesIO object>"
    with pytest.raises(ToolContractError, match=r"list of PIL images, got 'cat\.png'"):
        await tool_content("look", "Red.", ["cat.png"], as_they_are)


async def test_images_of_a_row() -> None:
    messages = [{"role": "user", "content": [block("cat.png")]}]
    with pytest.raises(ConfigError, match="row 3: an image cannot be read: ValueError: expected a PIL image"):
        await load_images(messages, as_they_are, "row 3")

    async def forgets(messages: Any) -> list[Any]:
        return []

    with pytest.raises(ConfigError, match="row 3: 1 images in the messages, the data set class read 0"):
        await load_images(messages, forgets, "row 3")


async def test_positions_of_a_row_with_an_image() -> None:
    """The prompt has a word, an image of 2 by 2 and a word; the turn has three tokens."""
    engine = ReceiptingEngine(ScriptedEngine([[5, 6, 7]]))
    prompt = [1, PAD, PAD, PAD, PAD, 2]
    await engine.generate(Ask("r", prompt, {}, 3))
    receipts = Receipts("r", engine.take("r"))
    positions = np.array(
        [
            [0, 1, 2, 3, 4, 5, 6, 7, 8],
            [0, 1, 1, 1, 1, 3, 4, 5, 6],
            [0, 1, 1, 2, 2, 3, 4, 5, 6],
            [0, 1, 2, 1, 2, 3, 4, 5, 6],
        ]
    )

    def found(positions: Any) -> list[str]:
        row = CertificateRow(np.array(prompt), np.array([5, 6, 7]), np.ones(3), None, None, position_ids=positions)
        return [violation.what for violation in verify(row, receipts)]

    assert found(positions) == []
    assert found(np.arange(9)) == []
    assert found(np.tile(np.arange(9), (4, 1))) == []
    wrong = positions.copy()
    wrong[2, 7] = 9
    assert found(wrong) == ["position_ids for images are [5, 9, 5], expected 5 three times, beyond 3"]
    for dimension in (1, 2, 3):
        for token in (6, 7, 8):
            for other in (-1, 1):
                wrong = positions.copy()
                wrong[dimension, token] += other
                (what,) = found(wrong)
                assert what.startswith("position_ids for images are [")
    wrong = positions.copy()
    wrong[1:, 6:] -= 1
    assert found(wrong) == ["position_ids for images are [3, 3, 3], expected 3 three times, beyond 3"]
    wrong = positions.copy()
    wrong[0, 4] = 5
    assert found(wrong) == ["position_ids is 5, by the row's order 4"]
    assert found(positions[:3])[0] == "the position_ids column has shape [3, 9], expected [4, 9]"
