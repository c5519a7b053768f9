"""`MultiTurnHooks`: everything that we add to a trainer of verl, in one explicit order.

For each sampled batch, before verl updates critic and actor with it:

    old log-probs   with a bound, rows of the newest weights keep the engine's  engine_log_probs.py
                    meanwhile the statistics of the rows are fetched            batch_rows.py
      ↓
    outages         conversations that an outage affected become invalid        outages.py
      ↓
    scores          Optimal Tool Calls scale the scores of correct answers      otc.py
      ↓
    masks           rows with void turns leave the loss                         batch_rows.py
      ↓
    ages            tokens that are too old leave it; the ages are measured     token_ages.py
      ↓
    advantages      verl's estimator, without invalid rows in their group,      valid_groups.py
                    or one that counts conversations                            advantages.py
      ↓
    silence         those of groups without signal become exactly 0             skipped_rows.py
      ↓
    weights         a conversation's rows together weigh as one                 row_weights.py
      ↓
    certificate     the result is compared with the engine's output             verify.py
      ↓
    updates         as many as prompts ask for; those without a trained token   updates.py
                    are skipped, rows that teach nothing are spared             skipped_rows.py
      ↓
    join            the outcome of each row is recorded, once the step ends     step_join.py
      ↓
    reference       the actor becomes the reference of the KL term, if due      reference_resets.py

All of them get the batch's rows as one `BatchRows` (`batch_rows.py`), which knows keys, padding and statistics.

With `custom.multiturn.filter` a filter of our replay buffer judges the groups (`signal_filter.py`), and picks the data
rows that are drawn again (`rollout/groups/difficulty.py`).

In the asynchronous trainers groups come from our replay buffer (`replay_buffer.py`), and those that are too slow may be
begun anew when a step begins (`rerolls.py`). A file of the checkpoint names the trained prompts (`history.py`).

While the trainer waits for groups, and before it sends new weights, it looks after the generation servers
(`servers.py`). While it waits, and when a step begins, it also looks for outages that do not end (`outages.py`),
and for a mistake of the reward function, which ends the run.

A new concern that changes a batch goes before the certificate, which reads the columns that critic and actor fetch
next. The metrics are added when a step ends. After training the tools of the agent-loop workers are closed.

Where a step would begin, a run that has to end (`runs/stop_request.py`) saves a checkpoint and ends.
"""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig

from verl_multiturn.advantages.estimators import Estimator
from verl_multiturn.config import MultiTurnSettings
from verl_multiturn.errors import AdvantageContractError, RewardContractError
from verl_multiturn.models.checkpoints import checkpoint_folder, mend_tracker
from verl_multiturn.observe.metrics import Stats, conversations
from verl_multiturn.rollout.groups.staleness import StalenessBound
from verl_multiturn.rows.reward_numbers import ScoreRange
from verl_multiturn.runs.stop_request import StopRequest
from verl_multiturn.verl_bridge.closing import close_workers
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, list_prompts
from verl_multiturn.verl_bridge.loops.rewards import check_workers
from verl_multiturn.verl_bridge.servers.client import RolloutClient
from verl_multiturn.verl_bridge.settings import may_have_several_rows, runs_our_server, settings_of, why_rows_stay
from verl_multiturn.verl_bridge.trainer.checkpoint_writes import (
    StopDue,
    begin_checkpoint,
    save_last,
    stop_with_checkpoint,
)
from verl_multiturn.verl_bridge.trainer.data_set import draw_prompt
from verl_multiturn.verl_bridge.trainer.distillation import set_loss
from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler, Sampler
from verl_multiturn.verl_bridge.trainer.groups.history import History
from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import Sleep, replay_buffer_from
from verl_multiturn.verl_bridge.trainer.groups.rerolls import Rerolls
from verl_multiturn.verl_bridge.trainer.outages import OutageLasts, OutageStoreClient, StepOutages, ValidationScores
from verl_multiturn.verl_bridge.trainer.reference_resets import (
    ReferenceResets,
    require_no_reference,
    with_our_workers,
)
from verl_multiturn.verl_bridge.trainer.report import PREFIX, cut_metrics, observe_samples, prefixed, validated
from verl_multiturn.verl_bridge.trainer.rows.advantages import load_run_estimator
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows, StepRows
from verl_multiturn.verl_bridge.trainer.rows.engine_log_probs import EngineLogProbs
from verl_multiturn.verl_bridge.trainer.rows.otc import OtcScores
from verl_multiturn.verl_bridge.trainer.rows.rank_parts import deal, has_our_engine
from verl_multiturn.verl_bridge.trainer.rows.role_figures import RoleFigures
from verl_multiturn.verl_bridge.trainer.rows.row_weights import weigh_conversations
from verl_multiturn.verl_bridge.trainer.rows.skipped_rows import SkippedRows
from verl_multiturn.verl_bridge.trainer.rows.token_ages import TokenAges
from verl_multiturn.verl_bridge.trainer.rows.updates import (
    ACTOR,
    TrainedUpdates,
    data_parallel_size,
    mini_batches,
    rows_multiple,
    updates_of,
)
from verl_multiturn.verl_bridge.trainer.rows.valid_groups import compute_advantages
from verl_multiturn.verl_bridge.trainer.servers import (
    ANSWER_S,
    BalancerEntries,
    ServerDied,
    require_alive,
    require_ours,
)
from verl_multiturn.verl_bridge.trainer.step_join import NEEDED, StepJoin
from verl_multiturn.verl_bridge.trainer.verify import BatchVerifier

