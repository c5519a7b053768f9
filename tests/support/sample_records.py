"""Records of schema 2 for tests: a conversation, a session, and the whole folder of a run."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_multiturn.certificate.receipts import Receipt, prompt_hash
from verl_multiturn.records import schema
from verl_multiturn.records.rows import row_of
from verl_multiturn.records.write.records import RecordWriter

START = "20261126T101500-5f3a"
BEGAN = 1_790_000_000.0
PROMPT, SAMPLED, OBSERVATION = 0, 1, 3
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def sample_record(**changes: Any) -> dict[str, Any]:
    """Return the record of a conversation of two turns with one call; `changes` replace entries of it."""
    row, generations = _row(
        0,
        [1, 11, 12, 13, 14, 15],
        [([21, 22, 23, 2], [-0.1, -0.25, -1.5, -0.001], 3), ([41, 42, 2], [-0.5, -0.75, -0.0], 4)],
        [[31, 32, 33], []],
    )
    record = {
        "schema": 2,
        "request_id": "r-0",
        "uid": "group-0",
        "number": 0,
        "rerolled_from": None,
        "validation": False,
        "step": 1,
        "loop": "multi_turn_agent",
        "status": "finished",
        "began": BEGAN,
        "ended": BEGAN + 3.0,
        "row": None,
        "model": None,
        "sample": {
            "index": 7,
            "data_source": "sums",
            "ground_truth": "839",
            "extra_info": {"index": 7, "split": "train"},
            "messages": [{"role": "user", "content": "547 + 292 ="}],
            "tools": ["calculator"],
            "tools_kwargs": {},
            "interaction": None,
            "interaction_kwargs": {},
        },
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "stop_reason": "finished",
        "valid": True,
        "void": False,
        "error": "",
        "outages": [],
        "rows": [row],
        "generations": generations,
        "calls": [
            {
                "turn": 0,
                "id": "call_0_0",
                "tool": "calculator",
                "name": "calculator",
                "arguments": {"expression": "547 + 292"},
                "status": "ok",
                "text": "839",
                "images": [],
                "reward": 0.0,
                "metrics": {"left": 0},
                "attempts": 1,
                "cached": False,
                "truncated": False,
                "altered": False,
                "queue_s": 0.0,
                "seconds": 0.5,
                "at": BEGAN + 1.5,
            }
        ],
        "replies": [],
        "messages": [
            {"role": "user", "content": "547 + 292 ="},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call_0_0",
                        "type": "function",
                        "function": {"name": "calculator", "arguments": {"expression": "547 + 292"}},
                    }
                ],
            },
            {"role": "tool", "content": "839", "tool_call_id": "call_0_0", "name": "calculator"},
            {"role": "assistant", "content": "Answer: 839"},
        ],
        "asked": 1,
        "calc_rewards": {"calculator": 0.0},
        "score": 0.0,
        "scores": {},
        "trained": [],
        "differences": [],
        "time_up": None,
        "generate_s": 2.0,
        "tools_s": 0.5,
        "interaction_s": 0.0,
        "session": None,
        "timeline": [
            {"kind": "generation", "name": "", "turn": 0, "start": BEGAN, "end": BEGAN + 1.0},
            {"kind": "call", "name": "calculator", "turn": 0, "start": BEGAN + 1.0, "end": BEGAN + 1.5},
            {"kind": "generation", "name": "", "turn": 1, "start": BEGAN + 1.5, "end": BEGAN + 2.5},
        ],
    }
    return copy.deepcopy({**record, **changes})


def unproven_record(**changes: Any) -> dict[str, Any]:
    """Return the record of a conversation with an endpoint that reports no log-probabilities and no weights."""
    turns = [([21, 22, 23, 2], [0.0] * 4, -1), ([41, 42, 2], [0.0] * 3, -1)]
    row, generations = _row(0, [1, 11, 12, 13, 14, 15], turns, [[31, 32, 33], []])
    return sample_record(**{"rows": [row], "generations": generations, **changes})


def sample_session(**changes: Any) -> dict[str, Any]:
    """Return the record of an agent's session: two rows, a completion that no client got; `changes` replace entries."""
    first, one = _row(0, [1, 11, 12], [([21, 2], [-0.1, -0.2], 3)], [[]])
    second, two = _row(1, [1, 51, 52, 53], [([61, 2], [-0.3, -0.4], 3)], [[]])
    lost = _generation([1, 11, 12], 64, [22, 2], [-2.5, -0.5], [3, 3])
    lost |= {"cause": "undelivered", "ids": [22, 2], "logprobs": [-2.5, -0.5], "versions": [[2, 3]]}
    asked = {"at": BEGAN, "protocol": "chat", "wishes": {"max_tokens": 64}, "refused": None}
    session = {
        "requests": [
            asked
            | {
                "parent": None,
                "shared": 0,
                "messages": [{"role": "user", "content": "first"}],
                "tools": [SCHEMA],
                "generations": [0],
                "delivered": True,
                "order": 0,
            },
            asked
            | {
                "parent": None,
                "shared": 0,
                "messages": [{"role": "user", "content": "first"}],
                "tools": 0,
                "generations": [1],
                "delivered": False,
                "order": None,
            },
            asked
            | {
                "parent": None,
                "shared": 0,
                "messages": [{"role": "user", "content": "second"}],
                "tools": 0,
                "generations": [2],
                "delivered": True,
                "order": 1,
            },
        ],
        "roots": 2,
        "unenforced": {},
        "reward": 1.0,
        "by_id": False,
        "end": "returned",
        "problem": "",
    }
    generations = [{**one[0], "text": "one"}, {**lost, "text": None}, {**two[0], "text": "two"}]
    entries = {
        "request_id": "s-0",
        "uid": "group-s",
        "loop": "proxy_agent",
        "rows": [first, second],
        "generations": generations,
        "calls": [],
        "messages": [{"role": "user", "content": "second"}, {"role": "assistant", "content": "two"}],
        "calc_rewards": {},
        "session": session,
        "timeline": [],
    }
    return sample_record(**{**entries, **changes})


