"""A folder of records of zero-sum games between two roles: a row of each, their rewards and advantages in the join."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.sample_records import BEGAN, START, sample_run_file, sample_session
from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.records.read.joins import JoinedRow, name_of, table_of, write
from verl_multiturn.records.write.records import RecordWriter

ROLES = ("white", "black")


def sample_game(uid: str, number: int, white: float) -> dict[str, Any]:
    """Return the record of a game: white's reward is given, black's is its negative; a completion of the user beside.

    The record is a session of two rows; that of the user, who is not trained, is in none.
    """
    record = sample_session(request_id=f"{uid}-{number}", uid=uid, number=number)
    for generation, role in zip(record["generations"], ("white", "user", "black"), strict=True):
        generation |= {"role": role, "digest": _digest(record, generation, role)}
    record["generations"][1] |= {"cause": "not_trained_role"}
    record["session"] |= {"reward": None, "rewards": {"white": white, "black": -white}}
    record["session"] |= {"roles": [*ROLES, "user"], "trained": [*ROLES]}
    return record


def _digest(record: dict[str, Any], generation: dict[str, Any], role: str) -> str:
    """Return the digest of a generation's receipt with a role; a row of the session has one generation."""
    row = None if generation["row"] is None else record["rows"][generation["row"]]
    own = generation if row is None else {"ids": row["ids"][generation["start"] :], "logprobs": row["logprobs"]}
    versions = [3] * generation["tokens"]
    arrays = (np.array(own["ids"], "<i4"), np.array(own["logprobs"], "<f4"), np.array(versions, "<i8"))
    given = (generation["prompt_tokens"], generation["prompt_digest"], generation["max_tokens"])
    return Receipt(*given, *arrays, role).digest


def joined_games(uid: str, results: list[float], step: int = 1) -> list[JoinedRow]:
    """Return the join's rows of a group of games, by white's results: the advantages of a role are ±its rewards."""
    made = []
    for number, white in enumerate(results):
        for row, (role, score) in enumerate(zip(ROLES, (white, -white), strict=True)):
            mean = sum(results if role == "white" else [-each for each in results]) / len(results)
            joined = JoinedRow(f"{uid}-{number}", uid, number, row, False, step, role=role, score=score, trained=2)
            joined.parts, joined.group_mean, joined.group_std = json.dumps({"acc": white}), mean, 1.0
            joined.advantages = [score - mean] * 2  # type: ignore[assignment]
            made.append(joined)
    return made


def write_games(folder: Path, groups: dict[str, list[float]], step: int = 1) -> None:
    """Write the folder of a run with groups of games, by uid, all of one step.

    Args:
        folder: The folder.
        groups: White's result in each game of each group.
        step: The step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"run-{START}.json").write_text(json.dumps(sample_run_file()))
    writer = RecordWriter(folder, START)
    for uid, results in groups.items():
        for number, white in enumerate(results):
            record = sample_game(uid, number, white)
            line = {key: record[key] for key in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
            writer.begin({**line, "at": record["began"]})
            writer.keep(partial(dict, record), {**line, "at": record["ended"]})
            writer.scored({**line, "at": record["ended"] + 0.1, "score": 0.0})
    writer.close()
    rows = [row for uid, results in groups.items() for row in joined_games(uid, results, step)]
    name = name_of(False, step, START)
    write(folder, name, table_of(rows))
    line = {
        "event": "step", "start": START, "step": step, "began": BEGAN, "ended": BEGAN + 9, "phases": {"gen": 4.0},
        "join": name, "rows": len(rows), "metrics": {},
    }  # fmt: skip
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
