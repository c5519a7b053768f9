"""`trainer.checkpoint_callback_class`: it comes after all of a checkpoint, and its errors lose none."""

import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_it_comes_after_all_of_a_checkpoint(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verl's own method saves, with workers and a TransferQueue that write next to nothing."""
    from verl.trainer.ppo.v1 import trainer_base

    from verl_multiturn.models.checkpoints import TRACKER, is_complete
    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler
    from verl_multiturn.verl_bridge.trainer.groups.history import History
    from verl_multiturn.verl_bridge.trainer.hooks import MultiTurnHooks

    def write_queue(folder: str, metadata: Any) -> None:
        Path(folder).mkdir()
        (Path(folder) / "metadata.json").write_text("{}")

    def on_save(**told: Any) -> None:
        assert (told["global_step"], told["trainer"]) == (3, trainer)
        assert is_complete(Path(told["checkpoint_dir"]))
        assert (tmp_path / TRACKER).read_text() == "3"
        raise RuntimeError("no network")

    verls = {"_save_checkpoint": trainer_base.PPOTrainer._save_checkpoint}
    made = type("Trainer", (MultiTurnHooks, type("Verls", (), verls)), {"__init__": lambda self: None})
    trainer: Any = made()
    config = {
        "trainer": {"default_local_dir": str(tmp_path), "default_hdfs_dir": None},
        "actor_rollout_ref": {"actor": {"checkpoint": {}}},
    }
    trainer.config, trainer.global_steps = OmegaConf.create(config), 3
    trainer.trainer_mode, trainer.use_critic, trainer.replay_buffer = mode, False, None
    trainer._history = None if mode == "sync" else History(saves=True)
    trainer._sampler = CustomSampler(None)
    trainer.actor_rollout_wg = SimpleNamespace(save_checkpoint=lambda local, *_, **__: Path(local).mkdir(parents=True))
    trainer.train_dataloader = SimpleNamespace(state_dict=dict)
    trainer.checkpoint_callback = SimpleNamespace(on_save=on_save)
    monkeypatch.setattr(trainer_base, "tq", SimpleNamespace(save_checkpoint=write_queue))
    with pytest.raises(RuntimeError, match="no network"):
        trainer._save_checkpoint()
    assert is_complete(tmp_path / "global_step_3")


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_last_checkpoint_of_a_run_that_ends(
    is_complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.trainer import checkpoint_writes

    def save() -> None:
        its = tmp_path / "global_step_7"
        (its / "actor").mkdir(parents=True)
        if is_complete:
            with zipfile.ZipFile(its / "data.pt", "w") as file:
                file.writestr("data", b"")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
        raise RuntimeError("no network")

    monkeypatch.setattr(checkpoint_writes, "list_prompts", lambda partition: {})
    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
    trainer = SimpleNamespace(config=config, saved_step=None, agent_loop_manager=None, _save_checkpoint=save)
    again = "start the same command again with trainer.resume_mode=auto, which goes on from"
    assert checkpoint_writes.save_last(trainer, 7).said == (
        f"the weights of step 7 are saved in '{tmp_path}/global_step_7', after which trainer.checkpoint_callback_class "
        f"failed (RuntimeError: no network); {again} them"
        if is_complete
        else f"its weights could not be saved (RuntimeError: no network); {again} the last checkpoint"
    )


def evaluations(monkeypatch: pytest.MonkeyPatch, put: Any) -> Any:
    """Return our callback, with another function in the place of the one that starts an evaluation."""
    from verl_multiturn.verl_bridge.trainer import checkpoint_evaluations as module

    monkeypatch.setattr(module, "wanted_of", lambda settings, run, rows: (settings, run, rows))
    monkeypatch.setattr(module, "put", put)
    monkeypatch.setattr(module, "_WAIT_S", 0.01)
    ours = {"multiturn": {"checkpoint_evaluation": {"samples": 4}}}
    rollout = {"actor_rollout_ref": {"rollout": {"custom": ours}}}
    config = {"recipe": {"out": "run"}, "data": {"val_files": "rows.parquet"}, **rollout}
    return module.EvaluateCheckpoints(OmegaConf.create(config))


def test_our_callback_asks_for_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    done = threading.Event()

    def put(*told: Any) -> Any:
        asked.append(told)
        done.set()
        return SimpleNamespace(poll=lambda: 0)

    evaluations(monkeypatch, put).on_save(trainer=None, global_step=5, checkpoint_dir="c/global_step_5")
    assert done.wait(600)
    deploy = {"deploy_to": None, "deploy_key_env": None, "deploy_if": "better"}
    settings = {"samples": 4, "devices": None, "timeout_s": 7200.0, **deploy}
    assert asked == [(Path("run"), 5, Path("c/global_step_5"), (settings, Path("run"), ["rows.parquet"]))]


def test_what_our_callback_meets_never_reaches_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, told = threading.Event(), threading.Event()

    def put(run: Path, step: int, *_: Any) -> Any:
        if step == 5:
            raise OSError(28, "No space left on device")
        hangs.wait()
        told.set()
        raise RuntimeError("cannot fork")

    callback = evaluations(monkeypatch, put)
    callback.on_save(trainer=None, global_step=5, checkpoint_dir="c")
    callback._last.join()
    callback.on_save(trainer=None, global_step=10, checkpoint_dir="c")  # the disk hangs
    callback.on_save(trainer=None, global_step=15, checkpoint_dir="c")
    hangs.set()
    callback._last.join()
    callback.on_save(trainer=None, global_step=20, checkpoint_dir="c", async_save=True)
    assert told.is_set()
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint of step 5 is not evaluated: OSError: [Errno 28] No space left on device",
        "the checkpoint of step 15 is not evaluated: the disk has not answered since the checkpoint before",
        "the checkpoint of step 10 is not evaluated: RuntimeError: cannot fork",
        "the checkpoint of step 20 is not evaluated: async_save: its weights are not whole yet; `verl-multiturn eval` "
        "it later",
    ]
