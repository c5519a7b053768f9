"""Which recorded conversations are learned from, and where each of them lies: `choose`, and `RecordLoader.take` later.

    folders of records ─▶ choose ─▶ rows of a parquet file, lineage.jsonl ─▶ Shelf.take ─▶ record ─▶ trainer

Invariants:
- a record is verified against the receipts of its generations when it is chosen, and again each time it is taken. One
  that is torn, or of which an id, a mask or a log-probability was changed, is not trained;
- the selection depends on the records and the choice alone, not on the order of folders in a file system;
- every conversation is either chosen or counted with the cause for which it is excluded;
- of a gateway's session each trained token was sampled by weights that may have sampled it;
- of a session with roles (`proxy.roles`) the rows of a role are chosen by that role's reward. Roles that were not
  trained, and opponents, have no rows.

The digests are not signed: they find damage and careless edits, but not edits with new digests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_multiturn.describe import show
from verl_multiturn.errors import CertificateError, ConfigError
from verl_multiturn.records.read.origin import models_of, refuse_other
from verl_multiturn.records.read.records import Records, StoredRecord
from verl_multiturn.records.read.scores import Reward, joined_rewards
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.rollout.trajectory import NO_VERSION


@dataclass(frozen=True)
class SelectionRule:
    """Which conversations to learn from; None: no such bound."""

    min_score: float | None = None
    """Smallest reward of a conversation; with roles, of the role whose rows are learned from."""
    models: tuple[str, ...] | None = None
    """Digests of the weights (`Record.model`) that may have sampled its trained tokens. A trainer's name none."""
    staleness: int | None = None
    """How many of `models`, in their order from the oldest to the newest, may follow those that sampled it."""
    per_row: int | None = None
    """The most conversations of one data row: those with the highest rewards, the first ones among equals."""
    group: int | None = None
    """Number of conversations in each group, for a trainer that compares them; None: no groups."""
    max_length: int | None = None
    """The most tokens of a row, and so the next two of its prompt and its response."""
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    roles: tuple[str, ...] | None = None
    """Roles whose rows are learned from (`proxy.roles`); None: all that have rows."""

    def __post_init__(self) -> None:
        if self.min_score is not None and math.isnan(self.min_score):
            raise ConfigError("min_score=nan: no reward is below it, or above; name a number, or null")
        if self.staleness is not None and (self.staleness < 0 or not self.models):
            raise ConfigError(
                f"staleness={self.staleness} with models={list(self.models or ()) or None}: it is the number of models "
                "that may follow the one that sampled, 0 or more; name them in order, the newest last, or set null"
            )
        if self.per_row is not None and self.per_row < 1:
            raise ConfigError(f"per_row={self.per_row} leaves no conversation of a row; name 1 or more, or null")
        if self.group is None:
            return
        if self.group < 2:
            raise ConfigError(
                f"groups of {self.group}: a group of one has no baseline to compare with; set rollout.n to 2 or more, "
                "or learn from the good ones by SFT (leave variant=rl out)"
            )
        if self.roles is not None:
            raise ConfigError(
                f"roles={list(self.roles)}: a trainer that compares groups learns from the roles of its own setting; "
                "set it to null, and proxy.roles and proxy.train as in the run that recorded them"
            )
        if self.min_score is not None or self.per_row is not None:
            raise ConfigError(
                f"min_score={self.min_score} and per_row={self.per_row} leave parts of a group out, whose mean is its "
                "baseline; set both to null"
            )

    @property
    def fresh(self) -> tuple[str, ...] | None:
        """Return those of `models` that `staleness` lets through; None: any model is."""
        if self.models is None or self.staleness is None:
            return self.models
        return self.models[-self.staleness - 1 :]


