"""The viewer's filter."""

import pyarrow as pa
import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.records.index.query import Term, mask_of, parse

TABLE = pa.table(
    {
        "request_id": ["Ab", "bc", "cd"],
        "score": [0.0, None, 1.5],
        "step": [1, 2, 3],
        "valid": [True, False, None],
        "fate": ["trained", "cut", None],
    }
)


def test_terms() -> None:
    assert parse(' score<1  fate=cut,open why="a, b" word ') == [
        Term("score", "<", ("1",)),
        Term("fate", "=", ("cut", "open")),
        Term("why", "=", ("a, b",)),
        Term("", "", ("word",)),
    ]
    assert parse('uid="a ""b""" uid=""') == [Term("uid", "=", ('a "b"',)), Term("uid", "=", ("",))]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("score<1", ["Ab"]),
        ("score>=0", ["Ab", "cd"]),
        ("score=none", ["bc"]),
        ("score!=none", ["Ab", "cd"]),
        ("step=1,3", ["Ab", "cd"]),
        ("step!=1,3", ["bc"]),
        ("valid=true", ["Ab"]),
        ("valid!=true", ["bc", "cd"]),
        ("fate!=cut", ["Ab", "cd"]),
        ("request_id~AB", ["Ab"]),
        ("B", ["Ab", "bc"]),
        ("step>=2 step<3", ["bc"]),
    ],
)
def test_rows(where: str, rows: list[str]) -> None:
    mask = mask_of(TABLE, parse(where))
    assert TABLE.filter(mask)["request_id"].to_pylist() == rows


def test_no_term_leaves_all() -> None:
    assert mask_of(TABLE, parse("  ")) is None


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ('score<"1', "cannot be read from"),
        ("scores<1", "names the column 'scores'; expected one of request_id, score"),
        ("score<one", "compares score with 'one'; expected a number"),
        ("valid=maybe", "expected true or false"),
        ("fate>1", "is for numbers, and fate is a text"),
        ("step~1", "is for texts, and step is a number"),
    ],
)
def test_what_cannot_be(where: str, said: str) -> None:
    with pytest.raises(ConfigError, match="the filter") as error:
        mask_of(TABLE, parse(where))
    assert said in str(error.value)
