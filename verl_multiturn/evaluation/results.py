"""`read_results`: the files of an evaluation's folder, as typed results.

    evaluation.json        Evaluation   the request
    records/               Sample       a conversation for each row and sample: the one that counts
    records/join/          its reward   `records.read.scores` computes it, and who is right

Invariants:
- a figure is made of whole rows: those of which each sample ended, is valid and has a reward;
- which rows are shown does not depend on how long their conversations were. Short conversations end first, and are not
  a sample of all: see `Results.shown`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.plan import MANIFEST
from verl_multiturn.evaluation.tool_paths import Paths, paths_of
from verl_multiturn.paths import read_regular
from verl_multiturn.records.read.fates import start_of
from verl_multiturn.records.read.lines import flaw_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import Reward, by_role, has_failed, joined_rewards, was_late
from verl_multiturn.rows.reward_numbers import RoleRewards, ScoreRange


class EvaluatedWeights(BaseModel):
    """Which model was evaluated."""

    model_config = ConfigDict(extra="ignore")
    path: str
    hash: str
    """Digest of its weights, or name and address of a model behind chat completions: `model` of the records."""


class EvaluatedBenchmark(BaseModel):
    """The benchmark of an evaluation by name."""

    model_config = ConfigDict(extra="ignore")
    name: str
    departures: list[str] = []
    """Differences from its protocol, as a user reads them."""


class Evaluation(BaseModel):
    """The request: the entries of `evaluation.json` that the figures need."""

    model_config = ConfigDict(extra="ignore")
    recipe: str
    variant: Any = None
    overrides: Any = None
    model: EvaluatedWeights
    samples: int = Field(ge=1)
    """Conversations of each row."""
    temperature: float | None = None
    engine: str = ""
    rows: int = Field(ge=0)
    """Number of rows."""
    rows_digest: str | None = None
    reward_digest: str | None = None
    """Digest of the reward function; null: verl's own, by data source."""
    settings_digest: str | None = None
    """Digest of a conversation's other conditions: limits, tools, sampling, template."""
    benchmark: EvaluatedBenchmark | None = None
    """The benchmark; null: rows of a recipe."""


class EvaluatedSample(NamedTuple):
    """A conversation of the evaluation that ended."""

    request_id: str
    row: int
    """Number of its row."""
    number: int
    """Number of the sample in its row."""
    valid: bool
    stop_reason: str
    score: float | None
    """Its whole reward; None: it is invalid, or its reward function failed or returned no finite number."""
    right: bool
    """Whether it solved its task (`ScoreRange.is_right`); False without a score."""
    calls: int
    prompt_tokens: int
    """Tokens that the engine was given, all generations together."""
    cached_tokens: int | None
    """Prompt tokens that it had in its cache; None: not reported."""
    tokens: int
    """Tokens that it sampled."""
    began: float
    seconds: float
    start: str
    """Start of the evaluation in which it ran."""
    paths: Paths = Paths()
    """Which tools it could call, and which ways it took."""
    acc: float | None = None
    """The value `acc` of its reward; None: not reported."""
    roles: str | None = None
    """Its rewards by role, as `scores.rewards_in` has them; None without roles."""
    reward_failed: bool = False
    """Whether its reward reported `failed`, so that its score of 0 is no verdict."""
    reward_timed_out: bool = False
    """Whether its reward reported `timed_out`."""

    @property
    def by_role(self) -> RoleRewards:
        """Its rewards for `have_signal`; {} without a reward."""
        return by_role(self.score, self.roles)

    @property
    def state(self) -> str:
        """`scored`; `invalid`: it does not measure the model; `failed`: its reward function failed."""
        return "invalid" if not self.valid else "failed" if self.score is None else "scored"


@dataclass(frozen=True)
class EvaluatedRow:
    """A row and its results."""

    number: int
    """Number of the row in its file."""
    digest: str
    """Its content (`row_files.row_digest`)."""
    data_source: str
    samples: tuple[EvaluatedSample, ...]
    """The conversations that ended, one a sample, in their order."""

    @property
    def scored(self) -> list[EvaluatedSample]:
        """The conversations that have a reward."""
        return [sample for sample in self.samples if sample.score is not None]

    @property
    def score(self) -> float:
        """Mean reward of those that have one."""
        scores = [sample.score for sample in self.samples if sample.score is not None]
        return sum(scores) / len(scores)

    @property
    def right(self) -> int:
        """Number of conversations that solved the task."""
        return sum(sample.right for sample in self.samples)

    @property
    def rate(self) -> float:
        """Share of the conversations with a reward that solved the task."""
        return self.right / len(self.scored)

    def judged(self, scores: ScoreRange) -> EvaluatedRow:
        """Return this row, in which a range of rewards decides who is right."""
        samples = (
            each._replace(right=each.score is not None and scores.is_right(each.score, each.acc))
            for each in self.samples
        )
        return replace(self, samples=tuple(samples))