@dataclass(frozen=True)
class SelectedRecord:
    """A conversation that is learned from, and where its record lies."""

    path: str
    """File of its record."""
    offset: int
    """Position of the gzip member in it, or of the line."""
    place: int
    """Number of the record in the member."""
    request_id: str
    score: float
    """Its reward; with roles, the largest of those that are learned from."""
    models: tuple[str, ...]
    """Digests of the weights that sampled its trained tokens (`origin.models_of`); none of a trainer's."""
    data_row: Mapping[str, Any] | None
    """The row of an evaluation: its number and digest; None: a trainer's."""
    uid: str
    number: int
    """Number of the conversation in its group."""
    step: int
    trained: tuple[int, ...]
    """Number of trained tokens in each of its rows; 0: nothing is learned from the row."""
    of_rows: tuple[tuple[str | None, float], ...]
    """Role and reward of each of its rows; without roles None, and the whole reward."""
    task: str | None
    """Of a gateway's session, its task, which is also its `uid`; None: no gateway's."""
    sample: Mapping[str, Any] = field(repr=False)
    """The data set's entries (`schema.Sample`)."""

    @property
    def pointer(self) -> dict[str, Any]:
        """Return the arguments of `RecordLoader.take`, in plain types."""
        return {"path": self.path, "offset": self.offset, "place": self.place, "request_id": self.request_id}

    def lineage(self, row: int, index: int) -> dict[str, Any]:
        """Return the line of `lineage.jsonl` with the origin of a row of the training file; of a session, not its user.

        Args:
            row: Number of the row in the training file.
            index: Number of the conversation's row; of a group, of the conversation in it.
        """
        return {
            "row": row,
            "index": index,
            "request_id": self.request_id,
            "file": self.path,
            "offset": self.offset,
            "place": self.place,
            "models": list(self.models),
            "reward": self.score,
            "data_row": None if self.data_row is None else dict(self.data_row),
            "uid": self.uid,
            "number": self.number,
            "step": self.step,
        }


@dataclass(frozen=True)
class Selection:
    """The chosen conversations."""

    groups: tuple[tuple[SelectedRecord, ...], ...]
    """The conversations of each data row, in the order of their numbers."""
    left_out: Counter[str]
    """Conversations that were excluded, by cause."""
    faults: tuple[str, ...]
    """Unreadable parts, and records that differ from the engine's output: one sentence each."""

    @property
    def conversations(self) -> list[SelectedRecord]:
        """Return all chosen conversations."""
        return [each for group in self.groups for each in group]

    def told(self) -> str:
        """Return the selection as one line."""
        kept, parts = len(self.conversations), [f"{count} {cause}" for cause, count in sorted(self.left_out.items())]
        text = f"{kept} of {kept + self.left_out.total()} conversations are learned from"
        return text + (f"; left out: {', '.join(parts)}" if parts else "")


def choose(folders: Sequence[str | Path], choice: SelectionRule) -> Selection:
    """Choose conversations to learn from.

    Args:
        folders: Folders of runs or evaluations, folders of records, or files of records beside their joins.
        choice: Which conversations to learn from.

    Raises:
        ConfigError: A folder does not exist or holds no records, a conversation is in two of them, or nothing remains.
    """
    if not folders:
        raise ConfigError("no records are named; name folders of runs or evaluations: recipe.records=[DIR,…]")
    found: dict[tuple[Any, ...], list[SelectedRecord]] = {}
    left_out: Counter[str] = Counter()
    faults: list[str] = []
    seen: dict[str, str] = {}
    for folder in folders:
        records = Records(folder).require()
        rewards = joined_rewards(records)
        for placed in _placed(records):
            request_id = placed.record["request_id"]
            if (other := seen.get(request_id)) is not None:
                where = f"{other!r} twice" if other == str(placed.path) else f"{other!r} and in {str(placed.path)!r}"
                raise ConfigError(
                    f"request {show(request_id)} is in {where}, and would be learned from twice; name each folder once"
                )
            seen[request_id] = str(placed.path)
            reward = rewards.get(request_id, Reward())
            of_rows = _of_rows(placed.record, reward)
            cause, problem = _refusal(placed.record, reward, of_rows, choice)
            if cause or reward.score is None:
                left_out[cause] += 1
                faults += [f"{placed.path}, offset {placed.offset}: {problem}"] if problem else []
            else:
                chosen = _chosen(placed, reward.score, of_rows, choice)
                found.setdefault(_row_of(chosen), []).append(chosen)
        faults += [fault for fault in records.faults if "left out" in fault or "cannot be read" in fault]
    groups = list(_grouped(found.values(), choice, left_out))
    selection = Selection(tuple(groups), left_out, tuple(faults))
    if not groups:
        raise ConfigError(f"nothing is left to learn from: {selection.told()}; {_wider(choice)}")
    return selection


