"""The benchmark of commands: what it measures are commands that end well, with README.md's tool."""

from pathlib import Path

import pytest

from benchmarks.start import commands, cpu_seconds, write_files


@pytest.mark.slow
@pytest.mark.parametrize("key", commands(None))
def test_the_measured_commands_end_well(key: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    assert cpu_seconds(commands(None)[key], tmp_path) > 0


def test_show_is_measured_with_a_run_alone() -> None:
    assert commands(Path("/runs/mine"))["show"] == ["show", "/runs/mine"]
    assert "show" not in commands(None)
