"""`CertifiedOutput`: a conversation as the rows that verl's trainer gets, and `joined_row`: such a row in the join."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import Field
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_multiturn.certificate.receipts import as_unrewarded
from verl_multiturn.chat.images import Vision
from verl_multiturn.config import ASSISTANT, MultiTurnSettings, ScoreSettings
from verl_multiturn.describe import show
from verl_multiturn.errors import RewardContractError
from verl_multiturn.observe.metrics import Stats, numbers_of, stats_of
from verl_multiturn.observe.roles import role_of
from verl_multiturn.records.read.joins import JoinedRow
from verl_multiturn.rewards.rubric import TRANSCRIPT
from verl_multiturn.rewards.score import TURN_VALUES, VERDICTS, verdicts_of
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import ConversationRow, Outcome, SessionReport
from verl_multiturn.rollout.reward_fields import reward_fields
from verl_multiturn.rollout.trajectory import NO_VERSION
from verl_multiturn.rollout.transcript import transcript_of
from verl_multiturn.rollout.turn_rewards import Scores, interaction_scores, tool_scores, turns_of
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.rows.reward_numbers import LARGEST_SCORE, NoNumberError, UnusableNumberError, as_reward
from verl_multiturn.verl_bridge.loops.turn_values import TurnEnd, ends_of, values_of_turns
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.model.processors import plain_dict
from verl_multiturn.verl_bridge.names import STATS
from verl_multiturn.verl_bridge.settings import has_rubric

logger = logging.getLogger(__name__)

OUTAGE, UNJUDGEABLE = "outage", "unjudgeable"
"""Keys of a reward function's result: more than 0 where the row got no score for a cause of ours. With the first
one a service that the reward needs is away now; with the second one the row can never be scored."""
_ADDED = ("tool_score", "interaction_score", "completion_score")
"""Stats of the scores that are added to the reward function's."""
_PARTS = {"score": "compute_score", **{name: name for name in _ADDED}}
"""Entries of a row's stats that are parts of its reward, and their names in the join."""

Fields = Mapping[str, Any]
"""The columns of a row."""