def check_vocabulary(folders: Sequence[str | Path], vocabulary: Mapping[str, int], name: str) -> None:
    """Refuse records whose ids are those of another tokenizer.

    Args:
        folders: As for `choose`.
        vocabulary: The vocabulary of the model that learns.
        name: A name of that model, for errors.

    Raises:
        ConfigError: A run's tokenizer has another vocabulary, or its file does not name its vocabulary.
    """
    for folder in folders:
        remedy = f"name records of this model in the place of {str(folder)!r}, or the model that these are of"
        runs = Records(folder).runs
        if not runs or any(run["tokenizer"].get("digest") is None for run in runs):
            raise ConfigError(
                f"{str(folder)!r}: no run-*.json says which tokenizer its ids are of; name the folder that a run wrote"
            )
        for run in runs:
            refuse_other(run, {"tokenizer": remedy}, vocabulary=vocabulary, model=repr(name))


def _placed(records: Records) -> Iterator[StoredRecord]:
    for file in records.files:
        yield from records.placed(file)


def _of_rows(record: Mapping[str, Any], reward: Reward) -> tuple[tuple[str | None, float], ...]:
    """Return role and reward of each row of a record; a role that has none has the whole reward."""
    roles = {each.get("row"): each.get("role") for each in record["generations"]}
    found = [roles.get(index) for index in range(len(record["rows"]))]
    return tuple((role, reward.by_role.get(role, reward.score or 0.0)) for role in found)


def _is_learned(role: str | None, score: float, choice: SelectionRule) -> bool:
    """Return whether a row is learned from, by its role and that role's reward."""
    is_named = choice.roles is None or role in choice.roles
    return is_named and (choice.min_score is None or score >= choice.min_score)


def _refusal(
    record: Mapping[str, Any],
    reward: Reward,
    of_rows: Sequence[tuple[str | None, float]],
    choice: SelectionRule,
) -> tuple[str, str]:
    """Return why a conversation is excluded, and its record's fault; "" and "" for one that can be used."""
    try:
        check(record)
        models = models_of(record)
    except CertificateError as error:
        return "whose tokens are not those of the engine", str(error)
    lengths = [(row["prompt_length"], len(row["ids"]) - row["prompt_length"]) for row in record["rows"]]
    bounds = choice.max_length, choice.max_prompt_length, choice.max_response_length
    checks = {
        # Its rows are those that the run holds out.
        "of a trainer's validation": record["validation"] and record["row"] is None,
        # It came as text, or as text and calls (`rollout.engines.http_engine`): its ids were written down later, by us.
        "of an endpoint, which proves no tokens": _is_unproven(record),
        "of another model": not _are_of(record, models, choice.models),
        f"of a model that more than {choice.staleness} follow": not _are_of(record, models, choice.fresh),
        "invalid": not record["valid"],
        "without a reward": reward.score is None,
        "with a row of which no token was sampled": any(not row["logprobs"] for row in record["rows"]),
        "with images, which records do not hold": any(row["images"] for row in record["rows"]),
        f"of other roles than {list(choice.roles or ())}": choice.roles is not None
        and not any(role in choice.roles for role, _ in of_rows),
        f"with a reward below {choice.min_score}": not any(_is_learned(*each, choice) for each in of_rows),
        "too long": any(
            bound is not None and length > bound
            for prompt, response in lengths
            for bound, length in zip(bounds, (prompt + response, prompt, response), strict=True)
        ),
    }
    return next((cause for cause, holds in checks.items() if holds), ""), ""


