"""Checkpoints: which are whole, and the tracker file that a killed trainer leaves behind."""

import zipfile
from pathlib import Path

import pytest

from verl_multiturn.models.checkpoints import checkpoint_folder, is_complete, mend_tracker, resumes
from verl_multiturn.runs.run_folder import RunFolder

TRACKER = "latest_checkpointed_iteration.txt"


def write(checkpoints: Path, step: int, *, until: str = "transfer_queue", ours: bool = True) -> Path:
    """Write a checkpoint in verl's order, up to one of its parts."""
    folder = checkpoints / f"global_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    if ours:
        (folder / "trained.json").write_text("{}")
    for part in ("actor", "data.pt", "transfer_queue.tmp", "transfer_queue"):
        if part == "data.pt":
            with zipfile.ZipFile(folder / part, "w") as file:
                file.writestr("position", "16")
        else:
            (folder / part).mkdir(exist_ok=True)
        if part == "transfer_queue":
            (folder / "transfer_queue.tmp").rmdir()
            (folder / part / "metadata.json").write_text("{}")
        if part == until:
            break
    return folder


@pytest.mark.parametrize("until", ["actor", "data.pt", "transfer_queue.tmp"])
def test_the_beginning_of_a_checkpoint_is_not_complete(tmp_path: Path, until: str) -> None:
    assert not is_complete(write(tmp_path, 4, until=until))
    assert is_complete(write(tmp_path, 4))


def test_a_synchronous_checkpoint_has_no_transfer_queue(tmp_path: Path) -> None:
    assert is_complete(write(tmp_path, 4, until="data.pt", ours=False))
    assert not is_complete(write(tmp_path, 6, until="actor", ours=False))


def test_a_file_of_the_filter_alone_asks_for_no_transfer_queue(tmp_path: Path) -> None:
    folder = write(tmp_path, 4, until="data.pt")
    for content, complete in (
        ('{"queue": false}', True),
        ('{"queue": true}', False),
        ('{"queue": fal', False),
        ("[]", False),
    ):
        (folder / "trained.json").write_text(content)
        assert is_complete(folder) is complete


def test_half_a_data_loader_and_removed_weights_are_not_complete(tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    (folder / "actor").rmdir()
    assert not is_complete(folder)
    folder = write(tmp_path, 6)
    position = (folder / "data.pt").read_bytes()
    (folder / "data.pt").write_bytes(position[:-10])
    assert not is_complete(folder)


@pytest.mark.parametrize("torn", ["", "\0\0", "1", "12", "16", "-8", "8 steps"])
def test_a_torn_tracker_file_is_mended(tmp_path: Path, torn: str) -> None:
    for step in (4, 8):
        write(tmp_path, step)
    write(tmp_path, 12, until="transfer_queue.tmp")
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / TRACKER).write_text(torn)
    assert mend_tracker(tmp_path) == (
        f"{tmp_path / TRACKER} holds {torn!r}, which names no complete checkpoint; it now names 8, the newest complete "
        "one"
    )
    assert (tmp_path / TRACKER).read_text() == "8"
    assert mend_tracker(tmp_path) is None


def test_what_is_whole_stays(tmp_path: Path) -> None:
    """Who writes an older step into the tracker file means it."""
    for step in (4, 8):
        write(tmp_path, step)
    assert mend_tracker(tmp_path) is None  # without a tracker file nothing is torn
    assert not (tmp_path / TRACKER).exists()
    (tmp_path / TRACKER).write_text("4")
    assert mend_tracker(tmp_path) is None
    assert (tmp_path / TRACKER).read_text() == "4"


def test_without_a_complete_checkpoint_nothing_is_mended(tmp_path: Path) -> None:
    write(tmp_path, 4, until="actor")
    (tmp_path / TRACKER).write_text("")
    assert mend_tracker(tmp_path) is None
    assert (tmp_path / TRACKER).read_text() == ""
    assert not resumes(tmp_path)
    (tmp_path / TRACKER).write_text("4")
    assert mend_tracker(tmp_path) is None  # a checkpoint of another trainer has other files
    assert resumes(tmp_path)


def test_the_results_of_a_run_with_a_torn_tracker_file_stay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    write(tmp_path / "checkpoints", 4)
    (tmp_path / "checkpoints" / TRACKER).write_text("")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    folder.begin("retool", False, {"resume_mode": "auto"})
    assert "it now names 4, the newest complete one" in " ".join(capfd.readouterr().out.split())
    assert checkpoint_folder(tmp_path / "checkpoints", 4).is_dir()
    assert (tmp_path / "metrics.jsonl").exists()
