"""Start-up checks of a loss, rows, a sampler and a filter of one's own.

`tests/long/training/test_own_registrations.py` trains with the same files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_start_up_paths import alone, composed, refused, rows, started
from tests.support.own_registrations import write_files

__all__ = ["alone", "rows"]  # fixtures

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),  # verl's trainers are imported
]

LIBRARY = "actor_rollout_ref.model.external_lib"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of the current folder be imported, as in a run that is started there."""
    monkeypatch.syspath_prepend(str(tmp_path))


def settings(words: list[str]) -> dict[str, str]:
    return dict(word.lstrip("+").split("=", 1) for word in words)


def test_the_page_has_four_files(tmp_path: Path) -> None:
    assert list(write_files(tmp_path)) == ["my_loss", "my_rows", "my_sampler", "my_filter"]


def test_the_loss_of_the_page_starts(rows: str, tmp_path: Path) -> None:
    started(composed(rows, **settings(write_files(tmp_path)["my_loss"])))
    assert "my_loss" not in sys.modules, "imported in a process of its own"


@pytest.mark.usefixtures("imports_in_a_fork")
@pytest.mark.parametrize("name", ["my_rows", "my_sampler", "my_filter"])
def test_the_other_files_of_the_page_start(rows: str, tmp_path: Path, name: str) -> None:
    words = write_files(tmp_path)[name]
    assert words
    started(composed(rows, **settings(words)))
    assert name not in sys.modules, "imported in a process of its own"


@pytest.mark.usefixtures("imports_in_a_fork")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({LIBRARY: "my_loss", LOSS: "my_reinforse"}, f"{LOSS}='my_reinforse': neither verl nor 'my_loss' registers it"),
        ({LIBRARY: "my_loss", LOSS: "my_reinforse"}, "did you mean 'my_reinforce'?"),
        ({LIBRARY: "other", LOSS: "my_reinforce"}, "register it there with verl's register_policy_loss"),
        ({LIBRARY: "[my_loss, other]", LOSS: "zzz"}, f"{LOSS}='zzz': neither verl nor 'other' registers it"),
        ({LOSS: "my_reinforce"}, f"{LOSS}='my_reinforce': nobody has registered it; choose one of ["),
        (  # the trainer imports the rows, and the actor's processes do not
            {"data.custom_cls.path": "my_rows.py", "data.custom_cls.name": "Sums", LOSS: "my_reinforce"},
            f"{LOSS}='my_reinforce': nobody has registered it",
        ),
    ],
)
def test_a_loss_that_the_actor_would_not_find(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], said: str
) -> None:
    write_files(tmp_path)
    (tmp_path / "other.py").write_text("")
    assert said in refused(composed(rows, **changes), capsys)


@pytest.mark.usefixtures("imports_in_a_fork")
def test_a_loss_may_have_a_name_near_to_one_of_verls(rows: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    code = (tmp_path / "my_loss.py").read_text().replace("my_reinforce", "vanilla2")
    (tmp_path / "near_loss.py").write_text(code)
    (tmp_path / "other.py").write_text("")
    for library in ("near_loss", "[near_loss, other]", "[other, near_loss]"):
        started(composed(rows, **{LIBRARY: library, LOSS: "vanilla2"}))


@pytest.mark.usefixtures("imports_in_a_fork")
def test_an_old_name_of_our_data_set_is_ours(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    old: dict[str, Any] = {
        "data.custom_cls.path": "'pkg://verl_multiturn.verl_bridge.trainer.numbered_rows'",
        "data.custom_cls.name": "NumberedRows",
    }
    rollout = "actor_rollout_ref.rollout"
    difficulty = {f"{rollout}.custom.multiturn.filter": "difficulty", f"{rollout}.n": "2"}
    config = started(composed(rows, **old, **difficulty))
    assert config.data.custom_cls.path == "pkg://verl_multiturn.verl_bridge.trainer.data_set"
    assert "makes it" in refused(composed(rows, **difficulty, **{"data.custom_cls.path": "my_rows.py"}), capsys)