def _are_of(record: Mapping[str, Any], models: Sequence[str], allowed: Sequence[str] | None) -> bool:
    """Return whether all trained tokens are of allowed models; a trainer's, which name none, are of no named model."""
    names_some = bool(models) or isinstance(record["model"], list)
    return allowed is None or (names_some and set(models) <= set(allowed))


def _is_unproven(record: Mapping[str, Any]) -> bool:
    """Return whether neither a log-probability nor the weights of any sampled token are known."""
    rows = record["rows"]
    versions = {version for row in rows for _, mask, version, *_ in row["runs"] if mask}
    return versions == {NO_VERSION} and not any(logprob for row in rows for logprob in row["logprobs"])


def check(record: Mapping[str, Any]) -> None:
    """Verify a record.

    Raises:
        CertificateError: It differs from the engine's output.
    """
    if (found := verify_record(record).violations) != []:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise CertificateError(f"{found[0]}{more}")


def _chosen(
    placed: StoredRecord, score: float, of_rows: tuple[tuple[str | None, float], ...], choice: SelectionRule
) -> SelectedRecord:
    record, learned = placed.record, [_is_learned(*each, choice) for each in of_rows]
    if choice.group is None:
        score = max(reward for (_, reward), is_learned in zip(of_rows, learned, strict=True) if is_learned)
    trained = [sum(count for count, mask, *_ in row["runs"] if mask) for row in record["rows"]]
    return SelectedRecord(
        str(placed.path.absolute()),
        placed.offset,
        placed.place,
        record["request_id"],
        score,
        tuple(models_of(record)),
        record["row"],
        record["uid"],
        record["number"],
        record["step"],
        tuple(count if is_learned else 0 for count, is_learned in zip(trained, learned, strict=True)),
        of_rows,
        (record["session"] or {}).get("task"),
        record["sample"],
    )


def _row_of(chosen: SelectedRecord) -> tuple[Any, ...]:
    """Return the key that conversations of one data row share: the row's content and the model, or folder and uid.

    A gateway's uid is the task: its sessions are a group, whichever deployments sampled them.
    """
    if chosen.data_row is not None:
        return chosen.data_row["digest"], chosen.models
    return str(Path(chosen.path).parent), chosen.uid


def _grouped(
    found: Iterable[list[SelectedRecord]], choice: SelectionRule, left_out: Counter[str]
) -> Iterator[tuple[SelectedRecord, ...]]:
    for group in found:
        group.sort(key=lambda each: each.number)
        most = choice.group or choice.per_row or len(group)
        if choice.group is not None and len(group) < choice.group:
            left_out[f"in groups of fewer than {choice.group}"] += len(group)
            continue
        kept = group if choice.group is not None else sorted(group, key=lambda each: -each.score)
        if len(group) > most:
            left_out[f"beyond {most} of their row"] += len(group) - most
        yield tuple(sorted(kept[:most], key=lambda each: each.number))


def _wider(choice: SelectionRule) -> str:
    if choice.models is not None:
        return f"models={list(choice.models)} names the weights that may have sampled them"
    return "name other records, or set a wider choice"


class RecordLoader:
    """Takes records from their files, by the pointers that `SelectedRecord.pointer` made."""

    def __init__(self) -> None:
        self._records: dict[str, Records] = {}

    def take(self, pointer: Mapping[str, Any]) -> dict[str, Any]:
        """Return a record, verified.

        Raises:
            ConfigError: It is not there any more.
            CertificateError: It differs from the engine's output.
        """
        path, request_id = str(pointer["path"]), str(pointer["request_id"])
        if path not in self._records:
            self._records[path] = Records(path)
        records = self._records[path]
        stem = records.files[0].stem
        record = records.record_at(stem, int(pointer["offset"]), int(pointer["place"]))
        if record is None or record["request_id"] != request_id:
            why = f": {records.faults[-1]}" if records.faults else ""
            raise ConfigError(
                f"the record of request {show(request_id)} is not in {path!r} any more{why}; choose the conversations "
                "anew, in another --out"
            )
        check(record)
        return record
