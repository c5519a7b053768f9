"""`check-tool --interaction`: the conversation of each check has the world of an interaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import shops
from verl_multiturn.cli.main import app

GOODS = ["--interaction-kwargs", '{"goods": ["tea"]}']


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    shops.BASKETS.clear()
    shops.MOST[0] = 0
    yield
    assert shops.BASKETS == {}  # each world was closed


@pytest.fixture
def world(tmp_path: Path) -> str:
    path = tmp_path / "shops.yaml"
    path.write_text(
        "interaction:\n"
        "  - {name: corner, class_name: tests.shops.Shop}\n"
        "  - {name: user, class_name: verl_multiturn.interactions.scripted_user.ScriptedUser}\n"
    )
    return str(path)


def check(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check-tool", *arguments], env={"COLUMNS": "300"})
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("tool", ["Basket", "Named"])
def test_a_tool_that_shares_a_world_can_be_checked(tool: str) -> None:
    code, said = check(f"tests.shops.{tool}", "--interaction", "tests.shops.Shop", *GOODS)
    assert (code, "problem" in said, "skipped" in said) == (0, False, False), said
    assert shops.MOST[0] == 64  # as many conversations as `check-tool` has at once, each with a world of its own


def test_the_interaction_of_a_yaml(world: str) -> None:
    assert check("tests.shops.Basket", "--interaction", f"{world}:corner", *GOODS)[0] == 0
    code, said = check("tests.shops.Basket", "--interaction", world, *GOODS)
    assert code == 2
    assert "has the interactions ['corner', 'user']; name one, as in" in said
    assert check("tests.shops.Basket", "--interaction", f"{world}:shop")[0] == 2


def test_without_its_world_the_tool_says_what_is_missing() -> None:
    code, said = check("tests.shops.Basket")
    assert code == 1
    assert "if the tool shares the world of an interaction, name it: --interaction" in said
    assert "--interaction" not in check("tests.shops.Basket", "--interaction", "tests.shops.Shop", *GOODS)[1]


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ([], "start"),
        (["--interaction-kwargs", '{"goods": ["tea"], "open": 1}'], "open"),
        (["--interaction-kwargs", '{"goods": []}'], "RuntimeError: the shop is empty"),
    ],
)
def test_a_world_that_does_not_begin(kwargs: list[str], found: str) -> None:
    code, said = check("tests.shops.Basket", "--interaction", "tests.shops.Shop", *kwargs)
    assert code in (1, 2)
    assert found in said
    assert "Traceback" not in said
