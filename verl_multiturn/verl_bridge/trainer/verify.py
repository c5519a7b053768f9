"""Each batch is verified against the engine's output, right before the update.

It runs after the advantages are computed. So it verifies exactly the columns that critic and actor fetch next. Each row
is checked by itself (`verl_bridge/certificate/part.py`): in a large batch by several processes, in another one here.
How the rows belong together is checked here, for all of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Mapping, Sequence

from omegaconf import DictConfig

from verl_multiturn.certificate.conversations import gaps, repeated
from verl_multiturn.certificate.receipts import NOT_TRAINED_ROLE
from verl_multiturn.errors import CertificateError
from verl_multiturn.observe.roles import roles_of
from verl_multiturn.rollout.groups.staleness import StalenessBound
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.certificate.part import RowVerdict, Rules, TrainerRow, check_rows, violations_of
from verl_multiturn.verl_bridge.certificate.parts import FetchedColumns, Parts
from verl_multiturn.verl_bridge.settings import only_our_loop, settings_of
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

PREFIX = "rollout/certificate/"
_LOSS_INPUTS = ["old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights"]
_CRITIC_INPUTS = ["values", "returns"]
_METRICS = ("rows", "tokens", "unsampled", "not_trained_role", "violations", "unverified", "seconds")
_SHOWN = 5


class BatchVerifier:
    """The certificate of a trainer's batches.

    Metrics of a step, under `rollout/certificate/`:
    - `rows`, `tokens`: rows that were verified, and sampled tokens in them;
    - `unsampled`: rows among them whose receipts hold no usable generation; their mask is 0 throughout;
    - `not_trained_role`: generations of their conversations that are in no row, since their role is not trained;
    - `violations`: always 0 in a log, since a step with a violation does not finish and its exception has their number;
    - `unverified`: rows that another agent loop than ours made;
    - `seconds`: time that the verification took.

    Args:
        config: verl's whole configuration.
        use_critic: Whether the run trains a critic.
        masks_void_rows: Whether rows with void turns are kept out of the loss.
        bound: The bound of the ages, beyond which tokens are kept out of the loss; None: there is none.
    """

    def __init__(
        self, config: DictConfig, use_critic: bool, masks_void_rows: bool = False, bound: StalenessBound | None = None
    ) -> None:
        settings = settings_of(config.actor_rollout_ref.rollout)
        self._share = settings.certificate_share
        correction = config.algorithm.get("rollout_correction") or {}
        bypass = bool(correction.get("bypass_mode"))
        self._rules = Rules(
            loss_inputs=_LOSS_INPUTS + (_CRITIC_INPUTS if use_critic else []),
            only_ours=only_our_loop(config),
            # In bypass mode verl rejects samples within the loss, and does not write the mask.
            mask_may_shrink=bool(correction.get("rollout_rs")) and not bypass,
            bypass=bypass,
            masks_void_rows=masks_void_rows,
            teacher=bool((config.get("distillation") or {}).get("enabled")),
        )
        self._trained = settings.trained_roles
        self._max_staleness = None if bound is None else bound.max_staleness
        self._parts = Parts()
        self._tally: dict[str, float] = {}
        self.begin_step()

    def start(self, rows: int) -> None:
        """Start the processes that verify large batches, where batches will be large.

        Args:
            rows: Number of rows that a batch has at least.
        """
        if self._share > 0 and self._parts.are_worth(math.ceil(self._share * rows)):
            self._parts.start()

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
    ) -> FetchedColumns:
        """Verify the configured share of a batch's conversations, each with all its rows.

        Args:
            rows: Those of verl's batch, with its advantages.
            step: Training step; it is reported, and with `update` the seed of the draw.
            update: Number of the batch within the step.
            further: Names of columns that others need who look at the rows; a column for itself costs them a fetch of
                its own.
            engines: Rows whose old log-probs have to be the engine's, to the bit.

        Returns:
            The columns of `further`, of the rows that were verified.

        Raises:
            CertificateError: A row differs from the engine's output, or a part of the certificate gave no verdict.
        """
        started = time.perf_counter()
        try:
            return self._verify(rows, step, update, further, engines)
        finally:
            self._tally["seconds"] += time.perf_counter() - started

    def _verify(
        self, rows: BatchRows, step: int, update: int, further: Sequence[str], engines: Collection[RowKey]
    ) -> FetchedColumns:
        chosen = _draw(rows.keys, self._share, f"{step} {update}")
        fetched = FetchedColumns(frozenset(), dict)
        if not chosen:
            return fetched
        # TransferQueue would return one row for two rows with the same name.
        found = repeated(rows.keys) or gaps(rows.keys)
        if not found:
            causes, rules = rows.left_out, self._rules
            known = [_known(rows, key, causes, engines) for key in chosen]
            if self._max_staleness is not None:
                rules = rules._replace(oldest=step - 1 - self._max_staleness)
            try:
                verdicts, fetched = self._check(known, rows.partition_id, rules, further)
            except CertificateError as error:
                raise CertificateError(f"step {step}: {error}") from error
            self._count(verdicts)
            taken = None if self._trained is None else {key: roles_of(own) for key, own in rows.stats.items()}
            found = violations_of(verdicts, causes, self._trained, taken)
        self._tally["violations"] += len(found)
        if found:
            shown = "\n".join(f"  {violation}" for violation in found[:_SHOWN])
            more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise CertificateError(
                f"step {step}: the batch is not what the engine returned, and is not trained on "
                f"({len(found)} violations in {len(chosen)} rows):\n{shown}{more}"
            )
        return fetched

    def _check(
        self, rows: Sequence[TrainerRow], partition_id: str, rules: Rules, further: Sequence[str]
    ) -> tuple[list[RowVerdict], FetchedColumns]:
        if self._parts.are_worth(len(rows)):
            return self._parts.check(rows, partition_id, rules, further)
        verdicts, columns = check_rows(rows, partition_id, rules, further)
        by_key = {row.key: fields for row, fields in zip(rows, columns, strict=True)}
        return verdicts, FetchedColumns(by_key.keys(), lambda: by_key)

    def _count(self, verdicts: Sequence[RowVerdict]) -> None:
        verified = [verdict for verdict in verdicts if verdict.is_verified]
        self._tally["rows"] += len(verified)
        self._tally["unverified"] += len(verdicts) - len(verified)
        self._tally["tokens"] += sum(verdict.tokens for verdict in verified)
        ledgers = {verdict.key.conversation: verdict.note.ledger for verdict in verified if verdict.note is not None}
        self._tally["not_trained_role"] += sum(
            place.where == NOT_TRAINED_ROLE for ledger in ledgers.values() for place in ledger
        )
        self._tally["unsampled"] += sum(verdict.note is not None and not verdict.generations for verdict in verified)


def _known(rows: BatchRows, key: RowKey, causes: Mapping[str, str], engines: Collection[RowKey]) -> TrainerRow:
    tag = rows.tags[key]
    marks = key in rows.padding, key.conversation in causes, key in engines
    return TrainerRow(key, tag["min_global_steps"], tag["max_global_steps"], *marks)


def _draw(keys: Sequence[RowKey], share: float, seed: str) -> list[RowKey]:
    """Return all rows of a share of the conversations, rounded up."""
    if share >= 1:
        return list(keys)
    names = list(dict.fromkeys(key.conversation for key in keys))
    drawn = set(random.Random(seed).sample(names, math.ceil(share * len(names))))
    return [key for key in keys if key.conversation in drawn]
