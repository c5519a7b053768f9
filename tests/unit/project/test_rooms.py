"""Imports run one way, and importing the package is light."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from scripts.rooms import BRIDGE, circle, modules, names_of, order_of, strange, upward
from tests.conftest import ROOT

PACKAGE = ROOT / "verl_multiturn"
ORDER = order_of(ROOT)
STACK = ["verl_bridge", "cpu", "plugin", "cli"]
HEAVY = {"verl", "ray", "sglang"}
NO_NOUNS = {
    "alike", "compiled", "counted", "disturbed", "ended", "evaluated", "expected", "exported", "failed", "following",
    "joined", "joining", "judging", "left", "lost", "probed", "recorded", "recording", "registered", "scripted",
    "shared", "silent", "spared", "spawned",
}  # fmt: skip
"""Participles and adjectives that name no module."""
NO_NOUN_BEFORE = {
    "certified", "finished", "kept", "lost", "numbered", "said", "scored", "shown", "stored", "verified",
}  # fmt: skip
"""Participles with which the name of no module begins."""
ELSEWHERE = {
    *(f"harnesses.harbor.{name}" for name in ("mini_swe", "trials.environment", "trials.trial")),
    *(f"harnesses.verifiers.{name}" for name in ("chat_program", "remains", "tool_processes")),
}
"""Imported by the own Pythons of Harbor and verifiers alone (requirements/harbor.lock, requirements/verifiers.lock)."""

EXTRAS = {"a2a_": {"a2a", "google"}}
"""Packages that an extra brings, by the beginning of the modules that need it; `google` is protobuf."""


def imported(path: Path) -> frozenset[str]:
    """Return the names that a file imports, wherever it does."""
    return names_of(path)[0]


def test_rooms_import_one_way() -> None:
    assert not upward()


def test_the_rooms_of_the_bridge_import_one_way() -> None:
    assert not upward(inside=BRIDGE)


def test_every_import_of_ours_is_of_a_module_that_the_other_tests_see() -> None:
    """An old name, or one that `verl_multiturn` itself imports lazily, would be an arrow that nobody counts."""
    assert not strange()


@pytest.mark.parametrize(
    "line",
    ["from verl_multiturn.cli import main", "from .cli import main", "from . import cli", "from .cli.main import x"],
)
def test_an_import_that_runs_up_is_found_however_it_is_written(line: str, tmp_path: Path) -> None:
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    page = "# The rooms\n\n| `describe.py` | words |\n| `cli/` | commands |\n"
    (tmp_path / "docs" / "reference" / "rooms.md").write_text(page)
    package = tmp_path / "verl_multiturn"
    for name in ("__init__.py", "cli/__init__.py", "cli/main.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / "describe.py").write_text(f"def show():\n    {line}\n")
    (found,) = upward(tmp_path)
    assert found.startswith("describe imports cli")


def test_all_rooms_are_documented_and_each_once() -> None:
    rooms = {name.split(".")[0] for name in modules()}
    assert sorted(ORDER) == sorted(rooms)
    inside = {name.split(".")[1] for name in modules() if name.startswith(f"{BRIDGE}.")}
    assert sorted(order_of(ROOT, BRIDGE)) == sorted(inside)


def test_few_modules_lie_at_the_root() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 9


def test_files_import_in_no_circle() -> None:
    assert not circle()


@pytest.mark.parametrize("room", [room for room in ORDER if room not in STACK])
def test_a_tool_author_needs_no_gpu_stack(room: str) -> None:
    for module, path in modules().items():
        if module.split(".")[0] == room:
            assert not {name.split(".")[0] for name in imported(path)} & HEAVY, path


def test_setup_names_what_is_imported() -> None:
    needed: set[str] = set()
    for module, path in modules().items():
        if module.split(".")[0] not in STACK and module not in ELSEWHERE:
            # A function's imports may be missing.
            extra = [names for begin, names in EXTRAS.items() if path.name.startswith(begin)]
            needed |= {name.split(".")[0] for name in names_of(path)[1]}.difference(*extra)
    needed -= sys.stdlib_module_names | {"verl_multiturn"}
    known = packages_distributions()
    wanted = {known[name][0].lower().replace("_", "-") for name in needed}
    named = re.findall(r'^        "([\w-]+)>=', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert "numpy" in wanted
    assert wanted - {"pydantic-core"} <= set(named)  # which comes with pydantic alone


def test_no_module_hides_one_of_python() -> None:
    # A file that is run as a script has its folder before the standard library.
    assert not {path.stem for path in PACKAGE.rglob("*.py")} & sys.stdlib_module_names


def test_modules_are_named_by_nouns() -> None:
    words = {name: name.rpartition(".")[2] for name in modules()}
    wrong = [name for name, word in words.items() if word in NO_NOUNS or word.partition("_")[0] in NO_NOUN_BEFORE]
    assert not wrong, f"{wrong}: name a module by what it holds, not by what was done to it (`records`, not `recorded`)"


def test_importing_the_package_needs_neither_torch_nor_verl() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'verl', 'ray', 'sglang', 'transformers', 'hydra'): sys.modules[name] = None\n"
        "import verl_multiturn\n"
        "assert len(verl_multiturn.__all__) <= 30\n"
        "for name in verl_multiturn.__all__: getattr(verl_multiturn, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_file_talks_to_transfer_queue() -> None:
    talking = [name for name, path in modules().items() if any("transfer_queue" in each for each in imported(path))]
    assert talking == ["verl_bridge.compat.row_store"]
