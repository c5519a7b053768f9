"""`EvaluationProtocol`: how a named benchmark is evaluated, as `eval --benchmark NAME` reads it from a YAML file here.

    NAME.yaml       the protocol: the place of the rows, reward, prompt, sampling
    protocols.tsv   a line for each, and beside each cell its source

Invariants:
- a protocol is a recipe with overrides, so that an evaluation by name is one of a recipe, with the user's words last;
- each difference between an evaluation and its protocol is in `evaluation.json`, in the table and in the last line.
"""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.config import read_model
from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError

SINGLE_TURN = "benchmarks/single_turn"
"""The recipe of benchmarks with one question and one answer; its script has a reader for each."""
OF_THE_RECIPE = "recipe"
"""Reward of a benchmark whose recipe scores by its users or tools."""
_HERE = Path(__file__).resolve().parent
_TABLE = "protocols.tsv"
_SOURCE = ": source"
_PACKAGE = "package "
_SAMPLING = "actor_rollout_ref.rollout.val_kwargs"
_LENGTH = "data.max_response_length"
_COMPARED = (*(f"{_SAMPLING}.{key}" for key in ("n", "temperature", "top_p", "do_sample")), _LENGTH)
"""Settings whose values `NamedBenchmark.departures` compares, so that words with them need not be named."""
_ROWS = ("data.train_files", "data.val_files", "recipe.prepare.benchmark")
"""Settings that would put the rows of something else in the place of the benchmark's."""


class EvaluationProtocol(BaseModel):
    """How a benchmark is evaluated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = SINGLE_TURN
    variants: list[str] = []
    source: str | None = None
    """The data that the recipe's script gets in the place of its own (`--source`); None: its own, or `--rows`."""
    settings: list[str] = []
    """Further Hydra overrides."""
    rows: str
    """The place of the rows: the name of a data set on the hub, an address, or `package NAME` for an installed one."""
    split: list[str]
    """Names of the files of fetched rows, without endings; of a recipe, the splits that are evaluated."""
    columns: list[str] = []
    window: list[str] | None = Field(default=None, min_length=2, max_length=2)
    """First and last day of the problems, as in `2024-08-01`; None: all."""
    size: int | None = Field(default=None, gt=0)
    """Number of rows; None: not published."""
    reward: str
    """Name of a built-in reward, or `recipe`."""
    prompt: str | dict[str, str] | None = None
    """The user's message with `{question}` in it, or one for each form of problem; None: the recipe's."""
    n: int = Field(gt=0)
    """Conversations of each row."""
    temperature: float = Field(ge=0.0)
    top_p: float = Field(gt=0.0, le=1.0)
    length: int = Field(gt=0)
    """Most tokens of a response, all turns together."""

    @property
    def is_fetched(self) -> bool:
        """Whether the user fetches the rows; those of an installed package are there."""
        return not self.rows.startswith(_PACKAGE)

    def words(self, name: str, is_smoke: bool) -> list[str]:
        """Return the protocol as Hydra overrides of its recipe.

        Args:
            name: Name of the benchmark.
            is_smoke: Whether this is the smoke run, whose tiny model keeps its own length.
        """
        words = [
            f"{_SAMPLING}.n={self.n}",
            f"{_SAMPLING}.temperature={self.temperature}",
            f"{_SAMPLING}.top_p={self.top_p}",
            f"{_SAMPLING}.do_sample={self.temperature > 0}",
            *self.settings,
        ]
        if self.recipe == SINGLE_TURN:
            words.append(f"recipe.prepare.benchmark={name}")
        else:
            files = ",".join(f"${{recipe.out}}/data/{split}.parquet" for split in self.split)
            words.append(f"data.val_files=[{files}]")
        return words if is_smoke else [*words, f"{_LENGTH}={self.length}"]

    def needed(self, name: str) -> str:
        """Return the sentence that names the missing rows: their files, their place and their columns.

        Example: `aime24 needs its rows: fetch test of https://… (with the columns problem, answer), and name …`.
        """
        columns = f" (with the columns {', '.join(self.columns)})" if self.columns else ""
        what = self.rows if self.recipe != SINGLE_TURN else f"{' and '.join(self.split)} of {self.rows}"
        return (
            f"--benchmark {name} needs its rows, and nothing is fetched here; fetch {what}{columns}, and name the file "
            "or the folder with --rows"
        )


