"""Every test is in one lane of `scripts/test.sh --all`, and the other tiers exclude tests by their marks."""

from __future__ import annotations

import fnmatch
import itertools
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests import conftest
from tests.conftest import ROOT, child_processes
from tests.support import warm_python
from tests.support.lanes import LANES, Lane
from tests.support.warm_python import light_python, run_with_stack

PARTED = ROOT / "tests" / "integration"
"""The folder whose files are in two lanes, by the first letter of their names."""


def alike(path: Path) -> tuple[Path, str]:
    """Return the common files of the same lanes."""
    return path.parent, path.name[:6] if path.parent == PARTED else ""


FILES = sorted({alike(path): str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}.values())
"""One of all that are alike."""
MARKS = [
    {mark for mark, is_there in zip(("slow", "stack", "engine", "deaths", "long"), there, strict=True) if is_there}
    for there in itertools.product([False, True], repeat=5)
]


def lanes_with(tier: str, path: str, marks: set[str]) -> list[Lane]:
    return [lane for lane in LANES[tier] if lane.has(path, marks)]


def test_every_test_is_in_one_lane() -> None:
    assert len(FILES) > 20
    for path, marks in itertools.product(FILES, MARKS):
        (lane,) = lanes_with("--all", path, marks)
        default = [] if "long" in marks else [lane.name]
        assert [each.name for each in lanes_with("", path, marks)] == default, (path, marks)
        assert lane.stack == bool(marks & {"stack", "engine", "deaths"})


def test_the_fast_tier_has_no_more_than_what_it_says() -> None:
    for path, marks in itertools.product(FILES, MARKS):
        left_out = bool(marks) or path.startswith(("tests/faults/", "tests/unit/recipes/"))
        assert len(lanes_with("--fast", path, marks)) == (not left_out), (path, marks)


@pytest.mark.parametrize("tier", LANES)
def test_pytest_is_given_the_files_of_a_lane(tier: str) -> None:
    for lane in LANES[tier]:
        words = lane.arguments()
        ignored = [word.partition("=")[2] for word in words if word.startswith("--ignore-glob=")]
        folders = [Path(word) for word in words if word.startswith("tests")]
        given = {
            path
            for path in FILES
            if any(Path(path).is_relative_to(folder) for folder in folders)
            and not any(fnmatch.fnmatch(str(parent), glob) for glob in ignored for parent in parents(path))
        }
        assert words[words.index("-m") + 1] == lane.marks
        assert given == {path for path in FILES if any(lane.has(path, marks) for marks in MARKS)}


def parents(path: str) -> list[Path]:
    """Return a file and the folders above it, as pytest looks at them."""
    return [ROOT / path, *(ROOT / path).parents]


def collected(*words: str) -> list[str]:
    """Return the names of the tests that pytest chooses."""
    whole = ("-m", "pytest", "--collect-only", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", *words)
    if any("not stack" in word for word in words):  # such a run fails where SGLang has been imported
        ran = subprocess.run([light_python(), *whole], cwd=ROOT, capture_output=True, text=True, check=False)
    else:
        ran = run_with_stack(*whole)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return [line for line in ran.stdout.splitlines() if line.startswith("tests/")]


@pytest.mark.stack
def test_a_search_that_is_named_has_its_short_form() -> None:
    """`benchmarks.mutants` names searches so, and would find no test otherwise."""
    search = "tests/long/training/test_dapo_filter.py"
    short, whole = (set(collected("-m", marks, search)) for marks in ("not engine and not long", "long"))
    assert short
    assert whole
    assert short | whole == set(collected(search))
    assert not short & whole


@pytest.mark.stack
@pytest.mark.long
def test_the_lanes_together_collect_every_test() -> None:
    of_lanes = [name for lane in LANES["--all"] for name in collected(*lane.arguments())]
    whole = collected("tests")
    assert set(whole) - set(of_lanes) == set()
    assert sorted(of_lanes) == sorted(whole)
    default = [name for lane in LANES[""] for name in collected(*lane.arguments())]
    assert set(default) < set(of_lanes)
    assert sorted([*default, *collected("-m", "long", "tests")]) == sorted(of_lanes)


def test_a_server_of_the_session_is_no_child_to_the_tests_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: set[int] = set()
    for module in (conftest, warm_python):
        monkeypatch.setattr(module, "session_servers", servers)
    before = set(child_processes(recursive=True))
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"]) as server:
        try:
            made = SimpleNamespace(pid=server.pid, executable="python", close=server.wait)
            assert server.pid in {each.pid for each in child_processes()}
            assert warm_python._started(made) == "python"  # type: ignore[arg-type]
            assert set(child_processes(recursive=True)) <= before
        finally:
            for each in psutil.Process(server.pid).children():
                each.kill()
            server.kill()
