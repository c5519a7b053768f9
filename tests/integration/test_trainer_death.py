"""A trainer dies: content of its checkpoint, and a new start from it.

The last test has a real TransferQueue in a real Ray; in the others verl's trainer is a stand-in.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.stack,
    pytest.mark.deaths,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
]


def batch_of(*uids: str, padding: str = "") -> Any:
    """Make verl's batch with two rows for each uid, and a row that pads it."""
    keys = [f"{uid}_{session}_0" for uid in uids for session in range(2)]
    rows = [(key, {}) for key in keys] + ([(f"{padding}_0_0", {"is_padding": True})] if padding else [])
    return SimpleNamespace(keys=[key for key, _ in rows], tags=[tag for _, tag in rows], partition_id="train")


def rows_of(*uids: str, padding: str = "") -> Any:
    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

    return BatchRows(batch_of(*uids, padding=padding))


class VerlsTrainer:
    """The part of verl's asynchronous trainer below our hooks."""

    use_critic = use_reference_policy = False
    restored = 0

    def __init__(self, config: Any) -> None:
        from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler

        self.config = config
        self.global_steps = 0
        self.done: list[Any] = []
        self._sampler = CustomSampler(None)

    def _load_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir)
        self.global_steps = int((folder / "latest_checkpointed_iteration.txt").read_text())
        if self.config.trainer.resume_mode == "resume_path":
            self.global_steps = int(self.config.trainer.resume_from_path[-1])

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        self.done.append(sorted(path.name for path in folder.iterdir()))

    def step(self, metrics: Any, timing: Any) -> Any:
        return batch_of("a")

    def _add_async_warmup_batches(self, batches: float) -> None:
        self.done.append(batches)

    def _add_batch_to_generate(self) -> None:
        self.done.append("batch")

    def _add_prompts_to_generate(self, count: int) -> None:
        self.done.append(count)


