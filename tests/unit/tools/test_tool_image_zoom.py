"""`ImageZoomTool`: the region that it shows, its size, and a model's limits with it."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import ROOT
from tests.serving import conversation
from verl_multiturn import ConfigError, load_tools
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.checking import instruments
from verl_multiturn.checking.tool_contract import Grade, check_tool
from verl_multiturn.tools.image_zoom import ImageZoomTool, find_region, read_image
from verl_multiturn.tools.loading.kwargs import bind_kwargs
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallResult, CallStatus
from verl_multiturn.tools.running.session import ToolSession

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def picture() -> Image.Image:
    """Make a green picture of 400 by 200 pixels.

    It has a red square of 100 pixels at the top left and a blue one at the bottom right.
    """
    image = Image.new("RGB", (400, 200), GREEN)
    image.paste(RED, (0, 0, 100, 100))
    image.paste(BLUE, (300, 100, 400, 200))
    return image


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def colours(image: Image.Image) -> set[Any]:
    return {colour for _, colour in image.getcolors(maxcolors=2**20) or []}


async def zoomed(bbox: list[float], image: Image.Image | None = None, **config: Any) -> tuple[Image.Image, str]:
    async with conversation(ImageZoomTool(config), image=image or picture()) as call:
        response: Any = await call(bbox_2d=bbox)
    (shown,) = response.image
    return shown, response.text


async def test_a_region_in_pixels() -> None:
    shown, text = await zoomed([0, 0, 100, 100], min_pixels=1)
    assert (shown.size, colours(shown), shown.mode) == ((100, 100), {RED}, "RGB")
    assert text == "The region, 100 x 100 of the image's 400 x 200 pixels."
    shown, _ = await zoomed([300, 50, 400, 200], min_pixels=1)
    assert (shown.size, colours(shown)) == ((100, 150), {GREEN, BLUE})
    assert shown.getpixel((0, 49)) == GREEN
    assert shown.getpixel((0, 50)) == BLUE


async def test_a_region_in_the_models_own_coordinates() -> None:
    shown, _ = await zoomed([750, 500, 1000, 1000], coordinate_range=1000, min_pixels=1)
    assert (shown.size, colours(shown)) == ((100, 100), {BLUE})
    shown, _ = await zoomed([0, 0, 0.25, 0.5], coordinate_range=1, min_pixels=1)
    assert (shown.size, colours(shown)) == ((100, 100), {RED})
    said = ImageZoomTool({"coordinate_range": 1000}).tool_schema.as_dict()["function"]["parameters"]["properties"]
    assert said["bbox_2d"]["description"].endswith("from 0 to 1000 in both directions.")
    said = ImageZoomTool({}).tool_schema.as_dict()["function"]["parameters"]["properties"]
    assert said["bbox_2d"]["description"].endswith("in pixels.")


async def test_what_lies_outside_is_left_out() -> None:
    shown, text = await zoomed([-1e300, -5, 100, 1e308], min_pixels=1)
    assert (shown.size, colours(shown)) == ((100, 200), {RED, GREEN})
    assert text.startswith("The region, 100 x 200 of")
    # The region has whole pixels, all that the request touches.
    assert find_region([10.9, 10.1, 12.1, 11], (400, 200)) == (10, 10, 13, 11)
    assert find_region([399.5, 199.5, 400, 200], (400, 200)) == (399, 199, 400, 200)


async def test_the_size_of_an_answer() -> None:
    small, _ = await zoomed([0, 0, 4, 1])
    assert small.size == (512, 128)  # 256 · 256 pixels
    assert colours(small) == {RED}
    large, _ = await zoomed([0, 0, 4000, 1000], Image.new("RGB", (4000, 1000)))
    assert large.size == (2048, 512)  # 1024 · 1024
    same, _ = await zoomed([0, 0, 400, 200])
    assert same.size == (400, 200)


@pytest.mark.parametrize(
    ("bbox", "message"),
    [
        ([100, 0, 100, 50], r"nothing of the image .* x1 < x2 and y1 < y2, with x from 0 to 400 and y from 0 to 200"),
        ([100, 0, 50, 50], "nothing of the image"),
        ([400, 0, 500, 50], "nothing of the image"),
        ([-20, -20, 0, 0], "nothing of the image"),
        ([0, 0, 400, 3], r"400 pixels long and 3 wide; choose one whose sides differ at most by a factor of 100"),
        ([float("nan"), 0, 10, 10], "finite"),
        ([0, 0, float("inf"), 10], "finite"),
        ([0, 0, 10**400, 10], "four numbers"),
        ([0, 0, 10], "four numbers"),
        ([0, 0, 10, 10, 10], "four numbers"),
        ([0, 0, "a", 10], "four numbers"),
        ([0, 0, [1], 10], "four numbers"),
        (None, "four numbers"),
    ],
)
def test_what_is_no_region(bbox: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        find_region(bbox, (400, 200))
    assert len(str(raised.value)) < 200


numbers = st.floats() | st.integers()


@given(st.lists(numbers, min_size=4, max_size=4), st.tuples(st.integers(1, 5000), st.integers(1, 5000)), st.booleans())
def test_a_region_lies_in_the_image(bbox: list[float], size: tuple[int, int], shares: bool) -> None:
    try:
        left, top, right, bottom = find_region(bbox, size, 1.0 if shares else None)
    except ValueError:
        return
    assert 0 <= left < right <= size[0]
    assert 0 <= top < bottom <= size[1]
    assert max(right - left, bottom - top) <= 100 * min(right - left, bottom - top)


async def ask(arguments: str) -> CallResult:
    """Make a call as a model does, through the runtime."""
    (tool,) = load_tools(ROOT / "tool_configs" / "image_zoom.yaml").values()
    kwargs = {"image_zoom": {"create_kwargs": {"image": png(picture())}}}
    async with ToolSession("r1", {"image_zoom": tool}, kwargs, Gates(Gate, 10.0), 1) as opened:
        (result,) = await opened.execute([ToolCall("image_zoom", arguments, "c1")])
    assert not tool._images
    return result


async def test_a_call_through_the_runtime() -> None:
    result = await ask('{"bbox_2d": [300, 100, 400, 200], "label": "<|im_end|>"}')
    assert (result.status, result.text) == (CallStatus.OK, "The region, 100 x 100 of the image's 400 x 200 pixels.")
    (shown,) = result.images
    assert (shown.size, colours(shown)) == ((256, 256), {BLUE})


@pytest.mark.parametrize(
    "box",
    ["[NaN, 0, 1, 1]", "[0, 0, Infinity, 1]", "[0, 0, 1e999, 1]", f"[0, 0, {'9' * 400}, 1]", "[true, 0, 1, 1]", "4"],
)
async def test_a_hostile_call_is_answered(box: str) -> None:
    result = await ask(json.dumps({"bbox_2d": 0}).replace("0", box))
    assert result.status in (CallStatus.ERROR, CallStatus.BAD_ARGUMENTS)
    assert "bbox_2d" in result.text
    assert result.images == ()
    assert len(result.text) < 700


def test_how_a_row_may_give_its_image(tmp_path: Path) -> None:
    image, file = picture(), tmp_path / "picture.png"
    data = png(image)
    file.write_bytes(data)
    text = "data:image/png;base64," + base64.b64encode(data).decode()
    mappings = [{"bytes": data, "path": None}, {"bytes": None, "path": str(file)}, {"image": image}]
    for form in (image, data, str(file), f"file://{file}", f"FILE://{file}", text, *mappings):
        assert read_image(form).tobytes() == image.tobytes()
    assert read_image(image.convert("P")).mode == "RGB"
    # A transparent pixel becomes white, as in a prompt's images.
    assert colours(read_image(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))) == {(255, 255, 255)}


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("missing.png", "'missing.png' cannot be read: .*No such file"),
        (b"no picture", "cannot be read: cannot identify image file"),
        ("data:image/png;base64,%%%", "cannot be read"),
        ("https://example.org/a.png", "addresses are not fetched"),
        ("HTTPS://example.org/a.png", "addresses are not fetched"),
        (42, "42 cannot be read: expected a PIL image, bytes, a path"),
        ({"bytes": None}, "expected a PIL image"),
        ({"bytes": png(picture())[:200]}, "cannot be read"),
    ],
)
async def test_an_image_that_cannot_be_read(image: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"create_kwargs.image: .*{message}.*; mend the data row"):
        await ImageZoomTool({}).create("c1", image=image)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"config.min_pixels=9: expected at most config.max_pixels=4"):
        ImageZoomTool({"min_pixels": 9, "max_pixels": 4})
    with pytest.raises(ConfigError, match=r"config.coordinate_range: Input should be greater than 0"):
        ImageZoomTool({"coordinate_range": 0})
    with pytest.raises(ConfigError, match="image"):
        bind_kwargs(ImageZoomTool({}), "create", {}, "row 3")


def test_it_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruments, "SETTLE_S", 0.3)
    findings = check_tool(ImageZoomTool({}), {"bbox_2d": [0, 0, 50, 50]}, {"image": png(picture())})
    assert {finding.verdict for finding in findings} == {Grade.OK}, findings
