"""`finished_rows`: a finished conversation as rows of TransferQueue, in the form that verl's trainers read.

verl's own worker makes and writes them in one method, `AgentLoopWorkerTQ._agent_loop_postprocess`, a put for each
conversation. Ours makes them here and writes those of several conversations together (`shared_puts.py`). The contract
(`compat/contract.tsv`) shows when verl's method is another one.

Of the data row's own columns only those stay that somebody reads once the reward is known. A row has half as many
columns then, and a column costs more than its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from verl_multiturn.advantages.estimators import counts_conversations
from verl_multiturn.old_names import name_of_today
from verl_multiturn.records.json_text import dumps, plain
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import NewRow
from verl_multiturn.verl_bridge.loops.rewards import share_score
from verl_multiturn.verl_bridge.names import MANAGER, NUMBERED_ROWS, OUR_TRAINER, STATS
from verl_multiturn.verl_bridge.startup.verl_names import estimators, has_other_plugins

READ_LATER = ("uid", "raw_prompt", "data_source", "reward_model")
"""Columns of a data row that verl reads once a conversation is rewarded: its advantages and dumps the uid, a reward
model on the trainer's devices the prompt, its validation the others. Of our own code the advantages read the uid."""

_CONTENT = ("raw_prompt", "data_source", "reward_model", "extra_info", "tools_kwargs")
"""Columns of a data row that distinguish it from others of its index: verl's is 0 where a data set has none."""
_TRAINERS = ("sync", "colocate_async", "separate_async")

ModelInputs = Callable[[AgentLoopOutput, torch.Tensor], tuple[torch.Tensor, dict[str, Any]]]
"""Returns the position ids and the multi-modal inputs of a row, by its output and its `(S,)` token ids."""


def finished_rows(
    outputs: Sequence[AgentLoopOutput],
    columns: Mapping[str, Any],
    model_inputs: ModelInputs,
    kept: Collection[str] | None = READ_LATER,
) -> list[NewRow]:
    """Return the rows of a conversation, as the worker writes them.

    Args:
        outputs: Its agent loop's outputs, at least one. The last one has the reward, which the others get, too.
        columns: The data row, with `uid`, `session_id` and `global_steps`.
        model_inputs: Computes the model's inputs beside the tokens.
        kept: Columns of the data row that the rows get; None: all of them.

    Raises:
        RewardContractError: The reward cannot be trained on, see `CertifiedOutput.as_dict`.
    """
    share_score(outputs)
    own = {name: value for name, value in columns.items() if kept is None or name in kept}
    rows, place = [], place_of_sample(columns)
    for number, output in enumerate(outputs):
        input_ids = torch.tensor([*output.prompt_ids, *output.response_ids], dtype=torch.int64)
        position_ids, multi_modal_inputs = model_inputs(output, input_ids)
        row = {**output.as_dict(), **own}
        if (stats := (row.get("metrics") or {}).get(STATS)) is not None:
            stats["sample"] = place
        row.pop("multi_modal_data", None)  # images themselves; `multi_modal_inputs` has the model's inputs from them
        row |= {
            "input_ids": input_ids,
            "loss_mask": row["response_mask"],
            "position_ids": position_ids,
            "multi_modal_inputs": multi_modal_inputs,
        }
        key = RowKey(columns["uid"], str(columns["session_id"]), str(number))
        rows.append(NewRow(str(key), _tag(row, columns["global_steps"]), row))
    return rows


def place_of_sample(columns: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the place of a data row among those of a run, which is the same in every run of the same data.

    It is the step that began it, its `index`, as far as that is a whole number, and a digest of its content.

    Args:
        columns: The data row, with `global_steps`.
    """
    index = columns.get("index")
    content = dumps(plain([columns.get(name) for name in ("index", *_CONTENT)]))
    number = int(index) if isinstance(index, int | np.integer) else -1
    return int(columns["global_steps"]), number, hashlib.blake2b(content, digest_size=8).hexdigest()


def _tag(row: Mapping[str, Any], global_steps: int) -> dict[str, Any]:
    """Return verl's tag of a row: its lengths in tokens, and the steps of which its staleness is computed."""
    prompt_len, response_len = len(row["prompts"]), len(row["responses"])
    versions = {name: row["extra_fields"].get(name) for name in ("min_global_steps", "max_global_steps")}
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": global_steps,
        **versions,
    }


def kept_columns(config: DictConfig) -> Collection[str] | None:
    """Return the columns of data rows that a run keeps; None: all, since code of the user's own may read any of them.

    Args:
        config: verl's whole configuration.
    """
    return READ_LATER if own_reader(config) is None else None


def own_reader(config: DictConfig) -> str | None:
    """Return the setting or part that brings code of the user's own to stored rows; None: verl's and ours alone read.

    Args:
        config: verl's whole configuration.
    """
    trainers = {prefix + mode for prefix in ("", OUR_TRAINER) for mode in _TRAINERS}
    estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
    usual: dict[str, Collection[Any]] = {
        # A function of one's own that counts conversations is given them, and no rows.
        "algorithm.adv_estimator": {estimator} if counts_conversations(estimator) else estimators(),
        "trainer.v1.trainer_mode": trainers,
        "trainer.v1.sampler.custom_sampler.path": (None, ""),
        "data.custom_cls.path": (None, "", NUMBERED_ROWS[0]),
        "data.sampler.class_path": (None, ""),
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": (None, "", MANAGER),
        "actor_rollout_ref.model.external_lib": (None, ""),
        "skip.rollout_tq.enable": (None, False),  # verl keeps the rows as a file then
    }
    given = {key: OmegaConf.select(config, key) for key in usual}
    others = (key for key, each in given.items() if _of_today(each) not in usual[key])
    return next(others, "another plug-in of verl" if has_other_plugins() else None)


def _of_today(value: Any) -> Any:
    return name_of_today(value) if isinstance(value, str) else value
