"""Make rows of programming problems with tests: DeepCoder's, or your own in one of the forms of problems.py.

    python recipes/coding/prepare_data.py --out DIR [--source SOURCE] [--most-tests 15] [--smoke --model DIR]

A source is one of these:

- the hub name of DeepCoder's data, or of a data set with the same configurations (`lcbv5`, `primeintellect`, `taco`,
  `codeforces`);
- a folder into which that repository was downloaded, with a folder for each configuration;
- a folder with `train` and `test` as .parquet or .jsonl, or one such file, of which some problems are held out.

Test problems come first. A problem for training is left out if it is in the test split, or has come before. So is each
problem that the reward cannot score. Of a problem's tests, those with the longest inputs are kept. All that is left out
is counted by its reason, and printed as one JSON object.

`--smoke` makes problems in the forms of all data sets, and with `--model` a tiny model that knows their programs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from made_problems import made_entries
from problems import COLUMNS, Entry, Problem, UnusableError, longest_tests, read_problem
from sieve import KnownStatements, Tally, words_of

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.programs import unfit_tests
from verl_multiturn.rows.files import refuse_pointer
from verl_multiturn.runs.data import Row, arguments, hold_out, make_row, prepare, read_splits, write_rows

SOURCE = "agentica-org/DeepCoder-Preview-Dataset"
DATA_SETS = {
    "lcbv5": "livecodebench_v5",
    "primeintellect": "primeintellect",
    "taco": "taco",
    "codeforces": "codeforces",
}
"""Configurations of DeepCoder's data, with the `data_source` of their rows."""
SPLITS = {"train": ("lcbv5", "primeintellect", "taco"), "test": ("lcbv5", "codeforces")}
OTHER = "deepcoder"
"""The `data_source` of rows of other files."""
HELD_OUT = 0.05
MOST_TESTS = 15
MOST_CHARACTERS = 500_000
_READ_AT_ONCE = 16  # rows; those of LiveCodeBench have several megabytes each
_SUFFIXES = (".parquet", ".jsonl")
BLOCK = "Put the whole program into one ```python block at the end of your answer."
PROGRAM = f"Write a Python program that reads from standard input and prints to standard output. {BLOCK}"
COMPLETE = "Complete this Python code. Put all of it into one ```python block at the end of your answer."


def message_of(problem: Problem) -> str:
    """Return the user's message: the statement, and the form of the answer."""
    if problem.starter:
        return f"{problem.statement}\n\n{COMPLETE}\n```python\n{problem.starter}\n```"
    if name := problem.truth.get("fn_name"):
        return f"{problem.statement}\n\nWrite the Python function `{name}`. {BLOCK}"
    return f"{problem.statement}\n\n{PROGRAM}"


