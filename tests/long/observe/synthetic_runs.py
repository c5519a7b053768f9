"""Synthetic runs in the form of `records.schema`, healthy or with one fault: the input of `benchmarks.explain`.

A run is played conversation by conversation. A fault changes events in a conversation, and all that follows from it
follows here, too: a call that fails gives no answer, the answer is then wrong, its score 0, its group's advantages
others. So a fault has consequences, as in a real run, and the fault has to be distinguished from them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.long.observe.synthetic_records import AT_ONCE, BEGAN, Called, Played, Size, record_of, write_records
from verl_multiturn.records import schema
from verl_multiturn.records.read.joins import JoinName


class Fault:
    """A fault that is planted; this one is none."""

    name = "healthy"
    symptom = ""

    def plan(self, size: Size) -> None:
        """Change the run as a whole."""

    def play(self, talk: Played, draw: random.Random) -> None:
        """Change events in a conversation, before it is scored."""

    def score(self, talk: Played, draw: random.Random) -> None:
        """Change its score."""

    def compare(self, group: list[Played], draw: random.Random) -> None:
        """Change the advantages of a group."""

    def finish(self, step: dict[str, Any], groups: list[tuple[str, list[Played]]], draw: random.Random) -> None:
        """Change a step's line; conversations that are not trained are no longer joined."""


