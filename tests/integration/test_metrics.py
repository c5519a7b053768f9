"""Tools' rewards and metrics within verl: the columns that its worker writes, and the metrics that the trainer logs."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, EchoTool

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call><|im_end|>'
TURNS = [CALL, "1 and 2<|im_end|>"]
ROW = {"raw_prompt": [{"role": "user", "content": "1+1"}], "data_source": "sums", "reward_model": {"ground_truth": "2"}}


class Store:
    """TransferQueue within this process."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[dict[str, Any]], **where: Any) -> None:
        for i, key in enumerate(keys):
            self.fields[key] = {name: fields[name][i] for name in fields.keys()}  # noqa: SIM118
            self.tags[key] = tags[i]

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        (name,) = select_fields
        if any(name not in self.fields[key] for key in keys):
            return {}
        return list_of_dict_to_tensordict([{name: self.fields[key][name]} for key in keys])

    def batch(self) -> Any:
        return SimpleNamespace(keys=list(self.fields), tags=list(self.tags.values()), partition_id="train")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    from verl.trainer.ppo.v1 import agent_loop_tq

    from verl_multiturn.verl_bridge.compat import row_store

    store = Store()
    monkeypatch.setattr(agent_loop_tq, "tq", store)
    monkeypatch.setattr(row_store, "transfer_queue", store)
    return store


async def roll_out(
    tool: EchoTool,
    turns: list[str] = TURNS,
    seen: list[dict[str, Any]] | None = None,
    returned: Any = None,
    session_id: int = 0,
    **multiturn: Any,
) -> None:
    """Send a row through our agent loop and all that our worker does after it, including verl's reward manager.

    Args:
        tool: The tool `echo`.
        turns: Texts of the engine.
        seen: Filled with the `extra_info` that `compute_score` gets.
        returned: Result of `compute_score`; None means a score of 1.0.
        session_id: Number of the conversation in its group.
        multiturn: Settings of `custom.multiturn`.
    """
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    from tests.support.rollout_config import make_config
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.loops.agent_loop import MultiTurnAgentLoop
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel
    from verl_multiturn.verl_bridge.workers.shared_puts import SharedPuts
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

    config = make_config(500)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    rollout = config.actor_rollout_ref.rollout
    OmegaConf.update(rollout, "custom.multiturn", multiturn, force_add=True)
    engine = ScriptedEngine([tokenizer.encode(turn) for turn in turns])
    loop = object.__new__(MultiTurnAgentLoop)
    loop._runner = replace(build_runner(config, LoadedModel(tokenizer, "qwen2"), engine), tools={"echo": tool})
    row = {**ROW, "uid": "u", "session_id": session_id, "global_steps": 4, "extra_info": {"index": 7}}
    output = await loop.run({"temperature": 1.0, "logprobs": True}, **row)

    async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        if seen is not None:
            seen.append(extra_info)
        return {"score": 1.0, "acc": 1.0} if returned is None else returned

    manager = NaiveRewardManager(config, tokenizer, compute_score)
    handle = SimpleNamespace(compute_score=SimpleNamespace(remote=manager.run_single))
    worker: Any = object.__new__(MultiTurnWorker)
    worker.config, worker._puts = config, SharedPuts()
    worker._oversampled, worker._siblings, worker._conversation_ends, worker._row_ends = {}, {}, {}, {}
    worker.processor, worker.mm_processor_kwargs, worker.distillation_enabled = None, {}, False
    worker.reward_loop_worker_handles = [handle]
    await worker._agent_loop_postprocess(output, False, **row)


def make_trainer(*batches: Any, **changes: Any) -> Any:
    from tests.integration.trainer_rows import make_config
    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler
    from verl_multiturn.verl_bridge.trainer.hooks import MultiTurnHooks

    class Base:
        replay_buffer = SimpleNamespace(sample=lambda **kwargs: (batches[0], {"sampled": len(batches[0].keys)}))
        use_critic = False

        def __init__(self, config: Any) -> None:
            self.config, self._sampler = config, CustomSampler(None)

        def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
            return batches[0]

        def _validate(self) -> dict[str, Any]:
            _, metrics = self.replay_buffer.sample(global_steps=1, partition_id="val", batch_size=1)
            return {"val-core/acc": 1.0, **metrics}

    class Trainer(MultiTurnHooks, Base):
        mode = "sync"

    return Trainer(make_config(**changes))


def step(batch: Any) -> dict[str, Any]:
    """Return the metrics of a step, without those of the certificate and of updates, of which this one has none."""
    metrics: dict[str, Any] = {}
    assert make_trainer(batch).step(metrics, {}) is batch
    assert metrics.pop("rollout/skipped_updates") == 0
    return {name: value for name, value in metrics.items() if not name.startswith("rollout/certificate/")}


