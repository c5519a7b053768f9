"""The join of a step and a validation, of rows in a TransferQueue within this process."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integration.trainer_rows import CALL, WritableStore, make_output, make_trainer, put_in_place
from verl_multiturn.records.read.joins import figures
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import joined_rewards
from verl_multiturn.records.schema import JOINED, RunEnd, RunFile, StepLine

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

OURS = "actor_rollout_ref__rollout__custom__multiturn"
ANSWER = "2<|im_end|>"


def add(store: WritableStore, uid: str, scores: list[float | None]) -> None:
    """Add a group of conversations; with None the engine fails after a turn."""
    for session, score in enumerate(scores):
        output = make_output(uid, session, [CALL] if score is None else [CALL] * (session % 2) + [ANSWER])
        output.reward_score = score or 0.0
        output.extra_fields["reward_extra_info"] = {"acc": score or 0.0, "length": math.nan}
        fields = store.add(uid, session, output)
        fields["old_log_probs"] = fields["rollout_log_probs"] - 0.01
        fields["entropy"] = fields["response_mask"].float() * 0.5


class Run:
    """A trainer that records into a folder, with the stages of verl's `fit` around its steps."""

    def __init__(self, store: WritableStore, folder: Path, mode: str = "sync", **changes: Any) -> None:
        self.store, self.folder = store, folder
        self.trainer = make_trainer(mode, **{f"{OURS}__record_dir": str(folder), **changes})
        self.metrics: dict[str, Any] = {}

    def step(self, *batches: Any) -> dict[str, Any]:
        """Run a step and the work after it; return its metrics."""
        trainer = self.trainer
        metrics, times = {}, {"gen": 0.5, "step": 1.5}
        trainer.batches = list(batches)
        batch = trainer.step(metrics, times)
        metrics |= verls_metrics(self.store, batch)
        trainer._joining.end_step(trainer.global_steps, times, metrics, {})
        self.metrics = metrics
        return metrics

    def close(self) -> Any:
        """Write everything, and return the rows by the row's name."""
        self.trainer._joining._writer.close()
        return {
            f"{row['uid']}_{row['number']}_{row['row']}": row
            for _, table in Records(self.folder).joins()
            for row in table.to_pylist()
        }

    def figures(self) -> Any:
        (table,) = [table for _, table in Records(self.folder).joins()]
        assert table.schema == JOINED
        return figures(table)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in (self.folder / "steps.jsonl").read_text().splitlines()]


def verls_metrics(store: WritableStore, batch: Any) -> dict[str, float]:
    """Return the result of verl's own function for a batch."""
    from torch.nn.utils.rnn import pad_sequence
    from verl.protocol import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    rows = [store.rows[key] for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    names = ("prompts", "responses", "response_mask", "advantages", "rm_scores")
    columns = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in names}
    columns |= dict.fromkeys(("token_level_scores", "token_level_rewards"), columns["rm_scores"])
    columns["returns"] = columns["advantages"]
    for name, of in (("prompt_length", "prompts"), ("response_length", "responses")):
        columns[name] = pad_sequence([row[of].new_tensor([len(row[of])]) for row in rows], batch_first=True)[
            :, 0
        ].float()
    data = DataProto.from_single_dict(columns)
    data.non_tensor_batch["__num_turns__"] = np.ones(len(rows), np.int32)
    return dict(compute_data_metrics(data, use_critic=False))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "records"


