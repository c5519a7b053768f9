"""The recipes tool_n1 and otc: their rows, their conversion of public data, and their runs."""

import json
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import RECIPES, composed, run_script, script
from verl_multiturn import ConfigError

# Tool-N1.


def test_a_row_of_xlam_is_one_step() -> None:
    tool_n1 = script("tool_n1")
    tool = {
        "name": "live_giveaways_by_type",
        "description": "Retrieve live giveaways.",
        "parameters": {"type": {"description": "The type.", "type": "str", "default": "game"}},
    }
    entry = {
        "id": 0,
        "query": "Where can I find live giveaways for beta access and games?",
        "answers": '[{"name": "live_giveaways_by_type", "arguments": {"type": "beta"}}, '
        '{"name": "live_giveaways_by_type", "arguments": {"type": "game"}}]',
        "tools": json.dumps([tool]),
    }
    (step,) = tool_n1.steps_of(entry)
    row = tool_n1.row(step)
    system, user = row["prompt"]
    assert f"<tools>\n{json.dumps({'type': 'function', 'function': tool})}\n</tools>" in system["content"]
    assert user == {"role": "user", "content": entry["query"]}
    assert json.loads(row["reward_model"]["ground_truth"]) == json.loads(entry["answers"])
    assert row["data_source"] == "tool_n1"


@pytest.mark.parametrize("wrap", [json.dumps, lambda calls: json.dumps(json.dumps(calls)), list], ids=range(3))
def test_a_row_that_tool_n1_publishes_keeps_its_prompt(wrap: Any) -> None:
    calls = [{"name": "Market Trends API", "arguments": {"country": "us"}}]
    prompt = [{"role": "system", "content": "# Tool\n…"}, {"role": "user", "content": "Trends, please."}]
    entry = {
        "data_source": "toolcall",
        "prompt": prompt,
        "ability": "toolcall",
        "reward_model": {"style": "rule", "ground_truth": wrap(calls)},
        "extra_info": {"split": "train", "index": 0, "prompt_type": "qwen"},
    }
    tool_n1 = script("tool_n1")
    (row,) = tool_n1.rows_of([entry], "/data/toolcall.parquet", "train")
    assert row["prompt"] == prompt
    assert json.loads(row["reward_model"]["ground_truth"]) == calls
    assert row["data_source"] == "tool_n1/toolcall"
    broken = {**entry, "reward_model": {"ground_truth": '[{"name": "x"}]'}}
    assert tool_n1.rows_of([broken], "/data/toolcall.parquet", "train") == []


def test_each_source_of_tool_n1_keeps_its_name() -> None:
    rows = script("tool_n1").rows_of([TOOLACE], "Team-ACE/ToolACE", "test")
    assert {row["data_source"] for row in rows} == {"tool_n1/toolace"}


TOOLACE = {
    "system": "You compose functions. Here is a list of functions in JSON format that you can invoke:\n"
    '[{"name": "Market Trends API", "description": "Trends", "parameters": {"type": "dict", "properties": {}}, '
    '"required": null}]. \nPut it in the format of [func1(params_name=params_value), func2(params)]',
    "conversations": [
        {"from": "user", "value": "Trends, please."},
        {"from": "assistant", "value": '[Market Trends API(trend_type="MARKET_INDEXES", country="us")]'},
        {"from": "tool", "value": '[{"name": "Market Trends API", "results": {}}]'},
        {"from": "assistant", "value": "Here they are."},
        {"from": "user", "value": "And both of these."},
        {"from": "assistant", "value": "[Market Trends API(n=1), Market Trends API(n=2)]"},
    ],
}


def test_a_dialogue_of_toolace_is_a_step_for_each_turn_that_calls() -> None:
    first, second = script("tool_n1").steps_of(TOOLACE)
    name = "Market Trends API"
    assert first[1:] == (
        [{"role": "user", "content": "Trends, please."}],
        [{"name": name, "arguments": {"trend_type": "MARKET_INDEXES", "country": "us"}}],
    )
    assert [message["role"] for message in second[1]] == ["user", "assistant", "tool", "assistant", "user"]
    written = f'{{"name": "{name}", "arguments": {{"trend_type": "MARKET_INDEXES", "country": "us"}}}}'
    assert second[1][1]["content"] == f"<tool_call>\n{written}\n</tool_call>"
    assert [call["arguments"] for call in second[2]] == [{"n": 1}, {"n": 2}]