class CertifiedOutput(AgentLoopOutput):
    """verl's output of one row, with the fields that the certificate and the metrics need.

    `extra_fields` reach the user's `compute_score`; these fields do not. `as_dict` has their form in the batch.
    """

    reward_score: float | None = None
    """Result of the reward function, as verl sets it."""
    versions: list[int]
    """Weight version of each response token, `(R,)`; -1 where the token was not sampled or its version is unknown."""
    receipts: bytes = b""
    """Result of `Receipts.to_bytes`; empty when the trainer verifies no rows."""
    stats: dict[str, Any] = Field(default={}, exclude=True)
    """Values of the conversation for the metrics, as `stats_of` returns them."""
    turn_rewards: Scores = Field(default=[], exclude=True)
    """Pairs of a position in the response and the number that is added to the score there."""
    role: str | None = Field(default=None, exclude=True)
    """Role of all its turns; None where there are no roles."""
    is_last: bool | None = Field(default=None, exclude=True)
    """Whether it is the last row of its role, which has the reward of the whole; None: the last row of all is."""
    placed: float = Field(default=0.0, exclude=True)
    """Sum of `turn_rewards` in all rows of its role; of a session 0.0."""
    outcomes: dict[str | None, float | None] = Field(default={None: None}, exclude=True)
    """Reward of the whole for each role that has a row; None: `reward_score`, as it is for all of them."""
    earned: dict[str | None, float] = Field(default={}, exclude=True)
    """Sum of the rewards that an agent gave to single completions, by their role."""
    ends: list[TurnEnd | None] = Field(default=[], exclude=True)
    """Where each of the conversation's `assistant_texts` ends; None: in no row, or in one that is not trained."""
    void: bool = Field(default=False, exclude=True)
    """True for a conversation with a void turn; False also when void turns are not looked for."""

    def as_dict(self) -> dict[str, Any]:
        """Return verl's columns of the row, and ours.

        Ours are `rollout_versions` (int64, `(R,)`) and, unless it is empty, `rollout_receipts` (uint8, one number for
        each byte). The rewards of tools and interactions are added to `rm_scores`. The stats lie in `metrics`, under
        the key `STATS`. Their `conversation` has this row's number, the number of rows, and the score of the whole;
        `unrewarded` means that the row got no score for a cause of ours. The receipts have that, too.

        verl gives each row of a conversation the score of `compute_score`. Here the last one of each role alone has
        that role's, so that the rows' rewards add up to the conversation's.

        Raises:
            RewardContractError: The reward function's result is not a reward, or the rewards add up to more than
                the trainer can hold.
        """
        self._read_score()
        output: dict[str, Any] = super().as_dict()
        output.get("extra_fields", {}).pop(TRANSCRIPT, None)  # the reward has read it
        place = self.stats.get("conversation") or {"row": 0, "rows": 1}
        report = self.extra_fields.get("reward_extra_info") or {}
        values = values_of_turns(report, self.ends, self.role)
        rest = None if self.outcome is None else self.outcome - math.fsum(value for _, value in values)
        if "rm_scores" in output:
            output["rm_scores"].zero_()  # verl gives every row the score of the last one
            if place["row"] == place["rows"] - 1 if self.is_last is None else self.is_last:
                output["rm_scores"][-1] = rest
        own = [(end.position, value) for end, value in values if end.row == place["row"]]
        for position, reward in [*self.turn_rewards, *own]:
            output["rm_scores"][position] += reward
        conversation = {**place, "score": self.total()}
        # The score of `compute_score`. Where another reward replaces it, the stats overwrite it with None.
        reported = numbers_of(report)
        _warn_of_others(report, reported)
        unrewarded = any(reported.get(key, 0.0) > 0 for key in (OUTAGE, UNJUDGEABLE))
        output["metrics"][STATS] = {"score": self.reward_score, "reported": reported, **self.stats}
        output["metrics"][STATS] |= {"conversation": conversation, "unrewarded": unrewarded}
        if verdicts := verdicts_of(report):
            output["metrics"][STATS]["verdicts"] = verdicts
        if "speakers" in self.stats and self.is_last:
            output["metrics"][STATS]["role"] = {"score": (self.outcome or 0.0) + self.placed}
        if "session" in self.stats:
            output["metrics"][STATS]["session"] = {**self.stats["session"], "outcome": rest}
        output["rollout_versions"] = torch.tensor(output.pop("versions"), dtype=torch.int64)
        if receipts := output.pop("receipts", b""):
            receipts = as_unrewarded(receipts) if unrewarded else receipts
            # A tensor crosses TransferQueue without being pickled.
            output["rollout_receipts"] = torch.from_numpy(np.frombuffer(receipts, np.uint8).copy())
        return output

    def _read_score(self) -> None:
        """Read the reward manager's result, which verl leaves as it is; a function in it was checked before."""
        try:
            if self.reward_score is not None or "reward_extra_info" in self.extra_fields:  # then a manager has scored
                self.reward_score = as_reward(self.reward_score)
            as_reward(self.total(), LARGEST_SCORE)
            for role in self.outcomes:  # those of several may cancel out in the sum
                as_reward(self._whole(role) + self.earned.get(role, 0.0), LARGEST_SCORE)
        except NoNumberError as error:
            raise RewardContractError(f"the reward function must return a number as score, {error}") from None
        except UnusableNumberError as error:
            raise RewardContractError(f"the reward of a conversation: {error}; let rewards be smaller") from None

    @property
    def is_scored(self) -> bool:
        """Return whether there is a reward yet."""
        return self.reward_score is not None or any(name in self.stats for name in _ADDED)

    @property
    def outcome(self) -> float | None:
        """Return the reward of the whole for the row's role; None: there is none yet."""
        own = self.outcomes.get(self.role)
        return self.reward_score if own is None else own

    def total(self) -> float:
        """Return the sum of the conversation's rewards, those of all roles, once its reward is computed."""
        return float(sum(map(self._whole, self.outcomes)) + sum(self.stats.get(name, 0.0) for name in _ADDED))

    def _whole(self, role: str | None) -> float:
        """Return the reward of the whole for a role that has a row."""
        own = self.outcomes[role]
        return (self.reward_score or 0.0) if own is None else own