def read(source: str) -> dict[str, Iterable[tuple[str, Entry]]]:
    """Read the rows of a source one by one, each with the name of its data set, under the keys `train` and `test`.

    `test` is missing if the source is one file.

    Args:
        source: Local file or folder, or hub name.

    Raises:
        ConfigError: The source cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return {"train": _named(OTHER, _stream(path))}
    if path.is_dir() and not any((path / name).is_dir() for name in DATA_SETS):
        return {split: _named(OTHER, _files(path, split)) for split in SPLITS}
    if not path.is_dir() and (path.is_absolute() or path.suffix in _SUFFIXES):
        raise ConfigError(f"{source!r}: no such file or folder; name one, or a data set on the hub")
    return {split: _of_sets(source, path, split) for split in SPLITS}


def _of_sets(source: str, path: Path, split: str) -> Iterator[tuple[str, Entry]]:
    for name in SPLITS[split]:
        if path.is_dir():
            entries: Iterable[Entry] = _files(path / name, split)
        else:
            entries = read_splits(source, name, splits=(split, split), held_out=0)["train"]
        yield from _named(name, entries)


def _named(name: str, entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    for entry in entries:
        yield name, entry


def _files(folder: Path, split: str) -> Iterator[Entry]:
    """Yield the rows of the files of a split: `train.jsonl`, or `train-00000-of-00004.parquet` and so on."""
    named = re.compile(rf"{split}(-\d+-of-\d+)?")
    found = sorted(path for path in folder.glob(f"{split}*") if path.suffix in _SUFFIXES and named.fullmatch(path.stem))
    if not found:
        raise ConfigError(
            f"{str(folder)!r}: no file for the split {split!r}; expected {split}.jsonl, {split}.parquet or "
            f"{split}-00000-of-00001.parquet; download it there"
        )
    for path in found:
        yield from _stream(path)


def _stream(path: Path) -> Iterator[Entry]:
    import pyarrow as pa
    import pyarrow.parquet

    refuse_pointer(path)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{str(path)!r}: expected one of {', '.join(_SUFFIXES)}; convert it first")
    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                columns = [name for name in COLUMNS if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=_READ_AT_ONCE, columns=columns):
                    yield from batch.to_pylist()
        else:
            with path.open(encoding="utf-8") as lines:
                yield from (_loaded(line) for line in lines if line.strip())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; download it again") from error


def _loaded(line: str) -> Any:
    """Return the row of a line; a text, which is no row, where it is nested too deeply."""
    try:
        return json.loads(line)
    except RecursionError:
        return line


def usable_row(data_source: str, entry: Entry, most: int, most_characters: int) -> tuple[Problem, Row, Counter[str]]:
    """Return the problem and the row of a source's entry, and how many of its tests were kept and left out.

    Args:
        data_source: Name that chooses the reward.
        entry: The source's row.
        most: Most tests of a row.
        most_characters: Most characters of a row's tests.

    Raises:
        UnusableError: The reward cannot score it.
        RecursionError: A value is nested too deeply.
    """
    problem = read_problem(entry)
    try:
        unfit = unfit_tests(problem.truth, data_source)
    except ConfigError:
        raise UnusableError("tests that the reward does not take") from None
    chosen = longest_tests(problem.truth, unfit, most, most_characters)
    if not chosen:
        raise UnusableError("no test that is short enough")
    counts = Counter({"kept": len(chosen)}) + Counter(unfit.values())
    counts["beyond the most tests or characters"] = len(problem.truth["inputs"]) - counts.total()
    truth = dict(problem.truth)
    for key in ("inputs", "outputs"):
        truth[key] = [truth[key][index] for index in chosen]
    made = {"demonstration": entry["demonstration"]} if "demonstration" in entry else {}
    row = make_row(data_source, message_of(problem), truth, ability="code", **made)
    try:
        (row["prompt"][0]["content"] + row["reward_model"]["ground_truth"]).encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        raise UnusableError("text that is not Unicode") from None
    return problem, row, counts


def rows_of(
    found: Mapping[str, Iterable[tuple[str, Entry]]], most: int = MOST_TESTS, most_characters: int = MOST_CHARACTERS
) -> tuple[dict[str, list[Row]], dict[str, Tally]]:
    """Make the rows of both splits, and count what is left out.

    Args:
        found: Entries with their `data_source`, by split. Without `test`, some problems are held out.
        most: Most tests of a row.
        most_characters: Most characters of a row's tests.
    """
    known = KnownStatements()
    rows: dict[str, list[Row]] = {}
    tallies = {split: Tally() for split in SPLITS}
    for split in ("test", "train"):
        kept: dict[tuple[str, ...], Row] = {}
        tally = tallies[split]
        for data_source, entry in found.get(split, ()):
            tally.read += 1
            try:
                problem, row, counts = usable_row(data_source, entry, most, most_characters)
            except (UnusableError, RecursionError) as error:
                is_deep = isinstance(error, RecursionError)
                tally.left_out["a value that is nested too deeply" if is_deep else str(error)] += 1
                continue
            words = words_of(problem.statement)
            if words in kept:
                tally.left_out["a problem that has come before"] += 1
            elif split == "train" and known.has_one_like(words):
                tally.left_out["a problem of the test split"] += 1
            else:
                kept[words] = row
                tally.tests += counts
                if split == "test":
                    known.add(words)
        rows[split] = list(kept.values())
    if "test" not in found:
        train, held_out = hold_out(len(rows["train"]), HELD_OUT)
        rows["test"] = [rows["train"][index] for index in held_out]
        rows["train"] = [rows["train"][index] for index in train]
    for split, tally in tallies.items():
        tally.kept = len(rows[split])
    return {split: rows[split] for split in SPLITS}, tallies


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", SOURCE)
    parser.add_argument("--most-tests", type=int, default=MOST_TESTS, help="tests of a problem (%(default)s)")
    parser.add_argument(
        "--most-characters", type=int, default=MOST_CHARACTERS, help="of all tests of a problem (%(default)s)"
    )
    parser.add_argument("--model", type=Path, help="with --smoke: where a tiny model is written")
    args = parser.parse_args()
    found = made_entries() if args.smoke else read(args.source)
    named = {
        split: ((DATA_SETS.get(name, OTHER), entry) for name, entry in entries) for split, entries in found.items()
    }
    rows, tallies = rows_of(named, args.most_tests, args.most_characters)
    print(json.dumps({split: tally.as_dict() for split, tally in tallies.items()}), flush=True)
    if args.model is not None:
        from smoke_model import make_model

        make_model(args.model, [row for split in rows.values() for row in split])
    write_rows(args.out, rows, args.tools)


if __name__ == "__main__":
    prepare(main)
