"""The programs under `examples/` are short, and print the text of their README."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.documents import blocks
from tests.support.warm_python import light_python
from verl_multiturn.records import schema

pytestmark = pytest.mark.slow

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# Output of each program, by its name, as the README shows it.
SHOWN = {
    block.text.removeprefix("python examples/").strip(): block.output
    for block in blocks(Path("examples/README.md"))
    if block.text.startswith("python ")
}


def test_the_readme_shows_every_example() -> None:
    assert sorted(SHOWN) == EXAMPLES
    assert len(EXAMPLES) == 6


def test_the_record_is_of_the_current_schema() -> None:
    record = json.loads((ROOT / "examples" / "record.jsonl").read_text())
    assert record["schema"] == schema.SCHEMA


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_at_most_40_lines(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_the_readme_shows(name: str, tmp_path: Path) -> None:
    """Neither verl nor torch is needed for it: imports of the stack fail."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(['verl', 'torch', 'ray', 'sglang', 'transformers'])); "
    program = f"import runpy; runpy.run_path({str(ROOT / 'examples' / name)!r}, run_name='__main__')"
    done = subprocess.run(
        [light_python(), "-c", hidden + program],
        cwd=tmp_path,  # an example needs nothing of the folder that it is started in
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, SHOWN[name]), done.stderr
    assert list(tmp_path.iterdir()) == []
