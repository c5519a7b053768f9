"""Each batch is verified against what the engine returned, right before the update.

It runs after the advantages are computed. So it verifies exactly the columns that critic and actor fetch next.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from verl_multiturn.certificate.check import Row, Violation, verify
from verl_multiturn.certificate.conversations import gaps, repeated, shared, uncaused, unjoined
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.errors import CertificateError
from verl_multiturn.rollout.staleness import Bound
from verl_multiturn.row_keys import RowKey
from verl_multiturn.verl_bridge.compat.stored_rows import get_columns
from verl_multiturn.verl_bridge.loops.certified_output import STATS
from verl_multiturn.verl_bridge.settings import only_our_loop, settings_of
from verl_multiturn.verl_bridge.trainer.batch_rows import BatchRows

PREFIX = "rollout/certificate/"
VERSIONS, _RECEIPTS = "rollout_versions", "rollout_receipts"
# Columns that `certified_output.CertifiedOutput` adds.
_OURS = [VERSIONS, _RECEIPTS]
# Columns of verl's. Each row of our agent loop has them once `_compute_advantage` has ended.
_FIELDS = ["uid", "prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask",
           "rollout_log_probs", "old_log_probs", "advantages"]  # fmt: skip
_LOSS_INPUTS = ["old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights"]
_CRITIC_INPUTS = ["values", "returns"]
_METRICS = ("rows", "tokens", "unsampled", "violations", "unverified", "seconds")
_SHOWN = 5


class BatchVerifier:
    """The certificate of a trainer's batches.

    Metrics of a step, under `rollout/certificate/`:
    - `rows`, `tokens`: rows that were verified, and sampled tokens in them;
    - `unsampled`: rows among them whose receipts hold no usable generation; their mask is 0 throughout;
    - `violations`: always 0 in a log, since a step with a violation does not finish and its exception says how many;
    - `unverified`: rows that another agent loop than ours made;
    - `seconds`: time that the verification took.

    Args:
        config: verl's whole configuration.
        use_critic: Whether the run trains a critic.
        masks_void_rows: Whether rows with void turns are kept out of the loss.
        bound: The bound of the ages, beyond which tokens are kept out of the loss; None: there is none.
    """

    def __init__(
        self, config: DictConfig, use_critic: bool, masks_void_rows: bool = False, bound: Bound | None = None
    ) -> None:
        self._share = settings_of(config.actor_rollout_ref.rollout).certificate_share
        correction = config.algorithm.get("rollout_correction") or {}
        self._bypass = bool(correction.get("bypass_mode"))
        # In bypass mode verl rejects samples within the loss, and does not write the mask.
        self._mask_may_shrink = bool(correction.get("rollout_rs")) and not self._bypass
        self._loss_inputs = _LOSS_INPUTS + (_CRITIC_INPUTS if use_critic else [])
        self._masks_void_rows = masks_void_rows
        self._max_staleness = None if bound is None else bound.max_staleness
        self._only_ours = only_our_loop(config)
        self._tally: dict[str, float] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._tally = dict.fromkeys(_METRICS, 0)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step's batches so far."""
        return {PREFIX + name: value for name, value in self._tally.items()}

    def verify(
        self,
        rows: BatchRows,
        step: int,
        update: int,
        further: Sequence[str] = (),
        engines: Collection[RowKey] = (),
    ) -> dict[RowKey, dict[str, Any]]:
        """Verify the configured share of a batch's conversations, each with all its rows.

        Args:
            rows: Those of verl's batch, with its advantages.
            step: Training step; it is told, and with `update` the seed of the draw.
            update: Number of the batch within the step.
            further: Names of columns that are fetched, too, for others who look at the rows; a column for itself costs
                a fetch of its own.
            engines: Rows whose old log-probs have to be the engine's, to the bit.

        Returns:
            The columns that were fetched, by row.

        Raises:
            CertificateError: A row is not what the engine returned.
        """
        started = time.perf_counter()
        try:
            return self._verify(rows, step, update, further, engines)
        finally:
            self._tally["seconds"] += time.perf_counter() - started

    def _verify(
        self, rows: BatchRows, step: int, update: int, further: Sequence[str], engines: Collection[RowKey]
    ) -> dict[RowKey, dict[str, Any]]:
        chosen = _draw(rows.keys, self._share, f"{step} {update}")
        fetched: dict[RowKey, dict[str, Any]] = {}
        if not chosen:
            return fetched
        # TransferQueue would return one row for two rows with the same name.
        found = repeated(rows.keys) or gaps(rows.keys)
        if not found:
            receipts: dict[RowKey, Receipts] = {}
            causes = rows.left_out
            columns = fetch(chosen, rows.partition_id, [*self._loss_inputs, *further])
            fetched = dict(zip(chosen, columns, strict=True))
            for key, fields in fetched.items():
                found += self._verify_row(rows, key, fields, receipts, causes, step, key in engines)
            found += shared({key: each.request_id for key, each in receipts.items()})
            found += uncaused(receipts, causes)
            found += [] if found else unjoined(receipts)  # a row whose receipts cannot be read joins no others
        self._tally["violations"] += len(found)
        if found:
            shown = "\n".join(f"  {violation}" for violation in found[:_SHOWN])
            more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise CertificateError(
                f"step {step}: the batch is not what the engine returned, and is not trained on "
                f"({len(found)} violations in {len(chosen)} rows):\n{shown}{more}"
            )
        return fetched

    def _verify_row(
        self,
        rows: BatchRows,
        key: RowKey,
        fields: dict[str, Any],
        known: dict[RowKey, Receipts],
        causes: Mapping[str, str],
        step: int,
        has_engines: bool,
    ) -> list[Violation]:
        """Verify one row, and enter its receipts into `known`; `has_engines`: its old log-probs are the engine's."""
        receipts = Receipts("", [])
        if key not in rows.padding:
            if not (self._only_ours or _is_ours(fields)):
                self._tally["unverified"] += 1
                return []
            if missing := _missing(fields):
                return [Violation(f"of row {key}", None, None, f"it came without {' and '.join(missing)}")]
            try:
                receipts = Receipts.from_bytes(fields[_RECEIPTS].tobytes())
            except ValueError as error:
                return [Violation(f"of row {key}", None, None, str(error))]
            known[key] = receipts
            self._tally["unsampled"] += not any(g.is_generation for g in receipts.generations)
        self._tally["rows"] += 1
        self._tally["tokens"] += sum(len(g.ids) for g in receipts.generations)
        row = _row(rows, key, fields, {name: fields[name] for name in self._loss_inputs if name in fields})
        left_out = receipts.unrewarded or key.conversation in causes
        filtered = receipts.invalid or left_out or (receipts.void and self._masks_void_rows)
        oldest = None if self._max_staleness is None else step - 1 - self._max_staleness
        return verify(row, receipts, self._mask_may_shrink, self._bypass or has_engines, filtered, oldest)


