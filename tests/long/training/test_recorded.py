"""verl's trainer treats recorded conversations as it did when they were sampled, and refuses changed ones."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.stack


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_step_from_records_is_the_step_that_was_sampled(tmp_path: Path) -> None:
    from tests.long.training.recorded import run

    found = run(("step", "changed"), None, tmp_path, seed=0)
    assert found["ok"], found