@dataclass(frozen=True)
class NamedBenchmark:
    """An evaluation by name, as `eval` hands it to the engine's side."""

    name: str
    protocol: EvaluationProtocol
    words: tuple[str, ...] = ()
    """The user's words that change its conversations or rewards, as they were given."""

    def departures(self, sampled: Mapping[str, Any]) -> list[str]:
        """Return the differences of an evaluation from the protocol; the evaluation writes them into its description.

        Example: `["n 4 in the place of 32", "--set mt.turn_length=512"]`.

        Args:
            sampled: The evaluation's own values of `n`, `temperature`, `top_p`, `length` and `size`.
        """
        there = self.protocol.model_dump()
        found = [
            f"{'rows' if key == 'size' else key} {value} in the place of {there[key]}"
            for key, value in sampled.items()
            if there[key] is not None and value != there[key]
        ]
        return [*found, *self.words]


def is_compared(word: str) -> bool:
    """Return whether a Hydra override sets a value that `NamedBenchmark.departures` compares."""
    return word.partition("=")[0].strip().lstrip("+") in _COMPARED


def refuse_other_rows(name: str, words: Sequence[str]) -> None:
    """Refuse Hydra overrides that put other rows in the place of a benchmark's, alone or with a whole section.

    Args:
        name: Name of the benchmark.
        words: The user's overrides.

    Raises:
        ConfigError: One does.
    """
    for word in words:
        key = word.partition("=")[0].strip().lstrip("+~").partition("@")[0]
        if taken := [each for each in _ROWS if each == key or each.startswith(f"{key}.") or key.startswith(f"{each}.")]:
            remedy = "name each of its keys" if key not in _ROWS else "name it with --rows or another --benchmark"
            raise ConfigError(
                f"--set {word!r}: --benchmark {name} has its own rows, and sets {' and '.join(taken)} itself; {remedy}"
            )


def benchmarks() -> list[str]:
    """Return the names of the benchmarks, in the order of the table."""
    return [line["set"] for line in _lines()]


def read_protocol(name: str) -> EvaluationProtocol:
    """Read the protocol of a benchmark.

    Raises:
        ConfigError: There is no such benchmark; the known ones are named, the nearest first.
    """
    known = benchmarks()
    if name not in known:
        ratio = {each: difflib.SequenceMatcher(None, name.lower(), each).ratio() for each in known}
        near, hint = sorted(known, key=lambda each: -ratio[each]), did_you_mean(name.lower(), known)
        raise ConfigError(f"unknown benchmark {name!r}; {hint and hint + ' '}known are {', '.join(near)}")
    raw = yaml.safe_load((_HERE / f"{name}.yaml").read_text(encoding="utf-8"))
    return read_model(EvaluationProtocol, raw, f"{name}.yaml")


def cells() -> dict[str, dict[str, tuple[Any, str]]]:
    """Return the table: for each benchmark and each setting the value and its source; ("", "") becomes (None, "").

    The page of the protocols and `benchmarks.eval_sets` call it.
    """
    return {
        line["set"]: {
            key: (json.loads(value) if value else None, line[f"{key}{_SOURCE}"])
            for key, value in line.items()
            if key != "set" and not key.endswith(_SOURCE)
        }
        for line in _lines()
    }


def differing(name: str) -> list[str]:
    """Return the settings in which a benchmark's YAML and its line of the table differ, or which lack a source."""
    told, table = read_protocol(name).model_dump(), cells()[name]
    written = yaml.safe_load((_HERE / f"{name}.yaml").read_text(encoding="utf-8"))
    default = {key: field.default for key, field in EvaluationProtocol.model_fields.items()}
    found = [key for key in told if key not in table]
    for key, (value, source) in table.items():
        own = default.get(key) if value is None else value
        if key not in told or told[key] != own or (key in written and not source):
            found.append(key)
    return found


def _lines() -> Sequence[dict[str, str]]:
    with (_HERE / _TABLE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
