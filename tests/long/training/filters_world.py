"""Worlds for `benchmarks.filters`: the real replay buffers, pools and checkpoint files, on a TransferQueue in memory.

A world trains step by step. The model learns: each data row has a difficulty, the skill grows with the steps, and a
conversation is right with the probability that both make. A group's rewards depend on its row, on how often the row was
drawn, and on the step, and on nothing else, so that a world that goes on from a checkpoint gets the same.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tensordict_utils import get_tensordict

from tests.long.training.dapo_filter import (
    BATCH,
    TENTHS,
    Case,
    Conversation,
    N,
    Queue,
    in_place,
    make_buffer,
    plain_count,
)
from verl_multiturn.config import FilterMode
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.trainer.data_set import POSITION, draw_prompt, only_value
from verl_multiturn.verl_bridge.trainer.groups.history import History
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

SHARPNESS = 6.0
INVALID = 0.05


class Rows:
    """The data set of a world, whose rows are only their positions."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"raw_prompt": [{"role": "user", "content": str(position)}], POSITION: position}


@dataclass
class Kept:
    """Parts of a checkpoint beside our file: TransferQueue, and the data loader's position."""

    tags: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Any]]
    groups: dict[str, list[Conversation]]
    running: list[str]
    fetched: int
    draws: Counter[int]


@dataclass
class Found:
    """Results of a world."""

    drawn: dict[str, int] = field(default_factory=dict)
    """Position of each group's row, by uid."""
    left: dict[str, list[int]] = field(default_factory=dict)
    """Steps that trained, skipped or evicted each group."""
    counts: Counter[str] = field(default_factory=Counter)
    trained: Counter[int] = field(default_factory=Counter)
    """How often each row was trained with a signal."""