def joined_row(key: RowKey, stats: Stats | None, fields: Fields, step: int, validation: bool) -> JoinedRow:
    """Return the join's entry of a row before it is trained: whose it is, its score and the score's parts.

    Args:
        key: Its name.
        stats: Its stats; None for a row of another agent loop.
        fields: Its columns, `rm_scores` among them where it was scored.
        step: Step of the trainer.
        validation: Whether it belongs to a validation.
    """
    own = stats or {}
    number = int(key.session) if key.session is not None and key.session.isdecimal() else 0
    row = JoinedRow(own.get("request_id"), key.uid, number, max(0, key.number), validation, step)
    if (scores := fields.get("rm_scores")) is not None:
        row.score = float(np.asarray(scores, np.float32).sum(dtype=np.float64))
    if stats is not None:
        row.role = role_of(stats)
        parts = {**own.get("reported", {})}
        parts |= {ours: own[name] for name, ours in _PARTS.items() if own.get(name) is not None}
        parts |= {VERDICTS: own[VERDICTS]} if VERDICTS in own else {}
        row.parts = json.dumps(parts)
    return row


def is_valid(output: AgentLoopOutput | list[AgentLoopOutput]) -> bool:
    """Return whether an agent loop's conversation can be trained on; one of another loop than ours always can.

    Args:
        output: The return value of the agent loop's `run`; an empty list is not a conversation.
    """
    outputs = output if isinstance(output, list) else [output]
    return bool(outputs) and all(getattr(each, "stats", {}).get("valid", True) for each in outputs)


@dataclass(frozen=True)
class OutputSettings:
    """Properties of the rows that verl gets, from the settings and the model."""

    prompt_length: int
    """Most tokens of a prompt."""
    fill_id: int
    """Token id that fills the response of a conversation without one; never trained."""
    tool_reward: ScoreSettings
    interaction_reward: ScoreSettings
    final_answer: re.Pattern[str] | None
    """Pattern of a final answer, for finding void turns; None when void turns are not looked for."""
    vision: Vision | None
    """Placeholder tokens of the model; None for a model that takes no images."""
    mm_processor_kwargs: dict[str, Any]
    transcript: bool = False
    """Whether the reward function is handed the whole conversation in words."""

    @classmethod
    def of(cls, config: Any, settings: MultiTurnSettings, model: LoadedModel, vision: Vision | None) -> OutputSettings:
        """Return the properties of a run's rows.

        Args:
            config: verl's whole configuration.
            settings: Our settings in it.
            model: The model.
            vision: Its placeholder tokens; None for a model that takes no images.
        """
        pattern = settings.void_turn_pattern
        return cls(
            prompt_length=config.actor_rollout_ref.rollout.prompt_length,
            fill_id=model.fill_id,
            tool_reward=settings.tool_reward,
            interaction_reward=settings.interaction_reward,
            final_answer=None if pattern is None else re.compile(pattern),
            vision=vision,
            mm_processor_kwargs=plain_dict(config.data.get("mm_processor_kwargs")),
            # A rollout of SPMD gets no section of rewards.
            transcript=getattr(config, "reward", None) is not None and has_rubric(config),
        )


