"""Make rows with questions about pictures. The model may look at a region of the picture more closely.

    python recipes/image_zoom/prepare_data.py --out DIR [--source hiyouga/geometry3k] [--no-tool] [--smoke]

A source has the columns of geometry3k (`images`, `problem` with `<image>` in it, `answer`) or those of DeepEyes' data
(`prompt`, `images`, `reward_model`). The pictures are written to `DIR/images`; prompt and tool get the same file. With
`--smoke --model MODEL_DIR` a tiny model is written as well, which knows the made rows by heart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, read_splits, tool_call, write_rows
from verl_multiturn.tools.image_zoom import read_image
from verl_multiturn.tools.loading.registry import load_tools

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
# Qwen2.5-VL's template does not show tools, so the prompt describes the tool.
TOOLS = """

You may call this tool, described by a JSON schema:
{schema}
Write each call as a JSON object inside <tool_call> and </tool_call>, for example
{call}

"""
# Side in pixels of the squares in which Qwen2.5-VL sees a picture. It resizes a picture to whole squares, and gives
# coordinates in the pixels of the resized one.
BLOCK = 28
# Here the text begins with which DeepEyes' questions end: how to call their tool.
_THEIR_INSTRUCTIONS = "\nThink first, call"
COLORS = ("red", "green", "blue", "black")


def system_text(tools: Path | None, ending: str) -> str:
    """Return the system message.

    Args:
        tools: Tool YAML with the tool whose schema the message shows; None: no schema, because the model's template
            shows it.
        ending: Last sentence, on how to write the answer.
    """
    if tools is None:
        return f"{SYSTEM_TOOL} {ending}"
    schema = load_tools(tools)[TOOL].tool_schema
    example = tool_call(TOOL, {"bbox_2d": [0, 0, 56, 56]})
    described = TOOLS.format(schema=json.dumps(schema.model_dump(exclude_none=True)["function"]), call=example)
    return f"{SYSTEM_TOOL}{described}{ending}"


def row(entry: dict[str, Any], file: Path, tools: Path | None, tool: bool = True) -> Row:
    """Return the row of an entry, and write its picture to a file.

    Args:
        entry: A row of the source.
        file: Path for the picture.
        tools: Tool YAML with the tool that the prompt describes; None: the model's template shows the tool.
        tool: Whether the row has the tool.

    Raises:
        ConfigError: The entry has no picture or several, or unknown columns.
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
    """Return the picture, resized so that its sides are multiples of `BLOCK`.

    The model then gives coordinates in the same pixels as the tool uses.
    """
    width, height = (max(1, round(side / BLOCK)) * BLOCK for side in image.size)
    return image if image.size == (width, height) else image.resize((width, height))


def demonstration(count: int, tool: bool = True) -> list[str]:
    """Return the assistant's turns for a made picture: a call that looks at the squares, then the answer.

    Args:
        count: Number of squares in the picture.
        tool: Whether the row has the tool; without it there is no call.
    """
    look = [tool_call(TOOL, {"bbox_2d": [0, 0, 112, 56], "label": "squares"})] if tool else []
    return [*look, f"\\boxed{{{count}}}"]


def smoke_rows(folder: Path, tools: Path, tool: bool = True) -> list[Row]:
    """Make twelve rows whose task is to count squares.

    They have no demonstration, since the tiny model of the other recipes, which learns those, reads text only.

    Args:
        folder: Folder whose `images` gets the pictures.
        tools: Tool YAML that the prompts describe.
        tool: Whether the rows have the tool.
    """
    import PIL.Image

    rows = []
    for index in range(12):
        color, count = COLORS[index % 4], 1 + index // 4
        # The widths differ: verl 0.9.1 accepts no batch of a vision-language model whose rows are all equally long.
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
    """Write `train.parquet` and `test.parquet`."""
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