def test_steps_that_name_no_tool_of_theirs_are_left_out() -> None:
    tool_n1 = script("tool_n1")
    other = {
        **TOOLACE,
        "conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "[other(x=1)]"}],
    }
    assert list(tool_n1.steps_of(other)) == [None]
    assert list(tool_n1.steps_of({"query": "q", "tools": "[{]", "answers": "[]"})) == [None]
    assert list(tool_n1.steps_of({"query": "q", "tools": "[]", "answers": '[{"name": "f", "arguments": 1}]'})) == [None]
    with pytest.raises(ConfigError, match="expected query, tools and answers, or system and conversations"):
        list(tool_n1.steps_of({"text": ""}))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f()]", [("f", {})]),
        ('[a.b(x="1, (2)", y=[1, {"k": "]"}])]', [("a.b", {"x": "1, (2)", "y": [1, {"k": "]"}]})]),
        (
            "[Get it(n=-1.5, on=true, off=False, none=null)]",
            [("Get it", {"n": -1.5, "on": True, "off": False, "none": None})],
        ),
        (r"[f(x='it\'s')]", [("f", {"x": "it's"})]),
        (" [f(a=1),g(b=2)] ", [("f", {"a": 1}), ("g", {"b": 2})]),
        ("[]", None),
        ("hello", None),
        ("[1, 2]", None),
        ("[f(1)]", None),
        ("[f(**{'a': 1})]", None),
        ("[f(a=open('x'))]", None),
        ("[f(a=b)]", None),
        ("[f(a=1]", None),
        ("[f(a=1) and more]", None),
        ("[f(" + "(" * 5000 + ")" * 5000 + ")]", None),
        ("[f(a=" + "[" * 5000 + "]" * 5000 + ")]", None),
    ],
)
def test_calls_in_pythons_form_are_read(text: str, calls: list[tuple[str, dict[str, Any]]] | None) -> None:
    found = script("tool_n1").read_calls(text)
    assert found == (None if calls is None else [{"name": name, "arguments": given} for name, given in calls])


# Runs.


def test_tool_n1_reads_calls_and_executes_none() -> None:
    rollout = composed("tool_n1").actor_rollout_ref.rollout
    assert rollout.multi_turn.tool_config_path is None
    assert rollout.multi_turn.enable is False
    assert rollout.multi_turn.max_assistant_turns == 1
    assert rollout.agent.default_agent_loop == "multiturn_agent"


@pytest.mark.parametrize(
    ("variants", "tools", "model", "form"),
    [
        ([], "recipes/torl/tools.yaml", "Qwen/Qwen2.5-Math-1.5B", "grpo"),
        (["ppo"], "recipes/torl/tools.yaml", "Qwen/Qwen2.5-Math-1.5B", "ppo"),
        (["qwen2.5_math_7b"], "recipes/torl/tools.yaml", "Qwen/Qwen2.5-Math-7B", "grpo"),
        (["search"], "tool_configs/retrieval.yaml", "Qwen/Qwen2.5-3B-Instruct", "grpo"),
        (["search", "ppo"], "tool_configs/retrieval.yaml", "Qwen/Qwen2.5-3B-Instruct", "ppo"),
    ],
)
def test_otc_takes_over_another_recipe(variants: list[str], tools: str, model: str, form: str) -> None:
    config = composed("otc", *variants)
    rollout, beneath = config.actor_rollout_ref.rollout, "search_r1" if "search" in variants else "torl"
    assert rollout.multi_turn.tool_config_path == str(ROOT / tools)
    assert config.actor_rollout_ref.model.path == model
    assert rollout.custom.multiturn.otc.form == form
    assert rollout.custom.multiturn.otc.c == rollout.custom.multiturn.max_tool_calls == 4
    assert config.algorithm.adv_estimator == {"ppo": "gae", "grpo": "grpo"}[form]
    assert config.trainer.experiment_name == "-".join(["otc", *variants])
    assert config.recipe.prepare_data == str(RECIPES / beneath / "prepare_data.py")


def test_otc_knows_the_variants_of_the_recipe_beneath() -> None:
    ran = run_script(RECIPES / "otc" / "run.sh", "--print", "--variant", "none")
    assert ran.returncode == 2
    known = ran.stderr.splitlines()[0].partition("known are ")[2].split(", ")
    assert {"grpo", "ppo", "search", "simpletir", "zerotir", "fsdp2"} <= set(known)
