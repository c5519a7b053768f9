"""Tools of installed packages in a tool YAML, by their references; and the same form for users and rewards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.installed_packages import install
from verl_multiturn.checking.interaction_contract import interactions_to_check
from verl_multiturn.checking.tool_contract import tools_to_check
from verl_multiturn.cli.replay import _uses
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.running.registry import load_interactions
from verl_multiturn.rewards.router import check_reward_kwargs, compute_score
from verl_multiturn.tools.loading.registry import load_tools

CODE = '''
from verl_multiturn import BaseTool, Interaction, Reply
from verl_multiturn.rewards import Score


def stock(article: str) -> int:
    """Return the pieces in stock.

    Args:
        article: Name of the article.
    """
    return len(article)


def two(first="stock"):
    return [stock, Counter({}, {"type": "function", "function": {"name": "counter", "parameters": {"type": "object"}}})]


class Counter(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return str(self.config.get("step"))


class Echo(Interaction):
    async def reply(self, instance_id, messages, **kwargs):
        return Reply("yes", done=True)


async def exact(solution, ground_truth):
    return Score.of(solution.answer == ground_truth)


number = 3
'''
LINES = {
    "tools": [
        "stock = plug_shop:stock",
        "counter = plug_shop:Counter",
        "two = plug_shop:two",
        "number = plug_shop:number",
    ],
    "interactions": ["echo = plug_shop:Echo", "stock = plug_shop:stock"],
    "rewards": ["exact = plug_shop:exact"],
}
SCHEMA = "{type: function, function: {name: counter, description: Count., parameters: {type: object, properties: {}}}}"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package `plug-shop` for one test."""
    folder = tmp_path / "site-packages"
    install(folder, "plug-shop", LINES, {"plug_shop.py": CODE})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "plug_shop", raising=False)
    return folder


def yaml_of(folder: Path, *entries: str, key: str = "tools") -> Path:
    path = folder / f"{key}.yaml"
    path.write_text(f"{key}:\n" + "".join(f"- {entry}\n" for entry in entries), encoding="utf-8")
    return path


def test_a_tool_is_a_class_or_a_function(tmp_path: Path) -> None:
    counter = f"{{tool: plug-shop/counter, config: {{step: 3}}, tool_schema: {SCHEMA}, limits: {{concurrency: 2}}}}"
    tools = load_tools(yaml_of(tmp_path, "{tool: plug_shop/stock, limits: {timeout_s: 5}}", counter))
    assert list(tools) == ["stock", "counter"]
    assert tools["counter"].config == {"step": 3}


@pytest.mark.parametrize("key", ["class_name", "function", "toolset"])
def test_other_kinds_take_references_too(tmp_path: Path, key: str) -> None:
    entry = {
        "class_name": f"{{class_name: plug-shop/counter, tool_schema: {SCHEMA}}}",
        "function": "{function: plug-shop/stock}",
        "toolset": "{toolset: plug-shop/two, config: {first: stock}}",
    }[key]
    expected = {"class_name": ["counter"], "function": ["stock"], "toolset": ["stock", "counter"]}[key]
    assert list(load_tools(yaml_of(tmp_path, entry))) == expected


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{tool: plug-shop/stok}", r"tools\[0\].tool: no installed package gives 'plug-shop/stok' .*did you mean"),
        ("{tool: plug_shop.stock}", r"tools\[0\].tool: expected a reference such as 'my-tools/lookup', got"),
        ("{tool: [a]}", r"expected a reference such as"),
        ("{tool: plug-shop/stock, config: {}}", r"tools\[0\].config: 'plug-shop/stock' is a function, which has no"),
        ("{tool: plug-shop/stock, function: x.y}", "expected a mapping with one of"),
        ("{tool: plug-shop/stock, konfig: {}}", r"unknown key 'konfig'; did you mean 'config'\?"),
        ("{class_name: plug-shop/stock}", r"class_name: expected a class, but 'plug-shop/stock' is <function"),
        ("{function: plug-shop/counter}", "'plug-shop/counter' is a class; name it under 'class_name'"),
        ("{tool: plug-shop/number}", r"tools\[0\]: "),
        ("{tool: plug-shop/echo}", r"belongs to verl_multiturn.interactions, and not to verl_multiturn.tools"),
    ],
)
def test_refusals(tmp_path: Path, entry: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_tools(yaml_of(tmp_path, entry))


def test_check_tool_takes_a_reference(tmp_path: Path) -> None:
    assert [tool.name for tool in tools_to_check("plug-shop/stock", None, None)] == ["stock"]
    entry = f"{{tool: plug_shop/counter, config: {{step: 5}}, tool_schema: {SCHEMA}}}"
    path = yaml_of(tmp_path, "{tool: plug-shop/stock}", entry)
    for target in ("plug-shop/counter", "plug_shop.Counter"):
        (found,) = tools_to_check(target, None, path)
        assert found.config == {"step": 5}


def test_interactions_by_reference(tmp_path: Path) -> None:
    loaded = load_interactions(yaml_of(tmp_path, "{class_name: plug_shop/echo}", key="interaction"))
    assert list(loaded) == ["echo"]
    assert [made.name for made in interactions_to_check("plug-shop/echo", None)] == ["echo"]
    with pytest.raises(ConfigError, match=r"expected a class, but 'plug-shop/stock' is"):
        load_interactions(yaml_of(tmp_path, "{class_name: plug-shop/stock}", key="interaction"))


async def test_rewards_by_reference() -> None:
    routes = {"shop*": "plug_shop/exact"}
    extra = {"assistant_texts": ["7"]}
    assert (await compute_score("shop/1", "7", "7", extra, routes=routes))["score"] == 1.0
    assert (await compute_score("shop/1", "8", "7", {"assistant_texts": ["8"]}, routes=routes))["score"] == 0.0


def test_the_start_up_check_of_rewards_imports_nothing() -> None:
    check_reward_kwargs({"routes": {"shop*": "plug-shop/exact"}}, "kwargs")
    assert "plug_shop" not in sys.modules
    with pytest.raises(ConfigError, match=r"kwargs.routes\['shop\*'\]: no installed package gives 'plug-shop/exakt'"):
        check_reward_kwargs({"routes": {"shop*": "plug-shop/exakt"}}, "kwargs")


def test_a_replay_of_a_strange_folder_names_the_references() -> None:
    run: dict[str, Any] = {
        "tools": {"tools": [{"tool": "plug-shop/stock"}]},
        "interactions": {"interaction": [{"class_name": "plug-shop/echo"}]},
    }
    assert list(_uses([run])) == [
        "the tool 'plug-shop/stock'",
        "the class name 'plug-shop/echo'",
        "the tokenizer of its settings",
    ]
