"""Docstrings of functions: four styles, and texts that have none."""

import pytest

from verl_multiturn.tools.loading.docstrings import read_docstring

REST = """Search.

Titles only.

:param query: What to look for,
    in any language.
:param int limit: At most so many.
:type kind: str
:keyword kind: How: exact or fuzzy.
:returns: titles
:raises ValueError: never

This is no parameter.
"""
NUMPY = """Search.

Titles only.

Parameters
----------
query : str
    What to look for,
    in any language.
limit, most : int, optional
    At most so many.
kind
    How: exact or fuzzy.

Returns
-------
titles : list
    As they are printed.
"""
GOOGLE = """Search.

Titles only.

Args:
    query: What to look for,
        in any language.
    - limit (int, optional): At most so many.
    `kind` (dict(str, int)): How: exact or fuzzy.

Returns:
    titles: as they are printed
"""
EPYTEXT = """Search.

Titles only.

@param query: What to look for,
    in any language.
@param limit: At most so many.
@type limit: int
@param kind: How: exact or fuzzy.
@return: titles
"""


@pytest.mark.parametrize("text", [REST, NUMPY, GOOGLE, EPYTEXT], ids=["reST", "NumPy", "Google", "Epytext"])
def test_parameters_are_described_in_each_style(text: str) -> None:
    summary, described = read_docstring(text)
    assert summary == "Search.\n\nTitles only."
    assert described.pop("most", "At most so many.") == "At most so many."
    assert described == {
        "query": "What to look for, in any language.",
        "limit": "At most so many.",
        "kind": "How: exact or fuzzy.",
    }


@pytest.mark.parametrize(
    ("text", "summary", "described"),
    [
        (":param a: only", "", {"a": "only"}),
        ("At 12:30.\n:smile: hi\nArgs: none", "At 12:30.\n:smile: hi\nArgs: none", {}),
        ("S.\n\nArgs:\n  a: x\n\n    more\n  b: y\nAnd so on: no argument", "S.", {"a": "x more", "b": "y"}),
        ("S.\n\nNotes\n-----\na : b\n    c", "S.", {}),
        ("S.\n\n:param:\n:param a:\n:rtype: int", "S.", {}),
        ("S.\n\nNo heading\n---\nx", "", {}),
        (
            "S.\n\nKeyword Args:\n  a: x\n\nOther Parameters\n----------------\n*rest\n    y",
            "S.",
            {"a": "x", "rest": "y"},
        ),
    ],
)
def test_what_is_near_to_a_style(text: str, summary: str, described: dict[str, str]) -> None:
    read, found = read_docstring(text)
    assert found == described
    if summary:
        assert read == summary
