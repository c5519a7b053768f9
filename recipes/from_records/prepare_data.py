"""Choose recorded conversations to learn from: `train.parquet`, and `lineage.jsonl`, with the source of each row.

    python recipes/from_records/prepare_data.py --out DIR --records DIR… [--models HASH…] [--staleness K]
        [--min-score X] [--per-row K] [--roles NAME…] [--group N] [--tokenizer PATH] [--batch B]

Without `--group`, rows are for SFT: each names a record and a row of it. With `--group N`, they are for the agent loop
`recorded_agent`: each is a data row, with N of its conversations. The tokens stay where they are, in the records, and
are verified when they are taken. With `--smoke`, the records are made here (`made_records.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from made_records import write_records

from verl_multiturn.errors import ConfigError
from verl_multiturn.records.read.learning import SelectedRecord, Selection, SelectionRule, check_vocabulary, choose
from verl_multiturn.runs.data import arguments, prepare

AGENT = "recorded_agent"
_SHOWN = 5
Row = dict[str, Any]


def sft_rows(selection: Selection) -> tuple[list[Row], list[Row]]:
    """Return the rows for SFT, and their lines of `lineage.jsonl`: one for each row of a conversation that is trained.

    Args:
        selection: The chosen conversations.
    """
    rows: list[Row] = []
    lines: list[Row] = []
    for each in selection.conversations:
        for index, trained in enumerate(each.trained):
            if trained:
                role, reward = each.of_rows[index]
                line = {**each.lineage(len(rows), index), "role": role, "reward": reward}
                lines.append({**line, "trained_tokens": trained})
                rows.append({**each.pointer, "index": index})
    return rows, lines


def rl_rows(selection: Selection) -> tuple[list[Row], list[Row]]:
    """Return the rows for reinforcement learning, and their lines of `lineage.jsonl`: one for each conversation.

    Args:
        selection: The chosen conversations, in groups.
    """
    rows, lines = [], []
    for number, group in enumerate(selection.groups):
        for index, each in enumerate(group):
            lines.append({**each.lineage(number, index), "trained_tokens": sum(each.trained)})
        rows.append(rl_row(number, group))
    return rows, lines


def rl_row(number: int, group: Sequence[SelectedRecord]) -> Row:
    """Return the row of a group.

    Args:
        number: Its number in the file.
        group: Its conversations.
    """
    sample, task = group[0].sample, group[0].task
    truth = sample["ground_truth"] if task is None else ""
    # Shown alone: the tokens of the prompt are the records'. Words of a gateway's users are copied nowhere.
    shown = sample["messages"] if task is None else [{"role": "user", "content": f"task {task}"}]
    return {
        "data_source": (sample["data_source"] if task is None else None) or "recorded",
        "prompt": [{"role": each["role"], "content": as_text(each.get("content"))} for each in shown],
        "reward_model": {"style": "rule", "ground_truth": as_text(truth)},
        "extra_info": {"index": number, "records": [{**each.pointer, "score": each.score} for each in group]},
        "agent_name": AGENT,
    }


def as_text(value: Any) -> str:
    """Return a value as text: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_batch(rows: int, batch: int | None) -> None:
    """Refuse fewer rows than a batch, with which verl's SFT trainer ends in a division by zero.

    Args:
        rows: Number of rows.
        batch: Rows of a batch; None: not known.

    Raises:
        ConfigError: There are fewer.
    """
    if batch is not None and rows < batch:
        raise ConfigError(
            f"{rows} rows were chosen, fewer than a batch (data.train_batch_size={batch}), so that nothing could be "
            f"learned; set data.train_batch_size to {rows} or less, name more records, or choose more widely"
        )


def write(out: Path, rows: Sequence[Row], lines: Iterable[Row]) -> None:
    """Write `lineage.jsonl` and `train.parquet`.

    Args:
        out: Folder for the files. It is made if it does not exist.
        rows: The rows.
        lines: The lines.
    """
    import pyarrow as pa
    import pyarrow.parquet

    out.mkdir(parents=True, exist_ok=True)
    (out / "lineage.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), out / "new-train.parquet")
    (out / "new-train.parquet").replace(out / "train.parquet")


def main() -> None:
    """Choose the conversations, and write the files."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--records", nargs="*", default=[], metavar="DIR")
    parser.add_argument("--models", nargs="*", metavar="HASH")
    parser.add_argument("--staleness", type=int, metavar="K")
    parser.add_argument("--min-score", type=float)
    parser.add_argument("--per-row", type=int)
    parser.add_argument("--roles", nargs="*", metavar="NAME")
    parser.add_argument("--group", type=int)
    parser.add_argument("--tokenizer", metavar="PATH", help="folder or hub name of the model that learns")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--max-prompt-length", type=int)
    parser.add_argument("--max-response-length", type=int)
    args = parser.parse_args()
    vocabulary = None
    if args.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        vocabulary = tokenizer.get_vocab()
    folders = args.records
    if args.smoke and not folders:
        folders = [str(args.out / "records")]
        write_records(args.out / "records", tokenizer)
    choice = SelectionRule(
        min_score=args.min_score,
        models=None if args.models is None else tuple(args.models),
        staleness=args.staleness,
        per_row=args.per_row,
        group=args.group,
        max_length=args.max_length,
        max_prompt_length=args.max_prompt_length,
        max_response_length=args.max_response_length,
        roles=None if args.roles is None else tuple(args.roles),
    )
    selection = choose(folders, choice)
    if vocabulary is not None:
        check_vocabulary(folders, vocabulary, args.tokenizer)
    rows, lines = sft_rows(selection) if args.group is None else rl_rows(selection)
    for fault in selection.faults[:_SHOWN]:
        print(fault, file=sys.stderr)
    if len(selection.faults) > _SHOWN:
        print(f"… and {len(selection.faults) - _SHOWN} more", file=sys.stderr)
    print(selection.told(), file=sys.stderr)
    check_batch(len(rows), args.batch)
    write(args.out, rows, lines)


if __name__ == "__main__":
    prepare(main)
