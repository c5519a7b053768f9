"""Refusals about the rows of the data, which verl reads when the models are loaded, and scores minutes later.

Rows of a data set class of the user's own, and of files that are not on this machine, are not looked at.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from verl_multiturn.rows.checks import unscored
from verl_multiturn.rows.files import read_rows
from verl_multiturn.verl_bridge.names import NUMBERED_ROWS, PROXY_LOOP, RECORDED_LOOP, REWARD_MANAGERS
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow
from verl_multiturn.verl_bridge.startup.view import RunView

_TRAIN, _VAL = "data.train_files", "data.val_files"
_COLUMNS = ("data_source", "reward_model", "agent_name")
_BATCH = 4096


def _names(run: RunView, key: str) -> list[str]:
    listed = run.value(key)
    return [listed] if isinstance(listed, str) else list(map(str, listed or []))


def is_elsewhere(run: RunView, key: str) -> bool:
    """Return whether the rows of a setting are on another machine, or are read by a class of the user's own."""
    is_own = run.value("data.custom_cls.path") not in (None, "", NUMBERED_ROWS[0])  # ours read verl's files
    return is_own or any("://" in name for name in _names(run, key))


def files_of(run: RunView, key: str) -> list[Path] | None:
    """Return the files of rows that a setting names; None where one cannot be looked into from here."""
    if is_elsewhere(run, key):
        return None
    found: list[Path] = []
    for name in _names(run, key):
        path = Path(name).expanduser()
        found += map(Path, sorted(glob.glob(str(path)))) if glob.has_magic(name) and not path.exists() else [path]
    is_known = all(path.is_file() and not run.will_be_made(path) for path in found)
    return found if is_known else None


def row_count(path: Path) -> int:
    """Return the number of rows of a file."""
    if path.suffix == ".parquet":
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    return len(read_rows(path, [path.suffix]))


def rows_of(run: RunView, key: str) -> int | None:
    """Return the number of rows that a setting's files give a run; None where it is not known from here.

    verl leaves out some of them with `data.filter_overlong_prompts`.
    """
    if (files := files_of(run, key)) is None:
        return None
    most = run.value("data.train_max_samples" if key == _TRAIN else "data.val_max_samples")
    count = sum(map(row_count, files))
    return min(count, most) if isinstance(most, int) and most > 0 else count


def _batch_of(run: RunView) -> int:
    """Return how many rows verl takes at once; a batch that is not full is dropped."""
    one_by_one = (
        run.our_trainer not in (None, "sync")
        or run.filter_metric is not None
        or run.settings.filter in ("refill", "difficulty")
        or run.value("trainer.v1.sampler.sync_refill_failed_groups")
    )
    return 1 if one_by_one else int(run.value("data.gen_batch_size") or run.value("data.train_batch_size"))


def _too_few(run: RunView) -> dict[str, int] | None:
    if not run.is_v1 or (rows := rows_of(run, _TRAIN)) is None:
        return None
    batch = int(run.value("data.train_batch_size"))
    needed = _batch_of(run) if run.value("trainer.total_training_steps") else batch
    return {"rows": rows, "needed": needed} if rows < needed else None


def is_scored_otherwise(run: RunView) -> bool:
    """Return whether no reward manager of verl's reads the rows."""
    modes = (run.settings.tool_reward.mode, run.settings.interaction_reward.mode)
    sections = ("reward.reward_model.enable", "reward_model.enable", "distillation.enabled")
    name = run.value("reward_model.reward_manager") or run.value("reward.reward_manager.name")
    source = run.value("reward_model.reward_loop_source") or run.value("reward.reward_manager.source")
    own = source == "importlib" or name not in REWARD_MANAGERS
    return "replace" in modes or own or any(map(run.value, sections))


def _unscored(run: RunView) -> str:
    """Return which row cannot be scored, and why; empty where all can."""
    if not run.is_v1 or is_scored_otherwise(run):
        return ""
    default = run.rollout.agent.default_agent_loop
    for key in (_TRAIN, _VAL):
        for path in files_of(run, key) or []:
            for index, row in enumerate(columns_of(path, _COLUMNS)):
                if (row.get("agent_name") or default) in (PROXY_LOOP, RECORDED_LOOP):
                    continue  # the agent gives the reward
                if problem := unscored(row):
                    return f"{key}: {path}: row {index} {problem}"
    return ""


def columns_of(path: Path, names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, of a parquet file the columns of these names alone; some rows are read at once."""
    if path.suffix != ".parquet":
        yield from (row for row in read_rows(path, [path.suffix]) if isinstance(row, dict))
        return
    with pyarrow.parquet.ParquetFile(path) as file:
        columns = [name for name in names if name in file.schema_arrow.names]
        if not columns:
            yield from ({} for _ in range(file.metadata.num_rows))
            return
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from batch.to_pylist()


DATA_ROWS: list[Check] = [
    RefusalRow(
        (_TRAIN, "data.train_batch_size"),
        when=_too_few,
        given="data.train_files has {found[rows]} rows",
        why="fewer than the {found[needed]} of a batch (data.train_batch_size or gen_batch_size), so that no batch "
        "would be full",
        remedy="lower data.train_batch_size, or write more rows",
    ),
    RefusalRow(
        (_TRAIN, "data.val_files"),
        when=_unscored,
        given="{found}",
        why="verl's reward manager reads both columns of every row",
        remedy="write data_source and reward_model={{'ground_truth': …}} into each row, or score it otherwise: "
        "{PATH}.tool_reward.mode=replace, or a reward manager of your own",
    ),
]