def sample_run(
    folder: Path, steps: int = 2, groups: int = 2, size: int = 4, start: str = START, join: bool = True
) -> list[dict[str, Any]]:
    """Write the folder of a run, and return its records: groups of conversations in each step, joined and trained.

    Number 0 of each group is right (score 1.0), the others are wrong (0.0). The last step also has a validation of one
    conversation for each group, one conversation that was cancelled, and one that raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"run-{start}.json").write_text(json.dumps(sample_run_file(start=start)))
    writer = RecordWriter(folder, start)
    records = []
    for step in range(1, steps + 1):
        trained = [_keep(writer, start, step, group, number) for group in range(groups) for number in range(size)]
        records += trained
        line = {"event": "step", "step": step, "metrics": {"critic/score/mean": 1 / size}}
        _join(folder, start, line, trained, join)
    validated = [_keep(writer, start, steps, group, 0, validation=True) for group in range(groups)]
    _join(folder, start, {"event": "validation", "step": steps, "metrics": {}}, validated, join)
    for name, end in (("cancelled", writer.cancel), ("raised", writer.raised)):
        line = {"request_id": f"{start}-{name}", "uid": name, "number": 0, "step": steps, "at": BEGAN}
        writer.begin(line)
        end({**line, "why": "cut" if name == "cancelled" else "ConfigError: no such tool"})
    writer.close()
    return records + validated


def sample_run_file(**changes: Any) -> dict[str, Any]:
    """Return the file of a run; `changes` replace entries of it."""
    return {
        "schema": 2,
        "start": START,
        "began": BEGAN,
        "host": "host-0",
        "versions": {"verl_multiturn": "0.1.0", "python": "3.11"},
        "settings": {
            "trainer": {"total_training_steps": 2, "experiment_name": "sums"},
            "actor_rollout_ref": {"model": {"path": "Qwen/Qwen3-4B"}},
            "data": {"train_files": ["a.parquet", "b.parquet"]},
        },
        "tools": None,
        "interactions": None,
        "schemas": [SCHEMA],
        "tokenizer": {"path": "tiny", "class": "Fast", "size": 512, "digest": "00"},
        "template": {"digest": "11", "text": "{{ messages }}"},
        "reward_function": {},
        "resumed_from": None,
        "reference_step": None,
        **changes,
    }


def _keep(
    writer: RecordWriter, start: str, step: int, group: int, number: int, validation: bool = False
) -> dict[str, Any]:
    kind = "v" if validation else "t"
    record = sample_record(
        request_id=f"{start}-{kind}{step}-{group}-{number}",
        uid=f"{start}-{kind}{step}-{group}",
        number=number,
        validation=validation,
        step=step,
        sampling={"temperature": 0.0 if validation else 1.0},
    )
    line = {key: record[key] for key in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
    writer.begin({**line, "at": record["began"]})
    writer.keep(lambda: record, {**line, "at": record["ended"]})
    writer.scored({**line, "at": record["ended"] + 0.1, "score": float(number == 0)})
    return record


def _join(folder: Path, start: str, line: dict[str, Any], records: Sequence[dict[str, Any]], join: bool) -> None:
    if not join:
        return
    step, event = line["step"], line["event"]
    name = f"{event}-{step:06d}-{start}.parquet"
    (folder / "join").mkdir(exist_ok=True)
    rows = [joined_row(record, event == "validation") for record in records]
    pq.write_table(pa.Table.from_pylist(rows, schema.JOINED), folder / "join" / name)
    made = {
        **{"start": start, "began": BEGAN + 10 * step, "ended": BEGAN + 10 * step + 9, "phases": {"gen": 4.0}},
        **{"join": name, "rows": len(rows), "evicted": [], "filtered": [], "failed": [], "rerolled": {}},
        **line,
    }
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(made) + "\n")


def joined_row(record: dict[str, Any], validation: bool = False, **changes: Any) -> dict[str, Any]:
    """Return a join's data on the first row of a record; `changes` replace entries."""
    sampled = len(record["rows"][0]["logprobs"])
    score = float(record["number"] == 0)
    row = dict.fromkeys(schema.JOINED.names)
    row |= {name: record[name] for name in ("request_id", "uid", "number", "step")}
    row |= {"row": 0, "validation": validation, "score": score, "parts": json.dumps({"acc": score}), "trained": sampled}
    if not validation:
        logprobs = [float(each) for each in record["rows"][0]["logprobs"]]
        row |= {"update": 0, "otc_factor": 1.0, "group_mean": 0.25, "group_std": 0.5}
        row |= {"advantages": [1.5 if score else -0.5] * sampled, "old_log_probs": logprobs}
        row |= {"entropy": np.full(sampled, 0.25, np.float16)}
    return row | changes


