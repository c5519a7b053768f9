"""Data sets for a run: a local file or a hub name in, verl's parquet out, checked against the tools.

A row is what verl's data set and our agent loop read; `make_row` is the one place that knows its columns.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.chat.messages import check_messages
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.row_files import READERS, read_rows
from verl_multiturn.tools.registry import load_tools
from verl_multiturn.tools.validate import validate_dataset

Row = dict[str, Any]
_SHOWN = 5


def make_row(
    data_source: str,
    prompt: str | Sequence[Mapping[str, Any]],
    ground_truth: Any,
    *,
    system: str = "",
    ability: str = "",
    tools: Sequence[str] | None = None,
    tools_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    **extra_info: Any,
) -> Row:
    """A row in verl's schema.

    Args:
        data_source: chooses the reward.
        prompt: the user's message, or all messages.
        ground_truth: what the reward compares with; what is no text is kept as JSON, since a column of a parquet file
            has one type and a data set may mix tasks.
        system: goes before a prompt that is one message.
        tools: names of those that the row has, one or more; None: all of the run.
        tools_kwargs: by tool, then `create_kwargs`, `execute_kwargs` …; the row then has only tools that it names.
        extra_info: handed to the reward.

    Raises:
        ConfigError: `tools` is empty, which verl takes for all; or a message has an unknown role.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    check_messages(messages, f"a row of {data_source!r}")
    if tools is not None:
        if not tools:
            raise ConfigError(f"tools={tools!r}: verl gives such a row all tools; name one, or leave `tools` out")
        extra_info["tool_selection"] = list(tools)
    if tools_kwargs is not None:
        extra_info |= {"need_tools_kwargs": True, "tools_kwargs": tools_kwargs}
    truth = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, ensure_ascii=False)
    return {
        "data_source": data_source,
        "ability": ability,
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def read_splits(
    source: str, name: str | None = None, splits: tuple[str, str] = ("train", "test"), held_out: float = 0.05
) -> dict[str, Sequence[Any]]:
    """The rows of a data set as dictionaries, under `train` and `test`.

    Args:
        source: a local .parquet, .jsonl, .json or .csv file, some rows of which are held out; a folder with a file for
            each split, named after it; or the name of a data set on the Hugging Face hub, whose rows are read one by
            one, with pictures as they are stored.
        name: the configuration of a data set on the hub.
        splits: what the data set calls its two splits; the same name twice: rows of that one are held out.
        held_out: the share of rows that become the test split where there is but one, taken at even distances, since
            files are often in the order of their parts; 0: none.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if splits[0] != splits[1] and not Path(source).expanduser().is_file():
        return {"train": _read(source, splits[0], name), "test": _read(source, splits[1], name)}
    rows = _read(source, splits[0], name)
    if not held_out:
        return {"train": rows, "test": []}
    try:
        train, test = hold_out(len(rows), held_out)
    except ConfigError as error:
        raise ConfigError(f"{source!r}: {error}") from None
    return {"train": _chosen(rows, train), "test": _chosen(rows, test)}


def benchmark_names(entries: Sequence[Any], default: str) -> list[str]:
    """Return the `data_source` under which each row of a validation set is reported: the one that it came with, below
    `math/`, where the set holds several benchmarks, so that each has its own accuracy; the default for all otherwise.

    Example: `["math/aime24", "math/math_500"]` for rows with the data sources `AIME24` and `Math 500`.
    """
    came_with = [str(entry.get("data_source") or "") if isinstance(entry, Mapping) else "" for entry in entries]
    if len(set(came_with)) < 2:
        return [default] * len(came_with)
    plain = [re.sub(r"[^a-z0-9.]+", "_", name.rpartition("/")[2].lower()).strip("_") for name in came_with]
    return [f"math/{name}" if name else default for name in plain]


def hold_out(size: int, share: float) -> tuple[list[int], list[int]]:
    """Which of so many rows are for training, and which for testing: that share of them, at even distances.

    Raises:
        ConfigError: there are not two.
    """
    if size < 2:
        raise ConfigError(f"{size} rows cannot be parted into some to train on and some to test on; give two or more")
    count = min(max(1, round(size * share)), size - 1)
    test = [(2 * i + 1) * size // (2 * count) for i in range(count)]
    return sorted(set(range(size)) - set(test)), test


class _HubRows(Sequence[dict[str, Any]]):
    """Rows of a data set of the hub, each read from the disk when it is asked for: the pictures of all do not fit in
    memory."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format("arrow")
        self.features = _keep_encoded(copy.deepcopy(dataset.features))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.features.decode_example(self.dataset[index].to_pylist()[0])


def _keep_encoded(feature: Any) -> Any:
    """A data set's features, with pictures that are not decoded."""
    import datasets

    inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    for each in inner:
        if isinstance(each, datasets.Image):
            each.decode = False
        elif each is not None:
            _keep_encoded(each)
    return feature


def _chosen(rows: Sequence[Any], indexes: Sequence[int]) -> Sequence[Any]:
    if isinstance(rows, _HubRows):
        return _HubRows(rows.dataset.select(indexes))
    return [rows[index] for index in indexes]


def _read(source: str, split: str, name: str | None) -> Sequence[dict[str, Any]]:
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.stem == split and file.suffix in READERS)
        if not found:
            raise ConfigError(f"{source!r}: no file for the split {split!r}; expected one of {_expected(split)}")
        path = found[0]
    if path.is_file():
        return read_rows(path, list(READERS))
    if path.suffix in READERS or path.is_absolute():
        raise ConfigError(f"{source!r}: no such file; give a local file, a folder, or a hub name")
    import datasets

    try:
        return _HubRows(datasets.load_dataset(source, name, split=split))
    except Exception as error:  # the hub, its client and a data set's own files each raise theirs
        raise ConfigError(
            f"{source!r} is no local file, and the hub does not give its split {split!r}: "
            f"{type(error).__name__}: {error}; download it, and name the file or folder in its place (--data of a "
            "recipe, or an option of its prepare_data.py)"
        ) from error


