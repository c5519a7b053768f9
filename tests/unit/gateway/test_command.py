"""Options of `verl-multiturn gateway` that are refused before anything starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli.main import app

MODEL = str(ROOT / "recipes" / "quickstart" / "model")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--host", "0.0.0.0"], "--host '0.0.0.0' lets other machines in"),
        (["--host", "::"], "--host '::' lets other machines in"),
        (["--host", "my.machine"], "--host 'my.machine' lets other machines in"),
        (["--reward-range", "1", "0"], "--reward-range 1 0: expected LOW below HIGH"),
        (["--reward-range", "nan", "1"], "--reward-range nan 1: expected LOW below HIGH"),
        (["--admin-key-env", "NO_SUCH_KEY"], "--admin-key-env: the environment variable 'NO_SUCH_KEY' is not set"),
        (["--engine", "nonsense"], "--engine 'nonsense': expected sglang, or an address"),
        (["--engine-key-env", "KEY"], "--engine-key-env 'KEY' is for an address"),
        (["--recipe", "no_such"], "no_such"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(tmp_path: Path, words: list[str], error: str) -> None:
    result = CliRunner().invoke(app, ["gateway", MODEL, "--records", str(tmp_path / "live"), *words])
    assert result.exit_code == 2, result.output
    assert error in result.output
    assert not list(tmp_path.rglob("*.jsonl*"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = CliRunner().invoke(app, ["gateway", MODEL, "--records", str(file)])
    assert result.exit_code == 2
    assert f"--records {str(file)!r}" in result.output
