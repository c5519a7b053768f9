"""Files of `convert` are read back by the readers of this environment, with the same numbers."""

import pytest

from tests.long.observe.convert import PACKAGES, run


@pytest.mark.long
def test_readers_add_up_the_same_numbers() -> None:
    """DuckDB, Scout and Harbor are not of this project; `python -m benchmarks.convert --make FOLDER` asks them, too."""
    result = run(None, dict.fromkeys(PACKAGES))
    assert result["ok"]
    assert (result["otel"], result["perfetto"]) == ("ok", "ok")
