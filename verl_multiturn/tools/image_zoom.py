"""`ImageZoomTool`: shows the model a region of the row's image, enlarged or shrunk.

Each conversation has one image, which the row gives as `create_kwargs.image`: a PIL image, the bytes of a file, a path,
a `data:image/…;base64,` text, or the mapping with `bytes`, `path` or `image` in which data sets store images. The image
is read as verl reads a prompt's images, and kept at its full size, since a resized copy has lost detail.

Invariants:
- every region is cut from the row's image, never from an earlier answer;
- an answer's image has between `min_pixels` and `max_pixels` pixels, up to rounding, whatever the model requested.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.chat.images import is_pil
from verl_multiturn.clients.http_connections import is_http, scheme_of
from verl_multiturn.config import read_model
from verl_multiturn.describe import message_of
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[int, int, int, int]
"""Left, top, right and bottom of a region, in pixels; column `right` and row `bottom` are outside of the region."""

# Qwen's processors refuse an image whose sides differ by a factor of 200.
_MAX_RATIO = 100


class ImageZoomSettings(BaseModel):
    """Settings of the image tool, each with its default and meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coordinate_range: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Number for the whole width, and for the whole height, in the model's coordinates.

    1000 for Qwen3-VL, 1 for shares of the image. null: the coordinates are pixels of the row's image, as for
    Qwen2.5-VL, if the prompt shows the image at its full size.
    """

    min_pixels: int = Field(256 * 256, gt=0)
    """Smallest number of pixels of an answer's image: a smaller region is enlarged."""

    max_pixels: int = Field(1024 * 1024, gt=0)
    """Largest number of pixels of an answer's image: a larger region is shrunk."""


