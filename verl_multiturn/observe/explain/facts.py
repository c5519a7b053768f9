"""`Facts`: the data in which symptoms are looked for, read from a run's records in one pass.

A run may have a million conversations of thousands of tokens. So of each conversation only sums and short texts are
kept (`ConversationFacts`), and its tokens are let go.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_multiturn.certificate.check import SAMPLED
from verl_multiturn.observe.explain.lateness import critical_path
from verl_multiturn.observe.join_columns import JoinTable
from verl_multiturn.observe.spans import spans_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import Reward, is_right, ranges_of, rewards_of
from verl_multiturn.rows.reward_numbers import RoleRewards

_ANSWER = re.compile(r"(?:####|\\boxed\{|<answer>|\banswer\s*(?:is\b|:))", re.IGNORECASE)
_LONGEST_ANSWER = 200
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


@dataclass(slots=True)
class CallFacts:
    """One call."""

    tool: str
    """Name of the tool; the one that the model wrote where none answered."""
    status: str
    queue_s: float
    seconds: float


@dataclass(slots=True)
class ConversationFacts:
    """One conversation, or one session of an agent."""

    request_id: str
    uid: str
    validation: bool
    step: int
    """Step that trained it; where none did, the step in which it was begun."""
    began_step: int
    """Step in which it was begun."""
    row: str
    """Name of its data row."""
    source: str
    """Its `data_source`."""
    stop: str
    valid: bool
    void: bool
    began: float
    ended: float
    """When it was over, its reward included."""
    parts_s: dict[str, float]
    """Seconds of its critical path by part; {} where no timeline was recorded."""
    generated: int
    """Tokens that the engine returned."""
    unplaced: dict[str, int]
    """Tokens in no row, by cause."""
    calls: list[CallFacts]
    has_tools: bool
    has_interaction: bool
    answer: str
    """The last message's answer; "" where it has none."""
    marked: bool
    """Whether a mark such as `####` is before the answer."""
    truth: str
    """The row's ground truth, as text; "" where none was recorded."""
    attempts: int
    """The most calls, or turns without calls, that differ in nothing but numbers."""
    identical: int
    """The most calls of one tool with the same arguments."""
    agent_end: str | None
    """How a session's agent ended; None: it is a conversation."""
    joined: bool = False
    """Whether the trainer's side was recorded."""
    score: float | None = None
    right: bool = False
    """Whether it solved its task; False without a score."""
    advantage: float | None = None
    """Mean over its sampled tokens."""
    by_role: RoleRewards = field(default_factory=dict)
    """Its rewards by role (`reward_numbers.have_signal`); {} without a reward."""
    advantages: dict[str | None, float] = field(default_factory=dict)
    """Mean over the sampled tokens of each role; without roles that of all, under None."""
    parts: dict[str, float] = field(default_factory=dict)
    """The reward's parts, and the other numbers that its function reported."""
    trained: int = 0
    """Sampled tokens that the loss counted."""
    sampled: int = 0
    too_old: int = 0
    """Sampled tokens that were excluded for their age."""
    untrained: str | None = None
    drift: float = 0.0
    """Largest |trainer - rollout log-probability| of its tokens."""


@dataclass
class Drift:
    """Differences between the trainer's log-probabilities and the engine's."""

    count: int = 0
    absolute: float = 0.0
    """Sum of their absolute values."""
    signed: float = 0.0
    """Sum of the differences, trainer less engine."""

    def add(self, differences: Any) -> None:
        """Add those of some tokens."""
        self.count += len(differences)
        self.absolute += float(np.abs(differences).sum())
        self.signed += float(differences.sum())


@dataclass
class Facts:
    """All that was read of a run."""

    runs: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    """Steps of the trainer, without validations."""
    training: list[ConversationFacts]
    validation: list[ConversationFacts]
    drift: dict[tuple[int, int, int], Drift]
    """By step, turn and weight version."""
    entropy: dict[int, Drift]
    """Entropies by step: `absolute` is their sum, `count` the number of tokens."""
    begun: dict[str, str]
    """Data row of each group that has a record, by its uid."""
    ends: dict[str, list[str]]
    """Request ids by how their conversation ended, from the lines beside the records: `end`, `drop`, `raise`, …"""
    trained_groups: int = 0
    """Groups of the join, whether they have records or not."""
    timeline: bool = False
    """Whether timelines were recorded."""

    @property
    def played(self) -> list[ConversationFacts]:
        """Return the conversations to look at: those of the training, or of an evaluation that trains nothing."""
        return self.training or self.validation

    @property
    def settings(self) -> dict[str, Any]:
        """Return verl's configuration of the last start; {} where none was recorded."""
        return self.runs[-1].get("settings") or {} if self.runs else {}

    @property
    def mode(self) -> str:
        """Return verl's name of the trainer's mode; "" where it was not recorded."""
        return str(setting(self.settings, "trainer.v1.trainer_mode") or "")


