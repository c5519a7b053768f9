"""Make the rows of Search-R1: open questions whose answers have to be searched for.

    python recipes/search_r1/prepare_data.py --out DIR [--source PeterJinGo/nq_hotpotqa_train] [--validate N] [--smoke]

A source has the columns `question`, `golden_answers` and, if it has several sets, `data_source`. With `--smoke`, a
corpus of a few lines (`DIR/corpus/passages.jsonl`) and a tool YAML that searches it (`DIR/tools.yaml`) are written as
well.

`test.parquet` has at most N questions of each set (500), always the same ones, for the validations during a run.
`test_all.parquet` has all questions.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import Row, arguments, hold_out, make_row, prepare, read_splits, tool_call, write_rows

TOOL = "search"
SYSTEM = (
    f"You answer questions. Think inside <think> and </think> first, and again after each result. Whenever you do not "
    f"know something, look it up with the tool `{TOOL}`. Give the answer, without an explanation, inside <answer> and "
    f"</answer>, for example <answer>Beijing</answer>."
)
PEOPLE = ("Ada Brook", "Ben Frost", "Cora Hill", "Dan Lake", "Eva Moss", "Finn Reed", "Gus Stone", "Ida Vale")
TEST_PEOPLE = ("Jan Wood", "Kim Birch", "Lou Clay", "Mia Dawn")
TOWNS = ("Velm", "Orsk", "Tarn", "Pell", "Quin", "Rusk", "Senn", "Ulm", "Wick", "Yarm", "Zell", "Bree")
RIVERS = ("Aller", "Bode", "Cher", "Dove", "Exe", "Fal", "Gail", "Hase", "Inn", "Jagst", "Kocher", "Lahn")


def row(entry: dict[str, Any], **extra_info: Any) -> Row:
    """Return the row of a question.

    Args:
        entry: A row of the source.
        extra_info: Other fields of `extra_info`.

    Raises:
        ConfigError: The entry has no golden answers.
    """
    answers = entry.get("golden_answers")
    if answers is None:
        raise ConfigError(f"expected the columns 'question' and 'golden_answers', got {sorted(entry)}")
    question = entry["question"].strip()
    question += "" if question.endswith("?") else "?"
    return make_row(
        f"searchR1_{entry.get('data_source') or 'nq'}",
        question,
        {"target": [answers] if isinstance(answers, str) else [str(answer) for answer in answers]},
        system=SYSTEM,
        ability="fact-reasoning",
        tools=[TOOL],
        question=question,
        **extra_info,
    )


def some_of_each(rows: Sequence[Row], most: int) -> list[Row]:
    """Choose rows of each set at even distances, always the same ones.

    Args:
        rows: Rows of all sets.
        most: Largest number of rows of each set.
    """
    by_set: dict[str, list[Row]] = defaultdict(list)
    for each in rows:
        by_set[each["data_source"]].append(each)
    chosen: list[Row] = []
    for group in by_set.values():
        # `hold_out` never chooses all rows of a set, so it is not called where all fit.
        chosen += group if len(group) <= most else [group[i] for i in hold_out(len(group), most / len(group))[1]]
    return chosen


def demonstration(person: str, town: str, river: str) -> list[str]:
    """Return the assistant's turns: two searches, the second one for the result of the first, then the answer.

    Args:
        person: The person of the question.
        town: The town where the person was born, which the first search finds.
        river: The river of the town, which is the answer.
    """
    return [
        f"<think>Where was {person} born?</think>\n{tool_call(TOOL, {'query': person})}",
        f"<think>In {town}. Which river is there?</think>\n{tool_call(TOOL, {'query': f'river {town}'})}",
        f"<think>The {river}.</think>\n<answer>{river}</answer>",
    ]


def smoke_facts() -> list[tuple[str, str, str]]:
    """Return triples of a person, the place of birth and its river. The last ones are for the test split."""
    return list(zip((*PEOPLE, *TEST_PEOPLE), TOWNS, RIVERS, strict=True))


def smoke_rows() -> list[Row]:
    """Make questions that need two searches, each with a demonstration."""
    return [
        row(
            {
                "question": f"Which river flows through the town where {person} was born?",
                "golden_answers": [river],
                "data_source": "hotpotqa",
            },
            demonstration=demonstration(person, town, river),
        )
        for person, town, river in smoke_facts()
    ]


def write_corpus(folder: Path) -> dict[str, Any]:
    """Write the corpus of the made questions.

    Args:
        folder: Folder whose `corpus` gets the passages.

    Returns:
        The entry for a tool YAML of a tool that searches the corpus.
    """
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    passages = []
    for person, town, river in smoke_facts():
        passages += [
            {"title": person, "text": f"{person} was born in {town}."},
            {"title": town, "text": f"The river {river} flows through {town}."},
        ]
    lines = [json.dumps({"id": str(number), **passage}) for number, passage in enumerate(passages)]
    (folder / "corpus" / "passages.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "class_name": "verl_multiturn.tools.search.SearchTool",
        "config": {
            "corpus": str((folder / "corpus").resolve()),
            "index_dir": str((folder / "index").resolve()),
            "top_k": 1,
        },
    }


def main() -> None:
    """Write `train.parquet`, `test.parquet` and, without `--smoke`, `test_all.parquet`."""
    parser = arguments(__doc__ or "", "PeterJinGo/nq_hotpotqa_train")
    parser.add_argument("--validate", type=int, default=500, help="questions of each set in test.parquet (%(default)s)")
    args = parser.parse_args()
    if args.smoke:
        made = smoke_rows()
        splits = {"train": made[: len(PEOPLE)], "test": made[len(PEOPLE) :]}
        args.tools = args.out / "tools.yaml"
        entry = write_corpus(args.out)
        args.tools.write_text(yaml.safe_dump({"tools": [entry]}, sort_keys=False), encoding="utf-8")
    else:
        splits = {split: [row(entry) for entry in rows] for split, rows in read_splits(args.source).items()}
        splits = {**splits, "test": some_of_each(splits["test"], args.validate), "test_all": splits["test"]}
    write_rows(args.out, splits, args.tools)


if __name__ == "__main__":
    prepare(main)