def agrees(run: Run) -> None:
    found = run.figures()
    verls = [f"critic/{name}" for name in ("score/mean", "advantages/mean", "advantages/min", "advantages/max")]
    assert list(found) == pytest.approx([run.metrics[name] for name in verls], abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_what_the_trainer_made_of_each_row(store: WritableStore, folder: Path, mode: str, share: float) -> None:
    add(store, "u", [1.0, 0.0, 0.0, None])
    add(store, "v", [1.0, 1.0, 0.5, 1.0])
    run = Run(store, folder, mode, **{f"{OURS}__certificate_share": share})
    run.step(store.batch())
    rows = run.close()
    assert list(rows) == [f"{uid}_{session}_0" for uid in "uv" for session in range(4)]
    agrees(run)
    for key, row in rows.items():
        fields = store.rows[key]
        mask = fields["response_mask"].numpy() == 1
        assert row["request_id"] == fields["metrics"]["rollout"]["request_id"]
        # An update takes one prompt.
        assert (row["step"], row["update"], row["validation"]) == (4, "uv".index(key[0]), False)
        assert (row["ref_log_probs"], row["importance_weights"]) == (None, None)
        if row["trained"]:
            assert (row["trained"], row["untrained"], row["untrained_tokens"]) == (mask.sum(), None, None)
            for name in ("advantages", "old_log_probs", "entropy"):
                assert row[name] == pytest.approx(fields[name].numpy()[mask].tolist(), abs=1e-6)
    # The engine failed in the last one of the first group: its tokens are there, and none is trained.
    failed = rows["u_3_0"]
    assert (failed["untrained"], failed["trained"], failed["untrained_tokens"]) == ("invalid", 0, None)
    assert len(failed["advantages"]) == len(failed["old_log_probs"]) > 0
    assert set(failed["advantages"]) == {0.0}
    assert json.loads(rows["u_0_0"]["parts"]) == {"acc": 1.0, "compute_score": 1.0}
    mean, std = np.mean([1, 0, 0]), np.std([1, 0, 0], ddof=1)
    assert (rows["u_3_0"]["group_mean"], rows["u_0_0"]["group_std"]) == pytest.approx((mean, std))
    assert [rows[f"v_{i}_0"]["score"] for i in range(4)] == [1.0, 1.0, 0.5, 1.0]


def test_the_line_of_a_step(store: WritableStore, folder: Path) -> None:
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    run = Run(store, folder)
    run.step(store.batch())
    run.close()
    (line,) = run.lines()
    read_line = StepLine.model_validate(line)
    assert (read_line.event, read_line.step, read_line.rows) == ("step", 4, 4)
    assert read_line.join == f"step-000004-{read_line.start}.parquet"
    assert read_line.start == run.trainer.config.actor_rollout_ref.rollout.custom.multiturn.derived.record_start
    assert read_line.phases == {"gen": 0.5, "step": 1.5}
    assert read_line.metrics["critic/score/mean"] == 0.5
    assert 0 < read_line.metrics["rollout/records/join_seconds"] < 60
    assert read_line.began <= read_line.ended


def test_padding_is_left_out_and_other_loops_rows_are_there(
    store: WritableStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.trainer import verify

    add(store, "u", [1.0, 0.0, 1.0, 0.0])
    add(store, "other", [1.0, 0.0, 0.0, 1.0])
    for session in range(4):
        for name in ("rollout_versions", "rollout_receipts", "metrics"):
            del store.rows[f"other_{session}_0"][name]
    add(store, "padx", [5.0])
    store.rows["padx_0_0"]["response_mask"].zero_()
    store.rows["padx_0_0"]["loss_mask"] = store.rows["padx_0_0"]["response_mask"]
    store.tags["padx_0_0"]["is_padding"] = True
    run = Run(store, folder, **{"actor_rollout_ref__rollout__agent__agent_loop_config_path": "loops.yaml"})
    monkeypatch.setattr(verify, "violations_of", lambda *args: [])
    run.step(store.batch())
    rows = run.close()
    assert "padx_0_0" not in rows
    assert len(rows) == 8
    agrees(run)
    other = rows["other_0_0"]
    assert (other["request_id"], other["parts"], other["untrained"]) == (None, None, None)
    assert other["trained"] == len(other["advantages"])


def test_why_tokens_are_not_trained(store: WritableStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_token_ages import ETA
    from tests.integration.test_token_ages import add as add_aged

    for session in range(4):  # two turns, of versions 1 and 3; the second one's advantage is that of all
        add_aged(store, "u", session)
    run = Run(store, folder, "separate_async", **{ETA: 1})
    run.step(store.batch())
    rows = run.close()
    agrees(run)
    versions = store.rows["u_0_0"]["rollout_versions"].numpy()
    sampled = versions[versions >= 0]
    row = rows["u_0_0"]
    assert (row["untrained"], row["trained"]) == ("too_old", int((sampled == 3).sum()))
    assert row["untrained_tokens"] == np.flatnonzero(sampled == 1).tolist()
    assert len(row["advantages"]) == len(sampled)


def test_void_rows_and_outages(store: WritableStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, "u", [1.0, 0.0, 1.0, 0.0])
    store.rows["u_0_0"]["metrics"]["rollout"]["void"] = True
    run = Run(store, folder, **{f"{OURS}__void_turn_pattern": "boxed", f"{OURS}__certificate_share": 0})
    monkeypatch.setattr(run.trainer._outages, "causes", lambda rows: {"u_1": "reward_outage"})
    run.step(store.batch())
    rows = run.close()
    agrees(run)
    assert [rows[f"u_{i}_0"]["untrained"] for i in range(4)] == ["void", "reward_outage", None, None]
    # A void turn's score counts in its group, the score of one with an outage does not.
    assert rows["u_2_0"]["group_mean"] == pytest.approx(2 / 3)


def test_several_updates_of_a_step(store: WritableStore, folder: Path) -> None:
    for uid in ("a", "b", "c"):
        add(store, uid, [1.0, 0.0, 0.0, 1.0])
    run = Run(store, folder, "separate_async")
    batches = [store.batch([f"{uid}_{i}_0" for uid in uids for i in range(4)]) for uids in (("a", "b"), ("c",))]
    trainer = run.trainer
    trainer.batches = batches
    trainer.step({}, {})
    rows = run.close()
    # An update takes one prompt.
    assert {key[0]: row["update"] for key, row in rows.items()} == {"a": 0, "b": 1, "c": 2}


def test_rows_whose_update_is_drawn_have_none(store: WritableStore, folder: Path) -> None:
    add(store, "a", [1.0, 0.0, 0.0, 1.0])
    add(store, "b", [1.0, 0.0, 0.0, 1.0])
    run = Run(store, folder, **{"actor_rollout_ref__actor__shuffle": True})
    run.step(store.batch())
    assert {row["update"] for row in run.close().values()} == {None}


def test_an_actor_that_is_not_updated(store: WritableStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    run = Run(store, folder)
    monkeypatch.setattr(run.trainer, "_update_actor", lambda batch, metrics: batch)  # as in a critic's warm-up
    run.step(store.batch())
    rows = run.close()
    assert {(row["update"], row["trained"], row["untrained"]) for row in rows.values()} == {(None, 0, "skipped_update")}
    agrees(run)


def test_what_optimal_tool_calls_scaled(store: WritableStore, folder: Path) -> None:
    add(store, "u", [1.0, 1.0, 0.0, 1.0])
    run = Run(store, folder, **{f"{OURS}__otc": {"form": "grpo", "c": 4.0, "alpha": 2.0}})
    run.step(store.batch())
    rows = run.close()
    agrees(run)
    assert rows["u_2_0"]["otc_factor"] is None
    for i in (0, 1, 3):
        assert rows[f"u_{i}_0"]["score"] == pytest.approx(rows[f"u_{i}_0"]["otc_factor"])


def test_the_columns_are_fetched_once(store: WritableStore, folder: Path) -> None:
    def calls(**changes: Any) -> int:
        made = WritableStore()
        add(made, "u", [1.0, 0.0, 0.0, 1.0])
        with pytest.MonkeyPatch.context() as patched:
            put_in_place(made, patched)
            trainer = make_trainer(**changes)
            trainer.batches = [made.batch()]
            trainer.step({}, {})
        return made.calls

    assert calls(**{f"{OURS}__record_dir": str(folder)}) == calls()


def test_without_a_folder_nothing_is_joined(store: WritableStore) -> None:
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    trainer = make_trainer()
    assert trainer._joining is None
    trainer.batches = [store.batch()]
    metrics: dict[str, Any] = {}
    trainer.step(metrics, {})
    assert not [name for name in metrics if "records" in name]
    assert "derived" not in trainer.config.actor_rollout_ref.rollout.custom.multiturn


def test_what_cannot_be_joined_ends_no_step(
    store: WritableStore, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl_multiturn.verl_bridge.trainer import step_join as joining

    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    run = Run(store, folder)
    monkeypatch.setattr(joining, "joined_row", lambda *args, **kwargs: 1 / 0)
    for _ in range(2):
        run.step(store.batch())
    assert run.close() == {}
    assert caplog.text.count("rows are missing in the records of a step: ZeroDivisionError") == 1
    assert [line["rows"] for line in run.lines()] == [0, 0]


def test_a_folder_that_cannot_be_written_ends_no_step(
    store: WritableStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("")
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    run = Run(store, folder)
    for _ in range(2):
        run.step(store.batch())
    run.trainer._joining._writer.close()
    assert run.trainer.updates == [list(store.rows)] * 2
    assert caplog.text.count("the run goes on") == 1


def test_a_validation(store: WritableStore, folder: Path) -> None:
    add(store, "u", [1.0, 0.0, None, 1.0])
    run = Run(store, folder)
    trainer = run.trainer
    trainer.replay_buffer = SimpleNamespace(sample=lambda **arguments: (store.batch(), {}))
    base = type(trainer).__mro__[2]

    def validate(self: Any) -> dict[str, Any]:
        for _ in range(2):
            self.replay_buffer.sample(global_steps=4, partition_id="val", batch_size=1)
        return {"val-core/acc": 0.5}

    base._validate = validate
    assert trainer._validate()["val-core/acc"] == 0.5
    rows = run.close()
    (line,) = run.lines()
    assert StepLine.model_validate(line).event == "validation"
    assert (line["step"], line["rows"], line["metrics"]["val-core/acc"]) == (4, 8, 0.5)
    assert line["join"] == f"validation-000004-{line['start']}.parquet"
    assert {(row["validation"], row["trained"], row["advantages"]) for row in rows.values()} == {(True, 0, None)}
    assert [rows[f"u_{i}_0"]["score"] for i in range(4)] == [1.0, 0.0, 0.0, 1.0]
    assert [rows[f"u_{i}_0"]["untrained"] for i in range(4)] == [None, None, "invalid", None]
    assert rows["u_0_0"]["group_mean"] == pytest.approx(2 / 3)
    earned = joined_rewards(Records(folder)).values()
    assert sorted((each.number, each.score) for each in earned) == [(0, 1.0), (1, 0.0), (2, None), (3, 1.0)]


def test_a_run_leaves_its_file_its_clocks_and_its_end(store: WritableStore, folder: Path) -> None:
    from verl_multiturn.verl_bridge.workers.news import RunNews

    run = Run(store, folder)
    trainer, joining = run.trainer, run.trainer._joining
    trainer.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1}, chat_template="{{ messages }}")
    clock = {"event": "clock", "file": "stem", "offset_s": 0.5, "error_s": 0.001}
    schemas = [{"type": "function", "function": {"name": "calculator"}}]
    told = [RunNews(clocks=[clock], schemas=schemas), RunNews(schemas=[])]

    def train() -> None:
        with joining.run(trainer):
            for number in (1, 2):
                joining.note_news(told[number - 1])
                trainer.global_steps = 4 + number  # the file is written again after the first step
                joining.end_step(number, {}, {}, {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    lines = run.lines()
    assert [line["event"] for line in lines] == ["clock", "step", "step", "end"]
    assert lines[0] == clock
    assert RunEnd.model_validate(lines[-1]).error == "KeyboardInterrupt"
    (path,) = folder.glob("run-*.json")
    found = RunFile.model_validate_json(path.read_text())
    assert path.name == f"run-{found.start}.json"
    assert found.schemas == schemas
    assert found.tokenizer["size"] == 2
    assert found.template["text"] == "{{ messages }}"
    assert found.settings["actor_rollout_ref"]["rollout"]["n"] == 4
    assert {"verl", "sglang", "python"} <= found.versions.keys()
    assert found.resumed_from == 4


def test_the_run_s_file_has_tools_and_reward_function(store: WritableStore, folder: Path, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from tests.conftest import ROOT
    from verl_multiturn.verl_bridge.trainer.run_notes import run_file

    run = Run(store, folder)
    config = run.trainer.config
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n- class_name: a.B\n  config: {api_key: abc, url: 'http://u:p@host'}\n")
    OmegaConf.update(config, "actor_rollout_ref.rollout.custom.multiturn.derived.tool_config_path", str(tools))
    for path in ("pkg://verl_multiturn.rewards", str(ROOT / "verl_multiturn" / "rewards" / "__init__.py")):
        OmegaConf.update(
            config, "reward.custom_reward_function", {"path": path, "name": "compute_score"}, force_add=True
        )
        found = run_file(run.trainer, "s", 1.0, None)
        assert found["tools"]["tools"][0]["config"] == {"api_key": "***", "url": "http://***@host"}
        assert found["reward_function"]["name"] == "compute_score"
        assert len(found["reward_function"]["digest"]) == 32
    RunFile.model_validate(found)
