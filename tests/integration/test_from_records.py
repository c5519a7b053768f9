"""Recorded conversations in verl's SFT data set and agent loop."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from tests.recipe_scripts import composed
from tests.support.sample_records import sample_record, sample_run, sample_session
from verl_multiturn import ConfigError
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.config import ScoreSettings
from verl_multiturn.records import schema
from verl_multiturn.records.read.learning import SelectionRule, choose
from verl_multiturn.records.read.lines import fitted

pytestmark = pytest.mark.stack


@pytest.fixture
def chosen(tmp_path: Path) -> list[Any]:
    sample_run(tmp_path / "records", steps=1, groups=1, size=2)
    return choose([tmp_path], SelectionRule()).conversations


def test_sft_gets_the_recorded_ids_and_masks(tmp_path: Path, chosen: list[Any]) -> None:
    from verl_multiturn.verl_bridge.offline.from_records.dataset import RecordedRows

    path = tmp_path / "train.parquet"
    rows = [{**each.pointer, "index": 0} for each in chosen]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = RecordedRows(str(path), None, {"pad_mode": "no_padding", "max_length": 16})
    assert len(data) == 2
    assert {key: value.tolist() for key, value in data[0].items()} == {
        "input_ids": [1, 11, 12, 13, 14, 15, 21, 22, 23, 2, 31, 32, 33, 41, 42, 2],
        "position_ids": list(range(16)),
        "loss_mask": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1],
    }
    with pytest.raises(ConfigError, match=r"has 16 tokens, and data.max_length is 15; raise it"):
        RecordedRows([str(path)], None, {"max_length": 15}, max_samples=1)[0]
    with pytest.raises(ConfigError, match="pad_mode='right'"):
        RecordedRows(str(path), None, {"pad_mode": "right"})


def settings() -> Any:
    from verl_multiturn.verl_bridge.loops.output import OutputSettings

    added = ScoreSettings(mode="add")
    return OutputSettings(64, 0, added, added, None, None, {})


def test_the_loop_returns_the_recorded_rows_and_their_receipts(chosen: list[Any]) -> None:
    from verl_multiturn.verl_bridge.offline.from_records.loop import RecordedAgentLoop

    loop = object.__new__(RecordedAgentLoop)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": {}}}})
    loop._runner = SimpleNamespace(output_settings=settings(), certified=True, config=config)  # type: ignore[assignment]
    listed = [{**each.pointer, "score": each.score} for each in chosen]
    row = {"extra_info": {"index": 3, "records": listed}, "uid": "new", "session_id": 1, "global_steps": 9}
    output: Any = asyncio.run(loop.run({}, **row))
    assert output.prompt_ids == [1, 11, 12, 13, 14, 15]
    assert output.response_ids == [21, 22, 23, 2, 31, 32, 33, 41, 42, 2]
    assert output.response_mask == [1, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert output.response_logprobs == [-0.1, -0.25, -1.5, -0.001, 0.0, 0.0, 0.0, -0.5, -0.75, 0.0]
    assert output.versions == [3, 3, 3, 3, -1, -1, -1, 4, 4, 4]
    assert (output.reward_score, output.total(), output.turn_rewards) == (0.0, 0.0, [])
    assert output.stats["calls"][0][:2] == ("calculator", "ok")
    assert (output.stats["assistant_turns"], output.stats["user_turns"]) == (2, 1)
    receipts = Receipts.from_bytes(output.receipts)
    assert (receipts.uid, receipts.session_id, receipts.request_id) == ("new", 1, chosen[1].request_id)
    assert [len(each.ids) for each in receipts.generations] == [4, 3]
    with pytest.raises(ConfigError, match="data row 3 has 2 recorded conversations, and number 2 was asked for"):
        asyncio.run(loop.run({}, **{**row, "session_id": 2}))
    with pytest.raises(ConfigError, match=r"and no extra_info\.records"):
        asyncio.run(loop.run({}, **{**row, "extra_info": {"index": 3}}))
    [path] = Path(chosen[1].path).parent.glob("*.jsonl.gz")
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="any more"):
        asyncio.run(loop.run({}, **row))


def test_a_sessions_reward_is_that_of_its_last_row() -> None:
    from verl_multiturn.verl_bridge.offline.from_records.loop import outcome_of, recorded_outputs

    record = fitted(schema.Record, sample_session())
    outputs = recorded_outputs(record, 0.5, settings(), 1)
    assert [output.response_ids for output in outputs] == [[21, 2], [61, 2]]
    columns = [output.as_dict() for output in outputs]
    assert [column["rm_scores"].tolist() for column in columns] == [[0.0, 0.0], [0.0, 0.5]]
    assert outcome_of(record).places == [0, "undelivered", 1]


def test_the_outcome_writes_the_recorded_columns() -> None:
    from verl_multiturn.verl_bridge.offline.from_records.loop import outcome_of

    record = fitted(schema.Record, sample_record())
    made = outcome_of(record).trajectory
    assert made.turn_ids == [0] * 6 + [0] * 4 + [1] * 3 + [1] * 3
    assert [int(source) for source in made.sources] == [0] * 6 + [1] * 4 + [3] * 3 + [1] * 3
    assert (made.prompt_length, made.turns, str(made.stop_reason)) == (6, 2, "finished")


def test_each_trainer_has_its_own_configuration() -> None:
    sft, rl = composed("from_records", smoke=True), composed("from_records", "rl", smoke=True)
    # With that section our start-up check would take it for one of the PPO trainer.
    assert "actor_rollout_ref" not in sft
    assert (sft.recipe.trainer, sft.recipe.prepare["min-score"]) == ("verl.trainer.sft_trainer", 1.0)
    assert sft.data.custom_cls.path == "pkg://verl_multiturn.verl_bridge.offline.from_records.dataset"
    assert (rl.recipe.trainer, rl.recipe.prepare.group) == ("verl.trainer.main_ppo", 4)
    assert rl.algorithm.rollout_correction.rollout_is == "token"
    assert rl.data.val_files == rl.data.train_files