def write_rows(folder: Path, splits: Mapping[str, Sequence[Row]], tool_config: Path | None = None) -> None:
    """Write `<split>.parquet` for each split when the rows of all have been checked against the tools of a YAML.

    Raises:
        ConfigError: a message has an unknown role, rows do not fit the tools or a parquet file, or a split is empty.
            What was written is left in `new-<split>.parquet` for a look; what was there before stays.
    """
    import pyarrow as pa
    import pyarrow.parquet

    tools = load_tools(tool_config) if tool_config is not None else None
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        if not rows:
            raise ConfigError(f"the split {split!r} has no rows; see what of the source was left out, and why")
        for index, row in enumerate(rows):
            check_messages(row["prompt"], f"the split {split!r}, row {index}")
        path = folder / f"new-{split}.parquet"
        numbered = [
            {**row, "extra_info": {"split": split, "index": index, **row["extra_info"]}}
            for index, row in enumerate(rows)
        ]
        try:
            pyarrow.parquet.write_table(pa.Table.from_pylist(numbered), path)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(
                f"the rows of the split {split!r} do not fit in a parquet file: {error}; a column has one type in all "
                "rows, and a dictionary at least one key"
            ) from error
        if tools is None:
            continue
        _, problems = validate_dataset(path, tools)
        if problems:
            listed = "\n".join(problems[:_SHOWN])
            raise ConfigError(f"{path}: {len(problems)} of {len(rows)} rows cannot work:\n{listed}")
    for split in splits:
        (folder / f"new-{split}.parquet").replace(folder / f"{split}.parquet")


def problem_and_answer(problem: Any, answer: Any) -> tuple[str, str]:
    """Those of a source's row as text.

    Raises:
        ConfigError: the problem is no text, or there is no answer.
    """
    if not isinstance(problem, str) or answer is None:
        raise ConfigError(
            f"a row of the source has the problem {problem!r:.100} and the answer {answer!r:.100}; expected texts"
        )
    return problem.strip(), str(answer).strip()


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as models of the Hermes format write it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def arguments(description: str, default_source: str) -> argparse.ArgumentParser:
    """What every `prepare_data.py` takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument(
        "--source", default=default_source, help="a local file or folder, or a hub name (default: %(default)s)"
    )
    parser.add_argument("--smoke", action="store_true", help="a small made set that needs no network")
    parser.add_argument("--tools", type=Path, help="the tool YAML that the rows are checked against")
    return parser


def prepare(main: Callable[[], None]) -> None:
    """Runs the `main` of a `prepare_data.py`; what an author can mend ends it with one line."""
    try:
        main()
    except MultiTurnError as error:
        sys.exit(f"error: {error}")


def _expected(stem: str) -> str:
    return ", ".join(f"{stem}{suffix}" for suffix in READERS)
