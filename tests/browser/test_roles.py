"""Zero-sum games of two roles in the page: rewards and advantages by role, and the role of each completion."""

from __future__ import annotations

from pathlib import Path

from tests.browser.conftest import Watched
from tests.support.role_samples import write_games
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.view.export import export


def exported_games(tmp_path: Path) -> str:
    folder = tmp_path / "records"
    write_games(folder, {"differs": [1.0, -1.0, 1.0], "same": [1.0, 1.0]})
    documents = Documents([folder])
    documents.refresh()
    export(documents, tmp_path / "games.html")
    return (tmp_path / "games.html").as_uri()


def test_a_group_has_the_figures_of_each_role(watched: Watched, tmp_path: Path) -> None:
    """Its sums are all 0: without roles nothing could be learned from it."""
    page, address = watched.page, exported_games(tmp_path)
    page.goto(f"{address}#group?uid=differs")
    facts = page.locator("section > p.facts").first
    facts.locator("text=mean of white").wait_for()
    said = " ".join(facts.inner_text().split())
    for figure in ("mean of black -0.3333", "std of black 1.155", "mean of white 0.3333", "std of white 1.155"):
        assert figure in said
    assert "nothing to learn from" not in said
    second = " ".join(page.locator("article.sibling header").nth(1).inner_text().split())
    assert "score 0 " in second
    assert "black 1, advantage 1.33" in second
    assert "white -1, advantage -1.33" in second
    page.goto(f"{address}#group?uid=same")
    page.locator("text=all scores are equal: nothing to learn from").wait_for()


def test_a_conversation_has_the_roles_of_its_completions(watched: Watched, tmp_path: Path) -> None:
    page, address = watched.page, exported_games(tmp_path)
    page.goto(f"{address}#talk?id=differs-1&tab=tree")
    page.locator("ul.tree summary").first.wait_for()
    head = " ".join(page.locator("article.talk > header").inner_text().split())
    assert "black 1, advantage 1.33" in head
    assert "white -1, advantage -1.33" in head
    summaries = [" ".join(each.split()) for each in page.locator("ul.tree summary").all_inner_texts()]
    assert [each.split(" row ")[0] for each in summaries[::2]] == ["completion 0", "completion 2"]
    assert [role in each for role, each in zip(("white", "user", "black"), summaries, strict=True)] == [True] * 3
    assert "not_trained_role" in summaries[1]
    page.locator("button", has_text="reward and data").click()
    table = " ".join(page.locator("table.plain").first.inner_text().split())
    assert "score of black 1" in table
    assert "mean advantage of white -1.33333" in table
    assert "row 1 (black): group's mean -0.333333" in table
    page.locator("button", has_text="row 1").click()
    page.locator("text=role black").wait_for()


def test_a_group_without_roles_has_one_mean(watched: Watched, tmp_path: Path, exported: str) -> None:
    page = watched.page
    page.goto(f"{exported}#group?uid=sib")
    facts = page.locator("section > p.facts").first
    facts.wait_for()
    said = facts.inner_text()
    assert "mean" in said
    assert "mean of" not in said
