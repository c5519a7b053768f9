"""The five estimators of docs/write/algorithms.md have the values of the originals, in many random groups."""

from pathlib import Path

import pytest

from tests.long.training import algorithms

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.mark.parametrize("groups", [100, pytest.param(algorithms.GROUPS, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", algorithms.ORIGINALS)
def test_the_page_has_the_values_of_the_original(name: str, groups: int, tmp_path: Path) -> None:
    assert algorithms.largest_difference(name, algorithms.page_files(tmp_path)[name], groups) <= 1e-6
