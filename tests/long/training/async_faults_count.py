"""The fates of the prompts of a run whose processes were killed: drawn, trained, evicted, or still open.

Everything is read from the run's files: the data loader's position, the prompts in the checkpoint of TransferQueue, the
uids of each checkpoint's `trained.json`, and the records of the conversations.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.models.checkpoints import TRACKER, TRAINED, checkpoint_folder
from verl_multiturn.records.read.records import read_records

Question = str


@dataclass(frozen=True)
class Left:
    """Results that a run left behind, along the steps that led to the weights of its last checkpoint.

    Attributes:
        steps: Number of these steps.
        drawn: Number of prompts that the data loader gave out.
        trained: Uids by step.
        evicted: Uids that left untrained.
        open: Uids that the last checkpoint has in TransferQueue.
        questions: The question, by uid; a uid without a conversation has none.
        twins: How often each question is in the data.
    """

    steps: int
    drawn: int
    trained: Mapping[int, list[str]]
    evicted: list[str]
    open: list[str]
    questions: Mapping[str, Question]
    twins: Mapping[Question, int]


def count(left: Left) -> dict[str, int]:
    """Return how many prompts are there `twice`, and how many are `lost`.

    Every drawn prompt should have one uid among the trained, evicted and open ones; a prompt that was begun anew has
    its last one. A step that trained nothing counts as lost.
    """
    kept = [uid for step in sorted(left.trained) for uid in left.trained[step]]
    there = Counter([*kept, *left.evicted, *left.open])
    asked = Counter(left.questions[uid] for uid in there if uid in left.questions)
    again = sum(max(0, often - left.twins[question]) for question, often in asked.items())
    again = max(again, len(there) - left.drawn)  # of a uid without a conversation the question is not known
    undone = [step for step in range(1, left.steps + 1) if not left.trained.get(step)]
    return {
        "twice": sum(often - 1 for often in there.values()) + again,
        "lost": left.drawn - (len(there) - again) + len(undone),
    }


def read(out: Path) -> Left:
    """Read the folder of a run of one epoch that has ended."""
    import torch

    checkpoints = out / "checkpoints"
    last = int((checkpoints / TRACKER).read_text())
    trained: dict[int, list[str]] = {}
    evicted: list[str] = []
    for step in range(1, last + 1):
        file = checkpoint_folder(checkpoints, step) / TRAINED
        if not file.is_file():
            continue  # no checkpoint was written at this step
        found = json.loads(file.read_text())
        evicted += found["evicted"]
        for trained_in, uids in found["trained"].items():
            trained[int(trained_in)] = trained.get(int(trained_in), []) + uids
    folder = checkpoint_folder(checkpoints, last)
    prompts = open_prompts(folder / "transfer_queue", {uid for uids in trained.values() for uid in uids})
    position = torch.load(folder / "data.pt", weights_only=False)
    return Left(
        steps=last,
        drawn=position["_num_yielded"],
        trained=trained,
        evicted=evicted,
        open=list(prompts),
        questions={**_asked(out / "records"), **prompts},
        twins=_twins(out / "data" / "train.parquet"),
    )


def open_prompts(queue: Path, trained: set[str]) -> dict[str, Question]:
    """Return the prompts of a checkpoint of TransferQueue, without the trained ones, which are removed at load."""
    state = pickle.loads((queue / "controller_state.pkl").read_bytes())
    partition = state["partitions"]["train"]
    fields: dict[str, dict[int, Any]] = {}
    for unit in queue.glob("*/*.pkl"):
        for name, values in pickle.loads(unit.read_bytes())["field_data"].items():
            fields.setdefault(name, {}).update(values)
    return {
        key: _question(fields["raw_prompt"][index])
        for key, index in partition.keys_mapping.items()
        if partition.custom_meta.get(index, {}).get("is_prompt") and key not in trained
    }


def _question(messages: Any) -> Question:
    """Return the user's question in the messages of a conversation."""
    return next(str(message["content"]) for message in messages if message["role"] == "user")


def _asked(records: Path) -> dict[str, Question]:
    return {record["uid"]: _question(record["messages"]) for record in read_records(records) if record["uid"]}


def _twins(rows: Path) -> Counter[Question]:
    import pyarrow.parquet

    prompts = pyarrow.parquet.read_table(rows, columns=["prompt"])["prompt"].to_pylist()
    return Counter(_question(messages) for messages in prompts)
