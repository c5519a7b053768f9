"""Pages as a person sees them: columns under their headings, advice, names, questions and answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Watched


@pytest.fixture(params=["exported", "served"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def edges(cells: Any) -> list[float]:
    """Return the right ends of the texts of cells, in pixels."""
    return [
        round(each)
        for each in cells.evaluate_all(
            """cells => cells.map((cell) => {
              const range = document.createRange();
              range.selectNodeContents(cell);
              return range.getBoundingClientRect().right;
            })"""
        )
    ]


def test_numbers_of_a_step_end_where_their_headings_end(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#run")
    table = page.locator("details", has_text="steps (").locator("table.rows")
    table.locator("tbody tr, tr").nth(1).wait_for()
    headings = table.locator("thead th.number")
    assert headings.all_text_contents() == ["conversations", "mean score", "groups", "equal", "all right", "longest"]
    numbers = table.locator("tr", has=page.locator("td")).first.locator("td.number")
    assert edges(headings) == edges(numbers)


def test_findings_stand_under_the_curves_and_say_apart_what_to_do(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#run")
    page.locator("article.finding").first.wait_for()
    order = page.locator("h3").all_text_contents()
    assert order[0] == "findings"
    first = page.locator("article.finding").first.locator("p")
    assert first.nth(1).inner_text().startswith("what to do: ")
    assert "what to do" not in first.nth(0).inner_text()


def test_a_legend_has_the_last_values_until_a_cursor_comes(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#run")
    page.locator(".chart canvas").first.wait_for()
    page.wait_for_function(
        "[...document.querySelectorAll('.u-legend .u-value')].every((each) => each.textContent !== '--')"
    )
    assert page.locator(".u-legend .u-value").first.inner_text().isdigit()


def test_the_page_names_run_model_and_data(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#run")
    facts = page.locator(".facts").first
    facts.locator(".fact", has_text="model").wait_for()
    assert facts.locator(".fact").all_inner_texts()[:3] == [
        "run sums",
        "model Qwen/Qwen3-4B",
        "data a.parquet, b.parquet",
    ]
    assert page.title() == "sums – verl-multiturn"


def test_a_table_shows_questions_and_answers(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#table?where=uid%3Dsib")
    page.locator("td.excerpt").first.wait_for()
    headings = page.locator("thead th").all_inner_texts()
    cells = page.locator("tbody tr").first.locator("td").all_inner_texts()
    row = dict(zip(headings, cells, strict=True))
    assert (row["question"], row["answer"]) == ("547 + 292 =", "Answer: 839")


def test_a_group_shows_the_question_and_the_right_answer(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#group?uid=sib&dir=0")
    page.locator("table.asked").wait_for()
    rows = [each.split() for each in page.locator("table.asked tr").all_inner_texts()]
    assert [" ".join(words) for words in rows] == ["question 547 + 292 =", "ground truth 839"]


@pytest.mark.parametrize(
    ("fragment", "said"),
    [
        ("nowhere", "this page has no view 'nowhere'"),
        ("toString", "this page has no view 'toString'"),
        ("talk", "this address names no conversation"),
        ("group", "this address names no group"),
        ("group?uid=gone&dir=0", "no group has the uid gone"),
    ],
)
def test_a_wrong_address_is_reported(fragment: str, said: str, watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#{fragment}")
    page.locator("[role=alert]", has_text=said).wait_for()


def test_the_beginning_of_an_id_can_be_copied(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#table?where=long")
    long = page.locator("td code").first
    long.wait_for()
    assert long.inner_text() == (long.get_attribute("title") or "")[: len(long.inner_text())]