def setting(settings: dict[str, Any], path: str) -> Any:
    """Return the value of a setting, such as `trainer.v1.trainer_mode`; None where there is none."""
    value: Any = settings
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def read_facts(records: Records) -> Facts:
    """Return the facts of a run, without the conversations of a step that a later start did again.

    Args:
        records: Its records.
    """
    joined, rewards = JoinTable(records.joined()), rewards_of(records)
    ranges = ranges_of(rewards.values())
    scored: dict[str, float] = {}
    ends: dict[str, list[str]] = defaultdict(list)
    for line in records.lines():
        if line.get("event") not in ("begin", "score"):
            ends[str(line.get("event"))].append(line["request_id"])
        if line.get("event") == "score":
            scored[line["request_id"]] = number(line.get("at"))
    facts = Facts(
        list(records.runs),
        [step for step in records.steps() if step.get("event") == "step"],
        [],
        [],
        defaultdict(Drift),
        defaultdict(Drift),
        {},
        ends,
        joined.trained_groups,
    )
    for record in records.records():
        facts.begun[record.get("uid") or ""] = _row_name(record.get("sample") or {})
        reward = rewards.get(record["request_id"], Reward())
        if reward.undone:
            continue
        talk = _talk(record, scored.get(record["request_id"]))
        if talk.valid:
            talk.score, talk.right = reward.score, is_right(reward, ranges)
            talk.by_role = reward.by_role
        talk.parts = reward.parts
        _join(talk, record, joined, facts)
        facts.timeline |= bool(talk.parts_s)
        (facts.validation if talk.validation else facts.training).append(talk)
    return facts


def _talk(record: dict[str, Any], scored: float | None) -> ConversationFacts:
    sample = record.get("sample") or {}
    generations = record.get("generations") or []
    session = record.get("session")
    began, ended = number(record.get("began")), number(record.get("ended"))
    spans = spans_of(record)
    if scored is not None and scored > ended and not any(span.get("kind") == "reward" for span in spans):
        spans = [*spans, {"kind": "reward", "name": "", "start": ended, "end": scored}] if spans else spans
    if spans:
        ended = max(ended, max(number(span.get("end")) for span in spans))
    unplaced: Counter[str] = Counter()
    for generation in generations:
        if generation.get("row") is None:
            unplaced[str(generation.get("cause"))] += int(generation.get("tokens") or 0)
    messages = record.get("messages") or []
    answer, marked = _answer(messages)
    calls = record.get("calls") or []
    asked = [str(call.get("name")) + _as_text(call.get("arguments")) for call in calls]
    said = [_text(message) for message in messages if message.get("role") == "assistant" and not calls]
    return ConversationFacts(
        request_id=record["request_id"],
        uid=record.get("uid") or "",
        validation=bool(record.get("validation")),
        step=int(record.get("step") or 0),
        began_step=int(record.get("step") or 0),
        row=_row_name(sample),
        source=str(sample.get("data_source") or ""),
        stop=str(record.get("stop_reason") or ""),
        valid=bool(record.get("valid", True)),
        void=bool(record.get("void")),
        began=began,
        ended=ended,
        parts_s=critical_path(spans, began, ended),
        generated=sum(int(each.get("tokens") or 0) for each in generations),
        unplaced=dict(unplaced),
        calls=[_call(call) for call in calls],
        has_tools=bool(sample.get("tools")) or bool(calls),
        has_interaction=sample.get("interaction") is not None or bool(record.get("replies")),
        answer=answer,
        marked=marked,
        truth=_plain_answer(_as_text(sample.get("ground_truth"))),
        attempts=_most(_NUMBER.sub("#", text) for text in set(asked) | set(said)),
        identical=_most(asked),
        agent_end=None if session is None else str(session.get("end") or ""),
    )


