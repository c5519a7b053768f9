"""The commands that open somebody's folder, for `benchmarks.strangers_folder`: their words and their figures."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.long.strangers.strangers_material import ROOT, World

Words = Callable[[Path, Path, World], list[str]]
Figures = dict[str, float]


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        name: Its name in the results.
        material: Which kind of folder it opens.
        words: The words of the command line, from the folder, a folder for its output, and the world.
        heavy: Whether it needs torch.
        kind: `plain`; `view`: it serves, and is read as by a browser; `refuse`: it must refuse a stranger's folder.
        script: A program that is run in the place of the command line.
        writes: Files that it may change in the folder that it opens.
    """

    name: str
    material: str
    words: Words
    heavy: bool = False
    kind: str = "plain"
    script: Path | None = None
    writes: tuple[str, ...] = ()


_ENGINE = "http://127.0.0.1:9/v1"
COMMANDS = (
    Command("show", "run", lambda folder, out, world: ["show", str(folder)]),
    Command("show --json", "run", lambda folder, out, world: ["show", str(folder), "--json"]),
    Command("show --step", "run", lambda folder, out, world: ["show", str(folder), "--step", "1"]),
    Command("view --export", "run", lambda folder, out, world: ["view", str(folder), "--export", str(out / "v.html")]),
    Command("view", "run", lambda folder, out, world: ["view", str(folder)], kind="view"),
    Command("explain", "run", lambda folder, out, world: ["explain", str(folder), "--json"]),
    Command("convert", "run", lambda folder, out, world: _converted(folder, out)),
    Command("verify", "run", lambda folder, out, world: ["verify", str(folder)]),
    Command(
        "from_records",
        "run",
        lambda folder, out, world: ["--records", str(folder), "--out", str(out / "rows")],
        script=ROOT / "recipes" / "from_records" / "prepare_data.py",
    ),
    Command("export", "run", lambda folder, out, world: _exported(folder, out), heavy=True),
    Command("replay", "run", lambda folder, out, world: ["replay", str(folder)], heavy=True, kind="refuse"),
    Command("replay --live", "run", lambda folder, out, world: ["replay", str(folder), "--live"], True, "refuse"),
    Command("eval", "run", lambda folder, out, world: _asking("eval", folder, out, world), True, "refuse"),
    Command("probe", "run", lambda folder, out, world: _asking("probe", folder, out, world), True, "refuse"),
    Command("compare", "evaluation", lambda folder, out, world: ["compare", str(folder), str(world.honest("other"))]),
    Command("show of an evaluation", "evaluation", lambda folder, out, world: ["show", str(folder), "--json"]),
    Command("rows keep", "evaluation", lambda folder, out, world: _kept(folder, out, world)),
    Command("export of a model", "model", lambda folder, out, world: _exported(folder, out), heavy=True),
    Command("doctor --model", "model", lambda folder, out, world: ["doctor", "--model", str(folder)], True),
    Command("eval of a model", "model", lambda folder, out, world: _asking("eval", folder, out, world), True, "model"),
    Command("index", "corpus", lambda folder, out, world: ["index", "--corpus", str(folder), "--index-dir", str(out)]),
    Command(
        "validate --dataset",
        "rows",
        lambda folder, out, world: ["validate", str(ROOT / "tool_configs" / "calculator.yaml"), "--dataset",
                                    str(folder / "rows.jsonl")],
    ),
)  # fmt: skip


def _converted(folder: Path, out: Path) -> list[str]:
    return ["convert", str(folder), "--parquet", "--atif", "--otel", "--perfetto", "--out", str(out / "c")]


def _exported(folder: Path, out: Path) -> list[str]:
    return ["export", str(folder), "--to", str(out / "m")]


def _asking(name: str, folder: Path, out: Path, world: World) -> list[str]:
    rows = str(world.honest("rows") / "rows.jsonl")
    words = [name, str(folder), "--recipe", "quickstart", "--smoke", "--rows", rows, "--engine", _ENGINE]
    return [*words, "--out", str(out / name)]


def _kept(folder: Path, out: Path, world: World) -> list[str]:
    rows = str(world.honest("rows") / "rows.jsonl")
    return ["rows", "keep", rows, "--eval", str(folder), "--where", "0 < rate < 1", "--to", str(out / "k.jsonl")]


def figures_of(command: Command, out: Path) -> Figures:
    """Return the figures that a command printed or wrote: conversations, and the sum of their scores; {}: none."""
    said = last_object(out / "stdout")
    match command.name:
        case "show --json" | "show":
            fates = said.get("fates") or {}
            counts = [value for own in fates.values() for value in _numbers(own)]
            return {"conversations": sum(counts)} if counts else {}
        case "view --export":
            return _of_page(out / "v.html")
        case "view":
            path = out / "browser"
            told = json.loads(path.read_text()) if path.is_file() else {}
            if "rows" not in told:
                return {}
            return {"conversations": told["total"], "scores": _total(row.get("score") for row in told["rows"])}
        case "convert":
            return {"recorded": said["conversations"]} if "conversations" in said else {}
        case "verify":
            return {"recorded": said["records"]} if "records" in said else {}
        case "from_records":
            return _of_rows(out / "rows" / "train.parquet")
        case "compare":
            first = (said.get("comparisons") or [{}])[0]
            return {name: value for name, value in first.items() if isinstance(value, int | float)}
        case "rows keep":
            return {name: value for name, value in said.items() if isinstance(value, int | float)}
    return {}


def says_faults(command: Command, out: Path) -> bool:
    """Return whether a command reports that something could not be read, or is odd."""
    said = last_object(out / "stdout")
    found = said.get("faults", said.get("violations"))
    if found or said.get("damaged") or said.get("torn"):
        return True
    errors = (out / "stderr").read_text(encoding="utf-8", errors="replace")
    text = (out / "stdout").read_text(encoding="utf-8", errors="replace")
    return any("not read" in each or "left out" in each or "fault:" in each for each in (errors, text))


def last_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of the last line of a command's output; {}: there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(value: Any) -> Sequence[int]:
    values = value.values() if isinstance(value, dict) else [value]
    return [each for each in values if isinstance(each, int)]


def _total(scores: Any) -> float:
    return round(sum(float(score) for score in scores if score is not None), 6)


def _of_page(page: Path) -> Figures:
    if not page.is_file():
        return {}
    found = re.search(r'id="data-base">([^<]*)<', page.read_text(encoding="utf-8"))
    if found is None:
        return {}
    table = json.loads(gzip.decompress(base64.b64decode(found[1])))["table"]
    scores = dict(zip(table["names"], table["columns"], strict=True))["score"]
    return {"conversations": len(scores), "scores": _total(scores)}


def _of_rows(path: Path) -> Figures:
    import pyarrow.parquet as pq

    return {"recorded": pq.read_table(path).num_rows} if path.is_file() else {}
