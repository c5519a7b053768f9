"""Data sets for a run: from a local file or a hub name to verl's parquet files, checked against the tools.

Each row has the columns that verl's data set and this package's agent loop read. `make_row` is the one place that knows
these columns.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.chat.messages import read_messages, written_messages
from verl_multiturn.checking.data_rows import validate_dataset
from verl_multiturn.checking.problem_groups import gather_alike
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.rows.files import READERS, read_rows
from verl_multiturn.tools.loading.registry import load_tools

Row = dict[str, Any]
_LAST_SEED = 2**31 - 1
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
    interaction: str | None = None,
    interaction_kwargs: Mapping[str, Any] | None = None,
    **extra_info: Any,
) -> Row:
    """Make a row in verl's schema.

    Args:
        data_source: Name that chooses the reward.
        prompt: The user's message, or all messages. Where the interaction speaks first: the messages before that, such
            as a system message; `[]` beside `system`.
        ground_truth: The value that the reward compares the answer with. A value that is not text is stored as JSON,
            since a column of a parquet file has one type, and a data set may mix tasks.
        system: System message to put before the prompt; "": none.
        ability: Kind of the task, for example `math`.
        tools: Names of the tools that the row has, one or more; None: all tools of the run.
        tools_kwargs: Arguments for the tools' methods: by tool, then `create_kwargs`, `execute_kwargs` …, or `shown`.
            With them, the row has only the tools that they name.
        interaction: Name of the simulated user or environment; None: the run's only one, if it has any.
        interaction_kwargs: Arguments for its `start` and `reply`; they need its name.
        extra_info: Other fields for the reward.

    Returns:
        The row, for example `{"data_source": …, "prompt": [{"role": "user", "content": …}], …}`.

    Raises:
        ConfigError: `tools` is empty (verl would give such a row all tools), `interaction_kwargs` come without the name
            of an interaction, `prompt` is neither text nor a list of messages, or a message has an unknown role, video
            or audio.
    """
    messages = _messages(prompt, data_source)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    messages = written_messages(messages)
    read_messages(messages, f"a row of {data_source!r}")
    if tools is not None:
        if not tools:
            raise ConfigError(f"tools={tools!r}: verl gives such a row all tools; name one, or leave `tools` out")
        extra_info["tool_selection"] = list(tools)
    if tools_kwargs is not None:
        extra_info |= {"need_tools_kwargs": True, "tools_kwargs": tools_kwargs}
    if interaction is not None:
        # A parquet file has no mapping without keys.
        given = {interaction: dict(interaction_kwargs)} if interaction_kwargs else {"name": interaction}
        extra_info["interaction_kwargs"] = given
    elif interaction_kwargs is not None:
        raise ConfigError(
            f"interaction_kwargs={dict(interaction_kwargs)!r}: of no interaction; name it in `interaction`"
        )
    truth = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, ensure_ascii=False)
    return {
        "data_source": data_source,
        "ability": ability,
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def _messages(prompt: Any, data_source: str) -> list[dict[str, Any]]:
    """Return a prompt as a list of messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    is_list = isinstance(prompt, Iterable) and not isinstance(prompt, bytes | Mapping)
    listed = list(prompt) if is_list else [None]
    if wrong := [message for message in listed if not isinstance(message, Mapping)]:
        given = f"message {listed.index(wrong[0])}={show(wrong[0], 100)}" if is_list else f"prompt={show(prompt, 100)}"
        raise ConfigError(
            f"a row of {data_source!r}: {given}: expected the user's message, or a list of messages such as "
            '{"role": "user", "content": …}; where the interaction speaks first, give what stands before that: a '
            'message with the role "system", or prompt=[] and system="…"'
        )
    return [dict(message) for message in listed if message is not None]


def read_splits(
    source: str, name: str | None = None, splits: tuple[str, str] = ("train", "test"), held_out: float = 0.05
) -> dict[str, Sequence[Any]]:
    """Read the rows of a data set, under the keys `train` and `test`.

    Args:
        source: One of three. A local .parquet, .jsonl, .json or .csv file, of which some rows are held out. A folder
            with a file for each split, named after the split. The name of a data set on the Hugging Face hub; its rows
            are read one by one, with images as they are stored.
        name: Configuration of a data set on the hub.
        splits: The data set's own names of its two splits. The same name twice: rows of that split are held out.
        held_out: Share of the rows that become the test split where there is only one; 0: none. These rows are taken at
            even distances, since a file often lists its parts one after the other.

    Raises:
        ConfigError: There is no such data set, it cannot be read, or it has fewer than two rows to split.
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
    """Return the `data_source` under which each row of a validation set is reported.

    Where the rows came with several data sources, each row keeps its own, in lower case and below `math/`. Each
    benchmark then has its own accuracy. Otherwise all rows get the default.

    Example: `["math/aime24", "math/math_500"]` for rows with the data sources `AIME24` and `Math 500`.

    Args:
        entries: Rows as they came.
        default: Name for rows without a data source, and for all rows if they came with the same one.
    """
    came_with = [str(entry.get("data_source") or "") if isinstance(entry, Mapping) else "" for entry in entries]
    if len(set(came_with)) < 2:
        return [default] * len(came_with)
    plain = [re.sub(r"[^a-z0-9.]+", "_", name.rpartition("/")[2].lower()).strip("_") for name in came_with]
    return [f"math/{name}" if name else default for name in plain]


def hold_out(size: int, share: float) -> tuple[list[int], list[int]]:
    """Choose the rows for training and for testing, the latter at even distances.

    Example: `hold_out(4, 0.5)` returns `([0, 2], [1, 3])`.

    Args:
        size: Number of rows.
        share: Share of the rows for testing. Each side gets at least one row.

    Returns:
        Indexes of the rows for training, and of those for testing.

    Raises:
        ConfigError: There are fewer than two rows.
    """
    if size < 2:
        raise ConfigError(f"{size} rows cannot be parted into some to train on and some to test on; give two or more")
    count = min(max(1, round(size * share)), size - 1)
    test = [(2 * i + 1) * size // (2 * count) for i in range(count)]
    return sorted(set(range(size)) - set(test)), test


class _HubRows(Sequence[dict[str, Any]]):
    """The rows of a data set on the hub.

    Each row is read from disk when it is requested, because all images together do not fit in memory.
    """

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
    """Change a data set's features so that images are not decoded, and return them."""
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
    except Exception as error:  # the hub, its client and a data set's own files each raise errors of their own
        raise ConfigError(
            f"{source!r} is no local file, and the hub does not give its split {split!r}: "
            f"{type(error).__name__}: {error}; download it, and name the file or folder in its place (--data of a "
            "recipe, or an option of its prepare_data.py)"
        ) from error