def _join(talk: ConversationFacts, record: dict[str, Any], joined: JoinTable, facts: Facts) -> None:
    """Add the trainer's results for a conversation's rows."""
    advantages: dict[str | None, list[Any]] = defaultdict(list)
    for number_of_row, row in enumerate(record.get("rows") or []):
        at = joined.find(talk.request_id, number_of_row)
        if at is None:
            continue
        talk.joined = True
        talk.step = joined.step(at, talk.step)
        talk.trained += int(joined.number("trained", at) or 0)
        talk.untrained = joined.text("untrained", at) or talk.untrained
        turns, versions = _sampled(row.get("runs") or [])
        talk.sampled += len(turns)
        if joined.text("untrained", at) == "too_old":
            some = joined.floats("untrained_tokens", at)
            talk.too_old += len(turns) if some is None else len(some)
        if (values := joined.floats("advantages", at)) is not None:
            advantages[joined.text("role", at)].append(values)
        if (values := joined.floats("entropy", at)) is not None and not talk.validation:
            facts.entropy[talk.step].add(values[np.isfinite(values)])
        trainer = joined.floats("old_log_probs", at)
        if trainer is not None and not talk.validation and len(trainer) == len(turns):
            rollout = np.array(
                [number(each) for each in row.get("logprobs") or []], np.float32
            )  # as the trainer has them
            if len(rollout) == len(trainer):
                _add_drift(talk, trainer - rollout, turns, versions, facts.drift)
    of_roles = {role: np.concatenate(own) for role, own in advantages.items()}
    talk.advantages = {role: float(own.mean()) for role, own in of_roles.items() if len(own)}
    if talk.advantages:
        talk.advantage = float(np.concatenate([*of_roles.values()]).mean())


def _add_drift(
    talk: ConversationFacts, differences: Any, turns: Any, versions: Any, drift: dict[tuple[int, int, int], Drift]
) -> None:
    is_number = np.isfinite(differences)
    keys = np.stack([turns, versions])
    for turn, version in np.unique(keys[:, is_number], axis=1).T.tolist():
        chosen = differences[is_number & (turns == turn) & (versions == version)]
        drift[talk.step, turn, version].add(chosen)
        talk.drift = max(talk.drift, float(np.abs(chosen).mean()))


def _sampled(runs: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Return turn and weight version of each sampled token of a row."""
    chosen = [(count, turn, version) for count, _mask, version, turn, source in runs if source == SAMPLED]
    counts = [count for count, _, _ in chosen]
    return np.repeat([turn for _, turn, _ in chosen], counts), np.repeat([version for _, _, version in chosen], counts)


def _call(call: dict[str, Any]) -> CallFacts:
    name = str(call.get("tool") or call.get("name") or "")
    return CallFacts(name, str(call.get("status")), number(call.get("queue_s")), number(call.get("seconds")))


def _row_name(sample: dict[str, Any]) -> str:
    """Return a name for a conversation's data row: its index, or a digest of its messages."""
    source = str(sample.get("data_source") or "")
    if (index := sample.get("index")) is not None:
        return f"{source}:{index}"
    told = _as_text(sample.get("messages"))
    return f"{source}:{hashlib.blake2b(told.encode(errors='replace'), digest_size=8).hexdigest()}"


def _answer(messages: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """Return the answer in the last message, if the model wrote it, and whether a mark is before it.

    It is the text after the last mark; without one, the last line.
    """
    text = _text(messages[-1]).strip() if messages and messages[-1].get("role") == "assistant" else ""
    if not text:
        return "", False
    *before, said = _ANSWER.split(text[-100_000:])
    return _plain_answer(said if before and said.strip() else text.splitlines()[-1]), bool(before)


def _plain_answer(text: str) -> str:
    """Return the first line of an answer, without punctuation around it."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return first.strip(" .}*`\"'")[:_LONGEST_ANSWER].casefold()


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, default=str)


def _most(texts: Iterable[str]) -> int:
    """Return how often the most frequent text occurs."""
    return max(Counter(texts).values(), default=0)


def number(value: Any) -> float:
    """Return a number of a record, which may be the text `nan`; 0 where there is none."""
    return 0.0 if value is None else float(value)


def optional(value: Any) -> float | None:
    """Return a finite number of a record; None where it is none."""
    found = None if value is None else float(value)
    return found if found is not None and np.isfinite(found) else None
