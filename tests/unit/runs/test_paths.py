"""Words and paths of a command line as people write them: `~/`, Chinese, `=`, a folder that was deleted, any locale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from verl_multiturn.paths import at_home, word_at_home
from verl_multiturn.runs.compose import expand_homes
from verl_multiturn.runs.environment import environment_of
from verl_multiturn.runs.plan import plan_run, quoted
from verl_multiturn.tools.loading.registry import load_tools


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("word", "meant"),
    {
        "~/a": "HOME/a",
        "--out=~/runs": "--out=HOME/runs",
        "data.train_files=~/a b.parquet": "data.train_files=HOME/a b.parquet",
        "+a.b='~/c'": "+a.b='HOME/c'",
        "data.val_files=[~/a.parquet, '~/b.parquet',/c~/d]": "data.val_files=[HOME/a.parquet, 'HOME/b.parquet',/c~/d]",
        "~trainer.logger": "~trainer.logger",
        "~data.x=~/a": "~data.x=HOME/a",
        "a.b=x ~/c": "a.b=x ~/c",
        "What is in ~/c?": "What is in ~/c?",
        "x~/y": "x~/y",
        "--set": "--set",
    }.items(),
)
def test_the_home_folder_in_a_word(word: str, meant: str, home: Path) -> None:
    assert word_at_home(word) == meant.replace("HOME", str(home))


def test_the_home_folder_in_a_yaml_file(home: Path) -> None:
    given: dict[str, Any] = {"root": "~/dbs", "deep": [{"path": "~/a"}], "text": "in ~/b", "tilde": "~", "number": 3}
    assert at_home(given) == {**given, "root": f"{home}/dbs", "deep": [{"path": f"{home}/a"}]}


def test_a_tools_settings_may_lie_in_the_home_folder(home: Path, tmp_path: Path) -> None:
    (home / "corpus").mkdir()
    (home / "corpus" / "a.md").write_text("Cats sleep.", encoding="utf-8")
    file = tmp_path / "tools.yaml"
    entry = {"class_name": "verl_multiturn.tools.search.SearchTool", "config": {"corpus": "~/corpus"}}
    file.write_text(yaml.safe_dump({"tools": [entry]}), encoding="utf-8")
    assert list(load_tools(file)) == ["search"]


def test_a_schema_is_for_the_model_and_keeps_its_words(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools:\n  - class_name: verl_multiturn.tools.finish.FinishTool\n    tool_schema:\n      type: function\n"
        "      function:\n        name: finish\n        description: ~/ is your home folder.\n"
        "        parameters: {type: object, properties: {answer: {type: string, enum: ['~/a']}}, required: [answer]}\n"
    )
    shown = load_tools(file)["finish"].tool_schema.function
    assert shown.description == "~/ is your home folder."
    assert shown.parameters["properties"]["answer"]["enum"] == ["~/a"]


def test_the_home_folder_in_a_configuration(home: Path) -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"a": "~/x", "b": ["~/y", {"c": "~/z"}], "d": "${a}/w", "e": None, "f": "~"})
    OmegaConf.set_struct(config, True)
    expand_homes(config)
    found = OmegaConf.to_container(config, resolve=True)
    assert found == {"a": f"{home}/x", "b": [f"{home}/y", {"c": f"{home}/z"}], "d": f"{home}/x/w", "e": None, "f": "~"}
    assert OmegaConf.is_interpolation(config, "d")


OVERRIDES = {
    "data.train_files=/数据/a=b.parquet": "/数据/a=b.parquet",
    "data.train_files=[/数据/a.parquet,/b=c.parquet, d]": ["/数据/a.parquet", "/b=c.parquet", "d"],
    "+recipe.text=Wie heißt du?": "Wie heißt du?",
    "+recipe.text=it's = \\\\ #1 & more": "it's = \\\\ #1 & more",
    "+recipe.text=ends in = \\": "ends in = \\",
    "+recipe.text='a = b'": "a = b",
    "+recipe.text=plain": "plain",
    "+recipe.number=3": 3,
    "+recipe.numbers=[1,2]": [1, 2],
    "+recipe.pairs={a: 1, b: 2}": {"a": 1, "b": 2},
    "+recipe.none=null": None,
    "+recipe.variable=${oc.decode:${oc.env:SIZE}}": "${oc.decode:${oc.env:SIZE}}",
    "+recipe.variable=${oc.env:SIZE}": "${oc.env:SIZE}",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_hydra_reads_what_was_written(override: str) -> None:
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser")
    word = plan_run("quickstart", overrides=[override]).settings()[-1]
    assert parser.OverridesParser.create().parse_override(word).value() == OVERRIDES[override]
    assert quoted(word) == word


def start(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    kept |= {"PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "verl_multiturn.cli", *words]
    return subprocess.run(command, capture_output=True, env=kept)


@pytest.mark.slow
def test_a_folder_that_was_deleted_is_named(tmp_path: Path) -> None:
    program = (
        "import os, sys, runpy; os.rmdir(os.getcwd()); runpy.run_module('verl_multiturn.cli', run_name='__main__')"
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    kept = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program, "doctor"], capture_output=True, cwd=gone, env=kept)
    said = b"verl-multiturn: the current folder was deleted; change into one that is there, such as with `cd ~`\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, said, b"")


LOCALES: list[dict[str, str]] = [
    {"LC_ALL": "C"},
    {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    {"LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1:strict"},
]


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("locale", LOCALES, ids=str)
def test_every_locale_takes_all_letters(locale: dict[str, str], home: Path) -> None:
    words = ["data.train_files=/数据/a=b.parquet", "data.val_files=~/c.parquet", "+recipe.text=Wie heißt du?"]
    done = start("run", "quickstart", "--print", *words, HOME=str(home), **locale)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode("utf-8", "replace")
    assert "/a=b.parquet" in shown
    assert f"data.val_files={home}/c.parquet" in shown


@pytest.mark.parametrize(
    ("given", "passed"), [(None, ":backslashreplace"), ("ascii", "ascii:backslashreplace"), ("utf-8:strict",) * 2]
)
def test_no_letter_ends_a_process_of_a_run(given: str | None, passed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONIOENCODING", given)
    found = environment_of(plan_run("quickstart"), {"recipe": {"on_cpu": False}})
    assert found["PYTHONIOENCODING"] == passed
