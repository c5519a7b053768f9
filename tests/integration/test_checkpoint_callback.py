"""`trainer.checkpoint_callback_class`: it comes after all of a checkpoint, and what it raises loses none."""

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

    from verl_multiturn.launch.checkpoints import TRACKER, is_complete
    from verl_multiturn.verl_bridge.trainer.history import History
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
    trainer._filters = False
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
    from verl_multiturn.verl_bridge.trainer import checkpoints

    def save() -> None:
        its = tmp_path / "global_step_7"
        (its / "actor").mkdir(parents=True)
        if is_complete:
            with zipfile.ZipFile(its / "data.pt", "w") as file:
                file.writestr("data", b"")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
        raise RuntimeError("no network")

    monkeypatch.setattr(checkpoints, "list_prompts", lambda partition: {})
    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
    trainer = SimpleNamespace(config=config, saved_step=None, agent_loop_manager=None, _save_checkpoint=save)
    again = "start the same command again with trainer.resume_mode=auto, which goes on from"
    assert checkpoints.save_last(trainer, 7) == (
        f"the weights of step 7 are saved in '{tmp_path}/global_step_7', after which trainer.checkpoint_callback_class "
        f"failed (RuntimeError: no network); {again} them"
        if is_complete
        else f"its weights could not be saved (RuntimeError: no network); {again} the last checkpoint"
    )