class World(Queue):
    """A trainer with its replay buffer, TransferQueue and data loader.

    Args:
        mode: `custom.multiturn.filter`.
        is_async: Whether the replay buffer is the asynchronous one.
        seed: Seed of all draws.
        steps: Steps in which the skill grows from nothing to all.
        rows: Rows of the data set.
    """

    def __init__(self, mode: FilterMode, is_async: bool, seed: int, steps: int, rows: int = 200) -> None:
        super().__init__(Case("filters"), random.Random(f"{seed} {is_async}"))
        self.mode, self.is_async, self.seed, self.steps = mode, is_async, seed, steps
        self.data = Rows(rows)
        self.difficulty = [random.Random(f"{seed} row {position}").random() for position in range(rows)]
        self.found = Found()
        self.fetched = 0
        self.draws: Counter[int] = Counter()
        self.begin()

    def begin(self) -> None:
        """Start the trainer."""
        self.buffer = make_buffer(self, None, self.is_async, is_ours=True, mode=self.mode)
        self.buffer.begin_step()
        self.history = History(True, self.is_async)

    def _fetch(self) -> Any:
        position = self.fetched % len(self.data)
        self.fetched += 1
        columns = collate_fn([self.data[position]])
        columns["uid"] = collate_fn([{"uid": f"p{position}f{self.fetched}"}])["uid"]
        return get_tensordict(columns)

    def submit(self, count: int) -> None:
        """Begin groups; the trainer's `refill_fn`."""
        for _ in range(count):
            if self.buffer.filter.pools is None:
                prompt = self._fetch()
                position = int(only_value(prompt.pop(POSITION)))
            else:
                prompt = draw_prompt(self.buffer.filter.pools, self._fetch, self.data)
                position = int(only_value(prompt["raw_prompt"])[0]["content"])
            uid = str(only_value(prompt["uid"]))
            self.found.drawn[uid] = position
            self.draws[position] += 1
            self.groups[uid] = self._conversations(position, self.draws[position])
            self.tags[uid] = {"is_prompt": True, "status": "running", "global_steps": self.step}
            self.running.append(uid)

    def right(self, position: int) -> float:
        """Return the probability of a right answer in this step."""
        return 1 / (1 + math.exp(-SHARPNESS * (1.2 * self.step / self.steps + 0.1 - self.difficulty[position])))

    def _conversations(self, position: int, draw: int) -> list[Conversation]:
        rng = random.Random(f"{self.seed} {position} {draw} {self.step}")
        right, found = self.right(position), []
        for _ in range(N):
            is_right, valid = rng.random() < right, rng.random() >= INVALID
            tenths = TENTHS * (is_right and valid)
            parts = [tenths] if rng.random() < 0.5 else [tenths, 0]
            found.append(Conversation("ours", valid, tenths, parts))
        return found

    def train(self) -> None:
        """Train one step, and compare the filter's choices with a plain count."""
        self.polls = 0
        self.buffer.begin_step()
        counts = self.found.counts
        if self.is_async and not self.found.drawn:
            self.submit(BATCH)  # the warm-up, so that a batch is always running ahead
        before = len(self.found.drawn)
        self.submit(BATCH)
        batch = self.buffer.sample(self.step, "train", BATCH)[0]
        silent = set(self.buffer.filter.silent)
        taken = dict.fromkeys(RowKey.parse(name).uid for name in batch.keys)
        self.history.train(self.step, BatchRows(batch), silent)
        self.kv_clear("train", batch.keys)
        left = [uid for uids in self.buffer.take_left().values() for uid in uids]
        for uid in [*taken, *left]:
            self.found.left.setdefault(uid, []).append(self.step)
            has_signal = plain_count(self.groups[uid]) == "signal"
            counts.update(groups=1, signal=has_signal, conversations=N)
            if uid in taken and has_signal:
                self.found.trained[self.found.drawn[uid]] += 1
        for uid in taken:
            has_signal = plain_count(self.groups[uid]) == "signal"
            is_silent = uid in silent
            counts["trained_signal"] += has_signal
            counts["wrong"] += has_signal == is_silent if self.mode in ("skip", "difficulty") else is_silent
        counts["wrong"] += sum(plain_count(self.groups[uid]) == "signal" for uid in left)
        counts["in_vain"] += len(self.found.drawn) - before != BATCH + len(left)
        self.step += 1

    def save(self, folder: Path) -> Kept:
        """Write our file of a checkpoint as the trainer does, and return the content of verl's checkpoint."""
        self.history.save(self.step - 1, folder, [], {"filter": self.buffer.filter.state()})
        parts = (self.tags, self.rows, self.groups, self.running) if self.is_async else ({}, {}, self.groups, [])
        return Kept(*copy.deepcopy(parts), self.fetched, Counter(self.draws))

    def resume(self, folder: Path, kept: Kept, step: int) -> None:
        """Go on from a checkpoint, in a new process: nothing of the trainer stays."""
        self.tags, self.rows, self.groups, self.running = copy.deepcopy(
            (kept.tags, kept.rows, kept.groups, kept.running)
        )
        self.fetched, self.draws, self.step = kept.fetched, Counter(kept.draws), step
        self.rng = random.Random(f"{self.seed} {step}")
        self.begin()
        noted = self.history.load(folder).get("filter")
        if noted is not None:
            self.buffer.filter.restore(noted)
        for uid in self.running:
            self.tags[uid] = {"is_prompt": True, "status": "running", "global_steps": step}


def play(world: World, steps: int) -> World:
    """Train so many steps, and return the world."""
    with in_place(world):
        for _ in range(steps):
            world.train()
    return world


def play_killed(world: World, before: int, lost: int, steps: int, folder: Path) -> Counter[str]:
    """Train, save, train on, kill, go on from the checkpoint, and count differences from a run without the kill.

    Args:
        world: The world, at its beginning.
        before: Steps before the checkpoint.
        lost: Steps between the checkpoint and the kill.
        steps: Steps in all.
        folder: Folder of the checkpoint.
    """
    play(world, before)
    with in_place(world):
        kept = world.save(folder)
    state, found = copy.deepcopy(world.buffer.filter.state()), copy.deepcopy(world.found)
    play(world, lost)
    world.found = found
    with in_place(world):
        world.resume(folder, kept, before + 1)
    counts = Counter(unlike=world.buffer.filter.state() != state)
    play(world, steps - before)
    found = world.found
    counts["twice"] = sum(len(left) > 1 for left in found.left.values())
    there = {RowKey.parse(name).uid for name in world.tags}
    counts["lost"] = sum(uid not in found.left and uid not in there for uid in found.drawn)
    counts["wrong"], counts["in_vain"] = found.counts["wrong"], found.counts["in_vain"]
    return counts