class Run:
    """A run in memory, with the methods of `records.read.records.Records` that are needed.

    Args:
        size: How large it is.
        seed: Seed of all draws.
        fault: The fault that is planted.
    """

    evaluations: frozenset[str] = frozenset()
    has_trainer = True

    def __init__(self, size: Size, seed: int, fault: Fault | None = None) -> None:
        self._size, self._fault = size, fault or Fault()
        self._fault.plan(size)
        self._draw = random.Random(f"{seed}")
        self._numbers = np.random.default_rng(seed)
        self._found: list[dict[str, Any]] = []
        self._lines: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []
        self._clock = BEGAN
        self._play()

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Return the file of the run."""
        return [
            {
                "schema": 2,
                "start": "20261126T101500_000001",
                "began": BEGAN,
                "host": "synthetic",
                "versions": {"verl_multiturn": "0", "python": "3.11"},
                "settings": {
                    "trainer": {"v1": {"trainer_mode": self._size.mode}},
                    "algorithm": {"adv_estimator": "grpo"},
                    "actor_rollout_ref": {"model": {"path": "synthetic"}},
                },
                "resumed_from": None,
            }
        ]

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the conversations."""
        yield from self._found

    def sessions(self) -> dict[str, Any]:
        """Return the sessions of a gateway: none."""
        return {}

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines beside them."""
        yield from self._lines

    def steps(self) -> list[dict[str, Any]]:
        """Return steps and validations."""
        return self._steps

    def joined(self) -> pa.Table:
        """Return the join."""
        return pa.Table.from_pylist(self._rows, schema.JOINED)

    def joins(self, columns: Any) -> Iterator[tuple[JoinName, pa.Table]]:
        """Yield the join of each step and validation."""
        table = self.joined()
        for line in self._steps:
            validation = line["event"] == "validation"
            chosen = pc.and_(pc.equal(table["step"], line["step"]), pc.equal(table["validation"], validation))
            yield JoinName(validation, line["step"], "20261126T101500_000001"), table.filter(chosen)

    def write(self, folder: Path) -> None:
        """Write it as a run does."""
        folder.mkdir(parents=True)
        run = self.runs[0]
        (folder / f"run-{run['start']}.json").write_text(json.dumps(run))
        for begin in range(0, len(self._found), AT_ONCE):
            write_records(folder, run["start"], self._found[begin : begin + AT_ONCE])
        (folder / "join").mkdir()
        table = self.joined()
        for line in self._steps:
            name = f"{line['event']}-{line['step']}-{run['start']}.parquet"
            chosen = [
                row for row in self._rows
                if row["step"] == line["step"] and row["validation"] == (line["event"] == "validation")
            ]  # fmt: skip
            pq.write_table(pa.Table.from_pylist(chosen, table.schema), folder / "join" / name)
        text = "".join(json.dumps({**line, "join": None}) + "\n" for line in self._steps)
        (folder / "steps.jsonl").write_text(text)

    def _play(self) -> None:
        size = self._size
        self._validate(0)
        for step in range(1, size.steps + 1):
            began = self._clock
            groups = []
            for number in range(size.groups):
                row = (step - 1) * size.groups + number
                groups.append((f"g{step}-{number}", self._group(step, row)))
            line = {
                "event": "step",
                "start": "20261126T101500_000001",
                "step": step,
                "began": began,
                "ended": began,
                "phases": {},
                "join": None,
                "rows": 0,
                "metrics": {},
            }
            self._fault.finish(line, groups, self._draw)
            ended = max(self._record(uid, talk, began) for uid, group in groups for talk in group)
            self._clock = ended + 4.0 * (1 + 0.1 * self._draw.random())
            self._steps.append({**line, "ended": self._clock})
            if step % size.every == 0:
                self._validate(step)

    def _validate(self, step: int) -> None:
        if not self._size.validated:
            return
        began = self._clock
        ended = began
        for number in range(self._size.validated):
            talk = self._talk(step, 1_000_000 + number, 0, validation=True)
            self._fault.play(talk, self._draw)
            self._scored(talk)
            ended = max(ended, self._record(f"v{step}-{number}", talk, began))
        self._clock = ended + 0.5
        times = {"began": began, "ended": ended, "phases": {}, "join": None, "rows": 0, "metrics": {}}
        self._steps.append({"event": "validation", "start": "20261126T101500_000001", "step": step, **times})

    def _group(self, step: int, row: int) -> list[Played]:
        group = [self._talk(step, row, number) for number in range(self._size.size)]
        for talk in group:
            self._fault.play(talk, self._draw)
            self._scored(talk)
        valid = [talk.score for talk in group if talk.valid]
        mean = sum(valid) / len(valid) if valid else 0.0
        deviation = float(np.std(valid, ddof=1)) if len(valid) > 1 else 0.0
        for talk in group:
            talk.advantage = (talk.score - mean) / (deviation + 1e-6) if talk.valid else 0.0
        self._fault.compare(group, self._draw)
        return group

    def _talk(self, step: int, row: int, number: int, validation: bool = False) -> Played:
        size, draw = self._size, self._draw
        progress = step / size.steps
        own = random.Random(row * 7919)
        truth, difficulty = _truth(size.task, own), own.gauss(0.0, 1.0) * size.noise
        skill = _skill(progress, size)
        if validation:
            right = draw.random() < (0.98 if skill > 0.5 else 0.02 + 0.3 * skill) * size.best
        else:
            logit = math.log(skill / (1 - skill)) + difficulty
            right = draw.random() < 1 / (1 + math.exp(-logit))
        talk = Played(step, progress, row, truth, number, validation, difficulty, right, truth)
        if not right:
            talk.answer = _wrong(size.task, truth, draw)
        if size.task == "sums" and (right or draw.random() < 0.4):
            talk.calls = [
                Called("calculator", {"expression": f"{own.randint(10, 999)} + {own.randint(10, 999)}"}, truth)
            ]
        if size.task == "game":
            words = draw.sample(["wait", "look", "sleep", "eat", "read", "push", "pull"], size.turns - 1)
            first = ("go north", "open the box", "look", "take the key", "go back")
            talk.said = [f"I {draw.choice(first)}, then {word}" for word in words]
        turns = 1 + len(talk.calls) + len(talk.said)
        talk.tokens = [max(3, int(draw.lognormvariate(2.3, 0.3 * size.noise))) for _ in range(turns)]
        talk.engine_s = [0.3 + 0.04 * tokens * draw.lognormvariate(0.0, 0.15 * size.noise) for tokens in talk.tokens]
        for call in talk.calls:
            call.seconds, call.queue_s = draw.lognormvariate(-3.0, 0.5 * size.noise), draw.expovariate(500.0)
        talk.entropy = 0.008 + 0.44 * max(0.0, 1 - _learned(progress, size)) * draw.lognormvariate(0.0, 0.2)
        talk.drift = [size.drift] * turns
        return talk

    def _scored(self, talk: Played) -> None:
        talk.parts = {"compute_score": float(talk.right), "acc": float(talk.right)}
        talk.score = self._size.scale if talk.right else self._size.floor
        self._fault.score(talk, self._draw)

    def _record(self, uid: str, talk: Played, began: float) -> float:
        """Write a conversation down, and return when it was over."""
        request_id = f"{uid}-{talk.number}"
        record, ended = record_of(uid, request_id, talk, began, self._size, self._numbers)
        over = ended + talk.reward_s
        self._found.append(record)
        named = {"request_id": request_id, "uid": uid, "number": talk.number, "step": talk.step}
        self._lines.append({"event": "begin", **named, "validation": talk.validation, "at": began})
        self._lines.append({"event": "end", **named, "validation": talk.validation, "at": ended})
        self._lines.append({"event": "score", **named, "validation": talk.validation, "at": over, "score": talk.score})
        if talk.joined:
            for number, row in enumerate(record["rows"]):
                self._rows.append(self._joined(record, number, row, talk))
        return over

    def _joined(self, record: dict[str, Any], number: int, row: dict[str, Any], talk: Played) -> dict[str, Any]:
        sampled = len(row["logprobs"])
        turns = np.repeat(
            [run[3] for run in row["runs"] if run[4] == 1], [run[0] for run in row["runs"] if run[4] == 1]
        )
        old = min(sampled, round(talk.too_old * sampled))
        untrained = talk.untrained or ("too_old" if old else None)
        found: dict[str, Any] = {
            "request_id": record["request_id"],
            "uid": record["uid"],
            "number": talk.number,
            "row": number,
            "validation": talk.validation,
            "step": talk.step,
            "score": talk.score,
            "parts": json.dumps(talk.parts),
            "trained": 0 if talk.untrained or not talk.valid else sampled - old,
            "untrained": untrained or (None if talk.valid else "invalid"),
        }
        if untrained == "too_old":
            found["untrained_tokens"] = list(range(old))
        if not talk.validation:
            scale = np.array(talk.drift)[turns] if sampled else np.zeros(0)
            drift = self._numbers.laplace(0.0, 1.0, sampled) * scale
            found |= {
                "advantages": np.full(sampled, talk.advantage, np.float32),
                "old_log_probs": np.array(row["logprobs"], np.float32) + drift.astype(np.float32),
                "entropy": self._numbers.exponential(talk.entropy, sampled).astype(np.float16),
            }
        return found


def _learned(progress: float, size: Size) -> float:
    """Return how much was learned, from 0 to 1."""
    return 1 / (1 + math.exp(-12 * size.speed * (progress - 0.25 / size.speed)))


def _skill(progress: float, size: Size) -> float:
    return size.start + (size.best - size.start) * _learned(progress, size)


def _truth(task: str, own: random.Random) -> str:
    return own.choice("ABCD") if task == "choice" else str(own.randint(100, 1998))


def _wrong(task: str, truth: str, draw: random.Random) -> str:
    return (
        draw.choice([each for each in "ABCD" if each != truth])
        if task == "choice"
        else str(int(truth) + draw.randint(1, 90))
    )