def to_outputs(outcome: Outcome, settings: OutputSettings, step: int) -> list[CertifiedOutput]:
    """Return the rows of a finished conversation in verl's form.

    A conversation without a response gets a single untrained token. An invalid conversation has the mask 0 throughout,
    so that nothing of it is trained. Its score, and the fields for reward functions, come with its last row, from
    which verl takes them.

    Args:
        outcome: The finished conversation.
        settings: The settings that the rows depend on.
        step: Training step, reported as the weight version where the engine knows none.
    """
    rows = outcome.rows
    void = settings.final_answer is not None and outcome.has_void_turn(settings.final_answer)
    for_reward = reward_fields(outcome, void)
    stats = stats_of(outcome)
    if settings.final_answer is not None:
        stats["void"] = void
    outputs = []
    for index, (row, turns) in enumerate(zip(rows, turns_of(outcome), strict=True)):
        output = _row_output(row, settings, step, trained=outcome.valid)
        output.extra_fields |= for_reward
        output.stats = {**stats, "turns": turns, "conversation": {"rows": len(rows), "row": index}}
        output.void = void
        output.role = turns[0]["role"] if turns else None
        outputs.append(output)
    last = outputs[-1]
    if settings.transcript:
        last.extra_fields[TRANSCRIPT] = transcript_of(outcome)
    ends = ends_of(outcome)
    lasts = {output.role: output for output in outputs}
    for output in outputs:
        output.is_last = None if output.role is None else output is lasts[output.role]
        output.outcomes = dict.fromkeys(lasts)
        output.ends = ends
    last.num_turns = 1 + outcome.sampled_turns + outcome.user_turns
    last.metrics = AgentLoopMetrics(generate_sequences=outcome.generate_s, tool_calls=outcome.tools_s)
    if outcome.session is None:
        _add_rewards(outputs, outcome, settings)
        for output in outputs:
            own = [score for each in outputs if each.role == output.role for _, score in each.turn_rewards]
            output.placed = math.fsum(own)
    else:
        _add_session(outputs, outcome, outcome.session)
    return outputs


def _row_output(row: ConversationRow, settings: OutputSettings, step: int, trained: bool) -> CertifiedOutput:
    """Return the tokens of a row in verl's form; with the mask 0 throughout unless it is `trained`."""
    trajectory, images = row.trajectory, row.images
    prompt = trajectory.ids[: trajectory.prompt_length]
    if settings.vision is not None and len(prompt) > settings.prompt_length:
        # The prompt is cut. An image cannot be cut, so all images and their placeholders are dropped.
        prompt, images = settings.vision.without_media(prompt), []
    prompt = prompt[-settings.prompt_length :]
    has_response = trajectory.response_length > 0
    start = trajectory.prompt_length
    versions = [version for version in trajectory.versions if version >= 0] or [step]
    mask = trajectory.mask[start:] if trained else [0] * trajectory.response_length
    output = CertifiedOutput(
        prompt_ids=prompt,
        response_ids=trajectory.ids[start:] if has_response else [settings.fill_id],
        response_mask=mask if has_response else [0],
        response_logprobs=trajectory.logprobs[start:] if has_response else [0.0],
        versions=trajectory.versions[start:] if has_response else [NO_VERSION],
        num_turns=1 + trajectory.turns,
        metrics=AgentLoopMetrics(generate_sequences=0.0, tool_calls=0.0),
        extra_fields={"min_global_steps": min(versions), "max_global_steps": max(versions)},
    )
    if settings.vision is not None:
        output.multi_modal_data = {"images": images} if images else {}
        output.mm_processor_kwargs = settings.mm_processor_kwargs
    return output


