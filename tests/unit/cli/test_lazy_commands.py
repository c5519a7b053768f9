"""Commands are imported when they are called: which modules each may import, and the list of them."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli.commands import COMMANDS, command_of
from verl_multiturn.cli.main import app

_HEAVY = {
    "aiohttp",
    "datasets",
    "hydra",
    "numpy",
    "omegaconf",
    "pandas",
    "pyarrow",
    "pydantic",
    "torch",
    "transformers",
}
_HELP_NEEDS = {"cli", "describe", "errors", "old_names", "paths"}
"""Rooms that the list of the commands may import."""
_TOOL = '''
def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    return {"a": "1"}.get(key, "nothing found")
'''


def imported_by(arguments: list[str], folder: Path) -> set[str]:
    """Return the names of the modules that a command has imported when it ends well."""
    program = (
        "import json, sys\n"
        "from verl_multiturn.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: print('\\n' + json.dumps([end.code or 0, sorted(sys.modules)]))\n"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status, modules = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stdout
    return set(modules)


def rooms(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("verl_multiturn.")}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_list_of_the_commands_imports_none(arguments: list[str], tmp_path: Path) -> None:
    modules = imported_by(arguments, tmp_path)
    assert not modules & _HEAVY
    assert rooms(modules) <= _HELP_NEEDS
    assert {name for name in modules if name.startswith("verl_multiturn.cli.")} == {
        "verl_multiturn.cli.commands", "verl_multiturn.cli.main",
    }  # fmt: skip


def test_a_tool_is_checked_without_the_stack(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(_TOOL)
    modules = imported_by(["check-tool", "my_tools.lookup"], tmp_path)
    assert not modules & (_HEAVY - {"numpy", "pydantic"})


def test_rows_are_validated_without_the_stack(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "?"}], "data_source": "openai/gsm8k"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "4"}}
    row |= {"extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}}}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tools = str(ROOT / "tool_configs" / "gsm8k.yaml")
    modules = imported_by(["validate", tools, "--dataset", "rows.jsonl"], tmp_path)
    assert not modules & (_HEAVY - {"numpy", "pydantic"})


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_a_command_says_of_itself(name: str) -> None:
    command = command_of(name)
    assert command.name == name
    assert " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split()) == COMMANDS[name].help


def test_the_help_groups_the_commands_by_when_one_needs_them() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    panels = re.findall(r"(?m)^╭─ (\w+) ─|^│ ([a-z][a-z0-9-]*) ", shown)
    found: dict[str, list[str]] = {}
    for title, command in panels:
        if title:
            found[title] = []
        else:
            found[list(found)[-1]].append(command)
    del found["Options"]
    assert found == {
        "Write": [
            "recipe",
            "check-tool",
            "check-interaction",
            "check-advantage",
            "validate",
            "serve",
            "mcp",
            "a2a",
            "index",
            "retrieval-server",
        ],
        "Train": ["install", "doctor", "run", "gateway", "deploy", "export"],
        "Look": ["show", "view", "explain", "verify", "replay", "convert", "sessions"],
        "Evaluate": ["probe", "eval", "compare", "rows"],
    }


def test_each_command_is_in_the_list() -> None:
    folder = ROOT / "verl_multiturn" / "cli"
    assert {place.module for place in COMMANDS.values()} == {
        path.stem for path in folder.glob("*.py")
    } - {"__init__", "__main__", "commands", "ends", "main", "options", "tool_server"}  # fmt: skip


def test_the_package_has_its_names_without_importing_them(tmp_path: Path) -> None:
    import verl_multiturn

    program = "import json, sys, verl_multiturn; print(json.dumps([dir(verl_multiturn), sorted(sys.modules)]))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    names, modules = json.loads(done.stdout)
    assert set(verl_multiturn.__all__) <= set(names)
    assert rooms(set(modules)) == {"old_names"}
    for name in verl_multiturn.__all__:
        assert getattr(verl_multiturn, name).__class__ is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(verl_multiturn, "Nothing")  # noqa: B009
    with pytest.raises(ImportError):
        exec("from verl_multiturn import Nothing")


def test_the_types_and_the_modules_of_the_names_are_the_same() -> None:
    import ast

    import verl_multiturn

    (typed,) = [node for node in ast.parse(Path(verl_multiturn.__file__).read_text()).body if isinstance(node, ast.If)]
    imports = {
        (node.module or "").removeprefix("verl_multiturn."): tuple(alias.name for alias in node.names)
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
    }
    assert imports == verl_multiturn._PLACES
    assert {"__version__", *(name for names in imports.values() for name in names)} == set(verl_multiturn.__all__)


def test_a_wrong_name_imports_no_command(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from verl_multiturn.cli.main import main\n"
        "try: main()\n"
        "finally: print('verl_multiturn.cli.run' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "did you mean 'run'?" in done.stderr
    assert done.stdout.strip() == "False"
    assert done.returncode == 2


def test_modules_are_attributes_and_other_names_are_none() -> None:
    code = "import verl_multiturn as v; print(v.errors.ConfigError.__name__, hasattr(v, 'nothing'), dir(v)[-1])"
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert shown.split() == ["ConfigError", "False", "tool"]
