"""The benchmark of commands: it measures commands that end well, with README.md's tool."""

import sys
from pathlib import Path

import pytest

from benchmarks.start import _ROOT, commands, cpu_seconds, median_phases, start_command, starts, write_files


@pytest.mark.slow
@pytest.mark.parametrize("key", commands(None))
def test_the_measured_commands_end_well(key: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    assert cpu_seconds(commands(None)[key], tmp_path) > 0


def test_show_is_measured_with_a_run_alone() -> None:
    assert commands(Path("/runs/mine"))["show"] == ["show", "/runs/mine"]
    assert "show" not in commands(None)


def test_a_start_is_that_of_the_checkout(tmp_path: Path) -> None:
    command, environment = start_command(_ROOT, tmp_path / "out")
    assert Path(command[1]).is_file()
    assert (environment["PYTHON"], environment["PYTHONPATH"]) == (sys.executable, str(_ROOT))
    command, environment = start_command(tmp_path, tmp_path / "out")
    assert command[1].startswith(f"{tmp_path}/recipes/")
    assert environment["PYTHON"] == f"{tmp_path}/.venv/bin/python"


def test_starts_take_turns_and_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []

    def phases(checkout: Path) -> dict[str, float]:
        begun.append(checkout)
        return {"checks": 1.0 if checkout == _ROOT else 3.0, "ray": 1.0}

    monkeypatch.setattr("benchmarks.start.phases_of_start", phases)
    other = Path("/other")
    assert starts(2, other) == {
        "here": {"checks": 1.0, "ray": 1.0},
        "before": {"checks": 3.0, "ray": 1.0},
        "ratio": 0.5,
    }
    assert begun == [_ROOT, other] * 2
    assert starts(1, None) == {"here": {"checks": 1.0, "ray": 1.0}}
    assert median_phases([{"ray": 1.0}, {"ray": 9.0}, {"ray": 2.0}]) == {"ray": 2.0}