def scores_of(store: Store) -> Any:
    (fields,) = store.fields.values()
    mask, scores = fields["response_mask"], fields["rm_scores"]
    return mask, scores, {int(i): float(scores[i]) for i in scores.nonzero()}


async def test_a_step_tells_what_over_sampling_cut(store: Store) -> None:
    from verl_multiturn.verl_bridge.workers.news import RunNews

    await roll_out(EchoTool())
    metrics: dict[str, Any] = {}
    trainer = make_trainer(store.batch(), actor_rollout_ref__rollout__over_sample_rate=0.25)
    trainer.agent_loop_manager = SimpleNamespace(news=lambda of_all: RunNews(3, 4.5))
    trainer.step(metrics, {})
    assert metrics["rollout/async/cut_samples"] == 3
    assert metrics["rollout/async/cut_seconds"] == 4.5
    assert metrics["rollout/trajectories"] == 1
    assert "rollout/async/cut_samples" not in step(store.batch())


async def test_what_a_reward_function_sees(store: Store) -> None:
    from verl_multiturn import ToolResponse

    seen: list[dict[str, Any]] = []
    tool = EchoTool({"returns": (ToolResponse("hi"), 0.5, {"hits": 3}), "reward": 2.0})
    await roll_out(tool, seen=seen)
    assert seen == [
        {
            "index": 7,
            "num_turns": 4,
            "rollout_reward_scores": {},
            "turn_scores": [],
            "user_texts": [],
            "min_global_steps": 0,
            "max_global_steps": 0,
            "stop_reason": "finished",
            "assistant_texts": ["", "1 and 2"],
            "assistant_calls": [[{"name": "echo", "arguments": '{"text": "hi"}'}], []],
            "void": False,
            "rendering_differences": [],
            "tool_rewards": [0.5],
            "calc_rewards": {"echo": 2.0},
            "call_tools": ["echo"],
            "call_statuses": ["ok"],
            "tool_metrics": [{"hits": 3}],
        }
    ]
    _, scores, placed = scores_of(store)
    assert placed == {len(scores) - 1: 1.0}
    metrics = step(store.batch())
    assert metrics["rollout/reward/compute_score/mean"] == 1.0
    assert (metrics["rollout/reward/step/mean"], metrics["rollout/reward/calc/mean"]) == (0.5, 2.0)
    assert "rollout/reward/tools/mean" not in metrics
    assert metrics["rollout/tools/echo/metrics/hits"] == 3


async def test_what_compute_score_reports_is_logged(store: Store) -> None:
    returned = {"score": 0.5, "acc": True, "format": 1, "timed_out": 0.0, "pred": "2", "broken": float("nan")}
    await roll_out(EchoTool(), returned=returned)
    await roll_out(EchoTool(), session_id=1, returned={"score": 0.0, "acc": False, "format": 1, "timed_out": 1.0})
    metrics = step(store.batch())
    rewards = {key: value for key, value in metrics.items() if key.startswith("rollout/reward/")}
    assert rewards == {
        "rollout/reward/score/mean": 0.25,
        "rollout/reward/acc/mean": 0.5,
        "rollout/reward/format/mean": 1.0,
        "rollout/reward/timed_out/mean": 0.5,
        "rollout/reward/compute_score/mean": 0.25,
        "rollout/reward/step/mean": 0.0,
        "rollout/reward/calc/mean": 0.0,
    }
    assert metrics["rollout/tool_productivity"] == 0.5


async def test_a_bare_number_is_verls_acc(store: Store) -> None:
    await roll_out(EchoTool(), returned=0.5)
    metrics = step(store.batch())
    assert metrics["rollout/reward/acc/mean"] == metrics["rollout/reward/compute_score/mean"] == 0.5


async def test_tool_rewards_are_added(store: Store) -> None:
    from verl_multiturn import ToolResponse

    seen: list[dict[str, Any]] = []
    tool = EchoTool({"returns": (ToolResponse("hi"), 0.5, {}), "reward": 2.0})
    await roll_out(tool, seen=seen, tool_reward={"mode": "add", "weight": 0.5})
    assert len(seen) == 1
    mask, scores, placed = scores_of(store)
    turn_end = mask.tolist().index(0) - 1
    assert placed == {turn_end: 0.25, len(scores) - 1: 2.0}
    assert mask[list(placed)].tolist() == [1, 1]
    metrics = step(store.batch())
    assert metrics["rollout/reward/compute_score/mean"] == 1.0
    assert metrics["rollout/reward/tools/mean"] == 1.25
    (fields,) = store.fields.values()
    # The result of compute_score stays unchanged.
    assert fields["extra_fields"]["reward_extra_info"] == {"score": 1.0, "acc": 1.0}