def _add_session(outputs: list[CertifiedOutput], outcome: Outcome, session: SessionReport) -> None:
    """Add the agent's rewards to a session's rows, and those that belong to no row to the last one of their role.

    The reward of a completion goes to its last token, that of a completion in no row to the last token of the last row
    of its role. A role without a row, such as one that is not trained, has no reward.
    """
    lasts = {output.role: output for output in outputs}
    ends = {turn["turn"]: (output, turn["end"] - 1) for output in outputs for turn in output.stats["turns"]}
    rewarded = [turn for turn in outcome.turns if turn.reward is not None and turn.role in lasts]
    for output in outputs:
        if output is not lasts[output.role]:
            del output.stats["session"]
            continue
        outside = [
            {"turn": turn.number, "parent": turn.parent, "reward": turn.reward or 0.0}
            for turn in outcome.turns
            if turn.said is not None and turn.number not in ends and turn.role == output.role
        ]
        output.stats["session"] = {**output.stats["session"], "role": output.role, "outside": outside}
    for turn in rewarded:
        last = lasts[turn.role]
        output, position = ends.get(turn.number, (last, len(last.response_ids) - 1))
        output.turn_rewards = [*output.turn_rewards, (position, turn.reward or 0.0)]
    earned = {role: sum(turn.reward or 0.0 for turn in rewarded if turn.role == role) for role in lasts}
    given = {role: session.rewards.get(role or "", 0.0) for role in lasts} if session.rewards else {}
    whole = sum(given.values()) if given else session.reward
    # The first trained role with a row is the one that is right or wrong: the rewards of a game's players add up to 0,
    # and an opponent may have played the others.
    first = next((role for role in session.trained if role in lasts), None)
    accuracy = session.rewards.get(first or "", 0.0) if given else session.reward
    if session.by_id:
        accuracy = earned[first]
    for output in outputs:
        output.stats["completion_score"], output.earned = sum(earned.values()), earned
        if whole is not None:
            output.outcomes = {**output.outcomes, **given}
            output.reward_score = whole  # verl calls compute_score where there is none
            # As verl does with a score alone. Where there is none, verl counts an accuracy of 0.
            returned = outcome.stop_reason is StopReason.FINISHED
            output.extra_fields["reward_extra_info"] = {"acc": accuracy} if returned else {}
            output.stats["score"] = None


def _add_rewards(outputs: list[CertifiedOutput], outcome: Outcome, settings: OutputSettings) -> None:
    """Give the rows of a conversation the rewards of tools and interactions, as far as the settings ask for it."""
    for name, setting, scores_of in (
        ("tool", settings.tool_reward, tool_scores),
        ("interaction", settings.interaction_reward, interaction_scores),
    ):
        scores = scores_of(outcome, setting.weight)
        if setting.mode == "none":
            if name == "interaction" and any(scores) and "mode" not in setting.model_fields_set:
                _say_unused()
            continue
        total = sum(score for row in scores for _, score in row)
        for output, own in zip(outputs, scores, strict=True):
            output.turn_rewards = output.turn_rewards + own
            output.stats[f"{name}_score"] = total
            if setting.mode == "replace":
                output.reward_score = 0.0  # verl would call compute_score if there were no score yet
                # verl copies this from the last row to the others.
                output.extra_fields["reward_extra_info"] = {}
                output.stats["score"] = None
    if "replace" in (settings.tool_reward.mode, settings.interaction_reward.mode) and outcome.trained and outcome.valid:
        # As a session's first trained role: the rewards of two players may add up to 0.
        earned = [score for output in outputs if output.role == ASSISTANT for _, score in output.turn_rewards]
        for output in outputs:
            output.extra_fields["reward_extra_info"] = {"acc": math.fsum(earned)}


_MOST_NAMED = 16
"""Most entries of reports that the log names: a function may make keys of its rows."""
_named: set[str] = set()


def _warn_of_others(report: Mapping[str, Any], reported: Mapping[str, float]) -> None:
    """Log once of an entry of a reward function's report that it is in no metric and no record."""
    for key, value in report.items():
        if not isinstance(key, str) or key in reported or key in (VERDICTS, TURN_VALUES):
            continue
        if value is None or (isinstance(value, str) and not value):  # of a row without a verdict, or without a value
            continue
        if key not in _named and len(_named) < _MOST_NAMED:
            _named.add(key)
            logger.warning(
                "the reward function reported %s, which is no finite number but %s: it is in no metric and no record; "
                "log it in the function, or return a number (said once, and of %s entries at most)",
                show(key),
                type(value).__name__,
                _MOST_NAMED,
            )


@functools.cache
def _say_unused() -> None:
    """Mention once that an interaction gives rewards which nothing uses."""
    logger.warning(
        "an interaction gives rewards, and they are only reported; set custom.multiturn.interaction_reward.mode to add "
        "or replace to train on them (said once)"
    )