@dataclass(frozen=True)
class Results:
    """The contents of an evaluation's folder."""

    folder: Path
    evaluation: Evaluation
    rows: tuple[EvaluatedRow, ...]
    """The rows of which a conversation ended, in their order."""
    shown: tuple[EvaluatedRow, ...]
    """The rows that figures may be made of.

    When every conversation has ended these are the whole rows. Before that, only rows up to the first one of which a
    conversation is missing, and of these only those that have had as much time as the longest conversation took: a row
    that was begun later is there because it was short.
    """
    faults: tuple[str, ...]
    """Parts of the records that could not be read."""

    @property
    def whole(self) -> int:
        """Number of whole rows."""
        return sum(self.is_whole(row) for row in self.rows)

    def is_whole(self, row: EvaluatedRow) -> bool:
        """Return whether each sample of a row has a reward."""
        return len(row.scored) == self.evaluation.samples

    def count(self, state: str) -> int:
        """Return the number of conversations that are `scored`, `invalid` or `failed`."""
        return sum(sample.state == state for row in self.rows for sample in row.samples)

    @property
    def failed_rewards(self) -> int:
        """Number of conversations with a score whose reward reported `failed`."""
        return sum(sample.reward_failed for row in self.rows for sample in row.samples)

    @property
    def late_rewards(self) -> int:
        """Number of conversations with a score whose reward reported `timed_out`."""
        return sum(sample.reward_timed_out for row in self.rows for sample in row.samples)

    @property
    def scores(self) -> ScoreRange:
        """The range of the rewards, which decides who is right."""
        return ScoreRange.of(sample.score for row in self.rows for sample in row.samples)

    def judged(self, scores: ScoreRange) -> Results:
        """Return these results, in which a range of rewards decides who is right."""
        rows = {row.number: row.judged(scores) for row in self.rows}
        shown = tuple(rows[row.number] for row in self.shown)
        return replace(self, rows=tuple(rows.values()), shown=shown)

    @property
    def is_over(self) -> bool:
        """Whether every conversation that was requested has ended."""
        asked = self.evaluation.rows * self.evaluation.samples
        return sum(len(row.samples) for row in self.rows) >= asked


def read_results(folder: Path) -> Results:
    """Return the results in an evaluation's folder. It may still be running.

    Raises:
        ConfigError: The folder is none of an evaluation, or its conversations are not of its model or of one set of
            rows.
    """
    evaluation = _evaluation(folder)
    records = Records(folder)
    samples, names = _samples(records, evaluation.model.hash)
    rows = [
        EvaluatedRow(number, *names[number], tuple(own[each] for each in sorted(own)))
        for number, own in sorted(samples.items())
    ]
    if odd := [each for row in rows for each in row.samples if not 0 <= each.number < evaluation.samples]:
        raise ConfigError(
            f"record {odd[0].request_id!r} in {str(folder)!r} is sample {odd[0].number}, and each row has "
            f"{evaluation.samples}; it is none of this evaluation: evaluate again into another folder"
        )
    made = Results(folder, evaluation, tuple(rows), (), ())
    made = made.judged(made.scores)
    whole = [row for row in made.rows if made.is_whole(row)]
    shown = whole if made.is_over else _unchosen(made, _Times.of(records))
    return replace(made, shown=tuple(shown), faults=tuple(records.faults))


def _evaluation(folder: Path) -> Evaluation:
    path = folder / MANIFEST
    try:
        return Evaluation.model_validate(json.loads(read_regular(path, within=folder)))
    except FileNotFoundError:
        raise ConfigError(
            f"{str(folder)!r} has no {MANIFEST}; name the folder that `verl-multiturn eval … --out` wrote"
        ) from None
    except ValidationError as error:
        raise ConfigError(f"{str(path)!r}: {flaw_of(error)}; evaluate again into another folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error}); evaluate again into another folder") from None


