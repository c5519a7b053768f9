"""Questions about pictures, which the model may look at more closely.

    python recipes/image_zoom/prepare_data.py --out DIR [--source hiyouga/geometry3k] [--no-tool] [--smoke]

A source has the columns `images`, `problem`, with `<image>` in it, and `answer`, as geometry3k has them, or those of
DeepEyes' data (`prompt`, `images`, `reward_model`). The pictures are written to `DIR/images`; prompt and tool get the
same file. With `--smoke --model DIR` a tiny model that knows the made rows by heart is written as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from verl_multiturn.data import Row, arguments, make_row, prepare, read_splits, tool_call, write_rows
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.image_zoom import read_image
from verl_multiturn.tools.registry import load_tools

if TYPE_CHECKING:
    from PIL.Image import Image

TOOL = "image_zoom"
SOURCE = "hiyouga/geometry3k"
BOXED = "Give the answer in \\boxed{}."
TAGGED = "Give the answer, in as few words as will do, inside <answer> and </answer>."
SYSTEM = "You answer questions about a picture. Think first."
SYSTEM_TOOL = (
    f"{SYSTEM} To see details, look closer at a region with the tool `{TOOL}`; you then get a picture of it, and think "
    "again."
)
# Qwen2.5-VL's template says nothing of tools: the prompt does.
TOOLS = """

You may call this tool, described by a JSON schema:
{schema}
Write each call as a JSON object inside <tool_call> and </tool_call>, for example
{call}

"""
# Qwen2.5-VL sees a picture in squares of so many pixels, and counts in those pixels.
BLOCK = 28
# What DeepEyes' questions end with: how to call their tool.
_THEIR_INSTRUCTIONS = "\nThink first, call"
COLORS = ("red", "green", "blue", "black")


def system_text(tools: Path | None, ending: str) -> str:
    """The system message with the tool's schema; None: without it, where the model's template shows it."""
    if tools is None:
        return f"{SYSTEM_TOOL} {ending}"
    schema = load_tools(tools)[TOOL].tool_schema
    example = tool_call(TOOL, {"bbox_2d": [0, 0, 56, 56]})
    described = TOOLS.format(schema=json.dumps(schema.model_dump(exclude_none=True)["function"]), call=example)
    return f"{SYSTEM_TOOL}{described}{ending}"


def row(entry: dict[str, Any], file: Path, tools: Path | None, tool: bool = True) -> Row:
    """A row; its picture is written to `file`.

    Args:
        tools: the YAML whose tool the prompt describes; None where the template does it.
        tool: whether the row has the tool.

    Raises:
        ConfigError: the entry has not one picture, or other columns.
    """
    images = entry.get("images")
    if images is None or len(images) != 1:
        raise ConfigError(f"expected a column 'images' with one picture each, got {images!r:.100}")
    if entry.get("problem") is not None:
        question, answer, ending, source = entry["problem"], entry["answer"], BOXED, SOURCE
    elif entry.get("prompt") is not None and entry.get("reward_model") is not None:
        question = entry["prompt"][-1]["content"].partition(_THEIR_INSTRUCTIONS)[0]
        answer, ending, source = entry["reward_model"]["ground_truth"], TAGGED, f"deepeyes/{entry.get('data_source')}"
    else:
        raise ConfigError(
            f"expected the columns 'problem' and 'answer', or 'prompt' and 'reward_model', got {sorted(entry)}"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    in_blocks(read_image(images[0])).save(file)
    made = make_row(
        source,
        "<image>" + question.replace("<image>", "").strip(),
        str(answer),
        system=system_text(tools, ending) if tool else f"{SYSTEM} {ending}",
        ability="vision",
        tools_kwargs={TOOL: {"create_kwargs": {"image": str(file.resolve())}}} if tool else None,
        question=question.replace("<image>", "").strip(),
    )
    return {**made, "images": [str(file.resolve())]}


def in_blocks(image: Image) -> Image:
    """A picture whose sides are multiples of `BLOCK`: the model's pixels are then those of the tool."""
    width, height = (max(1, round(side / BLOCK)) * BLOCK for side in image.size)
    return image if image.size == (width, height) else image.resize((width, height))


def demonstration(count: int, tool: bool = True) -> list[str]:
    """What is said on a picture with so many squares: a look at them, and the answer."""
    look = [tool_call(TOOL, {"bbox_2d": [0, 0, 112, 56], "label": "squares"})] if tool else []
    return [*look, f"\\boxed{{{count}}}"]


def smoke_rows(folder: Path, tools: Path, tool: bool = True) -> list[Row]:
    """Squares to be counted. The demonstrations are not in the rows: the model for text has no use for them."""
    import PIL.Image

    rows = []
    for index in range(12):
        color, count = COLORS[index % 4], 1 + index // 4
        # Of several widths: verl 0.9.1 takes no batch of a vision-language model in which all rows are equally long.
        image = PIL.Image.new("RGB", (112 + BLOCK * (index % 4), 112), (255, 255, 255))
        for square in range(count):
            image.paste(color, (8 + 32 * square, 16, 28 + 32 * square, 36))
        entry = {
            "images": [image],
            "problem": f"<image>How many {color} squares are in picture {index}?",
            "answer": str(count),
        }
        rows.append(row(entry, folder / "images" / f"{index}.png", tools, tool))
    return rows


def main() -> None:
    parser = arguments(__doc__ or "", SOURCE)
    parser.add_argument("--template-shows-tools", action="store_true", help="the model's chat template does (Qwen3-VL)")
    parser.add_argument("--no-tool", action="store_true", help="the baseline: no tool, and none in the prompt")
    parser.add_argument("--splits", nargs=2, default=("train", "test"), help="what the source calls its splits")
    parser.add_argument("--model", type=Path, help="with --smoke: where a tiny vision-language model is written")
    args = parser.parse_args()
    args.tools = args.tools or Path(__file__).parents[2] / "tool_configs" / "image_zoom.yaml"
    described = None if args.template_shows_tools else args.tools
    if args.smoke:
        entry = yaml.safe_load(args.tools.read_text(encoding="utf-8"))["tools"][0]
        entry["config"] |= {"min_pixels": 56 * 56, "max_pixels": 112 * 112}  # a few tokens each
        args.out.mkdir(parents=True, exist_ok=True)
        args.tools = args.out / "tools.yaml"
        args.tools.write_text(yaml.safe_dump({"tools": [entry]}, sort_keys=False), encoding="utf-8")
        made = smoke_rows(args.out, args.tools, not args.no_tool)
        splits = {"train": made[:8], "test": made[8:]}
        if args.model is not None:
            from tiny_model import make_model

            said = [demonstration(int(each["reward_model"]["ground_truth"]), not args.no_tool) for each in made]
            make_model(args.model, made, said, args.tools)
    else:
        splits = {
            split: [
                row(entry, args.out / "images" / split / f"{index}.png", described, not args.no_tool)
                for index, entry in enumerate(rows)
            ]
            for split, rows in read_splits(args.source, splits=tuple(args.splits)).items()
        }
    write_rows(args.out, splits, None if args.no_tool else args.tools)


if __name__ == "__main__":
    prepare(main)