class ImageZoomTool(BaseTool):
    """The tool `image_zoom(bbox_2d, label)`. The tool ignores the label, which only helps the model to think.

    Args:
        config: The fields of `ImageZoomSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong.
    """

    outage_limits = OutageLimits(mode="off")  # it answers in this process
    repeatable = True

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self._settings = read_model(ImageZoomSettings, config, "config")
        if self._settings.min_pixels > self._settings.max_pixels:
            raise ConfigError(
                f"config.min_pixels={self._settings.min_pixels}: expected at most config.max_pixels="
                f"{self._settings.max_pixels}; change one of them"
            )
        super().__init__(config, tool_schema)
        self._images: dict[str, Image] = {}

    def get_schema(self) -> ToolSchema:
        """Return the schema, with the arguments of verl's own tool of this kind."""
        unit = self._settings.coordinate_range
        counted = "in pixels" if unit is None else f"from 0 to {unit:g} in both directions"
        box = {
            "type": "array",
            "items": {"type": "number"},
            "minItems": 4,
            "maxItems": 4,
            "description": f"The region as [x1, y1, x2, y2]: its top left and bottom right corner, {counted}.",
        }
        label = {"type": "string", "description": "What is to be seen there."}
        parameters = {"type": "object", "properties": {"bbox_2d": box, "label": label}, "required": ["bbox_2d"]}
        description = "Look closer at a region of the image."
        function = {"name": "image_zoom", "description": description, "parameters": parameters}
        return ToolSchema.read({"type": "function", "function": function}, "ImageZoomTool")

    # A required argument, so that `validate` finds the rows without it.
    async def create(self, instance_id: str, *, image: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Read the row's image.

        Args:
            instance_id: Id of the conversation.
            image: The image in one of the forms that `read_image` accepts.
            kwargs: Not used.

        Raises:
            ConfigError: The image cannot be read.
        """
        self._images[instance_id] = await asyncio.to_thread(read_image, image)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Return the region that the model asks for, as an image.

        Raises:
            ValueError: The image has no such region; the text is for the model.
        """
        image = self._images[instance_id]
        box = find_region(parameters["bbox_2d"], image.size, self._settings.coordinate_range)
        shown = await asyncio.to_thread(self._cut, image, box)
        width, height = box[2] - box[0], box[3] - box[1]
        text = f"The region, {width} x {height} of the image's {image.width} x {image.height} pixels."
        return ToolResponse(text, image=[shown])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the conversation."""
        self._images.pop(instance_id, None)

    def _cut(self, image: Image, box: Box) -> Image:
        region = image.crop(box)
        pixels = region.width * region.height
        wanted = min(max(pixels, self._settings.min_pixels), self._settings.max_pixels)
        if wanted == pixels:
            return region
        scale = math.sqrt(wanted / pixels)
        return region.resize((max(1, round(region.width * scale)), max(1, round(region.height * scale))))


def find_region(bbox: Any, size: tuple[int, int], coordinate_range: float | None = None) -> Box:
    """Return the region that a model asks for, cut to the image and widened to whole pixels.

    Args:
        bbox: The region as the model wrote it, `[x1, y1, x2, y2]`.
        size: Width and height of the image, in pixels.
        coordinate_range: As in `ImageZoomSettings`.

    Raises:
        ValueError: The box is not a region of the image, or is a strip that no processor accepts. The text is for the
            model.
    """
    try:
        x1, y1, x2, y2 = (float(number) for number in bbox)
    except (TypeError, ValueError, OverflowError):  # an integer beyond 1e308 is too large for a float
        raise ValueError("bbox_2d must be four numbers: [x1, y1, x2, y2]") from None
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        raise ValueError("bbox_2d must be four finite numbers: [x1, y1, x2, y2]")
    width, height = size
    whole_x, whole_y = (width, height) if coordinate_range is None else (coordinate_range, coordinate_range)
    # Divide before multiplying: a product of large numbers would be infinite.
    left, right = (min(max(x / whole_x, 0.0), 1.0) * width for x in (x1, x2))
    top, bottom = (min(max(y / whole_y, 0.0), 1.0) * height for y in (y1, y2))
    if not (left < right and top < bottom):
        raise ValueError(
            f"bbox_2d has nothing of the image in it; it needs x1 < x2 and y1 < y2, with x from 0 to {whole_x:g} and y "
            f"from 0 to {whole_y:g}"
        )
    box = (math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom))
    sides = sorted((box[2] - box[0], box[3] - box[1]))
    if sides[1] > _MAX_RATIO * sides[0]:
        raise ValueError(
            f"the region is {sides[1]} pixels long and {sides[0]} wide; choose one whose sides differ at most by a "
            f"factor of {_MAX_RATIO}"
        )
    return box


def read_image(given: Any) -> Image:
    """Read a row's image into memory, in RGB; a transparent one gets a white background.

    Args:
        given: A PIL image, the bytes of a file, a path, a `data:image/…;base64,` text, or a mapping with one of these
            under `bytes`, `image` or `path`.

    Raises:
        ConfigError: It is not an image, or cannot be read.
    """
    import PIL.Image

    try:
        found = given
        if isinstance(given, Mapping):
            found = next((given[key] for key in ("bytes", "image", "path") if given.get(key) is not None), None)
        image = found if is_pil(found) else PIL.Image.open(_source(found))
        if image.mode != "RGBA":
            return image.convert("RGB")
        # White, as qwen_vl_utils does it for a prompt's images.
        white = PIL.Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    except Exception as error:  # files may be missing, and broken images raise many things
        raise ConfigError(
            f"create_kwargs.image: {given!r:.100} cannot be read: {message_of(error)}"[:500] + "; mend the data row"
        ) from error


def _source(given: Any) -> Any:
    """Return an input that PIL can open: a path, or a file in memory."""
    if isinstance(given, bytes):
        return io.BytesIO(given)
    if not isinstance(given, str):
        raise ValueError("expected a PIL image, bytes, a path, or a mapping with one of these as bytes, image or path")
    if scheme_of(given) == "data":
        return io.BytesIO(base64.b64decode(given.partition("base64,")[2], validate=True))
    if is_http(given):
        raise ValueError("addresses are not fetched; put the file's bytes or path into the row")
    return given.partition("//")[2] if scheme_of(given) == "file" and "//" in given else given