def _samples(records: Records, model: str) -> tuple[dict[int, dict[int, EvaluatedSample]], dict[int, tuple[str, str]]]:
    """Return the conversations that count by row and sample, and of each row its digest and data source."""
    rewards = joined_rewards(records)
    starts = _starts(records)
    found: dict[int, dict[int, EvaluatedSample]] = defaultdict(dict)
    names: dict[int, tuple[str, str]] = {}
    for file in records.files:
        start = start_of(file.stem, starts)
        for record in (placed.record for placed in records.placed(file)):
            if (row := record["row"]) is None:
                raise ConfigError(
                    f"record {record['request_id']!r} in {str(file.path)!r} names no row; it is none of an evaluation"
                )
            if record["model"] != model:
                raise ConfigError(
                    f"record {record['request_id']!r} in {str(file.path)!r} is of the model {show(record['model'])}, "
                    f"and the evaluation of {model!r}; give each evaluation a folder of its own"
                )
            name = row["digest"], str(record["sample"]["data_source"])
            if names.setdefault(row["number"], name) != name:
                raise ConfigError(
                    f"row {row['number']} is {names[row['number']][0]} in one record and {row['digest']} in "
                    f"{record['request_id']!r}: the rows changed meanwhile; evaluate into another folder"
                )
            sample = _sample(record, start, rewards.get(record["request_id"], Reward()))
            best = found[row["number"]].get(sample.number)
            if best is None or _worth(sample) > _worth(best):
                found[row["number"]][sample.number] = sample
    return found, names


def _starts(records: Records) -> list[str]:
    """Return the names of all starts. Several starts are not a fault: an evaluation goes on where it was ended."""
    return [path.stem.removeprefix("run-") for folder in records.folders for path in sorted(folder.glob("run-*.json"))]


def _worth(sample: EvaluatedSample) -> tuple[bool, float]:
    """Order conversations of one sample: one that counts comes before one that does not, and the first one before all.

    A second one that counts is never chosen, so that trying again changes no figure.
    """
    return sample.score is not None, -sample.began


def _sample(record: Mapping[str, Any], start: str, reward: Reward) -> EvaluatedSample:
    generations = record["generations"]
    cached = [each["cached_tokens"] for each in generations if each["cached_tokens"] is not None]
    has_score, parts = record["valid"] and reward.score is not None, reward.parts
    return EvaluatedSample(
        request_id=record["request_id"],
        row=record["row"]["number"],
        number=record["number"],
        valid=record["valid"],
        stop_reason=record["stop_reason"],
        score=reward.score if record["valid"] else None,
        right=False,  # the range of all rewards decides it, which is known once all are read
        # An agent answers its calls itself; the completions have their ids.
        calls=len(record["calls"]) or sum(len(each["call_ids"]) for each in generations),
        prompt_tokens=sum(each["prompt_tokens"] for each in generations),
        cached_tokens=sum(cached) if cached else None,
        tokens=sum(each["tokens"] for each in generations),
        began=record["began"],
        seconds=max(0.0, record["ended"] - record["began"]),
        start=start,
        paths=paths_of(record),
        acc=reward.acc,
        roles=reward.roles_text,
        reward_failed=has_score and has_failed(parts),
        reward_timed_out=has_score and was_late(parts),
    )


class _Times(NamedTuple):
    """The times that the last start of an evaluation wrote."""

    start: str
    now: float
    """Time of the last thing that it wrote."""
    open: dict[str, float]
    """When each conversation began that has not ended, by its row's uid."""

    @classmethod
    def of(cls, records: Records) -> _Times:
        starts = _starts(records)
        begun: dict[str, dict[str, tuple[str, float]]] = defaultdict(dict)
        now: dict[str, float] = defaultdict(float)
        for line in records.lines():
            start = start_of(line["file"], starts)
            now[start] = max(now[start], line["at"])
            if line["event"] == "begin":
                begun[start][line["request_id"]] = line["uid"], line["at"]
            elif line["event"] != "score":
                begun[start].pop(line["request_id"], None)
        last = max(now, default="")
        for shot in records.snapshots():
            if start_of(shot["file"], starts) == last:
                now[last] = max(now[last], shot["at"])
        opened: dict[str, float] = {}
        for uid, at in begun[last].values():
            opened[uid] = min(at, opened.get(uid, at))
        return cls(last, now[last], opened)


def _unchosen(results: Results, times: _Times) -> Iterator[EvaluatedRow]:
    """Yield the whole rows of an evaluation that is not over which are there whatever their length: `Results.shown`."""
    took = [sample.seconds for row in results.rows for sample in row.samples if sample.start == times.start]
    longest = max([*took, *(times.now - began for began in times.open.values())], default=0.0)
    first_open = min((int(uid) for uid in times.open if uid.isdecimal()), default=None)
    for row in results.rows:
        late = any(each.start == times.start and each.began > times.now - longest for each in row.samples)
        is_open = len(row.samples) < results.evaluation.samples
        if late or is_open or (first_open is not None and row.number >= first_open):
            return
        if results.is_whole(row):
            yield row