async def test_tool_rewards_take_the_place_of_compute_score(store: Store) -> None:
    seen: list[dict[str, Any]] = []
    await roll_out(EchoTool({"reward": 2.0}), seen=seen, tool_reward={"mode": "replace"})
    assert seen == []
    _, scores, placed = scores_of(store)
    assert placed == {len(scores) - 1: 2.0}
    metrics = step(store.batch())
    assert metrics["rollout/reward/tools/mean"] == 2.0
    assert "rollout/reward/compute_score/mean" not in metrics


@pytest.mark.parametrize("mode", ["add", "replace"])
async def test_an_invalid_conversation_gets_no_tool_reward(store: Store, mode: str) -> None:
    seen: list[dict[str, Any]] = []
    await roll_out(EchoTool({"reward": 2.0}), [], seen, tool_reward={"mode": mode})
    _, scores, _ = scores_of(store)
    assert scores.tolist() == [1.0 if mode == "add" else 0.0]
    metrics = step(store.batch())
    assert metrics["rollout/invalid_share"] == 1
    assert metrics["rollout/stop/engine_error"] == 1
    assert metrics["rollout/reward/tools/mean"] == 0


async def test_only_rows_of_ours_count(store: Store) -> None:
    await roll_out(EchoTool())
    (key,) = store.fields
    store.fields["other_0_0"], store.tags["other_0_0"] = copy.deepcopy(store.fields[key]), {}
    del store.fields["other_0_0"]["metrics"]["rollout"]
    store.fields["padx_0_0"], store.tags["padx_0_0"] = store.fields[key], {"is_padding": True}
    # The `metrics` of verl's own loops lack our part.
    metrics = step(store.batch())
    assert (metrics["rollout/trajectories"], metrics["rollout/calls/total"]) == (1, 1)
    # A custom manager may write no `metrics` at all.
    store.fields["other_0_0"] = {name: value for name, value in store.fields[key].items() if name != "metrics"}
    assert step(store.batch()) == metrics
    del store.fields[key], store.tags[key]
    assert step(store.batch()) == {}
    assert step(SimpleNamespace(keys=["padx_0_0"], tags=[{"is_padding": True}], partition_id="train")) == {}


async def test_validation_has_the_same_metrics(store: Store) -> None:
    await roll_out(EchoTool())
    trainer = make_trainer(store.batch())
    sample = trainer.replay_buffer.sample
    trained = step(store.batch())
    metrics = trainer._validate()
    assert metrics.pop("val-core/acc") == 1.0
    assert metrics.pop("sampled") == 1
    assert metrics == {f"val/{key}": value for key, value in trained.items()}
    assert trainer.replay_buffer.sample is sample


async def test_a_validation_with_several_samples_has_pass_at_k(store: Store) -> None:
    await roll_out(EchoTool(), returned=1.0)
    await roll_out(EchoTool(), returned=0.0, session_id=1)
    metrics = make_trainer(store.batch())._validate()
    passed = {key: value for key, value in metrics.items() if "pass@" in key}
    assert passed == {
        "val/rollout/pass@1": 0.5,
        "val/rollout/pass@1/prompts": 1,
        "val/rollout/pass@2": 1.0,
        "val/rollout/pass@2/prompts": 1,
    }
    assert not any("pass@" in key for key in step(store.batch()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.use_v1": "False"}, "mode='add': only verl's V1 trainer takes it"),
        ({"reward.reward_model.enable": "True"}, "scores of reward.reward_model without a resource pool"),
        ({"reward_model.enable": "True"}, "scores of reward_model without a resource pool"),
        ({"custom.multiturn.tool_reward.mode": "sum"}, r"tool_reward.mode: Input should be 'none', 'add' or 'replace'"),
        (
            {
                "algorithm.filter_groups.enable": "True",
                "algorithm.filter_groups.metric": "acc",
                "custom.multiturn.tool_reward.mode": "replace",
            },
            "algorithm.filter_groups.metric='acc' does not exist; set it to reward",
        ),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    given = {"custom.multiturn.tool_reward.mode": "add", **changes}
    ours = {f"+actor_rollout_ref.rollout.{key}": value for key, value in given.items() if key.startswith("custom.")}
    others = {key: value for key, value in given.items() if not key.startswith("custom.")}
    with pytest.raises(ConfigError, match=message):
        configuration.prepare_config(composed(**{**ours, **others, "ray_kwargs.ray_init.num_cpus": "64"}))