def _row(
    index: int,
    prompt: list[int],
    turns: Sequence[tuple[list[int], list[float], int]],
    context: Sequence[list[int]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a row, and its generations: each turn has ids, logprobs and a version; context follows each turn."""
    ids, given = list(prompt), len(prompt)
    mask, logprobs, versions, turn_ids, sources = (
        [0] * given,
        [0.0] * given,
        [-1] * given,
        [0] * given,
        [PROMPT] * given,
    )
    generations = []
    for number, ((sampled, numbers, version), after) in enumerate(zip(turns, context, strict=True)):
        made = _generation(ids, 256, sampled, numbers, [version] * len(sampled))
        generations.append({**made, "row": index, "start": len(ids), "parent": number - 1 if number else None})
        ids += sampled + after
        mask += [1] * len(sampled) + [0] * len(after)
        logprobs += numbers + [0.0] * len(after)
        versions += [version] * len(sampled) + [-1] * len(after)
        turn_ids += [number] * len(sampled) + [number + 1] * len(after)
        sources += [SAMPLED] * len(sampled) + [OBSERVATION] * len(after)
    row = row_of(given, ids, mask, logprobs, versions, turn_ids, sources)
    return {**row, "ids": ids, "logprobs": [float(str(each)) for each in row["logprobs"]]}, generations


def _generation(
    given: list[int], budget: int, ids: list[int], logprobs: list[float], versions: list[int]
) -> dict[str, Any]:
    digest = prompt_hash()
    digest.update(np.array(given, "<i4").tobytes())
    arrays = np.array(ids, "<i4"), np.array(logprobs, "<f4"), np.array(versions, "<i8")
    receipt = Receipt(len(given), digest.hexdigest(), budget, *arrays)
    return {
        "prompt_tokens": len(given),
        "prompt_digest": digest.hexdigest(),
        "max_tokens": budget,
        "tokens": len(ids),
        "finish": "stop",
        "digest": receipt.digest,
        "row": None,
        "start": None,
        "cause": None,
        "ids": None,
        "logprobs": None,
        "versions": None,
        "cached_tokens": None,
        "parent": None,
        "summary": False,
        "state": None,
        "reward": None,
        "text": "",
        "asked_at": BEGAN,
        "at": BEGAN + 1.0,
    }
