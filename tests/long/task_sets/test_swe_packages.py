"""A repair of a package is always paid, and the untouched tree never."""

import pytest

from tests.long.task_sets.swe_packages import holds, measure


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_repairs_are_paid_and_untouched_trees_are_not() -> None:
    pytest.importorskip("toolz")
    found = measure("toolz", 40, 0)
    assert holds(found), found
