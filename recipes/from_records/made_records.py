"""Records for `--smoke`: sums that were not sampled, in the form of a run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from verl_multiturn.certificate.receipts import Receipt, prompt_hash
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.joins import JoinedRow
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.run_file import digest_of_vocabulary, path_of
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome, Request
from verl_multiturn.rollout.turn import Turn

START = "20260101T000000_000000"
GROUPS, SIZE = 8, 4


def write_records(folder: Path, tokenizer: Any) -> None:
    """Write a folder of records, if it is not there: 8 sums with 4 answers each, two of which are right.

    Args:
        folder: The folder.
        tokenizer: The tokenizer of the model that learns.
    """
    if path_of(folder, START).exists():
        return
    writer = RecordWriter(folder, START)
    joined = []
    for group in range(GROUPS):
        for number in range(SIZE):
            ended = _ended(group, number, tokenizer)
            line = {"request_id": ended.outcome.request_id, "uid": ended.group, "number": number, "step": 1}
            writer.begin({**line, "at": 0.0})
            writer.keep(lambda ended=ended: record_of(ended), {**line, "at": 0.0})  # type: ignore[misc]
            row = JoinedRow(line["request_id"], ended.group, number, 0, False, 1, score=float(number < SIZE // 2))
            row.trained = len(ended.generations[0].ids)
            joined.append(row)
    writer.close()
    joins.write(folder, joins.name_of(False, 1, START), joins.table_of(joined))
    about = {
        "schema": 2,
        "start": START,
        "began": 0.0,
        "host": "made",
        "versions": {},
        "settings": {},
        "tokenizer": {"digest": digest_of_vocabulary(tokenizer.get_vocab())},
    }
    path_of(folder, START).write_text(json.dumps(about), encoding="utf-8")


def _ended(group: int, number: int, tokenizer: Any) -> Life:
    """Return a conversation of one turn; the first half of a group gives the right sum."""
    left, right = 10 + group, 3 * group + 1
    messages = [{"role": "user", "content": f"What is {left} + {right}?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    said = f"{left + right + max(0, number - SIZE // 2 + 1)}"
    ids = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
    logprobs, versions = [-0.5] * len(ids), [0] * len(ids)
    outcome = Outcome.begun(f"made-{group}-{number}")
    outcome.trajectory.append_prompt(prompt)
    outcome.trajectory.append_sampled(ids, logprobs, versions)
    outcome.trajectory.seal(StopReason.FINISHED)
    outcome.turns = [Turn(0, end=len(ids), finish="stop", at=0.0)]
    outcome.messages, outcome.asked = [*messages, {"role": "assistant", "content": said}], 1
    digest = prompt_hash()
    digest.update(np.array(prompt, "<i4").tobytes())
    arrays = np.array(ids, "<i4"), np.array(logprobs, "<f4"), np.array(versions, "<i8")
    receipt = Receipt(len(prompt), digest.hexdigest(), 64, *arrays)
    row = {"data_source": "made", "reward_model": {"ground_truth": str(left + right)}, "extra_info": {"index": group}}
    request = Request(outcome.request_id, messages)
    life = Life(outcome.request_id, f"group-{group}", number, loop="multiturn_agent", step=1, row=row)
    life.outcome, life.generations, life.request = outcome, [receipt], request
    return life