logger = logging.getLogger(__name__)


class MultiTurnHooks:
    """Mixin for a trainer class of verl; list it before verl's class."""

    mode: ClassVar[str]
    """verl's name of the trainer that this one extends."""
    # Attributes of verl's trainer.
    config: DictConfig
    use_critic: bool
    use_teacher_policy: bool
    global_steps: int
    local_trigger_step: int
    parameter_sync_step: int
    replay_buffer: Any
    agent_loop_manager: Any = None
    checkpoint_manager: Any
    llm_server_manager: Any
    reward_loop_manager: Any
    actor_rollout_wg: Any
    critic_wg: Any
    role_worker_mapping: dict[Any, Any]
    use_reference_policy: bool
    _restored_tq_prompt_count: int
    _add_prompts_to_generate: Any
    _shutdown_dump_executor: Any
    train_dataset: Any

    _sampler: Sampler
    """Source of the groups: our replay buffer, or a `CustomSampler` around the user's."""
    saved_step: int | None = None
    """Step whose weights lie in the run's own folder of checkpoints: this trainer saved or loaded them there."""
    _estimator: Estimator | None = None
    """The run's estimator, if it counts conversations."""
    reference: ReferenceResets | None = None
    """Reference of the KL term; None: it is never reset."""
    _joining: StepJoin | None = None
    """Recorder of the trainer's rows; None: the run keeps no records."""
    _surplus = 0
    """Groups of a loaded checkpoint that later steps need not submit."""

    def __init__(self, config: DictConfig) -> None:
        # verl reads the mode in many places, and knows only its own names.
        config.trainer.v1.trainer_mode = self.mode
        settings = settings_of(config.actor_rollout_ref.rollout)
        self._bound = bound = _bound_of(settings, self.mode)  # verl's constructor builds the replay buffer
        super().__init__(config)  # type: ignore[call-arg]
        self._rows = StepRows()
        self._outages = StepOutages(OutageStoreClient(), settings.outage.stop_s)
        self._scored = ValidationScores(self._outages.causes)
        self._validation_scores = ScoreRange()
        self._masks_void_rows = settings.void_turn_pattern is not None
        self._otc = OtcScores(settings.otc)
        self._engines = EngineLogProbs(settings.old_log_prob_bound, config)
        self._verifier = BatchVerifier(config, self.use_critic, self._masks_void_rows, bound)
        filters = settings.filter != "off"
        self._role_figures = RoleFigures()
        self._spared = SkippedRows(config) if filters and why_rows_stay(config) is None else None
        self._updates = TrainedUpdates(config.actor_rollout_ref.rollout.n, self._spared)
        self._ages = None if self.mode == "sync" else TokenAges(bound)
        self._saves = config.trainer.save_freq > 0
        has_queue = self.mode != "sync"
        self._estimator = load_run_estimator(config, settings)
        has_state = self._estimator is not None and self._estimator.function.has_state
        self._history = History(self._saves, has_queue) if has_queue or filters or has_state else None
        self._settings, self._several_rows = settings, may_have_several_rows(config, settings)
        self._keeps_groups = has_our_engine(config)
        """Whether a rank gets whole groups, whose rows share their prompt."""
        self._prompts = 0
        """Prompts of the batch that was balanced last."""
        self._over_samples = bool(config.actor_rollout_ref.rollout.get("over_sample_rate"))
        self._rerolls = Rerolls(bound) if bound is not None and bound.strategy == "reroll" else None
        self._whole: int | None = None
        """Step that the trainer's weights have finished, which is then the engines' version; None within a step's
        updates."""
        self._joining = StepJoin.of(config, settings, bound)
        self.reference = ReferenceResets.of(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        if self.reference is not None:
            self.role_worker_mapping = with_our_workers(self.role_worker_mapping)

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        if self.use_teacher_policy:
            set_loss(self.actor_rollout_wg, self.config)

    def _build_replay_buffer(self) -> Any:
        verls = super()._build_replay_buffer()  # type: ignore[misc]
        rollout = self.config.actor_rollout_ref.rollout
        mode = settings_of(rollout).filter
        ours = replay_buffer_from(verls, self._bound, self.config.data.train_batch_size, mode, rollout.n)
        self._sampler = CustomSampler(verls) if ours is None else ours
        return verls if ours is None else ours

    def _fetch_one_gen_batch(self) -> Any:
        fetch = super()._fetch_one_gen_batch  # type: ignore[misc]
        if (pools := self._sampler.filter.pools) is None:
            return fetch()
        self.train_dataset.is_numbered = True  # verl's first fetch starts the loaders of the rows
        return draw_prompt(pools, fetch, self.train_dataset)

    def _add_async_warmup_batches(self, num_warmup_batches: float) -> None:
        # With more of them, groups would be beyond the bound from the start.
        bound = self._bound
        most = num_warmup_batches if bound is None else min(num_warmup_batches, bound.max_staleness)
        self._surplus = max(0, self._restored_tq_prompt_count - int(most * self.config.data.train_batch_size))
        super()._add_async_warmup_batches(most)  # type: ignore[misc]

    def _add_batch_to_generate(self) -> None:
        # A checkpoint may have more groups than may run ahead: it was written within a step, or with a larger bound.
        size = self.config.data.train_batch_size
        there = min(self._surplus, size)
        self._surplus -= there
        if not there:
            super()._add_batch_to_generate()  # type: ignore[misc]
        elif there < size:
            self._add_prompts_to_generate(size - there)

    def _save_checkpoint(self) -> None:
        folder = self._checkpoint_folder()
        begin_checkpoint(folder)
        if self._history is not None:
            kept = {"filter": self._sampler.filter.state(), "advantage": self._estimator and self._estimator.saved()}
            self._history.save(self.global_steps, folder, self._sampler.take_evicted(), kept)
        if self.reference is not None:
            self.reference.save(folder, self.actor_rollout_wg)
        super()._save_checkpoint()  # type: ignore[misc]
        self.saved_step = self.global_steps

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        if trainer.resume_mode == "auto" and (mended := mend_tracker(Path(trainer.default_local_dir))):
            logger.warning("%s", mended)
        super()._load_checkpoint()  # type: ignore[misc]
        if not self.global_steps:
            return
        named = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        self.saved_step = self.global_steps if named is None else None
        folder = self._checkpoint_folder() if named is None else Path(named)
        if self.reference is not None:
            self.reference.load(folder, self.actor_rollout_wg)
        else:
            require_no_reference(folder, self.use_reference_policy)
        if self._history is not None:
            kept = self._history.load(folder)
            restored = list_prompts(TRAIN)
            if self._estimator is not None and (said := self._estimator.restore(kept.get("advantage"))):
                logger.warning("%s", said)
            if (filtered := kept.get("filter")) is not None:
                self._sampler.filter.restore(filtered)
                if (pools := self._sampler.filter.pools) is not None:
                    pools.keep(restored, len(self.train_dataset))
            # The keeper that knew of their outages is gone. verl begins the groups that had not finished again.
            self._outages.doubt([uid for uid, tag in restored.items() if tag.get("status") == "finished"])

    def _checkpoint_folder(self) -> Path:
        """Return the folder of the step's checkpoint."""
        return checkpoint_folder(Path(self.config.trainer.default_local_dir), self.global_steps)

    def prepare_step(self) -> dict[str, Any]:
        """Begin late groups anew, with the weights that were just published; then do as verl does."""
        if self._rerolls is not None:
            self._rerolls.run(self)
            if (pools := self._sampler.filter.pools) is not None:
                pools.rename(self._rerolls.rerolled)
        metrics: dict[str, Any] = super().prepare_step()  # type: ignore[misc]
        return metrics

    def get_llm_client(self) -> Any:
        """Return the client that agent loops ask for generations: ours, where the servers are.

        Raises:
            ConfigError: A server that should be ours is not.
        """
        verls = super().get_llm_client()  # type: ignore[misc]
        if not runs_our_server(self.config.actor_rollout_ref.rollout):
            return verls
        for manager in (self.llm_server_manager, getattr(self, "standalone_server_manager", None)):
            require_ours(manager.get_replicas() if manager is not None else [])
        return RolloutClient(verls.config, verls._load_balancer)

    def get_reward_handles(self) -> Any:
        """Return the reward workers that agent loops ask, as verl does; their functions' results are checked."""
        check_workers(self.reward_loop_manager.reward_loop_workers)
        return super().get_reward_handles()  # type: ignore[misc]

    def fit(self, agent_loop_manager: Any) -> Any:
        """Run verl's training; close the tools of the agent-loop workers afterwards, also when it failed."""
        waiter = agent_loop_manager if hasattr(agent_loop_manager, "wait") else Sleep()
        self._sampler.follow(waiter, self.look_after, self._outages.causes)
        with contextlib.ExitStack() as ends:
            ends.callback(close_workers, agent_loop_manager.agent_loop_workers)
            if self._joining is not None:
                ends.enter_context(self._joining.run(self))
            try:
                return super().fit(agent_loop_manager)  # type: ignore[misc]
            except (ServerDied, OutageLasts, RewardContractError, AdvantageContractError) as error:
                raise type(error)(f"{error}; {save_last(self, self._whole).said}") from None
            except StopDue:
                stop_with_checkpoint(self, self._stop, self._whole)
                self._shutdown_dump_executor()
                return None

    def look_after(self) -> None:
        """Look after the servers, for outages that do not end and mistakes of the reward function; the trainer waits.

        Raises:
            ServerDied: A server has died.
            OutageLasts: An outage lasts for too long.
            RewardContractError: The reward function made a mistake.
        """
        self.look_after_servers()
        self._look_for_mistakes()
        self._look_for_outages()

    def _look_for_mistakes(self) -> None:
        if mistake := getattr(self.agent_loop_manager, "mistake", ""):
            self._make_room()
            raise RewardContractError(mistake)

    def _look_for_outages(self) -> None:
        try:
            self._outages.look()
        except OutageLasts:
            self._make_room()
            raise

    def look_after_servers(self) -> None:
        """Find colocated servers that have died, and list those again that only a client lost; the trainer waits.

        Raises:
            ServerDied: A server has died.
        """
        self._require_colocated()
        replicas = [replica for replica in self.llm_server_manager.get_replicas() if hasattr(replica, "look")]
        self._listing.put_back({replica.server_address: replica for replica in replicas})

    @cached_property
    def _stop(self) -> StopRequest:
        return StopRequest(Path(self.config.trainer.default_local_dir))

    @cached_property
    def _listing(self) -> BalancerEntries:
        return BalancerEntries(self.llm_server_manager.global_load_balancer)

    def _require_colocated(self) -> None:
        try:
            require_alive(self.llm_server_manager.get_replicas())
        except ServerDied:
            self._make_room()
            raise

    def _make_room(self) -> None:
        """Let the colocated servers that live make room for the training workers, which save the weights."""
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.sleep_replicas()

    def on_init_end(self) -> None:
        """Send the first weights, as verl does; start verifiers of large batches, while the first one is sampled."""
        super().on_init_end()  # type: ignore[misc]
        if self.reference is not None:
            self.reference.look_at(self.actor_rollout_wg)
        self._whole = self.global_steps
        # A step of `separate_async` trains a batch for each of its updates. Conversations may have several rows.
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        self._verifier.start(prompts * self.config.actor_rollout_ref.rollout.n)

    def on_step_begin(self) -> None:
        """Begin a step, as verl does, if the run goes on.

        Raises:
            StopDue: The run has to end.
            OutageLasts: An outage lasts for too long. An asynchronous run may never wait, and look for it then.
            RewardContractError: The reward function has made a mistake.
        """
        if self._stop.is_made():
            self._make_room()
            raise StopDue
        self._look_for_mistakes()
        self._look_for_outages()
        if self._joining is not None:
            self._joining.began = time.time()
        super().on_step_begin()  # type: ignore[misc]

    def on_step_end(self) -> None:
        """Send new weights, as verl does, if all colocated servers live.

        Raises:
            ServerDied: One of them has died.
        """
        self._whole = self.global_steps
        require_alive(self.llm_server_manager.get_replicas(), ANSWER_S)
        super().on_step_end()  # type: ignore[misc]

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        """Run verl's step, and add our metrics of its batch, which holds the rows of all the step's updates.

        When a step makes several updates, our counts are sums over them. verl's own aggregation would average them.
        """
        parts: list[Any] = [self._outages, self._otc, self._engines, self._verifier, self._updates, self._ages]
        parts += [self._rerolls, self._sampler, self._spared, self._role_figures, self.reference]
        self._silent = set[str]()
        counted = [part for part in [*parts, self._joining] if part is not None]
        for each in [self._rows, *counted]:
            each.begin_step()
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        if self._joining is not None:
            self._joining.write(self.global_steps)
        if self.reference is not None:
            self.reference.end_step(self.global_steps, self.actor_rollout_wg, timing_raw)
        rows = self._rows.of(batch)
        if self._history is not None:
            self._history.train(self.global_steps, rows, self._silent)
        if self._history is None or not self._saves:
            self._sampler.take_evicted()  # keeps the list from growing with each step
        for each in counted:
            metrics.update(each.metrics())
        stats = conversations(rows.stats)
        self._outages.watch(stats, self.config.actor_rollout_ref.rollout.n)
        self._role_figures.watch(stats)
        metrics.update(prefixed(PREFIX, stats))
        if self._over_samples or self._joining is not None:
            self._look_at_news(metrics)
        return batch

    def _look_at_news(self, metrics: dict[str, Any]) -> None:
        """Ask the agent-loop workers for their news, and add their counts to the metrics."""
        if not (self._over_samples or hasattr(self.agent_loop_manager, "news")):  # a manager of the user's
            return
        news = self.agent_loop_manager.news(of_all=self._over_samples)
        if self._over_samples:
            metrics.update(cut_metrics(news))
        if self._joining is not None:
            metrics[f"{PREFIX}records/dropped"] = news.dropped
            self._joining.note_news(news)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        rows = self._rows.of(batch)
        with ThreadPoolExecutor(1) as beside:  # the driver only waits for the workers meanwhile
            stats = beside.submit(lambda: rows.stats)
            batch = self._old_log_prob(batch, metrics)
            stats.result()
        return batch

    def _old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        verls, workers = super()._compute_old_log_prob, self.actor_rollout_wg  # type: ignore[misc]
        if self._spared is not None:
            self._spared.silent = self._sampler.filter.silent
            self._silent |= self._spared.silent
            if self._settings.old_log_prob_bound is None:  # else the engine's spare more
                return self._spared.old_log_probs(batch, metrics, verls, data_parallel_size(workers, ACTOR))
        rows, update = self._rows.of(batch), self.local_trigger_step
        return self._engines.compute(batch, metrics, rows, self.global_steps, update, verls, workers)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        verls = super()._compute_advantage  # type: ignore[misc]
        rows = self._rows.of(batch)
        self._outages.leave_out(rows)
        self._otc.scale(rows)
        if self._masks_void_rows:
            rows.mask_void()
        if self._ages is not None:
            self._ages.look(rows, self.global_steps)
        batch = compute_advantages(batch, rows, metrics, verls, self.config, self._estimator)
        rows = self._rows.of(batch)  # of the update's batch
        if self._spared is not None:
            self._spared.silence(rows.keys, rows.partition_id)
        self._role_figures.look(rows)
        if self.reference is not None:
            self.reference.look(rows, () if self._spared is None else self._spared.silent)
        if self._settings.context.weight == "conversation":
            weigh_conversations(rows, self.config.actor_rollout_ref.actor.loss_agg_mode)
        further = () if self._joining is None else NEEDED
        update, engines = self.local_trigger_step, self._engines.taken
        fetched = self._verifier.verify(rows, self.global_steps, update, further, engines)
        if self._joining is not None:
            self._joining.look(rows, fetched, self.global_steps, self._otc.factors)
        return batch

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], *arguments: Any, **named: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, *arguments, **named)  # type: ignore[misc]
        left = self._sampler.take_left()
        if self._joining is not None:
            rerolled = {} if self._rerolls is None else {"rerolled": self._rerolls.rerolled}
            self._joining.end_step(self.global_steps, timing_raw, metrics, {**left, **rerolled})

    def _balance_batch(self, batch: Any, *arguments: Any, **named: Any) -> Any:
        self._prompts = len(self._rows.of(batch).groups)
        batch = super()._balance_batch(batch, *arguments, **named)  # type: ignore[misc]
        if self._keeps_groups and (ranks := data_parallel_size(self.actor_rollout_wg, "actor")) > 1:
            rows = self._rows.of(batch)
            groups = [str(key) if key in rows.padding else key.uid for key in rows.keys]
            lengths = [tag["seq_len"] for tag in batch.tags]
            silent = {*self._sampler.filter.silent}
            silent |= {str(key) for key in rows.padding} if silent else set()
            batch.reorder([row for part in deal(groups, lengths, ranks, silent) for row in part])
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if not self._several_rows:
            multiple: int = super()._get_required_batch_multiple(dp_size)  # type: ignore[misc]
            return multiple
        return rows_multiple(self._prompts, dp_size, self.config)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._whole = None
        verls, settings = super()._update_actor, self.config.actor_rollout_ref.actor  # type: ignore[misc]
        arguments = (batch, metrics, verls, settings, self.actor_rollout_wg, ACTOR)
        if not self._several_rows:
            updated = self._updates.run(*arguments)
        else:
            updates = updates_of(self._prompts, self.config)
            with mini_batches(len(batch.keys), updates, self.config.actor_rollout_ref.rollout.n, settings):
                updated = self._updates.run(*arguments)
        if self._joining is not None:
            self._joining.note_updates(self._updates.numbers)
            if self._spared is not None:
                self._joining.note_spared(batch.keys, self._spared.silent)
        return updated

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._whole = None
        verls, settings = super()._update_critic, self.config.critic  # type: ignore[misc]
        return self._updates.run(batch, metrics, verls, settings, self.critic_wg, "train")

    def _validate(self) -> dict[str, Any]:
        """Run verl's validation, and add the metrics of its batches."""
        stats: list[Stats] = []
        began, self._scored = time.time(), ValidationScores(self._outages.causes)
        with observe_samples(self.replay_buffer, stats, self._look_at_validation):
            metrics: dict[str, Any] = super()._validate()  # type: ignore[misc]
        metrics |= validated(stats, self._validation_scores)
        if self._joining is not None:
            self._joining.end_validation(self.global_steps, began, metrics)
        return metrics

    def _look_at_validation(self, rows: BatchRows) -> None:
        self._scored.look(rows)
        if self._joining is not None:
            self._joining.look_at_validation(rows, self.global_steps)

    def _val_metrics_update(
        self, sources: Any, uids: Any, infos: Any, turns: Any, expected_acc_counts: Any = None
    ) -> dict[str, Any]:
        *samples, expected = self._scored.samples(sources, uids, infos, turns, expected_acc_counts)
        metrics: dict[str, Any] = super()._val_metrics_update(  # type: ignore[misc]
            *samples, expected_acc_counts=expected
        )
        return metrics


def _bound_of(settings: MultiTurnSettings, mode: str) -> StalenessBound | None:
    """Return the bound of the ages; None without one, and in `sync`, where all tokens have the age 0."""
    if settings.max_staleness is None or mode == "sync":
        return None
    return StalenessBound(settings.max_staleness, settings.staleness_strategy)
