"""Make the rows of `researcher`: questions that take several pages.

    python recipes/researcher/prepare_data.py --out DIR [--source PeterJinGo/nq_hotpotqa_train] [--validate N] [--smoke]

A source has the columns `question`, `golden_answers` and, if it has several sets, `data_source`, as that of
`search_r1`. Sets whose questions mostly take one page (`ONE_PAGE`) are excluded. `test.parquet` has at most N questions
of each set (100), always the same ones.

With `--smoke`, 200 pages (`DIR/corpus/pages.jsonl`) and a tool YAML that reads them (`DIR/tools.yaml`) are written as
well.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from made_pages import Task, tasks, write_pages

from verl_multiturn.runs.data import Row, arguments, make_row, prepare, read_splits, write_rows

TOOLS = ["search", "browse", "python"]
SYSTEM = (
    "You answer questions. Think inside <think> and </think> first. Look up what you do not know: `search` finds "
    "pages, `browse` opens a page by its title, and `python` computes. Give the answer, without an explanation, inside "
    "<answer> and </answer>, for example <answer>Beijing</answer>."
)
ONE_PAGE = {"nq", "triviaqa", "popqa"}


def row(question: str, answers: list[str], source: str, **extra_info: Any) -> Row:
    """Return the row of a question.

    Args:
        question: The question.
        answers: The right answers.
        source: Name of the set.
        extra_info: Other fields of `extra_info`.
    """
    return make_row(
        f"researcher/{source}",
        question,
        {"target": answers},
        system=SYSTEM,
        ability="research",
        tools=TOOLS,
        **extra_info,
    )


def converted(entry: dict[str, Any]) -> Row | None:
    """Return the row of an entry of a source; None for one of `ONE_PAGE`.

    Raises:
        ConfigError: The entry has no golden answers.
    """
    source = entry.get("data_source") or "hotpotqa"
    if source in ONE_PAGE:
        return None
    read = _search_r1().row(entry)  # the same columns
    truth = entry["golden_answers"]
    answers = [truth] if isinstance(truth, str) else [str(answer) for answer in truth]
    return row(str(read["prompt"][-1]["content"]), answers, source)


def smoke_row(task: Task) -> Row:
    """Return the row of a made question."""
    return row(task.question, [str(task.age)], "made", works=task.works)


def _search_r1() -> ModuleType:
    """Import `prepare_data.py` of the recipe `search_r1`."""
    path = Path(__file__).resolve().parents[1] / "search_r1" / "prepare_data.py"
    spec = importlib.util.spec_from_file_location("recipe_search_r1", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", "PeterJinGo/nq_hotpotqa_train")
    parser.add_argument("--validate", type=int, default=100, help="questions of each set in test.parquet (%(default)s)")
    args = parser.parse_args()
    if args.smoke:
        splits = {
            "train": [smoke_row(task) for task in tasks() if not task.is_test],
            "test": [smoke_row(task) for task in tasks() if task.is_test],
        }
        args.tools = args.out / "tools.yaml"
        tools = write_pages(args.out)
        args.tools.write_text(yaml.safe_dump(tools, sort_keys=False), encoding="utf-8")
    else:
        read = read_splits(args.source)
        splits = {split: [made for entry in rows if (made := converted(entry))] for split, rows in read.items()}
        splits["test"] = _search_r1().some_of_each(splits["test"], args.validate)
    write_rows(args.out, splits, args.tools)


if __name__ == "__main__":
    prepare(main)