def _draw(keys: Sequence[RowKey], share: float, seed: str) -> list[RowKey]:
    """Return all rows of a share of the conversations, rounded up."""
    if share >= 1:
        return list(keys)
    names = list(dict.fromkeys(key.conversation for key in keys))
    drawn = set(random.Random(seed).sample(names, math.ceil(share * len(names))))
    return [key for key in keys if key.conversation in drawn]


def fetch(keys: Sequence[RowKey], partition_id: str, loss_inputs: Sequence[str]) -> list[dict[str, Any]]:
    """Return the batch columns of each row, tensors as numpy arrays; a column that a row lacks is left out.

    Args:
        keys: Names of the rows in TransferQueue.
        partition_id: TransferQueue's partition.
        loss_inputs: Further columns that the loss takes.
    """
    names = list(dict.fromkeys([*_FIELDS, *loss_inputs, *_OURS]))
    rows = fetch_some(keys, partition_id, names)
    if not _missing(rows[0]):
        return rows
    # TransferQueue leaves a column out when one of the rows lacks it, as rows of other agent loops do.
    for row, marked in zip(rows, fetch_some(keys, partition_id, ["uid", "metrics"]), strict=True):
        row.update(marked)
    ours = [i for i, row in enumerate(rows) if _is_ours(row)]
    if not ours:
        return rows
    fetched = fetch_some([keys[i] for i in ours], partition_id, names)
    if _missing(fetched[0]):  # fetch one by one, to see which rows lack it
        fetched = [fetch_some([keys[i]], partition_id, names)[0] for i in ours]
    for i, columns in zip(ours, fetched, strict=True):
        rows[i].update(columns)
    return rows


def _missing(row: dict[str, Any]) -> list[str]:
    return [name for name in (*_FIELDS, *_OURS) if name not in row]


def _is_ours(row: dict[str, Any]) -> bool:
    """Tell whether our agent loop made a row: one of our columns is enough, since the others may have been lost."""
    return VERSIONS in row or _RECEIPTS in row or STATS in (row.get("metrics") or {})


def fetch_some(keys: Sequence[RowKey], partition_id: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return columns of each row, tensors as numpy arrays; one that any of the rows lacks is left out of all."""
    data = get_columns(keys, partition_id, names)
    columns: dict[str, list[Any]] = {}
    for name in data.keys():  # noqa: SIM118  # iterating a TensorDict yields its rows
        column = data.get(name)
        columns[name] = _arrays(column) if isinstance(column, torch.Tensor) else column.tolist()
    return [{name: values[i] for name, values in columns.items()} for i in range(len(keys))]


def _arrays(column: Any) -> list[Any]:
    """Return the rows of a tensor as numpy arrays; rows of different lengths come as a nested tensor."""
    if column.dtype == torch.bfloat16:  # numpy has no such type
        column = column.float()
    if column.is_nested and column.dim() == 2:  # takes a quarter of the time of `unbind`
        return np.split(column.values().numpy(), column.offsets().numpy()[1:-1])
    return [row.numpy() for row in column.unbind()]


def _row(rows: BatchRows, key: RowKey, fields: dict[str, Any], loss_inputs: dict[str, Any]) -> Row:
    return Row(
        prompt_ids=fields["prompts"],
        response_ids=fields["responses"],
        mask=fields["response_mask"],
        logprobs=fields.get("rollout_log_probs"),
        versions=fields.get(VERSIONS),
        loss_mask=fields["loss_mask"],
        loss_inputs=loss_inputs,
        input_ids=fields["input_ids"],
        position_ids=fields["position_ids"],
        min_version=rows.tags[key]["min_global_steps"],
        max_version=rows.tags[key]["max_global_steps"],
        uid=str(fields["uid"]),
        key=str(key),
        padding=key in rows.padding,
    )
