"""`Conversations`: one conversation of an evaluation after another, by the loops of training, without Ray.

    row of verl's data set ──▶ Conversation, or an agent behind the endpoint ──▶ Judge ──▶ record, rows of the join

Invariants:
- a conversation that the engine, a tool or the endpoint failed is invalid, whatever it looks like;
- an author's mistake (data, tools, configuration) ends the evaluation, as it would end a training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_multiturn.calls.closing import close_all
from verl_multiturn.calls.timeline import during
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.plan import DataRow
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.records.read.joins import JoinedRow
from verl_multiturn.records.read.scores import sum_of_rows
from verl_multiturn.rollout.engines.protocol import Engine
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.tools.loading.registry import schema_of
from verl_multiturn.verl_bridge.loops.life import follow, note_score
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput
from verl_multiturn.verl_bridge.loops.proxy_loop import build_endpoint
from verl_multiturn.verl_bridge.loops.runner import build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.names import AGENT_LOOP, SAMPLING_LOOPS
from verl_multiturn.verl_bridge.offline.evaluate.rewards import FAILED, INVALID, EvaluationRewards


@dataclass(frozen=True)
class ConversationScore:
    """The result of a conversation."""

    rows: list[JoinedRow]
    """Its rows in the join."""
    score: float | None
    """Its whole reward; None where it has none that counts."""
    cause: str | None
    """Why it has none, as in the join's column `untrained`."""
    has_met: bool = False
    """Whether a call of it failed, which may turn out to be an outage."""
    raised: str = ""
    """Error that its reward function raised; "": none."""

    @property
    def is_failed(self) -> bool:
        """Whether its reward function raised."""
        return self.cause == FAILED


class Conversations:
    """The conversations of one evaluation.

    Args:
        config: verl's whole configuration, prepared.
        model: The model, without its weights.
        rows: verl's data set.
        engine: Samples.
        weights: Hash of the model's weights, for the records.
        start: Name of this start, with which request ids end, so that none comes twice.

    Raises:
        ConfigError: A setting, a tool, the call format, an agent or the reward cannot work here.
    """

    def __init__(
        self, config: DictConfig, model: LoadedModel, rows: Any, engine: Engine, weights: str, start: str
    ) -> None:
        self._rows, self._weights, self._suffix = rows, weights, start.rpartition("_")[2]
        rollout = config.actor_rollout_ref.rollout
        self.runner = build_runner(config, model, engine)
        self._judge = EvaluationRewards(config, model.tokenizer)
        self._default_loop = str(rollout.agent.default_agent_loop)
        self._endpoint: Endpoint | None = None
        params = rollout.val_kwargs
        self._sampling = self.runner.sampling(
            {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "repetition_penalty": 1.0,
                "logprobs": True,
            }
        )

    @property
    def schemas(self) -> list[Any]:
        """Schemas of all tools, as the template gets them."""
        return [schema_of(tool).as_dict() for tool in self.runner.tools.values()]

    def loop_of(self, row: DataRow) -> str:
        """Return the name of a row's agent loop.

        Raises:
            ConfigError: It is none of ours; verl's own need its servers, and so Ray. Or the row has no reward.
        """
        name = str(self._rows[row.position].get("agent_name", self._default_loop))
        if name not in SAMPLING_LOOPS:
            raise ConfigError(
                f"data row {row.number} has the agent loop {name!r}, which asks verl's servers in Ray; eval runs "
                f"{' and '.join(sorted(SAMPLING_LOOPS))}"
            )
        if name == AGENT_LOOP:  # the agent gives the reward of a session
            self._judge.require_reward(row.data_source)
        return name

    async def run(self, row: DataRow, sample: int) -> ConversationScore:
        """Roll a row out, judge it and hand its record over.

        Raises:
            ConfigError, ToolContractError, InteractionContractError, AgentContractError: The author of the data, a
                tool, an interaction, an agent or the configuration made a mistake.
        """
        uid, name = str(row.number), f"{row.number}-{sample}-{self._suffix}"
        loop, fields = self.loop_of(row), dict(self._rows[row.position])
        fields.pop("agent_name", None)
        fields |= {"uid": uid, "session_id": sample, "global_steps": 0}
        known = {**fields, "agent_name": loop}
        with follow(known, self.runner.records, name=name, validation=True) as life:
            life.data_row, life.model = (row.number, row.digest), self._weights
            outputs = await (self._conversation if loop == AGENT_LOOP else self._session)(fields, name)
            with during("reward"):
                joined, raised = await self._judge.judge(fields, outputs, RowKey(uid, str(sample), "0"))
            cause = joined[-1].untrained
            if raised:
                life.status, life.error = "error", f"the reward function raised {raised}"
            elif cause != INVALID:
                note_score(list(outputs))
        score = sum_of_rows(each.score for each in joined) if cause is None else None
        return ConversationScore(joined, score, cause, bool(outputs[-1].stats.get("outages")), raised)

    def is_judged(self, request_id: str) -> bool:
        """Return whether a conversation hit a failure that counts as an outage, as far as is known now."""
        return self.runner.outages.is_judged(request_id)

    async def _conversation(self, fields: Mapping[str, Any], name: str) -> Sequence[CertifiedOutput]:
        request = await self.runner.request(fields, self._sampling, name)
        return await self.runner.outputs(request, fields, 0)

    async def _session(self, fields: Mapping[str, Any], name: str) -> Sequence[CertifiedOutput]:
        if self._endpoint is None:
            self._endpoint = build_endpoint(self.runner)
        outcome, receipts = await self._endpoint.run(name, fields, self._sampling)
        return self.runner.finish(outcome, receipts, fields, 0, self._sampling)

    async def aclose(self) -> None:
        """Close tools, interactions, agents and the writer of the records."""
        runner = self.runner
        owners = [*runner.tools.values(), *runner.interactions.values()]
        await close_all([*owners, *([self._endpoint] if self._endpoint is not None else [])])
        if runner.records is not None:
            await runner.records.aclose()
