"""DAPO's filter in our replay buffers: random groups with invalid conversations and conversations of several rows.

    python -m benchmarks.dapo_filter [--steps 200] [--seed 0]

The real replay buffers, sync and asynchronous, train on random groups in a TransferQueue within this process. Each
group has its own share of right answers and of invalid conversations; a conversation has one to four rows, whose
rewards are parts of its own in an order drawn at random, so that sums of floats differ. Some are sessions whose agent
failed, which report no `acc`; some are of another agent loop. Every group that a buffer takes or leaves out is compared
with a plain count: of all its valid conversations, are there two with different numbers? The last line is a JSON
object:

- `groups`: groups that were taken or dropped; `steps`: training steps;
- `wrong`: groups that the count would have treated otherwise;
- `too_few_valid`: of the groups that were dropped, those with fewer than two valid conversations, `kept`: such groups
  that were trained, because their step had replaced a batch of them already;
- `endless`: worlds in which a step did not end; one of the worlds has invalid conversations alone;
- `raised`: worlds in which the filter raised;
- `verl_wrong`, `verl_raised`, `verl_endless`: the same of verl's own filter, which compares rows: the control.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer as verls_module
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_multiturn.config import FilterMode
from verl_multiturn.verl_bridge.compat import row_store
from verl_multiturn.verl_bridge.trainer.groups import replay_buffer as our_module
from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import replay_buffer_from

Kind = Literal["ours", "failed session", "other loop"]

BATCH, N = 4, 8
TENTHS = 10
# Polls after which a step counts as one that does not end. The slowest world here takes some 40.
MOST_POLLS = 400


class Conversation(NamedTuple):
    """A conversation as it was drawn."""

    kind: Kind
    valid: bool
    right: int
    """Tenths of its reward: 0 or 10."""
    rows: Sequence[int]
    """Tenths that each row brings; they sum up to `right`."""


@dataclass(frozen=True)
class Case:
    """A kind of groups: the shares of right and of invalid conversations that a group may have."""

    name: str
    right: Sequence[float] = (0.0, 0.5, 1.0)
    invalid: Sequence[float] = (0.0, 0.0, 0.3, 1.0)
    metric: str = "reward"
    kinds: Sequence[float] = (0.8, 0.1, 0.1)
    """Shares of our conversations, of sessions whose agent failed, and of conversations of another loop."""


CASES = (
    Case("no outage", invalid=(0.0,)),
    Case("some invalid"),
    Case("acc", metric="acc"),
    Case("mostly invalid", invalid=(0.6, 0.9, 1.0)),
    Case("all invalid", invalid=(1.0,), kinds=(1.0, 0.0, 0.0)),
)


class EndlessError(Exception):
    """A step does not end."""


class Figures(Counter[str]):
    """Counts by the names of the last line."""


def drawn(case: Case, rng: random.Random) -> list[Conversation]:
    """Draw the conversations of a group."""
    right, invalid = rng.choice(case.right), rng.choice(case.invalid)
    return [_conversation(case, rng.random() < right, rng.random() >= invalid, rng) for _ in range(N)]


def _conversation(case: Case, is_right: bool, valid: bool, rng: random.Random) -> Conversation:
    kinds: list[Kind] = ["ours", "failed session", "other loop"]
    kind = rng.choices(kinds, case.kinds)[0]
    if kind == "other loop":
        return Conversation(kind, True, TENTHS * is_right, [TENTHS * is_right])
    if kind == "failed session" or not valid:  # a reward function finds no answer there
        return Conversation(kind, valid, 0, [0] * rng.randint(1, 4))
    parts = [0] * rng.randint(1, 4)
    for _ in range(TENTHS * is_right):
        parts[rng.randrange(len(parts))] += 1
    if len(parts) > 1:  # one row's gain is another row's loss
        moved = rng.randint(0, 3)
        parts[0], parts[-1] = parts[0] + moved, parts[-1] - moved
    return Conversation("ours", valid, TENTHS * is_right, parts)


def plain_count(group: Sequence[Conversation]) -> Literal["signal", "same", "too few"]:
    """Judge a group by counting its valid conversations."""
    numbers = [conversation.right for conversation in group if conversation.valid]
    if len(numbers) < 2:
        return "too few"
    return "signal" if len(set(numbers)) > 1 else "same"


class Queue:
    """TransferQueue within this process, and a clock that does not run. A submitted group ends after a poll or two."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self.case, self.rng = case, rng
        self.groups: dict[str, list[Conversation]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.running: list[str] = []
        self.polls = 0
        self.step = 1

    def submit(self, count: int) -> None:
        """Begin fresh groups; the trainer's `refill_fn`."""
        for _ in range(count):
            uid = f"g{len(self.groups)}"
            self.groups[uid] = drawn(self.case, self.rng)
            self.tags[uid] = {"is_prompt": True, "status": "running", "global_steps": self.step}
            self.running.append(uid)

    def finish(self) -> None:
        """End some of the running groups, in any order."""
        self.rng.shuffle(self.running)
        for _ in range(min(len(self.running), self.rng.randint(1, 2 * BATCH))):
            uid = self.running.pop()
            self.tags[uid]["status"] = "finished"
            for session, conversation in enumerate(self.groups[uid]):
                for index in range(len(conversation.rows)):
                    key = f"{uid}_{session}_{index}"
                    self.tags[key], self.rows[key] = {"min_global_steps": self.step - 1}, _row(conversation, index)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all tags; an endless search of a trainer ends here."""
        self.polls += 1
        if self.polls > MOST_POLLS:
            raise EndlessError
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_clear(self, partition_id: str, keys: Sequence[str]) -> None:
        """Remove prompts and rows."""
        for key in keys:
            self.rows.pop(key, None)
            self.tags.pop(key, None)

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        """Return columns of rows; one that a row lacks is skipped, as in TransferQueue."""
        rows = [self.rows[key] for key in keys]
        names = [name for name in select_fields if all(name in row for row in rows)]
        return list_of_dict_to_tensordict([{name: row[name] for name in names} for row in rows])

    def time(self) -> float:
        """Return 0: no time passes."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Let groups end."""
        self.finish()

    def wait(self, timeout_s: float) -> None:
        """Let groups end."""
        self.finish()

    def end_of(self, uids: Any) -> None:
        """Return None: no part here measures how late the trainer wakes up."""

    def take_raised(self) -> int:
        """Return 0."""
        return 0


def _row(conversation: Conversation, index: int) -> dict[str, Any]:
    """Return the columns of a row that a filter may read, as our agent loop writes them."""
    tenths = conversation.rows[index]
    scores = torch.zeros(3)
    for _ in range(abs(tenths)):
        scores[index % 3] += 0.1 if tenths > 0 else -0.1
    invalid = conversation.kind == "ours" and not conversation.valid
    acc = {} if conversation.kind == "failed session" or invalid else {"acc": conversation.right / TENTHS}
    fields = {"rm_scores": scores, "extra_fields": {"reward_extra_info": acc}, "metrics": {}}
    if conversation.kind != "other loop":
        total = sum(sum([0.1 if part > 0 else -0.1] * abs(part)) for part in conversation.rows)
        stats: dict[str, Any] = {
            "valid": conversation.valid,
            "conversation": {"row": index, "rows": len(conversation.rows), "score": total},
        }
        if conversation.kind == "failed session":
            stats["session"] = {}
        fields["metrics"] = {"rollout": stats}
    return fields


def make_buffer(queue: Queue, metric: str | None, is_async: bool, is_ours: bool, mode: FilterMode = "off") -> Any:
    """Make a replay buffer, ours or verl's; `mode` is `custom.multiturn.filter`."""
    common: dict[str, Any] = {"refill_fn": queue.submit, "filter_groups_metric": metric}
    if is_async:
        verls = ReplayBufferAsync("separate_async", {}, None, "drop", {}, **common)
    else:
        verls = ReplayBuffer("sync", {}, None, "drop", {}, train_batch_size=BATCH, gen_batch_size=1, **common)
    if not is_ours:
        return verls
    buffer = replay_buffer_from(verls, None, BATCH, mode, N)
    buffer.waiter = queue
    return buffer


def _noting(buffer: Any) -> set[str]:
    """Return a set that gets the groups which the filter of a buffer leaves out."""
    filtered: set[str] = set()
    evict = buffer._evict_terminal_groups

    def noting(global_steps: int, partition_id: str, reasons: Any) -> Any:
        filtered.update(reasons[1])
        return evict(global_steps, partition_id, reasons)

    buffer._evict_terminal_groups = noting
    return filtered


@contextmanager
def in_place(queue: Queue) -> Iterator[None]:
    """Put a queue in the place of TransferQueue, for verl's buffers and ours."""
    with (
        mock.patch.object(verls_module, "tq", queue),
        mock.patch.object(verls_module, "time", queue),
        mock.patch.object(our_module, "time", queue),
        mock.patch.object(row_store, "transfer_queue", queue),
    ):
        yield


def play(case: Case, steps: int, is_async: bool, seed: int, is_ours: bool = True) -> Figures:
    """Train so many steps, and count the fates of the groups."""
    queue = Queue(case, random.Random(f"{seed} {case.name} {is_async}"))
    figures = Figures()
    with in_place(queue):
        buffer = make_buffer(queue, case.metric, is_async, is_ours)
        filtered = _noting(buffer)
        try:
            for queue.step in range(1, steps + 1):
                _train(queue, buffer, filtered, figures)
        except EndlessError:
            figures["endless"] += 1
        except RuntimeError:  # verl's filter, of a metric that is not there
            figures["raised"] += 1
    return figures


def _train(queue: Queue, buffer: Any, filtered: set[str], figures: Figures) -> None:
    """Train one step, and compare each group that was taken or filtered with the count."""
    queue.polls = 0
    filtered.clear()
    if hasattr(buffer, "begin_step"):
        buffer.begin_step()
    queue.submit(BATCH)
    batch: KVBatchMeta = buffer.sample(queue.step, "train", BATCH)[0]
    queue.kv_clear("train", batch.keys)
    taken = {key.split("_")[0] for key in batch.keys}
    counted = {uid: plain_count(queue.groups[uid]) for uid in taken | filtered}
    too_few = sum(counted[uid] == "too few" for uid in filtered)
    # A step that has replaced a batch of groups with nothing to compare trains those that come then.
    kept = sum(counted[uid] == "too few" for uid in taken) if too_few == BATCH else 0
    unlike = [uid for uid in taken if counted[uid] != "signal"] + [uid for uid in filtered if counted[uid] == "signal"]
    found = {"steps": 1, "groups": len(counted), "too_few_valid": too_few, "kept": kept, "wrong": len(unlike) - kept}
    figures.update(found)


def figures_of(steps: int, seed: int, is_ours: bool) -> Figures:
    """Play all cases with both buffers, and sum up."""
    summed = Figures()
    for case in CASES:
        for is_async in (False, True):
            found = play(case, steps, is_async, seed, is_ours)
            print(f"{'ours' if is_ours else 'verl'} {'async' if is_async else 'sync '} {case.name}: {dict(found)}")
            summed.update(found)
    return summed


def run(steps: int, seed: int) -> dict[str, int]:
    """Play, and return the figures of our filter and of verl's own.

    Args:
        steps: Steps of each world.
        seed: Decides the draws.
    """
    ours, verls = (figures_of(steps, seed, is_ours) for is_ours in (True, False))
    names = ("groups", "steps", "wrong", "too_few_valid", "kept", "endless", "raised")
    return {name: ours[name] for name in names} | {
        f"verl_{name}": verls[name] for name in ("wrong", "raised", "endless")
    }