def write_rows(folder: str | Path, splits: Mapping[str, Sequence[Row]], tool_config: Path | None = None) -> None:
    """Check the rows of all splits, and then write `<split>.parquet` for each split.

    Each row's `extra_info` gets its `split` and `index`, unless it has its own.

    Args:
        folder: Folder for the files. It is made if it does not exist.
        splits: The rows of each split.
        tool_config: The tool YAML that the rows are checked against; None: no such check.

    Raises:
        ConfigError: A message has an unknown role, video or audio; rows do not fit the tools or a parquet file; or a
            split is empty. The written files stay in `new-<split>.parquet` for you to look at. Files that existed
            before stay unchanged.
    """
    import pyarrow as pa
    import pyarrow.parquet

    tools = load_tools(tool_config) if tool_config is not None else None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        if not rows:
            raise ConfigError(f"the split {split!r} has no rows; see what of the source was left out, and why")
        for index, row in enumerate(rows):
            read_messages(row["prompt"], f"the split {split!r}, row {index}")
        rows = [{**row, "prompt": written_messages(row["prompt"])} for row in rows]
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
            lines = gather_alike(problems)
            listed = "\n".join(lines[:_SHOWN])
            more = f"\n… and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise ConfigError(f"{path}: {len(problems)} of {len(rows)} rows cannot work:\n{listed}{more}")
    for split in splits:
        (folder / f"new-{split}.parquet").replace(folder / f"{split}.parquet")


def problem_and_answer(problem: Any, answer: Any) -> tuple[str, str]:
    """Return the problem and the answer of a source's row as text, without white space around them.

    Raises:
        ConfigError: The problem is not text, or there is no answer.
    """
    if not isinstance(problem, str) or answer is None:
        raise ConfigError(
            f"a row of the source has the problem {problem!r:.100} and the answer {answer!r:.100}; expected texts"
        )
    return problem.strip(), str(answer).strip()


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a tool call in the Hermes format."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def arguments(description: str, default_source: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every `prepare_data.py` takes.

    `--seed` is among them, since a recipe may pass it to any script. An argument that a script adds under the same name
    takes its place.

    Args:
        description: Text for `--help`.
        default_source: Default of `--source`; None: the script makes its own rows, and refuses a source.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # scripts of users have a --seed of their own
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    if default_source is None:
        parser.add_argument("--source", type=_refused, help=argparse.SUPPRESS)
    else:
        parser.add_argument(
            "--source", default=default_source, help="a local file or folder, or a hub name (default: %(default)s)"
        )
    parser.add_argument("--smoke", action="store_true", help="a small made set that needs no network")
    parser.add_argument("--tools", type=Path, help="the tool YAML that the rows are checked against")
    parser.add_argument(
        "--seed", type=seed_option, default=0, help="seed of rows that are drawn (default: %(default)s)"
    )
    return parser


def check_seed(seed: Any, where: str) -> None:
    """Refuse a seed that one of the generators of random numbers in a run does not take.

    Args:
        seed: The seed.
        where: Its source, with its value, for errors.

    Raises:
        ConfigError: It is not a whole number, negative or too large.
    """
    if type(seed) is not int or not 0 <= seed <= _LAST_SEED:
        raise ConfigError(f"{where}: expected a seed from 0 to {_LAST_SEED}; choose one")


def seed_option(text: str) -> int:
    """Read the option `--seed` of a script."""
    try:
        check_seed(seed := int(text), text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a seed from 0 to {_LAST_SEED}, got {text!r}") from None
    return seed


def _refused(source: str) -> str:
    raise argparse.ArgumentTypeError(
        f"this recipe makes its own rows; leave --data {source} out, or name finished parquet files of your own with "
        "data.train_files=… data.val_files=…"
    )


def prepare(main: Callable[[], None]) -> None:
    """Run the `main` of a `prepare_data.py`. A mistake of the author ends it with one line instead of a traceback."""
    try:
        main()
    except MultiTurnError as error:
        sys.exit(f"error: {error}")


def _expected(stem: str) -> str:
    return ", ".join(f"{stem}{suffix}" for suffix in READERS)