def make(folder: Path, **trainer: Any) -> Any:
    from tests.integration.trainer_rows import make_config
    from verl_multiturn.verl_bridge.trainer.hooks import MultiTurnHooks

    settings = {"default_local_dir": str(folder), "resume_mode": "auto", "save_freq": 1, **trainer}
    changes = {f"trainer__{name}": value for name, value in settings.items()}
    changes["data__train_batch_size"] = 4
    changes["actor_rollout_ref__rollout__custom__multiturn__max_staleness"] = 1
    ours = type("Ours", (MultiTurnHooks, VerlsTrainer), {"mode": "colocate_async"})
    return ours(make_config("colocate_async", **changes))


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Take the place of TransferQueue; the list gets the groups that are removed."""
    from verl_multiturn.verl_bridge.trainer import hooks
    from verl_multiturn.verl_bridge.trainer.groups import history

    calls: list[set[str]] = []

    def clear_groups(uids: set[str], partition: str) -> int:
        assert partition == "train"
        calls.append(uids)
        return 2 * len(uids)

    monkeypatch.setattr(history, "clear_groups", clear_groups)
    monkeypatch.setattr(hooks, "list_prompts", lambda partition: {})
    return calls


def saved(folder: Path, step: int) -> Any:
    return json.loads((folder / f"global_step_{step}" / "trained.json").read_text())


def test_the_trained_uids_are_there_before_verl_saves(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    for step, uids in ((1, "ab"), (2, "cd"), (3, "ef")):
        trainer.global_steps = step
        trainer._history.train(step, rows_of(*uids, padding="pad0"))
        if step != 1:
            trainer._save_checkpoint()
    assert trainer.done == [["trained.json"], ["trained.json"]]
    assert saved(tmp_path, 2) == {"trained": {"1": ["a", "b"], "2": ["c", "d"]}, "evicted": [], "padding": ["pad0"]}
    assert saved(tmp_path, 3) == {"trained": {"3": ["e", "f"]}, "evicted": [], "padding": ["pad0"]}


def test_a_checkpoint_that_is_written_again_keeps_its_uids(tmp_path: Path) -> None:
    from verl_multiturn.verl_bridge.trainer.groups.history import History

    history = History(saves=True)
    history.train(1, rows_of("a", "b"))
    history.save(1, tmp_path, ["c"])
    history.save(1, tmp_path, ["d"])
    assert json.loads((tmp_path / "trained.json").read_text()) == {
        "trained": {"1": ["a", "b"]},
        "evicted": ["c", "d"],
        "padding": [],
    }
    history.train(2, rows_of("e"))
    history.save(2, tmp_path, [])
    assert json.loads((tmp_path / "trained.json").read_text()) == {
        "trained": {"2": ["e"]},
        "evicted": [],
        "padding": [],
    }


def test_a_run_without_checkpoints_keeps_one_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, save_freq=-1)
    for step, uids in ((1, "ab"), (2, "cd"), (3, "ef")):
        trainer.global_steps = step
        trainer._history.train(step, rows_of(*uids, padding=f"pad{step}"))
    trainer._save_checkpoint()  # since a server died
    assert saved(tmp_path, 3) == {"trained": {"3": ["e", "f"]}, "evicted": [], "padding": ["pad3"]}


def test_evicted_prompts_do_not_gather_where_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler
    from verl_multiturn.verl_bridge.trainer.rows import batch_rows

    class Sampler(CustomSampler):
        def __init__(self) -> None:
            super().__init__(None)
            self.evicted = ["x"]

        def take_evicted(self) -> list[str]:
            taken, self.evicted = self.evicted, []
            return taken

    monkeypatch.setattr(batch_rows, "fetch_stats", lambda keys, partition: dict.fromkeys(keys))
    for save_freq, left in ((-1, []), (2, ["x"])):
        trainer = make(tmp_path, save_freq=save_freq)
        trainer._sampler = Sampler()
        trainer.step({}, {})
        assert trainer._sampler.evicted == left


@pytest.mark.parametrize("content", ["", '{"trained": {"1": ["a"', "[]", '{"trained": {"1": ["a"]}}'])
def test_a_torn_file_of_a_checkpoint_is_one_error(tmp_path: Path, removed: list[set[str]], content: str) -> None:
    from verl_multiturn import ConfigError

    folder = tmp_path / "global_step_1"
    folder.mkdir()
    (folder / "trained.json").write_text(content)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    trainer = make(tmp_path, resume_mode="resume_path", resume_from_path=str(folder))
    with pytest.raises(ConfigError) as raised:
        trainer._load_checkpoint()
    assert str(raised.value).startswith(f"'{folder}/trained.json' was not written to its end (")
    assert "trainer.resume_from_path" in str(raised.value)
    assert removed == []


def test_what_was_trained_is_dropped_at_load(tmp_path: Path, removed: list[set[str]]) -> None:
    trainer = make(tmp_path)
    for step, uids in ((1, "ab"), (2, "cd")):
        trainer.global_steps = step
        trainer._history.train(step, rows_of(*uids))
        trainer._save_checkpoint()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    trainer = make(tmp_path)
    trainer._load_checkpoint()
    assert (trainer.global_steps, removed) == (2, [{"c", "d"}])
    trainer = make(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_1"))
    trainer._load_checkpoint()
    assert (trainer.global_steps, removed) == (1, [{"c", "d"}, {"a", "b"}])


def test_a_start_from_scratch_and_one_without_the_file_remove_nothing(tmp_path: Path, removed: list[set[str]]) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    make(tmp_path)._load_checkpoint()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    make(tmp_path)._load_checkpoint()
    assert removed == []


def test_a_torn_tracker_file_is_mended_at_the_start(
    tmp_path: Path, removed: list[set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    from tests.unit.trainer.test_checkpoints import write

    (write(tmp_path, 5) / "trained.json").write_text('{"trained": {"5": ["a"]}, "evicted": [], "padding": ["pad"]}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    trainer = make(tmp_path)
    trainer._load_checkpoint()
    assert (trainer.global_steps, removed) == (5, [{"a", "pad"}])
    assert "it now names 5, the newest complete one" in caplog.text


def test_a_checkpoint_that_is_written_over_is_incomplete_until_its_end(tmp_path: Path) -> None:
    from tests.unit.trainer.test_checkpoints import write
    from verl_multiturn.models.checkpoints import is_complete
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import begin_checkpoint

    folder = write(tmp_path, 4)
    begin_checkpoint(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["actor"]
    assert not is_complete(folder)


def test_the_trainer_knows_which_checkpoint_holds_its_weights(tmp_path: Path, removed: list[set[str]]) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    trainer = make(tmp_path)
    assert trainer.saved_step is None
    trainer._load_checkpoint()
    assert trainer.saved_step == 3
    trainer.global_steps = 4
    trainer._save_checkpoint()
    assert trainer.saved_step == 4
    # The weights of another folder are not those of this folder's checkpoint of the same step.
    trainer = make(tmp_path, resume_mode="resume_path", resume_from_path="elsewhere/global_step_3")
    trainer._load_checkpoint()
    assert trainer.saved_step is None


@pytest.mark.parametrize(
    ("restored", "submitted"),
    [(0, ["batch", "batch"]), (4, ["batch", "batch"]), (8, ["batch"]), (6, [2, "batch"]), (13, [3])],
)
def test_groups_that_a_checkpoint_has_too_many_are_not_submitted(
    tmp_path: Path, restored: int, submitted: list[Any]
) -> None:
    """With batches of 4 and the bound 1, four groups run ahead."""
    trainer = make(tmp_path)
    trainer._restored_tq_prompt_count = restored
    trainer._add_async_warmup_batches(1)
    for _ in range(2 if restored != 13 else 3):
        trainer._add_batch_to_generate()
    assert trainer.done == [1, *submitted]


def test_a_checkpoint_that_is_written_while_groups_finish(queue: Any, tmp_path: Path) -> None:
    """A group that finishes during the save is whole in the checkpoint, or is begun again; none is there twice."""
    import threading

    import torch
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import get_tensordict

    from tests.long.training.async_faults_count import open_prompts
    from verl_multiturn.verl_bridge.compat.row_store import clear_groups, list_prompts
    from verl_multiturn.verl_bridge.trainer.groups.history import History
    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

    def put(key: str, **tag: Any) -> None:
        row = TensorDict({"tokens": torch.nested.as_nested_tensor([torch.tensor([7, 8])], layout=torch.jagged)}, [1])
        queue.kv_batch_put(keys=[key], partition_id="train", fields=row, tags=[tag])

    def finish() -> None:
        for uid in uids:
            put(f"{uid}_0_0", min_global_steps=0)
            queue.kv_put(key=uid, partition_id="train", tag={"status": "finished"})

    uids = [f"running{number}" for number in range(20)]
    tags = [{"is_prompt": True, "status": "running", "global_steps": 1} for _ in uids]
    asked = get_tensordict({"raw_prompt": [[{"role": "user", "content": f"what is {uid}?"}] for uid in uids]})
    queue.kv_batch_put(keys=uids, partition_id="train", fields=asked, tags=tags)
    put("done_0_0", min_global_steps=0)  # verl has removed its prompt, and not yet its row
    history = History(saves=True)
    history.train(1, BatchRows(SimpleNamespace(keys=["done_0_0"], tags=[{}], partition_id="train")))
    history.save(1, tmp_path, [])
    finishing = threading.Thread(target=finish)
    finishing.start()
    queue.save_checkpoint(tmp_path / "transfer_queue")
    finishing.join()
    clear_groups(uids, "train")
    put("later", is_prompt=True, status="running", global_steps=2)
    queue.load_checkpoint(tmp_path / "transfer_queue")
    history.load(tmp_path)
    listed = queue.kv_list("train")["train"]
    prompts = list_prompts("train")
    assert sorted(prompts) == sorted(uids)
    assert "done_0_0" not in listed
    finished = [uid for uid, tag in prompts.items() if tag["status"] == "finished"]
    for uid in finished:
        row = queue.kv_batch_get(keys=[f"{uid}_0_0"], partition_id="train", select_fields=["tokens"])
        assert row["tokens"][0].tolist() == [7, 8]
    # The benchmark reads the same prompts from the files.
    assert open_prompts(tmp_path / "transfer_queue", {"done"}) == {uid: f"what is {uid}?" for uid in uids}
